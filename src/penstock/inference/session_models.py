"""The models of a session in this process: one, or many, of which some are loaded while rows wait for others.

models/residency.py decides; what it says is done here, by the threads that wait for answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Hashable, Mapping

from penstock.batching.entry import Entry, Span
from penstock.errors import ModelLoadError, PenstockError, UsageError
from penstock.failures import LOADING, OUT_OF_MEMORY, Failure
from penstock.inference.lane import LocalLane, Request, settle
from penstock.inference.models_by_key import FileSizes, ModelsByKey
from penstock.inference.residents import Resident, Residents
from penstock.inference.shared import SessionState
from penstock.models.freed_memory import FreedMemory
from penstock.models.front import Front
from penstock.models.loading import LoadedModel
from penstock.models.measures import Measures
from penstock.models.outcome import Outcome
from penstock.models.residency import Admit, LoadNow, Refuse, Residency, Step, UnloadNow
from penstock.models.uses import bytes_told, not_loaded, told_attempt, told_too_large
from penstock.observe.metrics import ModelUse
from penstock.rows import safe_str
from penstock.seeding import seeded

logger = logging.getLogger(__name__)


class OneModel:
    """The model of a session that has one, whoever loads it: rows go straight to its front."""

    def __init__(self, residents: Residents, front: Front[Request]) -> None:
        self._residents = residents
        self._front = front
        self._leases = 0  # batches that run; guarded by the sessions' lock

    @property
    def copy(self) -> Resident:
        return self._residents.copy(None)

    @property
    def is_called(self) -> bool:
        """Whether batches run, or are about to."""
        return self._leases > 0

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether its load has raised this for lack of memory."""
        return self._residents.is_out_of_memory(None, error)

    def add(self, entry: Entry[Request], now: float) -> None:
        self._front.add(entry, entry.item.lane, now)

    def discard(self, lane: LocalLane) -> None: ...

    def resized(self, model: str, size: int) -> None: ...

    def lease(self, model: Hashable) -> Resident:
        self._leases += 1
        return self.copy

    def release(self, model: Hashable) -> None:
        self._leases -= 1

    def go_on(self) -> bool:
        return False

    def used(self) -> Mapping[Hashable, ModelUse]:
        return {}

    def next_time(self) -> float | None:
        return None


