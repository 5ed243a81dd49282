"""The batcher: rows that callers submitted, cut into batches. Pure: the caller passes in the time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeAlias, TypeVar

from penstock.batching.entry import LOOKAHEAD, Aim, Entry, Span
from penstock.batching.lengths import LengthGroup
from penstock.batching.limits import BatchLimits

T = TypeVar("T")

SPARE = 64  # groups without rows that are remembered, at least

_Age: TypeAlias = tuple[float, int]  # when the oldest row of a group came in; of equals, the group that began first


class Batcher(Generic[T]):
    """Decides when a batch is ready, and which rows are in it.

    Rows without lengths leave in the order they came; rows with lengths as batching/lengths.py says. A batch never holds
    more rows than aimed at, and never weighs more than max_weight or costs more than aimed at unless it is a single row.
    Of groups from which a batch may leave, the one whose oldest row is oldest goes first.

    Each model has limits of its own, and each of its copies an aim. Groups stand in heaps by age: all of them, for each
    max_wait, and those that are full. So taking a batch costs the same however many groups wait; only when the aim of a
    model is lowered, its groups are looked through.
    """

    def __init__(self, limits: BatchLimits, aim: Aim | None = None) -> None:
        self.waiting = 0  # rows
        self._waiting_for: dict[Hashable, int] = {}  # the same by model, where there are any
        self._models: dict[Hashable, _Model[T]] = {}
        self._alone: deque[Entry[T]] = deque()
        self._ages: dict[float | None, list[_Place[T]]] = {}  # by max_wait: every group there is, and some used-up ones
        self._full: list[_Place[T]] = []  # groups that are full for some copy, and some that no longer are
        self._lines: dict[Hashable, set[_Line[T]]] = {}  # by owner: where rows of its own may wait
        self._begun = 0  # groups
        self._used_up = 0  # of them, that are remembered
        first = Aim(limits.most_rows, limits.max_padded_cost, limits.lookahead_rows or LOOKAHEAD[0])
        self.register(None, limits, [aim or first])

    def register(self, model: Hashable, limits: BatchLimits, aims: Sequence[Aim]) -> None:
        """A model's limits, and the aim of each of its copies. What is not registered is treated like None."""
        self._models[model] = _Model(limits, list(aims))
        self._ages.setdefault(limits.max_wait, [])

    def aim_of(self, model: Hashable = None, copy: int = 0) -> Aim:
        return self._of(model).aims[copy]

    def set_aim(self, aim: Aim, model: Hashable = None, copy: int = 0) -> None:
        """What a full batch is from now on."""
        told = self._of(model)
        before, told.aims[copy] = told.least, aim
        told.least = _least(told.aims)
        if told.least.rows < before.rows or told.least.lookahead < before.lookahead:
            for line in told.lines.values():
                self._list_if_full(line)

    def add(self, entry: Entry[T], now: float) -> None:
        entry.arrived = now
        if entry.taken == entry.stop:
            return
        rows = entry.stop - entry.taken
        self.waiting += rows
        self._waiting_for[entry.model] = self._waiting_for.get(entry.model, 0) + rows
        if entry.alone:
            self._alone.append(entry)
            return
        model = self._of(entry.model)
        key = (entry.model, entry.group, entry.lengths is not None)
        line = model.lines.get(key)
        if line is None:
            line = model.lines[key] = _Line(key, model, _Group() if entry.lengths is None else LengthGroup())
            heappush(self._ages[model.limits.max_wait], ((now, self._begun + 1), line))
            self._used_up += 1
        if not line.group.rows:
            self._used_up -= 1
            self._begun += 1
            line.age = now, self._begun
        line.group.add(entry)
        if entry.owner is not None:
            if (lines := self._lines.get(entry.owner)) is None:
                lines = self._lines[entry.owner] = set()
            lines.add(line)
        if not line.listed:
            self._list_if_full(line)

    def take(
        self, now: float, *, flush: bool = False, linger: float = math.inf, copy: int = 0, in_a_row: int = 1
    ) -> list[Span[T]] | None:
        """The next batch for this copy if one is full or due, or with `flush` whatever waits longest. `linger`: seconds
        after which rows leave, too, that have no max_wait. `in_a_row`: up to so many full ones, if one entry has them."""
        if self._alone:
            entry = self._alone.popleft()
            self._left(entry.model, entry.stop - entry.start)
            entry.taken = entry.stop
            return [Span(entry, entry.start, entry.stop)]
        line = self._first_full(copy) if self._full else None
        if now > -math.inf:  # otherwise only full ones leave
            line = self._first_due(line, now, flush, linger)
        if line is None:
            return None
        group, before, aim = line.group, line.group.rows, line.model.aims[copy]
        if in_a_row > 1 and isinstance(group, _Group):
            aim = group.in_a_row(line.model.limits, aim, in_a_row)
        spans = group.cut(line.model.limits, aim, due=line.is_due(now))
        self._shrank(line, before)
        return spans

    def _first_due(self, full: _Line[T] | None, now: float, flush: bool, linger: float) -> _Line[T] | None:
        """Of those that may leave, and a full one, the group whose oldest row is oldest."""
        found = full
        for wait, heap in self._ages.items():
            longest = linger if wait is None else wait
            other = self._first(heap) if flush or longest < math.inf else None
            if other is None or (found is not None and found.age <= other.age):
                continue
            if flush or now >= other.age[0] + longest:
                found = other
        return found

    def are_waiting(self, model: Hashable) -> bool:
        """Whether rows for this model wait."""
        return model in self._waiting_for

    def deadline(self, linger: float = math.inf) -> float | None:
        """When the oldest row will have waited long enough: the time to ask again."""
        times = []
        for wait, heap in self._ages.items():
            longest = linger if wait is None else wait
            if longest < math.inf and (line := self._first(heap)) is not None:
                times.append(line.age[0] + longest)
        return min(times, default=None)

    def discard(self, owner: Hashable) -> None:
        """Forget the rows, not yet taken, of an owner that has given up."""
        if any(entry.owner == owner for entry in self._alone):
            for entry in self._alone:
                if entry.owner == owner:
                    self._left(entry.model, entry.stop - entry.start)
            self._alone = deque(entry for entry in self._alone if entry.owner != owner)
        for line in self._lines.pop(owner, ()):
            before = line.group.rows
            line.group.discard(owner)
            self._shrank(line, before)

    # A place in a heap is never moved when rows leave: an age only grows, so what is first is put right when it is asked
    # for. A group is in each heap once at most, and in that of its age until it is forgotten.

    def _shrank(self, line: _Line[T], before: int) -> None:
        """Rows of a group have left."""
        if before > line.group.rows:
            self._left(line.key[0], before - line.group.rows)
        if line.group.rows:
            line.age = line.group.oldest, line.age[1]
        elif before:
            self._used_up += 1
            if self._used_up > SPARE and 2 * self._used_up > sum(map(len, self._ages.values())):
                self._forget_used_up()

    def _left(self, model: Hashable, rows: int) -> None:
        """So many rows for a model wait no more."""
        if not rows:
            return
        self.waiting -= rows
        self._waiting_for[model] -= rows
        if not self._waiting_for[model]:
            del self._waiting_for[model]

    def _forget_used_up(self) -> None:
        for heap in self._ages.values():
            for _, line in heap:
                if not line.group.rows:
                    del line.model.lines[line.key]
            heap[:] = [place for place in heap if place[1].group.rows]
            heapify(heap)
        self._used_up = 0

    def _first(self, heap: list[_Place[T]]) -> _Line[T] | None:
        """The group whose oldest row is oldest."""
        while heap:
            age, line = heap[0]
            if not line.group.rows:
                heappop(heap)
                del line.model.lines[line.key]
                self._used_up -= 1
            elif age != line.age:
                heapreplace(heap, (line.age, line))
            else:
                return line
        return None

    def _first_full(self, copy: int) -> _Line[T] | None:
        """The same of those that are full for this copy."""
        heap, found = self._full, None
        passed: list[_Place[T]] = []
        while heap:
            age, line = heap[0]
            if line.group.is_full(line.model.limits, line.model.aims[copy]):
                if age == line.age:
                    found = line
                    break
                heapreplace(heap, (line.age, line))
            else:
                place = heappop(heap)
                line.listed = line.is_full()
                if line.listed:  # another copy aims lower
                    passed.append(place)
        for place in passed:
            heappush(heap, place)
        return found

    def _of(self, model: Hashable) -> _Model[T]:
        return self._models.get(model) or self._models[None]

    def _list_if_full(self, line: _Line[T]) -> None:
        if not line.listed and line.is_full():
            line.listed = True
            heappush(self._full, (line.age, line))


