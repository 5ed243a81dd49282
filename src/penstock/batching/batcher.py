"""The batcher: rows that callers submitted, cut into batches. Pure: the caller passes in the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from penstock.batching.entry import LOOKAHEAD, Aim, Entry, Span
from penstock.batching.lengths import LengthGroup
from penstock.batching.limits import BatchLimits

T = TypeVar("T")


class Batcher(Generic[T]):
    """Decides when a batch is ready, and which rows are in it.

    Rows without lengths leave in the order they came; rows with lengths as batching/lengths.py says. A batch never holds
    more rows than aimed at, and never weighs more than max_weight or costs more than aimed at unless it is a single row.
    """

    def __init__(self, limits: BatchLimits, aim: Aim | None = None) -> None:
        self.limits = limits
        self.aim = aim or Aim(limits.most_rows, limits.max_padded_cost, limits.lookahead_rows or LOOKAHEAD[0])
        self._groups: dict[Hashable, _Group[T] | LengthGroup[T]] = {}
        self._alone: deque[Entry[T]] = deque()

    def add(self, entry: Entry[T], now: float) -> None:
        entry.arrived = now
        if not entry.size:
            return
        if entry.alone:
            self._alone.append(entry)
            return
        key = (entry.group, entry.lengths is not None)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group() if entry.lengths is None else LengthGroup()
        group.add(entry)

    def take(self, now: float, *, flush: bool = False) -> list[Span[T]] | None:
        """The next batch if one is full or due, or with `flush` whatever waits longest."""
        if self._alone:
            entry = self._alone.popleft()
            entry.taken = entry.size
            return [Span(entry, 0, entry.size)]
        for key, group in sorted(self._groups.items(), key=_age) if len(self._groups) > 1 else self._groups.items():
            due = self._is_due(group, now)
            if flush or due or group.is_full(self.limits, self.aim):
                spans = group.cut(self.limits, self.aim, due=due)
                if not group.rows:
                    del self._groups[key]
                return spans
        return None

    def oldest(self) -> float:
        """When the row came in that has waited longest."""
        alone = [self._alone[0].arrived] if self._alone else []
        return min([group.oldest for group in self._groups.values()] + alone)

    def deadline(self) -> float | None:
        """When the oldest row will have waited long enough: the time to ask again."""
        if self.limits.max_wait is None or not self._groups:
            return None
        return min(group.oldest for group in self._groups.values()) + self.limits.max_wait

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        """Forget the rows, not yet taken, of entries whose caller has given up."""
        self._alone = deque(entry for entry in self._alone if not unwanted(entry.item))
        for group in self._groups.values():
            group.discard(unwanted)
        self._groups = {key: group for key, group in self._groups.items() if group.rows}

    @property
    def waiting(self) -> int:
        """How many rows wait."""
        return sum(group.rows for group in self._groups.values()) + sum(entry.size for entry in self._alone)

    def _is_due(self, group: _Group[T] | LengthGroup[T], now: float) -> bool:
        return self.limits.max_wait is not None and now >= group.oldest + self.limits.max_wait


def _age(item: tuple[Hashable, _Group[T] | LengthGroup[T]]) -> float:
    return item[1].oldest


class _Group(Generic[T]):
    """Rows that may share a batch, in the order they came."""

    __slots__ = ("entries", "rows", "weight")

    def __init__(self) -> None:
        self.entries: deque[Entry[T]] = deque()
        self.rows = 0
        self.weight = 0

    def add(self, entry: Entry[T]) -> None:
        self.entries.append(entry)
        self.rows += entry.size - entry.taken
        if entry.weights is not None:
            self.weight += sum(entry.weights[entry.taken :])

    @property
    def oldest(self) -> float:
        return self.entries[0].arrived

    def is_full(self, limits: BatchLimits, aim: Aim) -> bool:
        return self.rows >= aim.rows or (limits.max_weight is not None and self.weight >= limits.max_weight)

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        kept = [entry for entry in self.entries if not unwanted(entry.item)]
        self.entries, self.rows, self.weight = deque(), 0, 0
        for entry in kept:
            self.add(entry)

    def cut(self, limits: BatchLimits, aim: Aim, *, due: bool = False) -> list[Span[T]]:
        spans: list[Span[T]] = []
        room = aim.rows
        weight_left = limits.max_weight
        while room and self.entries:
            entry = self.entries[0]
            start = entry.taken
            stop = min(entry.size, start + room)
            if weight_left is not None and entry.weights is not None:
                stop, used = _fit(entry.weights, start, stop, weight_left, first=not spans)
                weight_left -= used
                self.weight -= used
            if stop == start:
                break
            spans.append(Span(entry, start, stop))
            entry.taken = stop
            room -= stop - start
            self.rows -= stop - start
            if stop < entry.size:
                break
            self.entries.popleft()
        return spans


def _fit(weights: Sequence[int], start: int, stop: int, left: int, *, first: bool) -> tuple[int, int]:
    """How far from `start` the weights fit into `left`, and their sum. The first row of a batch always fits; and where
    nothing is left, no row does, also if it weighs nothing: whether it had come by then must not matter."""
    used = 0
    for index in range(start, stop):
        if (used >= left or used + weights[index] > left) and not (first and index == start):
            return index, used
        used += weights[index]
    return stop, used
