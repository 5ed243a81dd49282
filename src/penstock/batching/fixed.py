"""Batches that depend on the rows and the limits alone: not on time, and not on how many rows came together."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Generic, TypeAlias, TypeVar

from penstock.batching.batcher import Batcher
from penstock.batching.entry import Entry
from penstock.batching.full_batches import Aiming
from penstock.batching.limits import BatchLimits

T = TypeVar("T")

Pieces: TypeAlias = list[tuple[T, int, int]]  # of a batch: some rows of an item, from and to


class FixedBatches(Generic[T]):
    """A batcher for the rows of one caller, under limits in which nothing is left to find (BatchLimits.fixed()).

    A batch leaves when it is full, or when the rows have ended. Rows with lengths gather until a window is full, in rows or
    in bytes, which ends at the same row however the rows come; all of them leave then. A batch ends where rows of another
    group begin, so what gathers is always less than one batch, or one window.
    """

    def __init__(self, limits: BatchLimits, by_length: bool) -> None:
        self._most_bytes = limits.lookahead_bytes
        self._batcher: Batcher[tuple[T, int]] = Batcher(limits, Aiming(limits, by_length).aim())
        self._group: Hashable = None
        self._bytes = 0  # in the window

    def add(self, entry: Entry[T], sizes: Sequence[int] = ()) -> Iterator[Pieces[T]]:
        """Add rows, and take the batches that they complete. `sizes`: the bytes of each row, where rows have lengths."""
        if entry.group != self._group:
            yield from self.flush()
            self._group = entry.group
        start = entry.start
        while start < entry.stop:
            stop = entry.stop if entry.lengths is None else self._end_of_window(sizes, start, entry.stop)
            self._batcher.add(_part(entry, start, stop, sum(sizes[start:stop])), 0.0)
            yield from self._take(flush=False)
            start = stop

    def flush(self) -> Iterator[Pieces[T]]:
        """The batches of all rows that gather: no more come."""
        yield from self._take(flush=True)

    def _take(self, *, flush: bool) -> Iterator[Pieces[T]]:
        while (spans := self._batcher.take(0.0, flush=flush)) is not None:
            places = [(span.entry.item, span.start, span.stop) for span in spans]
            yield [(item, offset + start, offset + stop) for (item, offset), start, stop in places]
        if not self._batcher.waiting:
            self._bytes = 0

    def _end_of_window(self, sizes: Sequence[int], start: int, stop: int) -> int:
        """The row, from `start`, before which the window is full, or the rows end."""
        last = min(stop, start + self._batcher.aim_of().lookahead - self._batcher.waiting)
        for at in range(start, last):
            self._bytes += sizes[at]
            if self._bytes >= self._most_bytes:
                return at + 1
        return last


def _part(entry: Entry[T], start: int, stop: int, size: int) -> Entry[tuple[T, int]]:
    """Some rows of an entry, with where they stand in it."""
    return Entry(
        (entry.item, start),
        stop - start,
        weights=None if entry.weights is None else _exact(entry.weights[start:stop]),
        lengths=None if entry.lengths is None else entry.lengths[start:stop],
        group=entry.group,
        bytes=size,
    )


def _exact(weights: Sequence[Any]) -> Sequence[Any]:
    """Weights whose sums are exact: those of floats depend on the order in which they are added."""
    if all(type(weight) is int for weight in weights):
        return weights
    return [Fraction(min(float(weight), sys.float_info.max)) for weight in weights]
