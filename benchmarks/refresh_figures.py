"""From the batches that were noted to what a change of models cost. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from refresh_models import Batch

SETTLED = 0.6  # seconds after the first answers of a new model, in which the old one is freed
BETWEEN = 0.05  # seconds between two seconds that are looked at


class Stretch(NamedTuple):
    """A time in which a model changes, or an equally long one in which none does."""

    start: float
    stop: float


class Change(NamedTuple):
    """What one change cost."""

    taken: float  # seconds from the file to the first answers of the new model, of the last process
    second: float  # rows in the second up to that, or in the one from then on, if they are fewer; as a share of the mean
    slowest: float  # rows in the slowest second from the file until the old model is freed, the same
    gap: float  # the longest time without an answer of a process, meanwhile


class Quiet(NamedTuple):
    """What is seen while nothing changes."""

    rate: float  # rows/s
    usual_gap: float  # the median of the seconds from one answer of a process to its next
    slowest: float  # as of a change, in all of the time
    gap: float


def costs(batches: Sequence[Batch], put: Sequence[tuple[float, int]], began: float) -> tuple[Quiet, list[Change]]:
    """put: when each new version came. What was before `began` is not looked at."""
    changing = [_stretch(batches, at, version) for at, version in put]
    ended = max(batch.ended for batch in batches) - 1
    calm = [part for part in _between(began, ended, changing) if part.stop - part.start > 1]
    rate = sum(_rows(batches, part) for part in calm) / sum(part.stop - part.start for part in calm)
    gaps = [gap for part in calm for gap in _gaps(batches, part)]
    slowest = min(_slowest(batches, Stretch(part.start + 0.5, part.stop - 0.4)) for part in calm) / rate
    quiet = Quiet(rate, statistics.median(gaps), slowest, max(gaps))
    return quiet, [_change(batches, part, rate) for part in changing]


def _change(batches: Sequence[Batch], part: Stretch, rate: float) -> Change:
    first = part.stop - SETTLED
    around = [_rows(batches, Stretch(first - 1, first)), _rows(batches, Stretch(first, first + 1))]
    return Change(first - part.start, min(around) / rate, _slowest(batches, part) / rate, max(_gaps(batches, part)))


def _stretch(batches: Sequence[Batch], at: float, version: int) -> Stretch:
    first: dict[int, float] = {}
    for batch in batches:
        if batch.version == version:
            first[batch.process] = min(batch.ended, first.get(batch.process, batch.ended))
    assert len(first) == len({batch.process for batch in batches}), f"version {version} did not answer in every process"
    return Stretch(at, max(first.values()) + SETTLED)


def _between(start: float, stop: float, changing: Sequence[Stretch]) -> Iterator[Stretch]:
    for stretch in changing:
        yield Stretch(start, stretch.start)
        start = stretch.stop
    yield Stretch(start, stop)


def _slowest(batches: Sequence[Batch], stretch: Stretch) -> float:
    """The rows of the slowest of all seconds whose middle is in the stretch."""
    start, stop = stretch.start - 0.5, stretch.stop - 0.5
    steps = int((stop - start) / BETWEEN) + 1
    near = [batch for batch in batches if batch.ended > start and batch.began < stop + 1]
    return min(_rows(near, Stretch(start + at * BETWEEN, start + at * BETWEEN + 1)) for at in range(steps))


def _rows(batches: Sequence[Batch], stretch: Stretch) -> float:
    """Rows that were answered meanwhile; a batch at the edge counts for the part of its time that is inside."""
    total = 0.0
    for batch in batches:
        inside = min(batch.ended, stretch.stop) - max(batch.began, stretch.start)
        if inside > 0:
            total += batch.rows * inside / (batch.ended - batch.began)
    return total


def _gaps(batches: Sequence[Batch], stretch: Stretch) -> list[float]:
    """Seconds from each answer of a process to its next one, of those that have some of the stretch."""
    ends: dict[int, list[float]] = defaultdict(list)
    for batch in sorted(batches, key=lambda each: each.ended):
        ends[batch.process].append(batch.ended)
    pairs = [pair for own in ends.values() for pair in pairwise(own)]
    return [after - before for before, after in pairs if before < stretch.stop and after > stretch.start]
