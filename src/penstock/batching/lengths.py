"""Rows of like length together: generations of waiting rows, sorted, the longest first.

Rows gather until there are enough for many batches (or nobody can add any). Then they are one generation: batches are cut
from it, longest first, until it is used up, while new rows gather for the next one. So a row never waits for more than two
generations, however long or short its neighbours are. In front of a device a generation has a bounded number of rows, those
that came first: callers then have their answers one after the other, and new rows at hand before the device has used up the
rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeAlias, TypeVar

from penstock.batching.entry import Aim, Entry, Span
from penstock.batching.limits import BatchLimits

T = TypeVar("T")


# One waiting row: its length; its order, which is less for newer rows and never the same; its entry, and its place there.
# As plain tuples they sort by themselves, the longest last, and of equals the oldest last: that one leaves first.
_Row: TypeAlias = tuple[int, int, Entry[T], int]


class LengthGroup(Generic[T]):
    """Rows that may share a batch, and whose lengths are known."""

    def __init__(self) -> None:
        self.rows = 0
        self.bytes = 0
        self._order = 0
        self._entries: deque[Entry[T]] = deque()  # with rows that wait, oldest first
        self._gathering: list[_Row[T]] = []
        self._leaving: list[_Row[T]] = []  # one generation, sorted: the longest is the last

    def add(self, entry: Entry[T]) -> None:
        assert entry.lengths is not None
        self._entries.append(entry)
        rows = entry.stop - entry.start
        self.rows += rows
        self.bytes += entry.bytes
        self._order -= rows
        order, lengths = self._order + entry.stop - 1, entry.lengths
        self._gathering.extend([(lengths[at], order - at, entry, at) for at in range(entry.start, entry.stop)])

    @property
    def oldest(self) -> float:
        while self._entries[0].taken == self._entries[0].stop:
            self._entries.popleft()
        return self._entries[0].arrived

    def is_full(self, limits: BatchLimits, aim: Aim) -> bool:
        return bool(self._leaving) or self.rows >= aim.lookahead or self.bytes >= limits.lookahead_bytes

    def cut(self, limits: BatchLimits, aim: Aim, *, due: bool = False) -> list[Span[T]]:
        """The longest rows of the generation, as many as fit; or, when it is `due`, the oldest row and its like."""
        if due or not self._leaving:
            rows = aim.lookahead if limits.new_shapes_cost and not due else len(self._gathering)
            self._leaving = sorted([*self._leaving, *self._gathering[:rows]])
            self._gathering = self._gathering[rows:]
        stop = self._place_of_oldest() + 1 if due else len(self._leaving)
        start = self._fit(stop, limits, aim)
        batch = self._leaving[start:stop]
        del self._leaving[start:stop]
        return self._spans(batch)

    def discard(self, owner: Hashable) -> None:
        self._gathering = [row for row in self._gathering if row[2].owner != owner]
        self._leaving = [row for row in self._leaving if row[2].owner != owner]
        self._entries = deque(entry for entry in self._entries if entry.owner != owner)
        self.rows = len(self._gathering) + len(self._leaving)
        self.bytes = sum(entry.bytes for entry in self._entries)

    def _place_of_oldest(self) -> int:
        return max(range(len(self._leaving)), key=lambda at: self._leaving[at][1])

    def _fit(self, stop: int, limits: BatchLimits, aim: Aim) -> int:
        """Where a batch that ends before `stop` starts: it keeps to rows, padded cost and weight."""
        longest = max(1, limits.padded_length(self._leaving[stop - 1][0]))
        room = max(1, min(aim.rows, aim.cost // longest if aim.cost is not None else aim.rows))
        start = max(0, stop - room)
        if limits.max_weight is None:
            return start
        used = 0
        for at in range(stop - 1, start - 1, -1):
            _, _, entry, place = self._leaving[at]
            used += entry.weights[place] if entry.weights is not None else 0
            if used > limits.max_weight and at < stop - 1:
                return at + 1
        return start

    def _spans(self, batch: list[_Row[T]]) -> list[Span[T]]:
        for _, _, entry, _ in batch:
            entry.taken += 1
            if entry.taken == entry.stop:
                self.bytes -= entry.bytes
        self.rows -= len(batch)
        return [Span(entry, at, at + 1) for _, _, entry, at in batch]
