"""The first copy of a model whose size nobody knows: loaded alone, to see whether each process of the run can have one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ModelLoadError
from penstock.inference.handler_copies import copy_of
from penstock.inference.session import InferenceSession
from penstock.inference.shared import SessionState
from penstock.inference.spec import InferenceSpec
from penstock.models.budget import MemoryBudget
from penstock.models.freed_memory import free_devices, trim
from penstock.models.memory import available_bytes

DEATHS = 8  # of processes that loaded it: then it is an error, before each split has had its tries, one after the other
FITS = "fits"  # the decision, with the bytes of all copies that were decided on, and of the budget that they are within

logger = logging.getLogger(__name__)


class FirstCopy:
    """`session`: has the copy, if this process has loaded it and may keep it. Used by one thread."""

    def __init__(self, owner: SessionState, key: str, step: str, spec: InferenceSpec) -> None:
        self.session: InferenceSession | None = None
        self._owner = owner
        self._key = key
        self._step = step
        self._spec = spec

    def decide(self, deaths: int, others: Sequence[str]) -> str:
        """Load it: FITS, and it stays, if there is room for those of the other processes, too; else why not. deaths: of
        processes that have loaded it. others: what was decided about other models."""
        if deaths >= DEATHS:
            raise ModelLoadError(
                f"step {self._step!r}: {deaths} workers, one after the other, died while they loaded its model\n"
                "  look for a crash in native code in load_model(), or a model that needs more memory than there is; with "
                "large_model=True on its handler it has a process of its own"
            )
        # What load_model() leaves in its handler goes with the copy, and is not sent to a host.
        path = replace(self._spec.path, model_handler=copy_of(self._spec.handler))
        session = InferenceSession(self._owner, self._key, self._step, replace(self._spec, path=path))
        try:
            session.load()
        except BaseException:
            session.close(wait=False)
            raise
        size, free, workers = session.model.bytes, available_bytes(), self._owner.around.workers
        # Copies of other models that are yet to be loaded are not seen in what is free.
        known = [tuple(map(int, other.split()[1:])) for other in others if other.startswith(FITS)]
        taken, budget = max(known, default=(0, MemoryBudget.of_free(free + size).bytes or 0))
        needed = taken + size * workers
        if needed <= budget and MemoryBudget.of_free(free).shared(workers - 1).holds(size):
            self.session = session
            return f"{FITS} {needed} {budget}"
        session.close()
        with self._owner.changed:
            session.hand_in_metrics()
        del session, path
        free_devices()  # before a host loads another copy
        trim()
        why = (
            f"a copy takes {size / 1e9:.3g} GB, and {workers} workers would hold one each: "
            f"{free / 1e9:.3g} GB were left beside the first"
        )
        why += f", and copies of other models take {taken / 1e9:.3g} GB" if taken else ""
        logger.warning("step %r: one model host for all workers: %s", self._step, why)
        return why
