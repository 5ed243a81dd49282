"""The decisions of a model host: who can still add rows, what runs next on which copy, and what becomes of rows whose
process has died. Pure: events and the time go in, commands come out.

    clients -> lanes -> batcher -> copies of the model (each at most `concurrent` batches at once, and one more waiting)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from penstock.batching.aim import Aiming
from penstock.batching.batcher import Batcher
from penstock.batching.entry import Aim, Entry, Span
from penstock.models.messages import HostSpec

ATTEMPTS = 4  # of a batch whose process dies, alone in it
LOADS = 5  # of a copy whose process dies before it is loaded, one after the other
LINGER = (0.002, 1.0)  # seconds that a free model waits at most for rows that may come: the least, the most


class Parcel(NamedTuple):
    """Rows that a client submitted together: what the batcher carries."""

    number: int
    client: int
    lane: int
    ticket: int
    content: Any  # the broker's own


@dataclass(eq=False)
class Batch:
    number: int
    spans: list[Span[Parcel]]
    aim: Aim | None = None  # that it was cut for; None: it runs again, and teaches nothing about sizes
    deaths: int = 0  # of processes that held this batch alone
    suspect: bool = False  # a process died with it: it now runs alone
    started: float | None = None

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.spans)

    @property
    def lengths(self) -> list[int] | None:
        if self.spans[0].entry.lengths is None or self.spans[0].entry.alone:
            return None
        return [length for entry, start, stop in self.spans for length in (entry.lengths or ())[start:stop]]


# Commands.


class StartCopy(NamedTuple):
    copy: int


class KillCopy(NamedTuple):
    copy: int
    why: str


class RunBatch(NamedTuple):
    copy: int
    batch: Batch


class BreakBatch(NamedTuple):
    """Nobody will answer these rows."""

    batch: Batch
    kind: str
    message: str


class GiveUp(NamedTuple):
    """No copy can be loaded: the host ends, and everybody is told why."""

    message: str


class End(NamedTuple):
    """Nobody is there any more."""


Command: TypeAlias = StartCopy | KillCopy | RunBatch | BreakBatch | GiveUp | End


@dataclass(eq=False)
class _Copy:
    aiming: Aiming
    state: str = "absent"  # starting, ready; late (it did not load in time) or killed, until it is gone
    since: float = 0.0
    failed_loads: int = 0
    batches: list[Batch] = field(default_factory=list)  # those that run, oldest first, and one that waits behind them


class Desk:
    """One host's state."""

    def __init__(self, spec: HostSpec, now: float) -> None:
        self._spec = spec
        self._batcher: Batcher[Parcel] = Batcher(spec.limits)
        self._copies = [_Copy(Aiming(spec.limits, spec.by_length)) for _ in range(spec.copies)]
        self._clients: set[int] = set()
        self._lanes: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], int | None] = {}  # lanes that add nothing until this parcel is answered
        self._left: dict[int, int] = {}  # rows of a parcel that are not answered
        self._of_lane: dict[tuple[int, int], set[int]] = {}  # its parcels that are not answered
        self._again: deque[Batch] = deque()
        self._lonely_since: float | None = now
        self._seconds = 0.0  # that the last batch took
        self._numbers = 0

    # What clients do.

    def joined(self, client: int) -> None:
        self._clients.add(client)
        self._lonely_since = None

    def gone(self, client: int, now: float) -> None:
        self._clients.discard(client)
        for _, lane in [each for each in self._lanes if each[0] == client]:
            self.closed(client, lane)
        if not self._clients:
            self._lonely_since = now

    def opened(self, client: int, lane: int) -> None:
        self._lanes.add((client, lane))

    def closed(self, client: int, lane: int) -> None:
        """What waits from there is forgotten; what runs, runs for nobody."""
        self._lanes.discard((client, lane))
        self._waiting.pop((client, lane), None)
        for number in self._of_lane.pop((client, lane), ()):
            self._left.pop(number, None)

        def unwanted(parcel: Parcel) -> bool:
            return (parcel.client, parcel.lane) == (client, lane)

        self._batcher.discard(unwanted)
        self._again = deque(batch for batch in self._again if not all(unwanted(span.entry.item) for span in batch.spans))

    def submitted(self, entry: Entry[Parcel], now: float) -> None:
        self._left[entry.item.number] = entry.size
        self._of_lane.setdefault((entry.item.client, entry.item.lane), set()).add(entry.item.number)
        self._batcher.add(entry, now)

    def waits(self, client: int, lane: int, parcel: int | None) -> None:
        """Until the rows of this parcel are answered; or, for None, until it goes on."""
        if (client, lane) in self._lanes and (parcel is None or parcel in self._left):
            self._waiting[client, lane] = parcel

    def goes(self, client: int, lane: int) -> None:
        self._waiting.pop((client, lane), None)

    def is_left(self, number: int) -> bool:
        """Whether some rows of a parcel are still to be answered."""
        return number in self._left

    # What processes do.

    def loaded(self, copy: int) -> None:
        self._copies[copy].state = "ready"
        self._copies[copy].failed_loads = 0

    def ended(self, copy: int, number: int, now: float) -> Batch | None:
        """A batch is answered, or raised an error of its own: either way it is over."""
        batches = self._copies[copy].batches
        batch = next((batch for batch in batches if batch.number == number), None)
        if batch is not None:
            batches.remove(batch)
            self._begin(self._copies[copy], now)
            self._settle(batch)
        return batch

    def learn(self, copy: int, batch: Batch, seconds: float, out_of_memory: int | None) -> None:
        self._seconds = seconds
        lengths = batch.lengths
        if out_of_memory is not None:
            self._copies[copy].aiming.out_of_memory(out_of_memory, None if lengths is None else lengths[-out_of_memory:])
        elif batch.aim is not None:
            self._copies[copy].aiming.ran(batch.aim, batch.rows, lengths, seconds)

    def died(self, copy: int, how: str, now: float) -> list[Command]:
        """Its process is gone. What it held runs again, alone; but not for ever."""
        state, self._copies[copy].state = self._copies[copy].state, "absent"
        batches, self._copies[copy].batches = self._copies[copy].batches, []
        if state in ("starting", "late"):
            self._copies[copy].failed_loads += 1
            if self._copies[copy].failed_loads >= LOADS:
                return [GiveUp(f"the process that loads the model died {LOADS} times: {how}")]
            return []
        ran = [batch for batch in batches if batch.started is not None]
        for batch in reversed(batches):
            batch.aim = None
            if batch in ran:
                batch.deaths += len(ran) == 1
                batch.suspect = True
            if batch.deaths < ATTEMPTS:
                self._again.appendleft(batch)
        return [self._broken(batch, how) for batch in ran if batch.deaths >= ATTEMPTS]

    # What to do now.

    def decide(self, now: float) -> list[Command]:
        if self._lonely_since is not None and now >= self._lonely_since + self._spec.grace:
            return [End()]
        return [*self._overdue(now), *self._starts(now), *self._runs(now)]

    def next_time(self, now: float) -> float | None:
        """When decide() should be asked again, if nothing happens before."""
        times = []
        if self._lonely_since is not None:
            times.append(self._lonely_since + self._spec.grace)
        for copy in self._copies:
            if copy.state == "starting" and self._spec.load_timeout is not None:
                times.append(copy.since + self._spec.load_timeout)
            if self._spec.timeout is not None:
                times += [batch.started + self._spec.timeout for batch in copy.batches if batch.started is not None]
        if self._batcher.waiting and any(copy.state == "ready" and not copy.batches for copy in self._copies):
            times.append(self._lingers_until())
        return min(times, default=None)

    def explain(self) -> str | None:
        return self._copies[0].aiming.explain()

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
                self._settle(batch)
                yield BreakBatch(batch, "timed out", f"the model took longer than the timeout of {limit:g} s")
            if late:
                copy.state = "killed"
                for batch in copy.batches:  # innocent: they go on elsewhere
                    batch.started = None
                yield KillCopy(number, f"a batch took longer than {limit:g} s")

    def _starts(self, now: float) -> Iterator[Command]:
        for number, copy in enumerate(self._copies):
            if copy.state == "absent" and self._lanes:
                copy.state, copy.since = "starting", now
                yield StartCopy(number)

    def _runs(self, now: float) -> Iterator[Command]:
        """Free copies first; then, behind what runs, full batches only: others may still grow."""
        for ahead in (0, 1):
            for number, copy in enumerate(self._copies):
                while copy.state == "ready" and (batch := self._next(copy, ahead, now)) is not None:
                    copy.batches.append(batch)
                    self._begin(copy, now)
                    yield RunBatch(number, batch)

    def _next(self, copy: _Copy, ahead: int, now: float) -> Batch | None:
        room = self._spec.concurrent + ahead - len(copy.batches)
        if room <= 0 or any(batch.suspect for batch in copy.batches):
            return None
        if self._again:
            if ahead or (self._again[0].suspect and copy.batches):
                return None
            return self._again.popleft()
        self._batcher.aim = copy.aiming.aim()
        idle = not copy.batches
        flush = idle and bool(self._batcher.waiting) and (self._nobody_can_add() or now >= self._lingers_until())
        spans = self._batcher.take(now, flush=flush)
        if spans is None:
            return None
        self._numbers += 1
        return Batch(self._numbers, spans, self._batcher.aim)

    def _nobody_can_add(self) -> bool:
        return len(self._waiting) == len(self._lanes)

    def _lingers_until(self) -> float:
        """A free model waits for callers that could add rows: as long as the user said, or as its last batch took."""
        deadline = self._batcher.deadline()
        if deadline is not None:
            return deadline
        least, most = LINGER
        return self._batcher.oldest() + min(most, max(least, self._seconds))

    def _begin(self, copy: _Copy, now: float) -> None:
        """The first batches of a copy run. Where they take turns, the second is not at it before the first is over."""
        for batch in copy.batches[: 1 if self._spec.in_turn else self._spec.concurrent]:
            if batch.started is None:
                batch.started = now

    def _broken(self, batch: Batch, how: str) -> Command:
        self._settle(batch)
        return BreakBatch(batch, "crashed", f"the model's process died {batch.deaths} times with these rows: {how}")

    def _settle(self, batch: Batch) -> None:
        for entry, start, stop in batch.spans:
            number, lane = entry.item.number, (entry.item.client, entry.item.lane)
            left = self._left.get(number)
            if left is None:
                continue  # nobody wants it any more
            self._left[number] = left - (stop - start)
            if not self._left[number]:
                del self._left[number]
                self._of_lane[lane].discard(number)
                if self._waiting.get(lane) == number:
                    del self._waiting[lane]
