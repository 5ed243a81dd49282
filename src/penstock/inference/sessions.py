"""The sessions of a process. Where the model of each lives is settled here, before the first lane to it opens.

what the user says (models/place.py)             in a host
it is a service, or one of many                  in each process, which holds what its budget allows
its files, unpacked, are within the budget       in each process, and all of them load at once
else the first process loads a copy, alone: the  in each process, if there is room for the others' copies beside those
others wait for what it decides (first_copy.py)  of other models, else in one host
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import EngineError
from penstock.inference.first_copy import FITS, FirstCopy
from penstock.inference.preparing import Tools
from penstock.inference.service_handler import ServiceHandler
from penstock.inference.session import InferenceSession
from penstock.inference.shared import SessionState
from penstock.inference.spec import InferenceSpec
from penstock.models.budget import MemoryBudget
from penstock.models.decision import decided
from penstock.models.memory import available_bytes, file_bytes
from penstock.models.place import Place, Surroundings, choose_place
from penstock.observe.metrics import MetricKey, Metrics

# Imported where a model has a host: most have none, and a first run waits for every import.
if TYPE_CHECKING:
    from penstock.inference.hosted import HostedSession

Session: TypeAlias = "InferenceSession | HostedSession"

UNPACKED = 10  # times the size of its files that a model may take: they may be compressed


class ProcessSessions(SessionState):
    """The sessions of one process, or of one run in it. Whoever makes it closes it."""

    def __init__(self, metrics: Metrics, around: Surroundings | None = None) -> None:
        super().__init__(metrics, around)
        self.tools = Tools()
        self._open: dict[str, Session] = {}  # guarded by `changed`, as are the next two
        self._making: dict[str, threading.Lock] = {}  # taken before `changed`; held while a first copy is measured
        self._closed = False

    def is_placed(self, step: str, spec: InferenceSpec) -> bool:
        """Whether open() knows where the model lives without loading it."""
        with self.changed:
            if spec.session_key(step) in self._open:
                return True
        return not is_measured(spec, self.around)

    def open(self, step: str, spec: InferenceSpec) -> Session:
        """The session of a step, or of all steps that share its model: here, or in a host."""
        key = spec.session_key(step)
        with self.changed:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            return self._found(key, step) or self._opened(key, step, spec)

    def drain_metrics(self) -> Metrics:
        """What was measured since the last time."""
        with self.changed:
            for session in self._open.values():
                session.hand_in_metrics()
            return self.metrics.drain()

    def close(self, *, wait: bool = True) -> None:
        """End the sessions' threads. Models go with the process, or when nothing refers to them."""
        with self.changed:
            self._closed = True
            sessions = list(self._open.values())  # closed without the lock: their threads need it to end
            self._open.clear()
        for session in sessions:
            session.close(wait=wait)
        self.native_threads.close()

    def _found(self, key: str, step: str) -> Session | None:
        with self.changed:
            if self._closed:
                raise EngineError(f"step {step!r}: the run has ended")
            return self._open.get(key)

    def _opened(self, key: str, step: str, spec: InferenceSpec) -> Session:
        session = self._made(key, step, spec)
        with self.changed:
            if not self._closed:
                self._open[key] = session
                return session
        session.close(wait=False)
        raise EngineError(f"step {step!r}: the run ended while its model was placed")

    def _made(self, key: str, step: str, spec: InferenceSpec) -> Session:
        place = choose_place(spec.wishes(), self.around)
        if not place.hosted:
            first, why = FirstCopy(self, key, step, spec), FITS
            if is_measured(spec, self.around):
                why = decided(self.around.folder, key, first.decide)
            if why.startswith(FITS):
                return first.session or InferenceSession(self, key, step, spec)
            place = Place(hosted=True, why=why)
            note = MetricKey(step, spec.metrics_namespace, "model_place")
            with self.changed:
                self.metrics.notes[note] = f"one host for all workers: {why}"
        from penstock.inference.hosted import HostedSession

        return HostedSession(self, key, step, spec, place)


def is_measured(spec: InferenceSpec, around: Surroundings) -> bool:
    """Whether nobody can tell, before a copy is loaded, that each process has room for one."""
    if around.workers == 1 or spec.by_key is not None or isinstance(spec.handler, ServiceHandler):
        return False
    if choose_place(spec.wishes(), around).hosted:
        return False
    size = file_bytes(spec.handler.model_files)
    return size is None or not MemoryBudget(available_bytes()).shared(around.workers).holds(size * UNPACKED)
