"""What a host measures, for its clients: of its model, or its many; where models of several steps share it, of each step."""

from __future__ import annotations

from typing import Any

from penstock.models.front import Front
from penstock.models.host_batches import HostBatch
from penstock.models.kept_sizes import KeptSize
from penstock.models.measures import Measures, Report
from penstock.models.messages import HostSpec, Loaded, Ran
from penstock.models.uses import Uses, step_of

NOTES_EVERY = 0.5  # seconds


class _Observed:
    """What no client was told of yet, of what one step hears about."""

    def __init__(self, spec: HostSpec, model: str | None) -> None:
        limits, _ = spec.own_limits.get(model or "", (spec.limits, False))
        self.measures = Measures(limits)
        self.kept = KeptSize(spec.run_dir)
        self.noted = 0.0


class HostReports:
    def __init__(self, spec: HostSpec) -> None:
        names: list[str | None] = [*spec.own_limits] if spec.by_step else [None]
        self._by_step = spec.by_step
        self._observed = {name: _Observed(spec, name) for name in names}

    def loaded(self, message: Loaded, front: Front[Any], copy: int) -> None:
        """A model is there; `copy`: its number at the front."""
        observed = self._of(message.model)
        observed.measures.loaded(message.seconds, message.bytes)
        observed.kept.open(message.search_key, front.search(self._name(message.model)), copy)

    def failed(self, model: str | None) -> None:
        """A batch of it is not answered, or not all of it."""
        self._of(model).measures.failed()

    def restarted(self, model: str | None) -> None:
        """A process that had this model at work; None: it had none."""
        self._of(model).measures.restarted()

    def ran(self, batch: HostBatch, message: Ran, now: float, front: Front[Any], uses: Uses | None) -> None:
        """A batch is answered."""
        name = self._name(batch.model)
        observed = self._of(name)
        failed = any(failure is not None for _, _, failures in message.answers for failure in failures.values())
        size, too_large = message.outcome.size, message.outcome.out_of_memory
        observed.measures.ran(batch.spans, message.seconds, size=size, failed=failed, out_of_memory=too_large)
        observed.measures.counted(message.outcome.counts)
        for model, use in ({} if uses is None else uses.news()).items():
            self._of(str(model)).measures.used({step_of(model)[1]: use})
        search = front.search(name)
        if observed.kept.keep(search) or now - observed.noted > NOTES_EVERY:
            observed.noted = now
            observed.measures.found(search.explain())

    def take(self, model: str | None) -> Report:
        """What whoever waits for answers of this model is told."""
        return self._of(model).measures.take()

    def _name(self, model: str | None) -> str | None:
        return model if self._by_step else None

    def _of(self, model: str | None) -> _Observed:
        return self._observed.get(model) or next(iter(self._observed.values()))
