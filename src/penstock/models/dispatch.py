"""The decisions of a model host: which copies there are, what runs on which, and what becomes of rows whose process has
died. Pure: events and the time go in, commands come out. When a batch leaves is decided by its front (models/front.py).

    clients -> lanes -> front -> copies of the model (each at most `concurrent` batches at once, and one more waiting)

With a budget, copies hold some of many models each, and have fronts of their own: models/keyed_models.py says which, and
batches run where their model is.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from penstock.batching.entry import Entry
from penstock.failures import OUT_OF_MEMORY, TIMED_OUT
from penstock.models.commands import Command, End, GiveUp, KillCopy, RunBatch, StartCopy
from penstock.models.fronts import Fronts
from penstock.models.host_batches import Copy, HostBatch, Submission, Submissions, first_fresh
from penstock.models.hunt import rows_of, spans_of
from penstock.models.keyed_models import KeyedModels, Refusal, leaky
from penstock.models.messages import HostSpec
from penstock.models.reruns import Reruns, rows_told
from penstock.models.uses import FORGIVEN, Uses, of_key

LOADS = 5  # of a copy whose process dies before it is loaded, one after the other
NOT_ENOUGH = "the model's process had not enough memory"


class Dispatch:
    """One host's state."""

    def __init__(self, spec: HostSpec, now: float) -> None:
        self._spec = spec
        self.fronts = Fronts(spec)
        self.front = self.fronts.all[0]
        copies = spec.copies + (spec.budget is not None)  # one for models that cannot be with others
        self._copies = [Copy(1 if spec.in_turn else spec.concurrent) for _ in range(copies)]
        again: deque[HostBatch] = deque()
        self.keyed: KeyedModels | None = None  # of a host for many models
        if spec.budget is not None:
            self.keyed = KeyedModels(spec, self.fronts, self._copies, again)
        self.submissions = Submissions(self.fronts, self.front.add if self.keyed is None else self.keyed.add)
        self._numbers = itertools.count(1)
        self._again = Reruns(again, self.submissions, self._numbers, retry_safe=spec.retry_safe)
        self._clients: set[int] = set()
        self._pending: list[Command] = []
        self._moved = ""  # what became of the model that a process died of
        self._lonely_since: float | None = now

    # What clients do.

    def joined(self, client: int) -> None:
        self._clients.add(client)
        self._lonely_since = None

    def gone(self, client: int, now: float) -> None:
        self._clients.discard(client)
        for _, lane in [each for each in self.fronts.lanes if each[0] == client]:
            self.closed(client, lane)
        if not self._clients:
            self._lonely_since = now

    def opened(self, client: int, lane: int, model: str | None = None) -> None:
        """model: that all of its rows will be for, of several."""
        self.fronts.opened((client, lane))
        if model is not None and self.keyed is not None:
            self.keyed.expect(model)

    def closed(self, client: int, lane: int) -> None:
        """What waits from there is forgotten; what runs, runs for nobody."""
        if self.submissions.close((client, lane)) and self.keyed is not None:
            self.keyed.discard((client, lane))
        self._pending += self._again.forget_unwanted()

    def submitted(self, entry: Entry[Submission], now: float) -> None:
        self.submissions.submitted(entry, now)

    # What processes do.

    def loaded(self, copy: int, device_bytes: int | None = None) -> None:
        """Its process has the model; or, where there are many, can load some."""
        if self._copies[copy].state == "starting":  # not late: that process is being killed
            self._copies[copy].state = "ready"
            self._copies[copy].failed_loads = 0
            if self.keyed is not None:
                self.keyed.ready(copy, device_bytes)

    def at_work(self, copy: int) -> str | None:
        """Of many models, one that runs there, or is loaded."""
        held = self._copies[copy]
        return next((model for batch in held.batches if (model := batch.model) is not None), next(iter(held.loads), None))

    @property
    def uses(self) -> Uses | None:
        """What each of many models has cost."""
        return None if self.keyed is None else self.keyed.residency.uses

    def calls(self, copy: int, number: int, now: float) -> None:
        """The model is called: for the first time with this batch, or with a part of it after it raised."""
        for batch in self._copies[copy].batches:
            if batch.number == number and batch.started is not None:
                batch.started = now

    def ended(self, copy: int, number: int, now: float, failed: int = 0) -> HostBatch | None:
        """A batch is answered, or raised an error of its own: either way it is over."""
        batch = self._copies[copy].pop(number)
        if batch is not None:
            self._copies[copy].begin(now)
            self.submissions.settle(batch.spans)
            if batch.hunt is not None:
                self._pending += self._again.follow(batch.hunt.known(failed))
            if self.keyed is not None:
                self.keyed.ended(copy, batch)
        return batch

    def exhausted(self, copy: int, number: int, left: Sequence[int]) -> tuple[HostBatch | None, list[Command]]:
        """These rows of a batch did not fit into memory, each alone; the others are answered. What others left behind may
        have filled it, so they run again in a fresh process, where one that fails alone is to blame."""
        held = self._copies[copy]
        batch = held.pop(number)
        if batch is None:
            return None, []
        if held.runs == 1 and batch.rows > 1:  # nothing was there before it: the batch itself was too large
            front, at = self.fronts.of(copy)
            front.out_of_memory(batch.spans, batch.rows, at)
        held.state = "killed"
        for other in held.batches:  # innocent: they go on elsewhere
            other.started = None
        if batch.hunt is not None:
            self.submissions.settle(batch.hunt.answered_but(left))
            steps = batch.hunt.exhausted(NOT_ENOUGH)
        else:
            rows, again = rows_of(batch.spans), set(left)
            self.submissions.settle(spans_of(row for at, row in enumerate(rows) if at not in again))
            steps = self._again.hunt(HostBatch(0, spans_of(rows[at] for at in left)), OUT_OF_MEMORY, NOT_ENOUGH)
        kill = KillCopy(copy, f"it had no memory left for {rows_told(len(left))}, which a fresh one may have")
        return batch, [kill, *self._again.follow(steps)]

    def outlook(self) -> str:
        """What becomes of the rows whose process is gone, for people."""
        moved, self._moved = self._moved, ""
        return self._again.outlook() + moved

    def died(self, copy: int, how: str, *, from_outside: bool = False) -> list[Command]:
        """Its process is gone. What it held runs again, alone; but not for ever. from_outside: somebody has killed it."""
        held = self._copies[copy]
        state, held.state = held.state, "absent"
        batches, held.batches = held.batches, []
        if state == "late":
            return [GiveUp(how)]
        if state == "starting":
            held.failed_loads += 1
            if held.failed_loads >= LOADS + FORGIVEN * from_outside:
                return [GiveUp(f"the process that loads the model died {held.failed_loads} times: {how}")]
            return []
        ran = [batch for batch in batches if batch.started is not None]
        alone = len(ran) == 1 and not held.loads
        if alone and self.keyed is not None:
            self._moved = self.keyed.charge(ran[0].model)
        commands = self._again.lost(batches, ran, how, alone=alone)
        if self.keyed is not None:
            self.keyed.lost(copy, how, killed=state == "killed", beside=bool(ran), from_outside=from_outside)
        return commands

    # What to do now.

    def decide(self, now: float) -> list[Command]:
        if self._lonely_since is not None and now >= self._lonely_since + self._spec.grace:
            return [End()]
        pending, self._pending = self._pending, []
        commands = [*pending, *self._overdue(now)]
        if self.keyed is not None:
            commands += leaky(self._copies)
            for made in self.keyed.decide(now):
                commands += self._again.refused(made) if isinstance(made, Refusal) else [made]
        commands += [*self._renewed(), *self._starts(now), *self._runs(now)]
        return commands if self.keyed is None else [*commands, *self._renewed()]  # for the next, if one of several has run

    def next_time(self) -> float | None:
        """When decide() should be asked again, if nothing happens before."""
        times = []
        if self._lonely_since is not None:
            times.append(self._lonely_since + self._spec.grace)
        for copy in self._copies:
            if copy.state == "starting" and self._spec.load_timeout is not None:
                times.append(copy.since + self._spec.load_timeout)
            if self._spec.timeout is not None:
                times += [batch.started + self._spec.timeout for batch in copy.batches if batch.started is not None]
        if self.keyed is not None:
            times += self.keyed.times()
        for number in self._askers():
            front, _ = self.fronts.of(number)
            if (leaves := front.next_time()) is not None:
                times.append(leaves)
        return min(times, default=None)

    def _askers(self) -> Iterable[int]:
        """Copies that take rows from their fronts as soon as these may leave."""
        if self.keyed is None and self._again.waiting:
            return ()
        copies = [number for number, copy in enumerate(self._copies) if copy.has_place]
        return copies[:1] if self.keyed is None else [number for number in copies if self._takes_new(number)]

    def _overdue(self, now: float) -> Iterator[Command]:
        for number, copy in enumerate(self._copies):
            limit = self._spec.load_timeout
            if copy.state == "starting" and limit is not None and now >= copy.since + limit:
                copy.state = "late"
                yield KillCopy(number, f"it took longer than the {limit:g} s that loading may take (load_timeout)")
                continue
            if self.keyed is not None and copy.state == "ready" and (model := self.keyed.late(number, now)) is not None:
                yield from self._spared(copy, "a model took too long to load, and these rows were called")
                yield KillCopy(number, f"{of_key(model)} took longer than the {limit:g} s that loading may take")
                continue
            limit = self._spec.timeout
            late = [b for b in copy.batches if limit is not None and b.started is not None and now >= b.started + limit]
            for batch in late:
                if self.keyed is not None:
                    self._moved = self.keyed.charge(batch.model)
                copy.batches.remove(batch)
                yield from self._again.failed(batch, TIMED_OUT, f"one call took longer than the timeout of {limit:g} s")
            if late:
                yield from self._spared(copy, "another batch took too long, and these rows were called")
                yield KillCopy(number, f"one call took longer than {limit:g} s")

    def _spared(self, copy: Copy, why_not: str) -> Iterator[Command]:
        """It is killed. What it held is innocent, and goes on elsewhere, if it may be called again."""
        copy.state = "killed"
        for batch in list(copy.batches):
            if batch.started is not None and not self._spec.retry_safe:
                copy.batches.remove(batch)
                yield from self._again.failed(batch, TIMED_OUT, why_not)
            batch.started = None

    def _renewed(self) -> Iterator[Command]:
        """Rows that need a fresh process, where none is and none comes, get one."""
        if (fresh := first_fresh(self._again.waiting)) is None:
            return
        numbers = range(len(self._copies)) if self.keyed is None else self.keyed.homes(fresh)
        if all(self._copies[number].state == "ready" and self._copies[number].runs for number in numbers):
            for number in numbers:
                copy = self._copies[number]
                if not copy.batches:
                    copy.state = "killed"
                    yield KillCopy(number, "rows for which another had no memory left need a fresh one")
                    return

    def _starts(self, now: float) -> Iterator[Command]:
        for number, copy in enumerate(self._copies):
            if copy.state == "absent" and self.fronts.lanes and (self.keyed is None or self.keyed.is_needed(number)):
                copy.state, copy.since, copy.runs, copy.leaks = "starting", now, 0, ""
                yield StartCopy(number)

    def _runs(self, now: float) -> Iterator[Command]:
        """Free copies first, then the least loaded; and behind what runs full batches only: others may still grow."""
        for held in range(self._spec.concurrent + 1):
            for number, copy in enumerate(self._copies):
                if copy.state == "ready" and len(copy.batches) == held and (batch := self._next(number, now)) is not None:
                    copy.batches.append(batch)
                    copy.runs += 1
                    copy.begin(now)
                    yield RunBatch(number, batch)

    def _next(self, number: int, now: float) -> HostBatch | None:
        copy = self._copies[number]
        if copy.holds_a_suspect or (self.keyed is not None and self.keyed.is_reserved(number)):
            return None
        if (again := self._first_again(number)) is not None:
            if not copy.has_place or (again.suspect and (copy.batches or copy.loads)):
                return None
            self._again.waiting.remove(again)
            return again
        taken = self.fronts.take(number, now, idle=copy.has_place)
        return None if taken is None else HostBatch(next(self._numbers), *taken)

    def _takes_new(self, number: int) -> bool:
        assert self.keyed is not None
        return not self.keyed.is_reserved(number) and self._first_again(number) is None

    def _first_again(self, number: int) -> HostBatch | None:
        """The first that may run there: what needs a fresh process goes first in one, and nowhere else."""
        again = [batch for batch in self._again.waiting if self.keyed is None or self.keyed.runs(number, batch)]
        fresh = (batch for batch in again if batch.fresh and not self._copies[number].runs)
        return next(itertools.chain(fresh, (batch for batch in again if not batch.fresh)), None)