class ManyModels:
    """Those of a session with many, whose lock is held by whoever calls, but while a model loads."""

    def __init__(
        self, owner: SessionState, residents: Residents, front: Front[Request], measures: Measures, models: ModelsByKey
    ) -> None:
        self._owner = owner
        self._changed: threading.Condition = owner.changed
        self._residents = residents
        self._front = front
        self._measures = measures
        self._leases: Counter[Hashable] = Counter()  # batches that run, by model
        self._to_load: deque[str] = deque()  # decided on, and no thread has begun; each is popped by one
        self._memory = FreedMemory()
        self._on_device = models.accelerator() is not None
        self._has_warned = False
        self._errors: dict[str, BaseException] = {}  # of the last attempt to load
        budget = models.budget_or_default(owner.around.default_budgets).shared(owner.around.workers)
        files = FileSizes(models)
        self._residency: Residency[Request] = Residency(budget, self._is_in_use, files=lambda model: files[str(model)])
        self._residency.ready(0, models.device_bytes() if budget.by_default else None)
        for model, (limits, by_length) in models.own_limits().items():
            front.register(model, limits, by_length)

    def add(self, entry: Entry[Request], now: float) -> None:
        """Rows go to the front, if their model is here."""
        entry.owner = entry.item.lane
        if self._residency.add(entry, now) is not None:
            self._front.add(entry, entry.owner, now)

    def discard(self, lane: LocalLane) -> None:
        self._residency.discard(lane)

    def resized(self, model: str, size: int) -> None:
        """A new version of it has taken the place of the old one."""
        self._residency.resized(model, size)

    def lease(self, model: Hashable) -> Resident:
        """A batch of it begins."""
        self._leases[model] += 1
        return self._residents.copy(model)

    def release(self, model: Hashable) -> None:
        self._leases[model] -= 1
        if not self._leases[model]:
            del self._leases[model]

    def go_on(self) -> bool:
        """Do something that lets rows come to their models: load one, with the lock released. False: there is nothing."""
        steps = self._residency.decide(time.monotonic())
        for step in steps:
            self._do(step)
        if any(isinstance(step, (Admit, Refuse)) for step in steps):
            self._owner.settled()
            return True
        if not self._to_load:
            return False  # threads that load something notify when it is done
        self._load(self._to_load.popleft())
        return True

    def used(self) -> Mapping[Hashable, ModelUse]:
        """What models have cost since this was last asked."""
        return self._residency.uses.news()

    def next_time(self) -> float | None:
        """When to ask again, if nothing happens."""
        return self._residency.next_time()

    def _is_in_use(self, model: Hashable) -> bool:
        return model in self._leases or self._front.are_waiting(model)

    def _do(self, step: Step) -> None:
        model = str(step.model)
        if isinstance(step, LoadNow):
            self._to_load.append(model)
        elif isinstance(step, UnloadNow):
            self._residents.unload(model)
            self._warn_of(self._memory.unloaded(model))
        elif isinstance(step, Admit):
            for entry in self._residency.take(model):
                self._front.add(entry, entry.owner, entry.arrived)
        else:
            for entry in self._residency.take(model):
                self._refuse(entry, step)

    def _load(self, model: str) -> None:
        self._memory.loads()
        self._changed.notify_all()  # others may load another one, or run what is here
        self._changed.release()
        loaded: LoadedModel | None = None
        try:
            with seeded(self._owner.around.seed, model):
                loaded = self._residents.load(model)
        except BaseException as exc:  # of whatever the handler does
            self._errors[model] = exc
            if isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C
        finally:
            self._changed.acquire()  # whatever was raised: the caller holds it, and releases it
            if loaded is not None:
                self._memory.loaded(model, loaded.in_ram, on_device=self._on_device or bool(loaded.devices))
                self._errors.pop(model, None)
                self._residency.loaded(model, loaded.bytes, loaded.seconds, loaded.certain)
                self._measures.loaded(loaded.seconds, loaded.bytes)
            else:
                self._memory.load_failed()
                no_memory = self._residents.is_out_of_memory(model, self._errors[model])
                self._residency.load_failed(model, no_memory=no_memory)
                why = f"{type(self._errors[model]).__name__}: {safe_str(self._errors[model])}"
                if told := told_attempt(model, self._residency.uses[model].failed, why):
                    logger.warning("%s", told)
            self._changed.notify_all()  # rows wait for this model, or for the room that it has not taken

    def _warn_of(self, leak: tuple[int, int] | None) -> None:
        if leak is None or self._has_warned:
            return
        self._has_warned = True
        self._owner.leaks = not self._owner.around.in_process
        held, expected = map(bytes_told, leak)
        logger.warning(
            "something keeps the memory of models that were unloaded: this process holds %s, where %s are expected. A "
            "worker is replaced after its split; another process may grow further (this is said once). With "
            "large_model=True on their handlers, models have a process of their own, which is started again then",
            held,
            expected,
        )

    def _refuse(self, entry: Entry[Request], step: Refuse) -> None:
        """Its rows have failed, where that is handled; else the run has."""
        model, lane = str(step.model), entry.item.lane
        if step.too_large:
            size = self._residency.uses[step.model].bytes
            origin: BaseException = MemoryError(told_too_large(model, size, self._residency.budget))
            error: PenstockError = ModelLoadError(f"step {lane.step!r}: {origin}")
        else:
            raised = self._errors[model]
            origin = raised.__cause__ or raised if isinstance(raised, ModelLoadError) else raised
            error = not_loaded(lane.step, model, origin)
            error.__cause__ = None if error is origin else origin
        spans = [Span(entry, entry.start, entry.stop)]
        if lane.handling is None or isinstance(error, UsageError) or not lane.handling.handles(origin):
            settle(spans, error)
            return
        model_id = self._residents.model_id(model)
        failure = Failure.of(origin, lane.step, kind=OUT_OF_MEMORY if step.too_large else LOADING, model_id=model_id)
        rows = entry.stop - entry.start
        settle(spans, Outcome([None] * rows, dict.fromkeys(range(rows), failure), model_id=model_id))
