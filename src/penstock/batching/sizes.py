"""The search for a good size: how many rows, or how much padded cost, a batch should have. Pure: rates in, sizes out.

Sizes stand on a ladder, each about 1.4 times the one before. The search climbs it by twos while throughput grows, settles
on the smallest size within 5% of the best, and then tries a neighbour now and then. Every comparison is of batches that ran
one after the other, so what changes slowly (the length of rows, the load of the machine) cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TypeAlias

NEAR = math.log(1.03)  # of the best: the smallest size this near to it wins, so that noise leaves it within 5%
WORTH = math.log(1.02)  # a gain that keeps the climb going
CLEAR = math.log(1.2)  # a change that no noise makes
PAUSE = 12  # batches between two tries of a neighbour
BACK = 8  # rungs: a sixteenth of the size
DROP = math.log(1.3)  # below what was usual, three times in a row: the world has changed
FIRST_STEP = 1.25  # of a ceiling, after one that failed
FEWEST = 8  # batches under a ceiling before more is tried
SHORTEST_WAIT = 0.25  # seconds that these take, at least; 50 batches will do, however quick
MOST_FAILURES = 8  # that double the wait: about a minute

_Search: TypeAlias = Generator[int, float, None]


class SizeFinder:
    """Finds the best of a ladder of sizes. Ask for `size`, run a batch of it, and tell what came of it.

    `trend`: the rows change steadily from batch to batch, as they do from the longest to the shortest; the climb is then
    slower, and surer.
    """

    def __init__(self, ladder: Sequence[int], start: int, trend: bool = False) -> None:
        self._ladder = ladder
        self._trend = trend
        self._top = len(ladder) - 1
        self._known: dict[int, float] = {}  # rung -> log of throughput, compared with its neighbours in time
        self._steps = self._search(rung_of(start, ladder))
        self._rung = next(self._steps)

    @property
    def size(self) -> int:
        return self._ladder[self._rung]

    def observe(self, size: int, amount: int, useful: float, seconds: float) -> None:
        """A batch was cut when `size` was aimed at; it had `amount` of it, and `useful` work in it took this long.

        Batches that were far from full tell nothing, nor do those that were cut before the size was changed.
        """
        if size == self.size and amount * 4 >= size * 3 and useful > 0 and seconds > 0:
            self._rung = self._steps.send(math.log(useful / seconds))

    def explain(self) -> str:
        """What was found, in words."""
        here = self._known.get(self._rung)
        tried = sorted(self._known)
        if here is None or len(tried) < 2:
            return f"{self.size}: too few full batches to compare sizes"
        others = ", ".join(f"{self._ladder[at]}: {math.exp(self._known[at] - here):.0%}" for at in tried if at != self._rung)
        return f"{self.size}: the smallest near the best; throughput against it: {others}"

    def _search(self, start: int) -> _Search:
        yield start  # the first batch pays for what is made lazily, and is not compared
        at, up = start, True
        while True:
            at = yield from self._climb(at, 2 if up else -2)
            best = self._best(at)
            found = yield from self._watch(best)
            if found is None:  # the world has changed: forget what was, and begin again, a good deal lower
                self._known.clear()
                found = max(0, best - BACK), True
            at, up = found

    def _climb(self, at: int, stride: int) -> Generator[int, float, int]:
        """Go on in one direction while that pays; return the last rung tried."""
        before = yield at
        self._known.setdefault(at, 0.0)
        misses = 0
        while at != (self._top if stride > 0 else 0) and misses < 2:
            following = min(max(at + stride, 0), self._top)
            rate = yield following
            gain = rate - ((before + (yield at)) / 2 if self._trend else before)
            self._known[following] = self._known[at] + gain
            at, before = following, rate
            misses = 2 if gain < -CLEAR else 0 if gain > WORTH else misses + 1
        return at

    def _watch(self, at: int) -> Generator[int, float, tuple[int, bool] | None]:
        """Stay, and try a neighbour now and then, more often at first. Return where to climb from, and whether upwards;
        None when throughput has dropped for good."""
        tries, slow = 0, 0
        usual: float | None = None
        while True:
            here = 0.0
            for _ in range(2 if tries < 4 else PAUSE):
                here = yield at
                slow = slow + 1 if usual is not None and here < usual - DROP else 0
                if slow == 3:
                    return None
                usual = here if usual is None else usual if slow else usual + 0.3 * (here - usual)
            tries += 1
            neighbour = self._neighbour(at, tries)
            if neighbour is None:
                continue
            there = yield neighbour
            gain = there - (here + (yield at)) / 2
            self._learn(at, neighbour, gain)
            if gain > CLEAR:
                return neighbour, neighbour > at
            chosen = self._best(at)
            if chosen != at:
                at, usual, slow = chosen, None, 0

    def _neighbour(self, at: int, tries: int) -> int | None:
        """Whom to compare with next; those known to be bad, or to lie behind such a one, only seldom."""
        wanted = at + (1, -1, 2, -2)[tries % 4]
        if not 0 <= wanted <= self._top:
            return None
        step = 1 if wanted > at else -1
        bad = any(
            self._known.get(rung, math.inf) < self._known[at] - CLEAR for rung in range(at + step, wanted + step, step)
        )
        return None if bad and tries // 4 % 8 != 7 else wanted

    def _learn(self, at: int, neighbour: int, gain: float) -> None:
        told = self._known.setdefault(at, 0.0) + gain
        old = self._known.get(neighbour)
        self._known[neighbour] = told if old is None else old + 0.5 * (told - old)

    def _best(self, at: int) -> int:
        if not self._known:
            return at
        best = max(self._known.values())
        return min(rung for rung, rate in self._known.items() if rate >= best - NEAR)


def rung_of(size: int, ladder: Sequence[int]) -> int:
    """The rung of the greatest size that is not over this one."""
    return max([0, *(at for at, each in enumerate(ladder) if each <= size)])


class Ceiling:
    """The most that fits into memory, learned when it did not. More is tried after a pause, which doubles with every try
    that fails; after one that goes well it is short, and the steps grow. Twice of what once failed shows that memory is
    back: the ceiling is forgotten."""

    def __init__(self) -> None:
        self._limit: float = math.inf
        self._failed = 0  # the size that did not fit
        self._failures = 0  # tries that failed
        self._step = FIRST_STEP
        self._batches = 0  # since the limit was changed
        self._seconds = 0.0  # that these took

    @property
    def is_known(self) -> bool:
        return self._limit is not math.inf

    def under(self, size: int) -> int:
        return max(1, int(min(size, self._limit)))

    def ran(self, seconds: float = 0.0) -> None:
        """A batch went well, in so many seconds."""
        if not self.is_known:
            return
        self._batches += 1
        self._seconds += seconds
        doubled = 1 << (self._failures if self._step == FIRST_STEP else 0)
        waited = self._batches >= FEWEST and self._seconds >= SHORTEST_WAIT * doubled
        if waited or self._batches >= min(50 * doubled, 3200):
            self._raise()

    def _raise(self) -> None:
        if self._limit >= 2 * self._failed:
            self._limit, self._failures = math.inf, 0
        self._limit *= self._step
        self._step = min(self._step**2, 2.0)
        self._batches, self._seconds = 0, 0.0

    def out_of_memory(self, size: int) -> None:
        """A batch of this size did not fit. Others that were cut before that was known may not fit either: one try."""
        if not self.is_known or self._batches >= FEWEST or self._step > FIRST_STEP:
            self._failures = min(self._failures + 1, MOST_FAILURES)
        self._limit = max(1, min(self._limit, size * 0.7))
        self._failed, self._step = size, FIRST_STEP
        self._batches, self._seconds = 0, 0.0


def ladder(least: int, most: int) -> list[int]:
    """Sizes from the least to the most, each about 1.4 times the one before."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, round(sizes[-1] * math.sqrt(2)))))
    return sizes


def device_ladder(least: int, most: int) -> list[int]:
    """The same for a device, which likes multiples: 2, 3, 4, 6, 8, 12, 16, ... between the least and the most."""
    sizes = {least, most}
    for power in range(most.bit_length()):
        sizes |= {size for size in (1 << power, 3 << power) if least < size < most}
    return sorted(sizes)