class _Model(Generic[T]):
    """Which batches a model takes, and the groups of rows that wait for it."""

    __slots__ = ("aims", "least", "limits", "lines")

    def __init__(self, limits: BatchLimits, aims: list[Aim]) -> None:
        self.limits = limits
        self.aims = aims  # of each copy
        self.least = _least(aims)
        self.lines: dict[Hashable, _Line[T]] = {}


def _least(aims: Sequence[Aim]) -> Aim:
    """What is full for one of these, is full for this."""
    return aims[0] if len(aims) == 1 else Aim(min(a.rows for a in aims), lookahead=min(a.lookahead for a in aims))


class _Line(Generic[T]):
    """A group in the heaps."""

    __slots__ = ("age", "group", "key", "listed", "model")

    def __init__(self, key: tuple[Hashable, Hashable, bool], model: _Model[T], group: _Group[T] | LengthGroup[T]) -> None:
        self.key = key
        self.model = model
        self.group = group
        self.age: _Age = (0.0, 0)  # while there are rows
        self.listed = False  # among the full ones

    def is_full(self) -> bool:
        """For one of the copies at least."""
        return self.group.is_full(self.model.limits, self.model.least)

    def is_due(self, now: float) -> bool:
        wait = self.model.limits.max_wait
        return wait is not None and now >= self.age[0] + wait


_Place: TypeAlias = tuple[_Age, _Line[T]]


class _Group(Generic[T]):
    """Rows that may share a batch, in the order they came."""

    __slots__ = ("entries", "rows", "weight")

    def __init__(self) -> None:
        self.entries: deque[Entry[T]] = deque()
        self.rows = 0
        self.weight = 0

    def add(self, entry: Entry[T]) -> None:
        self.entries.append(entry)
        self.rows += entry.stop - entry.taken
        if entry.weights is not None:
            self.weight += sum(entry.weights[entry.taken : entry.stop])

    @property
    def oldest(self) -> float:
        return self.entries[0].arrived

    def is_full(self, limits: BatchLimits, aim: Aim) -> bool:
        return self.rows >= aim.rows or (limits.max_weight is not None and self.weight >= limits.max_weight)

    def in_a_row(self, limits: BatchLimits, aim: Aim, most: int) -> Aim:
        """The aim for several full batches, if the first entry has them."""
        batches = min(most, (self.entries[0].stop - self.entries[0].taken) // aim.rows)
        return aim if limits.max_weight is not None or batches < 2 else Aim(batches * aim.rows)

    def discard(self, owner: Hashable) -> None:
        kept = [entry for entry in self.entries if entry.owner != owner]
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
            stop = min(entry.stop, start + room)
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
            if stop < entry.stop:
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
