"""The search for a good size on a device. Pure: what batches cost in, sizes out.

A run has few batches that fill a device: too few to climb a ladder by trial, and those that follow each other differ in
length. So the cost of a batch is modelled instead, as a fixed part and a part for each row or unit of padded cost, which may
depend on the length of rows, and fitted to the batches that ran. The larger a batch, the less its fixed part weighs; but
where rows have lengths, the more of it is padding. The size wanted is the smallest that is near the best of both.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.batching.sizes import rung_of

SHARE = 0.05  # of the best throughput that a smaller size may lack: where nothing is padded, the part that is fixed
LONGEST = 1.0  # seconds for a batch
ENOUGH = 8  # batches from which what was found is worth keeping
KEPT = 48  # batches that are fitted
DECAY = 0.96  # of the weight of a batch, with each that follows
FURTHEST = 4  # times the largest batch so far: how far a fit is trusted
SURE = 1.5  # standard errors
EARLY = 16  # batches within which it moves at once
STEADY = 8  # decisions in a row that want the same, before it moves later: the last batches of a run are unlike others
AGAIN = 64  # batches after which half and double are tried again
NOISE, WORTH = 0.05, 4.0  # of times, as if so many batches had shown it
FIXED = 0.5  # of the time of a usual batch may well be fixed
BY_LENGTH = 0.2  # by how much the cost of a unit may depend on length, from the shortest rows to the longest


class TimedBatch(NamedTuple):
    """What ran."""

    amount: int  # rows, or padded cost
    useful: float  # of that, without what is padded because rows differ
    length: int
    seconds: float


class Fit(NamedTuple):
    """What a batch costs."""

    fixed: float  # seconds
    unit: float  # seconds for each unit of amount
    error: float  # of the fixed part, seconds
    padding: float  # against what is useful, in a batch of amount 1: it grows with the batch, as lengths differ more

    def share(self, size: int) -> float:
        """Of the time of a batch, that is fixed."""
        return self.fixed / (self.fixed + self.unit * size)

    def cost(self, size: int, errors: float) -> float:
        """Seconds for a useful unit in batches of this size, if the fixed part is so many errors more than fitted."""
        return (max(0.0, self.fixed + errors * self.error) / size + self.unit) * (1 + self.padding * size)

    @property
    def largest(self) -> float:
        """The amount that takes no longer than a batch should; where most is fixed, smaller ones would not help."""
        return max(LONGEST - self.fixed, self.fixed) / self.unit


class DeviceSizeFinder:
    """Finds a size for batches on a device. Ask for `size`, run a batch of it, and tell what it cost.

    It begins at `start`, tries half and double of that once, and then stays where the fit says; it moves when that differs
    by two rungs or more, not for noise alone, and after its first batches only if that is so for a while. It goes below
    `least` only where a batch of that takes too long.
    """

    def __init__(self, ladder: Sequence[int], start: int, least: int) -> None:
        self._ladder = ladder
        self.least = least
        self._rung = rung_of(start, ladder)
        self._tries: deque[int] = deque([self._rung, *self._around()])
        self._batches: deque[TimedBatch] = deque(maxlen=KEPT)
        self._largest = 0  # amount that ran
        self._full = 0  # batches, since the last tries
        self._wished = 0  # decisions in a row for more (or, below 0, for less)
        self.observed = 0  # batches
        self.fit: Fit | None = None

    @property
    def size(self) -> int:
        """To aim at now."""
        return self._ladder[self._tries[0] if self._tries else self._rung]

    @property
    def found(self) -> int:
        return self._ladder[self._rung]

    def observe(self, batch: TimedBatch, *, full: bool) -> None:
        """A batch ran. `full`: it was cut for the size that is aimed at now, and is as large as that allows."""
        self.observed += 1
        if self.observed > 1 and batch.seconds > 0 and batch.amount * 4 >= min(self.found, self.least):
            self._batches.append(batch)  # the first one pays for what is made lazily
            self._largest = max(self._largest, batch.amount)
        if full and self._tries:
            self._tries.popleft()
            if self._tries and self._is_too_long(self._tries[0], batch):
                self._tries.popleft()
        self._full += full
        if not self._tries and len(self._batches) >= 3:
            self._decide()

    def did_not_fit(self) -> None:
        """What is tried is too large for memory."""
        if self._tries:
            self._tries.popleft()

    def is_far_from(self, size: int) -> bool:
        """Whether what was found is two rungs or more from this size."""
        return abs(self._rung - rung_of(size, self._ladder)) >= 2

    def explain(self) -> str:
        """What was found, in words."""
        if self.fit is None:
            return f"{self.found}: too few batches to tell what one costs"
        fixed, unit, _, padding = self.fit
        takes = (
            f"a batch takes {fixed * 1e3:.3g} ms and {unit * 1e6:.3g} us for each, {self.fit.share(self.found):.1%} fixed"
        )
        return f"{self.found}: {takes}" + (f"; padding adds {padding * self.found:.0%}" if padding else "")

    def _around(self) -> list[int]:
        """Half and double of where it is."""
        top = len(self._ladder) - 1
        return [rung for rung in (max(0, self._rung - 2), min(top, self._rung + 2)) if rung != self._rung]

    def _is_too_long(self, rung: int, batch: TimedBatch) -> bool:
        times = self._ladder[rung] / batch.amount
        return self.observed > 1 and times > 1 and times * batch.seconds > LONGEST

    def _decide(self) -> None:
        self.fit = fit = fitted(self._batches)
        rung = self._rung_for(fit, 0.0)
        surely_more = rung >= self._rung + 2 and self._rung_for(fit, -SURE) > self._rung
        surely_less = rung <= self._rung - 2 and self._rung_for(fit, SURE) < self._rung
        if self._is_wished(surely_more - surely_less):
            self._rung = rung
        elif self._full >= AGAIN:
            self._full = 0
            self._tries.extend(self._around())

    def _is_wished(self, direction: int) -> bool:
        """Whether to move, if it is to be more (1), less (-1) or neither (0)."""
        self._wished = self._wished + direction if self._wished * direction > 0 else direction
        is_moved = abs(self._wished) >= (1 if self.observed <= EARLY else STEADY)
        if is_moved:
            self._wished = 0
        return is_moved

    def _rung_for(self, fit: Fit, errors: float) -> int:
        """The smallest size that is near the best by this fit; not far beyond all that ran."""
        within = max(self._rung, rung_of(FURTHEST * self._largest, self._ladder))
        costs = [fit.cost(size, errors) for size in self._ladder[: within + 1]]
        near = min(costs) / (1 - SHARE)
        rung = next(at for at, cost in enumerate(costs) if cost <= near)
        longest = rung_of(int(min(fit.largest, self._ladder[-1])), self._ladder)
        return min(longest, max(rung_of(self.least, self._ladder), rung))


def fitted(batches: Sequence[TimedBatch]) -> Fit:
    """The costs that explain these batches best, the last ones first. Batches that took much longer than the others say,
    as the first of a shape do, hardly count.

    Fitted is the time for a unit: z = unit + fixed * u + by_length * v, where u is 1 / amount, and v the length; all scaled
    to about 1, as errors are relative to the time. What is known before: times are a little noisy, and lengths
    matter little.
    """
    usual = statistics.median(batch.seconds / batch.amount for batch in batches)
    amount = statistics.median(batch.amount for batch in batches)
    longest = max(batch.length for batch in batches)
    middle = statistics.fmean(batch.length for batch in batches)
    inputs = [(1.0, amount / batch.amount, (batch.length - middle) / longest) for batch in batches]
    costs = [batch.seconds / batch.amount / usual for batch in batches]
    ages = [DECAY**age for age in reversed(range(len(batches)))]
    weights, noise = ages, 2 * NOISE
    for _ in range(6):
        beliefs = (1e-4, (noise / FIXED) ** 2, (noise / BY_LENGTH) ** 2)
        solution, inverse = _solved(inputs, costs, weights, beliefs)
        over = [cost - sum(map(_times, solution, each)) for cost, each in zip(costs, inputs, strict=True)]
        limit = 2 * max(NOISE, 1.48 * statistics.median(map(abs, over)))
        weights = [age if more < limit else age * (limit / more) ** 2 for age, more in zip(ages, over, strict=True)]
        squares = sum(weight * more**2 for weight, more in zip(weights, over, strict=True))
        noise = math.sqrt((squares + WORTH * NOISE**2) / (max(sum(weights) - 3, 0.0) + WORTH))
    unit, fixed = max(solution[0], 1e-6), max(solution[1], 0.0)
    error = noise * math.sqrt(max(inverse[1][1], 0.0))
    return Fit(fixed * usual * amount, unit * usual, error * usual * amount, _padding(batches, ages))


def _padding(batches: Sequence[TimedBatch], weights: Sequence[float]) -> float:
    more = sum(weight * (batch.amount - batch.useful) for weight, batch in zip(weights, batches, strict=True))
    return max(0.0, more) / sum(weight * batch.amount * batch.useful for weight, batch in zip(weights, batches, strict=True))


def _times(one: float, other: float) -> float:
    return one * other


def _solved(
    inputs: Sequence[tuple[float, ...]], costs: Sequence[float], weights: Sequence[float], beliefs: Sequence[float]
) -> tuple[list[float], list[list[float]]]:
    """Weighted least squares, drawn to 0 by the beliefs: the solution, and the inverse of the normal matrix."""
    order = range(len(beliefs))
    rows = [
        [sum(w * x[i] * x[j] for w, x in zip(weights, inputs, strict=True)) + (beliefs[i] if i == j else 0.0) for j in order]
        + [float(i == j) for j in order]
        for i in order
    ]
    for i in order:  # positive definite: no pivoting
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in order:
            if j != i:
                rows[j] = [value - rows[j][i] * own for value, own in zip(rows[j], rows[i], strict=True)]
    inverse = [row[len(beliefs) :] for row in rows]
    right = [sum(w * x[i] * y for w, x, y in zip(weights, inputs, costs, strict=True)) for i in order]
    return [sum(map(_times, row, right)) for row in inverse], inverse
