"""Rows on their way through a model: what a caller holds, and what the batcher carries for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from penstock.batching.entry import Span
from penstock.blocks import Block, is_table, row_count
from penstock.errors import PenstockError, StepError
from penstock.failures import NOT_PICKLABLE, Failure, Handling
from penstock.inference.columns import with_answers
from penstock.rows import safe_str
from penstock.transport.packing import why_not_packed

if TYPE_CHECKING:
    from penstock.inference.hosted import HostedLane
    from penstock.inference.lane import Lane
    from penstock.models.front import Front


class Ticket:
    """Rows that were submitted together. The answers are there when `missing` is 0; `error` when they will never be.
    A row that failed has None for an answer, and its failure."""

    __slots__ = ("answers", "block", "error", "failures", "gathering", "missing", "pieces")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.missing = row_count(block)
        self.gathering = 0  # rows that are in no batch before other rows are submitted, where the caller forms batches
        self.error: PenstockError | None = None
        self.failures: dict[int, Failure] = {}  # by position
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

    def reset(self) -> None:
        """Its rows are submitted once more: what was answered does not count."""
        if not self.settled:
            self.missing = row_count(self.block)
            self.pieces = []
            self.failures = {}


class Caller:
    """One bundle that is running in this process, whichever sessions it submits to."""

    __slots__ = ("fronts", "hosted", "waits_for")

    def __init__(self) -> None:
        self.waits_for: Ticket | None = None
        self.fronts: dict[Lane, Front[Request]] = {}  # of models in this process: its lanes, and where they lead
        self.hosted: list[HostedLane] = []  # its lanes to models in other processes, which cannot see that it waits

    @contextlib.contextmanager
    def paused(self, here: Lane | HostedLane) -> Iterator[None]:
        """Inside, hosts know that this bundle waits at another model, and adds no rows to theirs."""
        elsewhere = [lane for lane in self.hosted if lane is not here]
        for lane in elsewhere:
            lane.pause()
        try:
            yield
        finally:
            for lane in elsewhere:
                lane.resume()

    @property
    def waiting(self) -> bool:
        """Whether it waits for answers that are not there, so that it cannot submit rows anywhere."""
        return self.waits_for is not None and not self.waits_for.settled


class Request(NamedTuple):
    """What the batcher carries: rows, the arguments for them, and who wants the answers."""

    ticket: Ticket
    args: Any
    lane: Lane


def answers_of(ticket: Ticket, model_id: str | None, step: str) -> Block:
    """The answers of a settled ticket; a table comes back with the columns `inference` and `model_id`."""
    if ticket.error is not None:
        raise ticket.error
    if not is_table(ticket.block):
        return ticket.answers
    try:
        return with_answers(ticket.block, ticket.pieces, model_id)
    except Exception as exc:
        what = "the answers of several batches make no column"
        raise StepError(f"step {step!r}: {what}: {type(exc).__name__}: {safe_str(exc)}") from exc


def settle(
    spans: list[Span[Request]],
    answers: Any,
    error: PenstockError | None,
    failures: Mapping[int, Failure] | None = None,
) -> None:
    """Hand the answers and the failures of one batch, or its error, to the tickets whose rows were in it."""
    if error is not None:
        for span in spans:
            span.entry.item.ticket.error = span.entry.item.ticket.error or error
        return
    if failures:
        _hand_out(spans, failures)  # first: a ticket counts as settled as soon as none of its rows is missing
    if len(spans) == 1:
        entry, start, stop = spans[0]
        entry.item.ticket.fill(start, stop, answers)
        return
    at = 0
    for entry, start, stop in spans:
        ticket = entry.item.ticket
        if stop - start == 1 and isinstance(answers, list):  # of rows of like length, each comes from elsewhere
            ticket.answers[start] = answers[at]
            ticket.missing -= 1
        else:
            ticket.fill(start, stop, answers[at : at + stop - start])
        at += stop - start


def _hand_out(spans: list[Span[Request]], failures: Mapping[int, Failure]) -> None:
    """To each ticket its own failures, under the name of its own step: several may share the model."""
    at = 0
    for entry, start, stop in spans:
        ticket, _, lane = entry.item
        for position in range(start, stop):
            failure = failures.get(at + position - start)
            if failure is not None:
                same = failure.step == lane.step
                ticket.failures[position] = failure if same else dataclasses.replace(failure, step=lane.step)
        at += stop - start


def not_packed(rows: list[Any], handling: Handling, step: str, model_id: str | None) -> dict[int, Failure]:
    """The failures of rows, or answers, that cannot be sent to another process, by position; where handled."""
    found = {at: exc for at, row in enumerate(rows) if (exc := why_not_packed(row)) is not None}
    return {
        at: Failure.of(exc, step, kind=NOT_PICKLABLE, model_id=model_id)
        for at, exc in found.items()
        if handling.handles(exc)
    }


def identity_of(args: Any) -> Hashable:
    """Equal for arguments that are equal: rows share a batch only if theirs are."""
    if args is None:
        return None
    try:
        identity: bytes = cloudpickle.dumps(args, protocol=5)
    except Exception:
        return id(args)
    return identity
