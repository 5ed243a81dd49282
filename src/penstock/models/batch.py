"""What a host's desk passes around: parcels of rows, batches of them, and the hunt for rows that kill or hang a process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.batching.entry import Aim, Span
from penstock.batching.isolation import isolate
from penstock.failures import OUT_OF_MEMORY


class Parcel(NamedTuple):
    """Rows that a client submitted together: what the batcher carries."""

    number: int
    client: int
    lane: int
    ticket: int
    content: Any  # the broker's own


@dataclass(eq=False)
class Batch:
    number: int
    spans: list[Span[Parcel]]
    aim: Aim | None = None  # that it was cut for; None: it runs again, and teaches nothing about sizes
    deaths: int = 0  # of processes that held this batch alone
    suspect: bool = False  # a process died with it: it now runs alone
    started: float | None = None
    hunt: Hunt | None = None  # that this is a part of
    fresh: bool = False  # it needs a process that has run nothing: another had not enough memory for it
    final: bool = False  # a row that did not fit alone, and runs in such a process: what comes of that counts

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.spans)

    @property
    def lengths(self) -> list[int] | None:
        if self.spans[0].entry.lengths is None:
            return None
        return [length for entry, start, stop in self.spans for length in (entry.lengths or ())[start:stop]]


class Hunt:
    """The search for the rows of a batch that kill their process, hang it, or fill its memory. Each part runs alone."""

    def __init__(self, batch: Batch, kind: str, how: str) -> None:
        self.kind = kind
        self.rows = [(entry, at) for entry, start, stop in batch.spans for at in range(start, stop)]
        self.search = isolate(len(self.rows), how, lambda _: self.kind == OUT_OF_MEMORY)
        self.unknown = set(range(len(self.rows)))
        self.restarts = 1
        self.found = 0
        self.fruitful = False  # whether rows were answered since the last restart
        self.asked: tuple[int, int] = (0, len(self.rows))  # the part that runs now
        self.running: list[int] = []  # its rows, without those that are known
        self.confirming: tuple[int, int] | None = None  # what is blamed, while it runs once more

    @property
    def is_over_budget(self) -> bool:
        return self.restarts > (len(self.rows).bit_length() + 3) * (self.found + 1)

    def spans(self, rows: Iterable[int]) -> list[Span[Parcel]]:
        """These rows of the batch, neighbours together."""
        spans: list[Span[Parcel]] = []
        for row in rows:
            entry, at = self.rows[row]
            if spans and spans[-1].entry is entry and spans[-1].stop == at:
                spans[-1] = Span(entry, spans[-1].start, at + 1)
            else:
                spans.append(Span(entry, at, at + 1))
        return spans
