"""What goes into the batcher, and what comes out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

LOOKAHEAD = 4096, 262_144  # rows: the least and the most, where the user sets none


class Entry(Generic[T]):
    """Rows that one caller submitted together, or those of them that are for one model. The batcher sees numbers of them;
    `item` is the caller's own."""

    __slots__ = (
        *("alone", "arrived", "bytes", "group", "item", "lengths", "model", "owner", "start", "stop", "taken", "weights"),
    )

    def __init__(
        self,
        item: T,
        stop: int,
        *,
        start: int = 0,
        weights: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        group: Hashable = None,
        alone: bool = False,
        bytes: int = 0,  # noqa: A002
        model: Hashable = None,
        owner: Hashable = None,
    ) -> None:
        self.item = item
        self.start, self.stop = start, stop  # which rows of the item
        self.taken = start  # rows before this one have left, or so many have
        self.weights = weights  # of all rows of the item, and so are:
        self.lengths = lengths  # rows with lengths are batched with rows of like length
        self.group = group  # only rows of one group share a batch
        self.alone = alone  # this entry is a batch already
        self.bytes = bytes  # about; counted where rows have lengths, because many of them wait
        self.model = model  # that they are for, among those that are registered with limits of their own
        self.owner = owner  # who may give them up
        self.arrived = 0.0


class Span(NamedTuple, Generic[T]):
    """Rows start to stop of an entry: a piece of a batch."""

    entry: Entry[T]
    start: int
    stop: int


def rows_in(spans: list[Span[T]]) -> int:
    return spans[0].stop - spans[0].start if len(spans) == 1 else sum([stop - start for _, start, stop in spans])


def lengths_of(spans: list[Span[T]]) -> list[int] | None:
    """The lengths of the rows of a batch, where they are known."""
    if spans[0].entry.lengths is None:
        return None
    return [length for entry, start, stop in spans for length in (entry.lengths or ())[start:stop]]


@dataclass(frozen=True, slots=True)
class Aim:
    """What a full batch is right now: a number of rows and, where rows have lengths, a padded cost; and how many rows
    with lengths should wait before some of them leave."""

    rows: int
    cost: int | None = None
    lookahead: int = LOOKAHEAD[0]
