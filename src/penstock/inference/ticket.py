"""Rows on their way through a model: what a caller holds, and what the batcher carries for it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from penstock.batching.batcher import Span
from penstock.blocks import Block, is_table, row_count
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.inference.session import Lane


class Ticket:
    """Rows that were submitted together. The answers are there when `missing` is 0; `error` when they will never be."""

    __slots__ = ("answers", "block", "error", "missing", "pieces")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.missing = row_count(block)
        self.error: PenstockError | None = None
        self.answers: list[Any] = [] if is_table(block) else [None] * self.missing
        self.pieces: list[tuple[int, Any]] = []  # of a table: where a piece starts, and its answers

    @property
    def settled(self) -> bool:
        return not self.missing or self.error is not None

    def fill(self, start: int, stop: int, answers: Any) -> None:
        if is_table(self.block):
            self.pieces.append((start, answers))
        else:
            self.answers[start:stop] = answers
        self.missing -= stop - start


class Caller:
    """One bundle that is running in this process, whichever sessions it submits to."""

    __slots__ = ("waits_for",)

    def __init__(self) -> None:
        self.waits_for: Ticket | None = None

    @property
    def waiting(self) -> bool:
        """Whether it waits for answers that are not there, so that it cannot submit rows anywhere."""
        return self.waits_for is not None and not self.waits_for.settled


class Request(NamedTuple):
    """What the batcher carries: rows, the arguments for them, and who wants the answers."""

    ticket: Ticket
    args: Any
    lane: Lane


def settle(spans: list[Span[Request]], answers: Any, error: PenstockError | None) -> None:
    """Hand the answers of one batch, or its error, to the tickets whose rows were in it."""
    at = 0
    for entry, start, stop in spans:
        ticket = entry.item.ticket
        if error is not None:
            ticket.error = ticket.error or error
        elif len(spans) == 1:
            ticket.fill(start, stop, answers)
        else:
            ticket.fill(start, stop, answers[at : at + stop - start])
        at += stop - start


def identity_of(args: Any) -> Hashable:
    """Equal for arguments that are equal: rows share a batch only if theirs are."""
    if args is None:
        return None
    try:
        identity: bytes = cloudpickle.dumps(args, protocol=5)
    except Exception:
        return id(args)
    return identity
