"""The front of a model: who may add rows, which rows wait, and when a batch of them leaves. Pure: the time is passed in.

    callers -> lanes -> rows by model and group -> a batch, for a copy that asks

One rule for every place where a model lives. The session in a process and the broker of a host tell the front what happens,
and carry out what it says; neither decides when a batch leaves.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

from penstock.batching.batcher import Batcher
from penstock.batching.entry import Aim, Entry, Span, lengths_of, rows_in
from penstock.batching.full_batches import Aiming
from penstock.batching.limits import BatchLimits

T = TypeVar("T")

LINGER = (0.002, 1.0)  # seconds that rows wait at most for others that may come: the least, the most
QUICK, MOST_IN_A_ROW = 0.001, 64  # seconds for which batches run in a row, and how many at most


class Front(Generic[T]):
    """A full batch leaves at once. For a copy that is idle, others leave too: when no lane can add to them, as all of them
    wait; when their oldest row has waited for max_wait; or, where there is no max_wait, when it has lingered for about as
    long as the last batch took. So a lane that is open and adds nothing holds nobody up.

    `eager`: the model has a process of its own, and what has lingered leaves whether anybody waits or not. Where batches run
    on the callers' own threads, it leaves for those who wait: one caller alone makes full batches at its own pace.

    Lanes are whatever the user of the front tells its callers apart by. A lane that waits adds nothing until it goes on.
    """

    def __init__(
        self,
        limits: BatchLimits,
        by_length: bool = False,
        *,
        copies: int = 1,
        most_seconds: float | None = None,
        in_turn: bool = False,
        eager: bool = False,
    ) -> None:
        """most_seconds: for a batch of a size that is searched for. in_turn: the batches of a copy that run at the same
        time take turns on its device."""
        self.lanes: set[Any] = set()
        self._waiting: set[Hashable] = set()  # of the lanes
        self._copies = copies
        self._most_seconds = most_seconds
        self._in_turn = in_turn
        self._eager = eager
        self._batcher: Batcher[T] = Batcher(limits)
        self._aimings: dict[Hashable, list[Aiming]] = {}  # by model, of each copy
        self._seconds = 0.0  # that the last batch took
        self._ended = [-math.inf] * copies  # when the last batch of a copy did
        self.register(None, limits, by_length)

    def register(self, model: Hashable, limits: BatchLimits, by_length: bool = False) -> None:
        """A model with limits of its own, and a search of its own for the size of its batches: entries name it. The limits
        given at first are those of all others."""
        self._aimings[model] = [Aiming(limits, by_length, self._most_seconds) for _ in range(self._copies)]
        self._batcher.register(model, limits, [aiming.aim() for aiming in self._aimings[model]])

    # Who is there.

    def opened(self, lane: Hashable) -> None:
        self.lanes.add(lane)

    def closed(self, lane: Hashable) -> None:
        """No more rows come by it; those that wait, nobody wants."""
        self.lanes.discard(lane)
        self._waiting.discard(lane)
        self._batcher.discard(lane)

    def waits(self, lane: Hashable) -> None:
        if lane in self.lanes:
            self._waiting.add(lane)

    def goes(self, lane: Hashable) -> None:
        self._waiting.discard(lane)

    # Rows.

    @property
    def rows(self) -> int:
        """How many wait."""
        return self._batcher.waiting

    def are_waiting(self, model: Hashable) -> bool:
        """Whether rows for this model do."""
        return self._batcher.are_waiting(model)

    def add(self, entry: Entry[T], lane: Hashable, now: float) -> None:
        entry.owner = lane
        self._batcher.add(entry, now)

    def take(self, now: float, *, idle: bool, copy: int = 0, in_a_row: bool = False) -> tuple[list[Span[T]], Aim] | None:
        """The next batch for a copy, if one may leave: any if it is idle, else a full one; and the aim it was cut for.
        `in_a_row`: where they are quick, and of one size, several full ones that follow each other in one entry."""
        times = self._times(copy) if in_a_row else 1
        if idle:
            nobody_can_add = len(self._waiting) == len(self.lanes)
            spans = self._batcher.take(now, flush=nobody_can_add, linger=self._linger(), copy=copy, in_a_row=times)
        else:
            spans = self._batcher.take(-math.inf, copy=copy, in_a_row=times)
        return None if spans is None else (spans, self._batcher.aim_of(spans[0].entry.model, copy))

    def take_any(self, now: float) -> list[Span[T]] | None:
        """What waits longest, for a model that is never too busy for it."""
        return self._batcher.take(now, flush=True)

    def _times(self, copy: int) -> int:
        is_fixed = len(self._aimings) == 1 and self._aimings[None][copy].is_fixed
        return min(MOST_IN_A_ROW, int(QUICK / self._seconds)) if is_fixed and self._seconds > 0 else 1

    def next_time(self) -> float | None:
        """When an idle copy should ask again, if nothing happens before; None: not before something does."""
        return self._batcher.deadline(self._linger())

    def _linger(self) -> float:
        """How long rows without a deadline wait for others."""
        least, most = LINGER
        return min(most, max(least, self._seconds)) if self._eager or self._waiting else math.inf

    # What is learned.

    def ran(
        self,
        spans: list[Span[T]],
        aim: Aim | None,
        seconds: float,
        ended: float,
        *,
        calls: int = 1,
        too_large: int | None = None,
        device_seconds: float | None = None,
        copy: int = 0,
    ) -> None:
        """A batch is answered, after so many calls; or several in a row, each in so many seconds. `aim`: that it was cut
        for; None if it teaches nothing about sizes. `too_large`: so many of its rows did not fit into memory together.
        `device_seconds`: that its device was at work, if that is known."""
        if self._in_turn:  # without the time of the one before
            before, self._ended[copy] = self._ended[copy], max(self._ended[copy], ended)
            seconds = max(0.0, min(seconds, ended - before))
        if too_large is not None:
            self._seconds = seconds
            self.out_of_memory(spans, too_large, copy)
        elif calls == 1:  # how long the search for bad rows took, says nothing
            self._seconds = seconds
            aiming = self._aiming(spans, copy)
            if aim is not None and not aiming.is_fixed:
                aiming.ran(aim, rows_in(spans), lengths_of(spans), seconds, device_seconds)
                self._batcher.set_aim(aiming.aim(), spans[0].entry.model, copy)

    def out_of_memory(self, spans: list[Span[T]], rows: int, copy: int = 0) -> None:
        """So many rows of a batch, the last ones, did not fit into memory together."""
        lengths, aiming = lengths_of(spans), self._aiming(spans, copy)
        aiming.out_of_memory(rows, None if lengths is None else lengths[-rows:])
        self._batcher.set_aim(aiming.aim(), spans[0].entry.model, copy)

    def search(self, model: Hashable = None) -> Search:
        """For the size of the batches of a model with limits of its own; None: of all others."""
        return Search(self._batcher, model, self._aimings[model])

    def _aiming(self, spans: list[Span[T]], copy: int) -> Aiming:
        return (self._aimings.get(spans[0].entry.model) or self._aimings[None])[copy]


def entries_of(item: T, submitted: Any, rows: int, size: int, group: Hashable) -> list[Entry[T]]:
    """So many rows of `size` bytes that were submitted together (a Ticket, or a host's Submit); of many models, those for
    each of them."""
    parts: Sequence[tuple[str | None, int, int]] = submitted.parts or [(None, 0, rows)]
    return [
        Entry(
            item,
            stop,
            start=start,
            weights=submitted.weights,
            lengths=submitted.lengths,
            group=group,
            alone=submitted.alone,
            bytes=size * (stop - start) // max(1, rows),
            model=model,
        )
        for model, start, stop in parts
    ]


class Search:
    """For the size of a model's batches, in each of its copies."""

    def __init__(self, batcher: Batcher[Any], model: Hashable, aimings: list[Aiming]) -> None:
        self._batcher, self._model, self._aimings = batcher, model, aimings

    def begin_at(self, size: int, copy: int = 0) -> None:
        """On a device it begins at what an earlier run has found."""
        self._aimings[copy].begin_at(size)
        self._batcher.set_aim(self._aimings[copy].aim(), self._model, copy)

    def found(self, copy: int = 0) -> int | None:
        """What a search on a device has come to, for the next run to begin at; None while it has seen too little."""
        return self._aimings[copy].found()

    def explain(self) -> str | None:
        """The size that was found, and why; None where the user set it."""
        return self._aimings[0].explain()
