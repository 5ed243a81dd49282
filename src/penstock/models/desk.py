"""The decisions of a model host: who can still add rows, what runs next on which copy, and what becomes of rows whose
process has died. Pure: events and the time go in, commands come out.

    clients -> lanes -> batcher -> copies of the model (each at most `concurrent` batches at once, and one more waiting)
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.batching.aim import Aiming
from penstock.batching.batcher import Batcher
from penstock.batching.entry import Entry
from penstock.batching.isolation import Blame
from penstock.failures import CRASHED, OUT_OF_MEMORY, TIMED_OUT
from penstock.models.batch import Batch, Hunt, Parcel
from penstock.models.callers import Callers
from penstock.models.commands import BreakBatch, Command, End, GiveUp, KillCopy, RunBatch, StartCopy
from penstock.models.messages import HostSpec

ATTEMPTS = 4  # of a single row whose process dies, alone in it
HUNT_AFTER = 2  # deaths of a process that held one batch: the first may have come from outside
LOADS = 5  # of a copy whose process dies before it is loaded, one after the other
NOT_ENOUGH = "the model's process had not enough memory"
LINGER = (0.002, 1.0)  # seconds that a free model waits at most for rows that may come: the least, the most


@dataclass(eq=False)
class _Copy:
    aiming: Aiming
    state: str = "absent"  # starting, ready; late (it did not load in time) or killed, until it is gone
    since: float = 0.0
    failed_loads: int = 0
    runs: int = 0  # batches that its process was given
    batches: list[Batch] = field(default_factory=list)  # those that run, oldest first, and one that waits behind them


class Desk:
    """One host's state."""

    def __init__(self, spec: HostSpec, now: float) -> None:
        self._spec = spec
        self._batcher: Batcher[Parcel] = Batcher(spec.limits)
        most = None if spec.timeout is None else spec.timeout / 4
        self._copies = [_Copy(Aiming(spec.limits, spec.by_length, most)) for _ in range(spec.copies)]
        self._callers = Callers()
        self._again: deque[Batch] = deque()
        self._pending: list[Command] = []
        self._lonely_since: float | None = now
        self._seconds = 0.0  # that the last batch took
        self._numbers = 0

    # What clients do.

    def joined(self, client: int) -> None:
        self._callers.clients.add(client)
        self._lonely_since = None

    def gone(self, client: int, now: float) -> None:
        self._callers.clients.discard(client)
        for _, lane in [each for each in self._callers.lanes if each[0] == client]:
            self.closed(client, lane)
        if not self._callers.clients:
            self._lonely_since = now

    def opened(self, client: int, lane: int) -> None:
        self._callers.lanes.add((client, lane))

    def closed(self, client: int, lane: int) -> None:
        """What waits from there is forgotten; what runs, runs for nobody."""
        self._callers.close((client, lane))

        def unwanted(parcel: Parcel) -> bool:
            return (parcel.client, parcel.lane) == (client, lane)

        self._batcher.discard(unwanted)
        dropped = [batch for batch in self._again if not self._callers.want(batch.spans)]
        self._again = deque(batch for batch in self._again if batch not in dropped)
        for hunt in [batch.hunt for batch in dropped if batch.hunt is not None]:
            self._part_is_known(hunt)

    def submitted(self, entry: Entry[Parcel], now: float) -> None:
        self._callers.submitted(entry)
        self._batcher.add(entry, now)

    def waits(self, client: int, lane: int, parcel: int | None) -> None:
        self._callers.waits((client, lane), parcel)

    def goes(self, client: int, lane: int) -> None:
        self._callers.goes((client, lane))

    def is_left(self, number: int) -> bool:
        return self._callers.is_left(number)

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
        batches = self._copies[copy].batches
        batch = next((batch for batch in batches if batch.number == number), None)
        if batch is not None:
            batches.remove(batch)
            self._begin(self._copies[copy], now)
            self._callers.settle(batch.spans)
            if batch.hunt is not None:
                batch.hunt.found += failed
                self._part_is_known(batch.hunt)
        return batch

    def exhausted(self, copy: int, number: int, left: Sequence[int], now: float) -> tuple[Batch | None, list[Command]]:
        """These rows of a batch did not fit into memory, each alone; the others are answered. What others left behind may
        have filled it, so they run again in a fresh process, where one that fails alone is to blame."""
        held = self._copies[copy]
        batch = next((batch for batch in held.batches if batch.number == number), None)
        if batch is None:
            return None, []
        held.batches.remove(batch)
        if held.runs == 1 and batch.rows > 1:  # nothing was there before it: the batch itself was too large
            held.aiming.out_of_memory(batch.rows, batch.lengths)
        held.state = "killed"
        for other in held.batches:  # innocent: they go on elsewhere
            other.started = None
        hunt, rows = batch.hunt, list(left)
        if hunt is None:
            whole = Hunt(batch, OUT_OF_MEMORY, NOT_ENOUGH)
            answered = whole.spans(at for at in range(len(whole.rows)) if at not in set(rows))
            self._numbers += 1
            hunt, how = Hunt(Batch(self._numbers, whole.spans(rows)), OUT_OF_MEMORY, NOT_ENOUGH), None
        else:
            known = [row for at, row in enumerate(hunt.running) if at not in set(rows)]
            answered = hunt.spans(known)
            hunt.unknown.difference_update(known)
            hunt.kind, how = OUT_OF_MEMORY, NOT_ENOUGH
            hunt.restarts += not (known or hunt.fruitful)  # while rows are answered it leads somewhere
            hunt.fruitful = False
        self._callers.settle(answered)
        kill = KillCopy(copy, f"it had no memory left for {rows_told(len(rows))}, which a fresh one may have")
        return batch, [kill, *(self._hunt_on(hunt, None) if how is None else self._hunted(hunt, how))]

    def outlook(self) -> str:
        """What becomes of the rows whose process is gone, for people."""
        batch = next((batch for batch in self._again if batch.suspect), None)
        if batch is None:
            return ""
        if batch.hunt is None or batch.rows == 1:
            return f"; {rows_told(batch.rows)} that it held run{'s' if batch.rows == 1 else ''} again, alone"
        return f"; looking for the row that is to blame, among {batch.rows}"

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
        if state == "late":
            return [GiveUp(how)]
        if state == "starting":
            self._copies[copy].failed_loads += 1
            if self._copies[copy].failed_loads >= LOADS:
                return [GiveUp(f"the process that loads the model died {LOADS} times: {how}")]
            return []
        ran = [batch for batch in batches if batch.started is not None]
        commands: list[Command] = []
        for batch in reversed(batches):
            batch.aim = batch.started = None
            if batch in ran:
                batch.suspect = True
                batch.deaths += len(ran) == 1
            if not self._callers.want(batch.spans) and batch.hunt is None:
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
            batch.hunt.restarts += 1
            batch.hunt.kind = kind
            return self._hunted(batch.hunt, how)
        if batch.rows == 1 or not self._spec.retry_safe:
            self._callers.settle(batch.spans)
            return [BreakBatch(batch, kind, how)]
        return self._hunt_on(Hunt(batch, kind, how), None)

    def _part_is_known(self, hunt: Hunt) -> None:
        """Its rows are answered, or nobody wants them any more: the hunt goes on."""
        hunt.unknown.difference_update(range(*hunt.asked))
        hunt.fruitful = True
        self._pending += self._hunted(hunt, None)

    def _hunted(self, hunt: Hunt, how: str | None) -> list[Command]:
        """What became of a part: it was answered, or not."""
        if hunt.is_over_budget:
            return self._give_up_hunt(hunt, how or "")
        if hunt.confirming is None:
            return self._hunt_on(hunt, how)
        start, stop = hunt.confirming
        hunt.confirming = None
        return [*(self._blame(hunt, start, stop, how) if how is not None else []), *self._hunt_on(hunt, None)]

    def _hunt_on(self, hunt: Hunt, reply: str | None) -> list[Command]:
        commands: list[Command] = []
        while True:
            try:
                step = hunt.search.send(reply)
            except StopIteration:
                return commands
            reply = None
            start, stop = hunt.asked = step.start, step.stop
            rows = [n for n in range(start, stop) if n in hunt.unknown and self.is_left(hunt.rows[n][0].item.number)]
            if not rows:
                continue  # they are answered, or nobody wants them
            if isinstance(step, Blame) and hunt.kind == TIMED_OUT:
                commands += self._blame(hunt, start, stop, step.error)
                continue
            if isinstance(step, Blame):  # once more: what killed its process may have come from outside
                hunt.confirming = start, stop
            self._numbers += 1
            final = hunt.kind == OUT_OF_MEMORY and isinstance(step, Blame)
            fresh = hunt.kind == OUT_OF_MEMORY and (final or not hunt.fruitful)
            hunt.running = rows
            part = Batch(self._numbers, hunt.spans(rows), suspect=True, hunt=hunt, fresh=fresh, final=final)
            self._again.appendleft(part)
            return commands

    def _blame(self, hunt: Hunt, start: int, stop: int, how: str) -> list[Command]:
        hunt.found += 1
        return self._break_rows(hunt, range(start, stop), how)

    def _give_up_hunt(self, hunt: Hunt, how: str) -> list[Command]:
        """Too many restarts: what is not known to be good fails together."""
        hunt.search.close()
        return self._break_rows(hunt, sorted(hunt.unknown), how)

    def _break_rows(self, hunt: Hunt, rows: Iterable[int], how: str) -> list[Command]:
        left = [row for row in rows if row in hunt.unknown]
        if not left:
            return []
        hunt.unknown.difference_update(left)
        self._numbers += 1
        batch = Batch(self._numbers, hunt.spans(left))
        self._callers.settle(batch.spans)
        return [BreakBatch(batch, hunt.kind, how)]

    # What to do now.

    def decide(self, now: float) -> list[Command]:
        if self._lonely_since is not None and now >= self._lonely_since + self._spec.grace:
            return [End()]
        pending, self._pending = self._pending, []
        return [*pending, *self._overdue(now), *self._renewed(), *self._starts(now), *self._runs(now)]

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
        if self._batcher.waiting and not self._again and any(self._has_place(copy) for copy in self._copies):
            times.append(self._lingers_until())
        return min(times, default=None)

    def _has_place(self, copy: _Copy) -> bool:
        """Whether a batch would run at once. Where batches take turns, it would only if there is none."""
        room = len(copy.batches) < self._at_once
        return room and copy.state == "ready" and not any(batch.suspect for batch in copy.batches)

    @property
    def _at_once(self) -> int:
        """How many batches of a copy run at the same time: where they take turns, one."""
        return 1 if self._spec.in_turn else self._spec.concurrent

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
            if copy.state == "absent" and self._callers.lanes:
                copy.state, copy.since, copy.runs = "starting", now, 0
                yield StartCopy(number)

    def _runs(self, now: float) -> Iterator[Command]:
        """Free copies first, then the least loaded; and behind what runs full batches only: others may still grow."""
        for held in range(self._spec.concurrent + 1):
            for number, copy in enumerate(self._copies):
                if copy.state == "ready" and len(copy.batches) == held and (batch := self._next(copy, now)) is not None:
                    copy.batches.append(batch)
                    copy.runs += 1
                    self._begin(copy, now)
                    yield RunBatch(number, batch)

    def _next(self, copy: _Copy, now: float) -> Batch | None:
        ahead = len(copy.batches) >= self._at_once
        if any(batch.suspect for batch in copy.batches):
            return None
        if (again := self._first_again(copy)) is not None:
            if ahead or (again.suspect and copy.batches):
                return None
            self._again.remove(again)
            return again
        self._batcher.aim = copy.aiming.aim()
        flush = (
            self._has_place(copy)
            and bool(self._batcher.waiting)
            and (self._callers.nobody_can_add() or now >= self._lingers_until())
        )
        spans = self._batcher.take(-math.inf if ahead else now, flush=flush)
        if spans is None:
            return None
        self._numbers += 1
        return Batch(self._numbers, spans, self._batcher.aim)

    def _first_again(self, copy: _Copy) -> Batch | None:
        """The first that may run there: what needs a fresh process goes first in one, and nowhere else."""
        fresh = (batch for batch in self._again if batch.fresh and not copy.runs)
        return next(itertools.chain(fresh, (batch for batch in self._again if not batch.fresh)), None)

    def _lingers_until(self) -> float:
        """A free model waits for callers that could add rows: as long as the user said, or as its last batch took."""
        deadline = self._batcher.deadline()
        if deadline is not None:
            return deadline
        least, most = LINGER
        return self._batcher.oldest() + min(most, max(least, self._seconds))

    def _begin(self, copy: _Copy, now: float) -> None:
        """The first batches of a copy run. Where they take turns, the second is not at it before the first is over."""
        if copy.state != "ready":
            return  # what a killed process still holds runs no more
        for batch in copy.batches[: self._at_once]:
            if batch.started is None:
                batch.started = now


def rows_told(rows: int) -> str:
    return "a row" if rows == 1 else f"{rows} rows"
