"""The decisions of a model host: which copies there are, what runs on which, and what becomes of rows whose process has
died. Pure: events and the time go in, commands come out. When a batch leaves is decided by its front (models/front.py).

    clients -> lanes -> front -> copies of the model (each at most `concurrent` batches at once, and one more waiting)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.batching.entry import Entry
from penstock.failures import CRASHED, OUT_OF_MEMORY, TIMED_OUT
from penstock.models.commands import BreakBatch, Command, End, GiveUp, KillCopy, RunBatch, StartCopy
from penstock.models.front import Front
from penstock.models.host_batches import Batch, Parcel, Parcels
from penstock.models.hunt import Hunt, Steps, rows_of, spans_of
from penstock.models.messages import HostSpec

ATTEMPTS = 4  # of a single row whose process dies, alone in it
HUNT_AFTER = 2  # deaths of a process that held one batch: the first may have come from outside
LOADS = 5  # of a copy whose process dies before it is loaded, one after the other
NOT_ENOUGH = "the model's process had not enough memory"


@dataclass(eq=False)
class _Copy:
    at_once: int  # batches that run at the same time: where they take turns, one
    state: str = "absent"  # starting, ready; late (it did not load in time) or killed, until it is gone
    since: float = 0.0
    failed_loads: int = 0
    runs: int = 0  # batches that its process was given
    batches: list[Batch] = field(default_factory=list)  # those that run, oldest first, and one that waits behind them

    @property
    def has_place(self) -> bool:
        """Whether a batch would run at once. Where batches take turns, it would only if there is none."""
        return self.state == "ready" and len(self.batches) < self.at_once and not self.holds_a_suspect

    @property
    def holds_a_suspect(self) -> bool:
        return any(batch.suspect for batch in self.batches)

    def begin(self, now: float) -> None:
        """The first batches run. Where they take turns, the second is not at it before the first is over."""
        if self.state == "ready":  # what a killed process still holds runs no more
            for batch in self.batches[: self.at_once]:
                if batch.started is None:
                    batch.started = now

    def pop(self, number: int) -> Batch | None:
        batch = next((batch for batch in self.batches if batch.number == number), None)
        if batch is not None:
            self.batches.remove(batch)
        return batch


class Dispatch:
    """One host's state."""

    def __init__(self, spec: HostSpec, now: float) -> None:
        self._spec = spec
        self.front: Front[Parcel] = Front(
            spec.limits,
            spec.by_length,
            copies=spec.copies,
            most_seconds=None if spec.timeout is None else spec.timeout / 4,
            in_turn=spec.in_turn,
            eager=True,
        )
        self.parcels = Parcels(self.front)
        self._copies = [_Copy(1 if spec.in_turn else spec.concurrent) for _ in range(spec.copies)]
        self._clients: set[int] = set()
        self._again: deque[Batch] = deque()
        self._pending: list[Command] = []
        self._lonely_since: float | None = now
        self._numbers = itertools.count(1)

    # What clients do.

    def joined(self, client: int) -> None:
        self._clients.add(client)
        self._lonely_since = None

    def gone(self, client: int, now: float) -> None:
        self._clients.discard(client)
        for _, lane in [each for each in self.front.lanes if each[0] == client]:
            self.closed(client, lane)
        if not self._clients:
            self._lonely_since = now

    def opened(self, client: int, lane: int) -> None:
        self.front.opened((client, lane))

    def closed(self, client: int, lane: int) -> None:
        """What waits from there is forgotten; what runs, runs for nobody."""
        self.parcels.close((client, lane))
        dropped = [batch for batch in self._again if not self.parcels.are_wanted(batch.spans)]
        self._again = deque(batch for batch in self._again if batch not in dropped)
        for hunt in [batch.hunt for batch in dropped if batch.hunt is not None]:
            self._pending += self._follow(hunt.known())

    def submitted(self, entry: Entry[Parcel], now: float) -> None:
        self.parcels.submitted(entry, now)

    # What processes do.

    def loaded(self, copy: int) -> None:
        if self._copies[copy].state == "starting":  # not late: that process is being killed
            self._copies[copy].state = "ready"
            self._copies[copy].failed_loads = 0

    def calls(self, copy: int, number: int, now: float) -> None:
        """The model is called: for the first time with this batch, or with a part of it after it raised."""
        for batch in self._copies[copy].batches:
            if batch.number == number and batch.started is not None:
                batch.started = now

    def ended(self, copy: int, number: int, now: float, failed: int = 0) -> Batch | None:
        """A batch is answered, or raised an error of its own: either way it is over."""
        batch = self._copies[copy].pop(number)
        if batch is not None:
            self._copies[copy].begin(now)
            self.parcels.settle(batch.spans)
            if batch.hunt is not None:
                self._pending += self._follow(batch.hunt.known(failed))
        return batch

    def exhausted(self, copy: int, number: int, left: Sequence[int]) -> tuple[Batch | None, list[Command]]:
        """These rows of a batch did not fit into memory, each alone; the others are answered. What others left behind may
        have filled it, so they run again in a fresh process, where one that fails alone is to blame."""
        held = self._copies[copy]
        batch = held.pop(number)
        if batch is None:
            return None, []
        if held.runs == 1 and batch.rows > 1:  # nothing was there before it: the batch itself was too large
            self.front.out_of_memory(batch.spans, batch.rows, copy)
        held.state = "killed"
        for other in held.batches:  # innocent: they go on elsewhere
            other.started = None
        if batch.hunt is not None:
            self.parcels.settle(batch.hunt.answered_but(left))
            steps = batch.hunt.exhausted(NOT_ENOUGH)
        else:
            rows, again = rows_of(batch.spans), set(left)
            self.parcels.settle(spans_of(row for at, row in enumerate(rows) if at not in again))
            steps = self._hunt(Batch(0, spans_of(rows[at] for at in left)), OUT_OF_MEMORY, NOT_ENOUGH)
        kill = KillCopy(copy, f"it had no memory left for {rows_told(len(left))}, which a fresh one may have")
        return batch, [kill, *self._follow(steps)]

    def outlook(self) -> str:
        """What becomes of the rows whose process is gone, for people."""
        batch = next((batch for batch in self._again if batch.suspect), None)
        if batch is None:
            return ""
        if batch.hunt is None or batch.rows == 1:
            return f"; {rows_told(batch.rows)} that it held run{'s' if batch.rows == 1 else ''} again, alone"
        return f"; looking for the row that is to blame, among {batch.rows}"

    def died(self, copy: int, how: str) -> list[Command]:
        """Its process is gone. What it held runs again, alone; but not for ever."""
        held = self._copies[copy]
        state, held.state = held.state, "absent"
        batches, held.batches = held.batches, []
        if state == "late":
            return [GiveUp(how)]
        if state == "starting":
            held.failed_loads += 1
            if held.failed_loads >= LOADS:
                return [GiveUp(f"the process that loads the model died {LOADS} times: {how}")]
            return []
        ran = [batch for batch in batches if batch.started is not None]
        commands: list[Command] = []
        for batch in reversed(batches):
            batch.aim = batch.started = None
            if batch in ran:
                batch.suspect = True
                batch.deaths += len(ran) == 1
            if not self.parcels.are_wanted(batch.spans) and batch.hunt is None:
                continue
            if batch not in ran or (len(ran) > 1 and self._spec.retry_safe) or self._is_to_run_again(batch):
                self._again.appendleft(batch)
            else:
                commands += self._failed(batch, CRASHED, f"the model's process died with these rows: {how}")
        return commands

    def _is_to_run_again(self, batch: Batch) -> bool:
        """Whether a batch whose process died gets another try as it is."""
        if not self._spec.retry_safe or batch.hunt is not None:
            return False
        return batch.deaths < (HUNT_AFTER if batch.rows > 1 else ATTEMPTS)

    def _failed(self, batch: Batch, kind: str, how: str) -> list[Command]:
        """A batch has killed its process, or hangs: find the rows that do it."""
        if batch.hunt is not None:
            return self._follow(batch.hunt.died(kind, how))
        if batch.rows == 1 or not self._spec.retry_safe:
            return self._follow([BreakBatch(batch, kind, how)])
        return self._follow(self._hunt(batch, kind, how))

    def _hunt(self, batch: Batch, kind: str, how: str) -> Steps:
        return Hunt(batch.spans, kind, how, self._numbers, self.parcels.is_left).begin()

    def _follow(self, steps: Steps) -> list[Command]:
        """What a hunt says: parts run before anything else; rows that nobody will answer are settled."""
        commands: list[Command] = []
        for step in steps:
            if isinstance(step, Batch):
                self._again.appendleft(step)
            else:
                self.parcels.settle(step.batch.spans)
                commands.append(step)
        return commands

    # What to do now.

    def decide(self, now: float) -> list[Command]:
        if self._lonely_since is not None and now >= self._lonely_since + self._spec.grace:
            return [End()]
        pending, self._pending = self._pending, []
        return [*pending, *self._overdue(now), *self._renewed(), *self._starts(now), *self._runs(now)]

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
        leaves = None if self._again else self.front.next_time()
        if leaves is not None and any(copy.has_place for copy in self._copies):
            times.append(leaves)
        return min(times, default=None)

    def _overdue(self, now: float) -> Iterator[Command]:
        for number, copy in enumerate(self._copies):
            limit = self._spec.load_timeout
            if copy.state == "starting" and limit is not None and now >= copy.since + limit:
                copy.state = "late"
                yield KillCopy(number, f"it took longer than the {limit:g} s that loading may take (load_timeout)")
                continue
            limit = self._spec.timeout
            late = [b for b in copy.batches if limit is not None and b.started is not None and now >= b.started + limit]
            for batch in late:
                copy.batches.remove(batch)
                yield from self._failed(batch, TIMED_OUT, f"the model took longer than the timeout of {limit:g} s")
            if late:
                copy.state = "killed"
                for batch in list(copy.batches):  # innocent: they go on elsewhere
                    if batch.started is not None and not self._spec.retry_safe:
                        copy.batches.remove(batch)
                        yield from self._failed(batch, TIMED_OUT, "another batch took too long, and these rows were called")
                    batch.started = None
                yield KillCopy(number, f"a batch took longer than {limit:g} s")

    def _renewed(self) -> Iterator[Command]:
        """Rows that need a fresh process, where none is and none comes, get one."""
        if any(batch.fresh for batch in self._again) and all(copy.state == "ready" and copy.runs for copy in self._copies):
            for number, copy in enumerate(self._copies):
                if not copy.batches:
                    copy.state = "killed"
                    yield KillCopy(number, "rows for which another had no memory left need a fresh one")
                    return

    def _starts(self, now: float) -> Iterator[Command]:
        for number, copy in enumerate(self._copies):
            if copy.state == "absent" and self.front.lanes:
                copy.state, copy.since, copy.runs = "starting", now, 0
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

    def _next(self, number: int, now: float) -> Batch | None:
        copy = self._copies[number]
        if copy.holds_a_suspect:
            return None
        if (again := self._first_again(copy)) is not None:
            if not copy.has_place or (again.suspect and copy.batches):
                return None
            self._again.remove(again)
            return again
        taken = self.front.take(now, idle=copy.has_place, copy=number)
        return None if taken is None else Batch(next(self._numbers), *taken)

    def _first_again(self, copy: _Copy) -> Batch | None:
        """The first that may run there: what needs a fresh process goes first in one, and nowhere else."""
        fresh = (batch for batch in self._again if batch.fresh and not copy.runs)
        return next(itertools.chain(fresh, (batch for batch in self._again if not batch.fresh)), None)


def rows_told(rows: int) -> str:
    return "a row" if rows == 1 else f"{rows} rows"
