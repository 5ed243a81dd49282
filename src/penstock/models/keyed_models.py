"""The many models of a host: which copy has which, what may run beside what, and what becomes of rows without a model.
Pure: events and the time go in, commands come out.

    rows -> their model is in a copy: the front of that copy
         -> it is not: they wait in the residency, until it is

Whose fault a death is has to be seen: a batch that may be to blame runs without loads beside it, and a load that may be,
without batches. A death with both at once is charged to neither; both then run alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from penstock.batching.entry import Entry
from penstock.failures import LOADING, OUT_OF_MEMORY
from penstock.models.commands import KillCopy
from penstock.models.fronts import Fronts
from penstock.models.host_batches import Copy, HostBatch, Lane, Submission, first_fresh
from penstock.models.messages import HostSpec, Leaks, LoadFailed
from penstock.models.residency import Copies, LoadNow, Refuse, Residency, Step, UnloadNow
from penstock.models.uses import ATTEMPTS, KILLS, Model, bytes_told, of_key, told_attempt, told_too_large


class Refusal(NamedTuple):
    """Nobody will answer the rows of a model: these, and those whose batches were to run again."""

    model: Model
    entries: list[Entry[Submission]]
    kind: str
    message: str
    error: LoadFailed | None = None


class KeyedModels(Copies):
    """`copies` and `again`, the batches that are to run once more, are the dispatch's own."""

    def __init__(self, spec: HostSpec, fronts: Fronts, copies: Sequence[Copy], again: deque[HostBatch]) -> None:
        assert spec.budget is not None
        self._load_timeout = spec.load_timeout
        self._fronts = fronts
        self._copies = copies
        self._again = again
        self.files: dict[Model, int] = {}  # bytes of their files, as clients have told
        rules: dict[str, Any] = {"copies": spec.copies, "apart": True, "doing": self}
        self.residency: Residency[Submission] = Residency(
            spec.budget, self.is_in_use, files=lambda model: self.files.get(model, 0), **rules
        )
        self._why: dict[Model, LoadFailed | str] = {}  # of models whose last load failed
        self._stale = True  # something has happened that the residency should look at

    # What happens.

    def add(self, entry: Entry[Submission], lane: Lane, now: float) -> None:
        entry.owner = lane
        copy = self.residency.add(entry, now)
        if copy is not None:
            self._fronts.all[copy].add(entry, lane, now)
        elif not self.residency.is_blocked:
            self._stale = True

    def expect(self, model: Model) -> None:
        """Rows for it will come."""
        self.residency.expect(model)
        self._stale = True

    def discard(self, lane: Lane) -> None:
        """Its rows are not wanted any more."""
        self.residency.discard(lane)
        self._stale = True

    def ready(self, copy: int, device_bytes: int | None) -> None:
        self.residency.ready(copy, device_bytes)
        self._stale = True

    def loaded(self, copy: int, model: str, size: int, seconds: float, certain: int = 0) -> None:
        if self._copies[copy].loads.pop(model, None) is not None:
            self._why.pop(model, None)
            self.residency.loaded(model, size, seconds, certain)
            self._stale = True

    def resized(self, model: str, size: int) -> None:
        """A new version of it has taken the place of the old one."""
        self.residency.resized(model, size)
        self._stale = True

    def load_failed(self, copy: int, failed: LoadFailed) -> str | None:
        """What to tell people, if it is tried again."""
        model = failed.model
        if self._copies[copy].loads.pop(model, None) is None:
            return None
        self._failed(model, failed, no_memory=failed.no_memory)
        return told_attempt(model, self.residency.uses[model].failed, _reason(failed))

    def leaks(self, copy: int, leak: Leaks) -> None:
        """Memory of models that were unloaded there is not free."""
        held, expected = bytes_told(leak.bytes), bytes_told(leak.expected)
        what = "something keeps the memory of models that were unloaded"
        self._copies[copy].leaks = f"{what}: it holds {held}, where {expected} are expected"

    def ended(self, copy: int, batch: HostBatch) -> None:
        """A batch is over there."""
        if batch.suspect or not self._copies[copy].batches or not self.is_in_use(batch.model):
            self._stale = True

    def lost(self, copy: int, how: str, **circumstances: bool) -> None:
        """Its process is gone. circumstances: those that Residency.lost() asks for."""
        self._copies[copy].loads.clear()
        let_in = self._fronts.withdraw(copy)
        for model in self.residency.lost(copy, let_in, **circumstances):
            self._why[model] = f"the process that loaded it died: {how}"
        self._stale = True

    def charge(self, model: Model) -> str:
        """A batch of it has killed its process. What becomes of it then, for people, if anything does."""
        is_moved = self.residency.charge(model)
        return f"; {of_key(model)} has killed {KILLS} processes, and gets one of its own" if is_moved else ""

    def is_needed(self, copy: int) -> bool:
        """Whether its process is to be there: that for models that others cannot be with, once there is one."""
        return copy < len(self._copies) - 1 or self.residency.is_apart_needed

    # What may run where.

    def runs(self, copy: int, batch: HostBatch) -> bool:
        """Whether its model is there."""
        return self.residency.copy_of(batch.model) == copy

    def is_reserved(self, copy: int) -> bool:
        """Whether no batch may begin there: for a load that runs alone, a fresh process, or a restart."""
        held = self._copies[copy]
        if held.leaks or self.residency.draining == copy or any(self.residency.uses[each].alone for each in held.loads):
            return True
        if (fresh := first_fresh(self._again)) is None:
            return False
        home = self.residency.copy_of(fresh.model)
        return held.runs > 0 if home == copy else home is None and not held.runs and copy in self.homes(fresh)

    def homes(self, batch: HostBatch) -> Sequence[int]:
        """Where a batch can run: where its model is, or may be loaded."""
        home = self.residency.copy_of(batch.model)
        return self.residency.copies_for(batch.model) if home is None else [home]

    def may_load(self, copy: int, model: Model) -> bool:
        held = self._copies[copy]
        if held.state != "ready" or held.leaks or held.holds_a_suspect:
            return False
        if any(batch.suspect and self.runs(copy, batch) for batch in self._again):
            return False
        if (fresh := first_fresh(self._again)) is None or copy not in self.homes(fresh):
            return True
        home = self.residency.copy_of(fresh.model)
        return home != copy if home is not None else (not held.runs) == (model == fresh.model)

    def is_running(self, copy: int) -> bool:
        return bool(self._copies[copy].batches)

    def is_in_use(self, model: Model) -> bool:
        copy = self.residency.copy_of(model)
        if copy is not None and self._fronts.all[copy].are_waiting(model):
            return True
        running = any(batch.model == model for held in self._copies for batch in held.batches)
        return running or any(batch.model == model for batch in self._again)

    # What to do now.

    def decide(self, now: float) -> list[LoadNow | UnloadNow | Refusal]:
        if not self._stale and ((time := self.residency.next_time()) is None or now < time):
            return []
        self._stale = False
        suspects = [batch for batch in reversed(self._again) if batch.suspect]
        for batch in sorted(suspects, key=lambda batch: batch.fresh):  # in the end, a fresh one is first
            self.residency.put_first(batch.model)
        return [made for step in self.residency.decide(now) if (made := self._do(step, now)) is not None]

    def _do(self, step: Step, now: float) -> LoadNow | UnloadNow | Refusal | None:
        if isinstance(step, LoadNow):
            self._copies[step.copy].loads[step.model] = now
        if isinstance(step, LoadNow | UnloadNow):
            return step
        entries = self.residency.take(step.model)
        if isinstance(step, Refuse):
            return self._refusal(step.model, entries, step.too_large)
        for entry in entries:
            self._fronts.all[step.copy].add(entry, entry.owner, now)
        return None

    def _refusal(self, model: Model, entries: list[Entry[Submission]], too_large: bool) -> Refusal:
        if too_large:
            message = told_too_large(model, self.residency.uses[model].bytes, self.residency.budget)
            return Refusal(model, entries, OUT_OF_MEMORY, message)
        why = self._why.get(model, "")
        what = f"{of_key(model)} could not be loaded, in {ATTEMPTS} attempts: {_reason(why)}"
        return Refusal(model, entries, LOADING, what, why if isinstance(why, LoadFailed) else None)

    def late(self, copy: int, now: float) -> str | None:
        """A model that takes too long to load; its process is to be killed."""
        limit = self._load_timeout
        for model, since in self._copies[copy].loads.items() if limit is not None else ():
            assert limit is not None
            if now >= since + limit:
                del self._copies[copy].loads[model]
                self.residency.charge(model)
                self._failed(model, f"it took longer than the {limit:g} s that loading may take (load_timeout)")
                return str(model)
        return None

    def times(self) -> Iterator[float]:
        """When something is due."""
        if (time := self.residency.next_time()) is not None:
            yield time
        if self._load_timeout is not None:
            for copy in self._copies:
                if copy.state == "ready":
                    yield from (since + self._load_timeout for since in copy.loads.values())

    def _failed(self, model: Model, why: LoadFailed | str, *, no_memory: bool = False) -> None:
        self._why[model] = why
        self.residency.load_failed(model, no_memory=no_memory)
        self._stale = True


def leaky(copies: Sequence[Copy]) -> Iterator[KillCopy]:
    """Processes that are to be started anew, and are idle."""
    for number, copy in enumerate(copies):
        if copy.leaks and copy.state == "ready" and not copy.batches and not copy.loads:
            copy.state = "killed"
            yield KillCopy(number, copy.leaks)


def _reason(why: LoadFailed | str) -> str:
    if isinstance(why, str):
        return why
    return why.error.message if why.failure is None else f"{why.failure.error_type}: {why.failure.message}"
