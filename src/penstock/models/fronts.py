"""The fronts of a host: one that all copies share; or, where each copy has models of its own, one for each. Pure."""

from __future__ import annotations

import math
from typing import Any

from penstock.batching.entry import Aim, Entry, Span
from penstock.models.front import Front
from penstock.models.messages import HostSpec


class Fronts:
    """A lane that opens, waits or closes does so at all of them."""

    def __init__(self, spec: HostSpec) -> None:
        self.shared = spec.budget is None
        self.all: list[Front[Any]] = [
            Front(
                spec.limits,
                spec.by_length,
                copies=spec.copies if self.shared else 1,
                most_seconds=None if spec.timeout is None else spec.timeout / 4,
                in_turn=spec.in_turn,
                eager=True,
            )
            for _ in range(1 if self.shared else spec.copies + 1)  # and one for models that have a process of their own
        ]
        for front in self.all:
            for model, (limits, by_length) in spec.own_limits.items():
                front.register(model, limits, by_length)

    @property
    def lanes(self) -> set[Any]:
        return self.all[0].lanes

    def of(self, copy: int) -> tuple[Front[Any], int]:
        """The front of a copy, and the copy's number there."""
        return (self.all[0], copy) if self.shared else (self.all[copy], 0)

    def opened(self, lane: Any) -> None:
        for front in self.all:
            front.opened(lane)

    def closed(self, lane: Any) -> None:
        for front in self.all:
            front.closed(lane)

    def waits(self, lane: Any) -> None:
        for front in self.all:
            front.waits(lane)

    def goes(self, lane: Any) -> None:
        for front in self.all:
            front.goes(lane)

    def take(self, copy: int, now: float, *, idle: bool) -> tuple[list[Span[Any]], Aim] | None:
        front, number = self.of(copy)
        return front.take(now, idle=idle, copy=number)

    def withdraw(self, copy: int) -> list[Entry[Any]]:
        """All rows that wait at the front of a copy, which wait there no more: the copy is gone, with its models."""
        found: dict[Entry[Any], list[Span[Any]]] = {}
        while (batch := self.take(copy, math.inf, idle=True)) is not None:
            for span in batch[0]:
                spans = found.setdefault(span.entry, [])
                if spans and spans[-1].stop == span.start:
                    span = Span(span.entry, spans.pop().start, span.stop)
                spans.append(span)
        return sorted((_part(*span) for spans in found.values() for span in spans), key=lambda part: part.arrived)


def _part(entry: Entry[Any], start: int, stop: int) -> Entry[Any]:
    """Some rows of an entry, as one of their own."""
    part = Entry(
        entry.item,
        stop,
        start=start,
        weights=entry.weights,
        lengths=entry.lengths,
        group=entry.group,
        alone=entry.alone,
        bytes=entry.bytes * (stop - start) // (entry.stop - entry.start),
        model=entry.model,
        owner=entry.owner,
    )
    part.arrived = entry.arrived
    return part
