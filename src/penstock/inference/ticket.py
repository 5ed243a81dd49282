"""Rows on their way through a model: what a caller holds until it has their answers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from penstock.blocks import Block, is_table, row_count
from penstock.errors import PenstockError, StepError
from penstock.failures import NOT_PICKLABLE, Failure, Handling
from penstock.inference.columns import with_answers
from penstock.models.outcome import Outcome, dealt
from penstock.rows import PredictionResult, safe_str
from penstock.transport.packing import why_not_packed


class Ticket:
    """Rows that were submitted together. The answers are there when `missing` is 0; `error` when they will never be.
    A row that failed has None for an answer, and its failure."""

    __slots__ = ("answers", "block", "error", "failures", "gathering", "missing", "pieces", "step")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.step = ""  # whose rows they are: its lane says so when it takes them
        self.missing = row_count(block)
        self.gathering = 0  # rows that are in no batch before other rows are submitted, where the caller forms batches
        self.error: PenstockError | None = None
        self.failures: dict[int, Failure] = {}  # by position
        self.answers: list[Any] = [] if is_table(block) else [None] * self.missing
        self.pieces: list[tuple[int, Any, str | None]] = []  # of a table: where a piece starts, its answers, whose they are

    @property
    def settled(self) -> bool:
        return not self.missing or self.error is not None

    def fill(self, start: int, stop: int, answers: Any, model_id: str | None) -> None:
        if is_table(self.block):
            self.pieces.append((start, answers, model_id))
        else:
            self.answers[start:stop] = answers
        self.missing -= stop - start

    def fail(self, at: int, failure: Failure) -> None:
        """Under the name of the ticket's own step: several may share the model."""
        self.failures[at] = failure if failure.step == self.step else dataclasses.replace(failure, step=self.step)

    def reset(self) -> None:
        """Its rows are submitted once more: what was answered does not count."""
        if not self.settled:
            self.missing = row_count(self.block)
            self.pieces = []
            self.failures = {}


def hand_out(outcome: Outcome, pieces: Iterable[tuple[Ticket | None, int, int]]) -> None:
    """Give the answers and the failures of one batch to the tickets whose rows were in it; None: nobody wants these."""
    if type(outcome.answers) is list and not outcome.failures and not outcome.wrapped:
        _hand_out_rows(outcome.answers, pieces)
        return
    for ticket, start, stop, answers, failures in dealt(outcome, pieces):
        if ticket is None:
            continue
        for at, failure in failures.items():  # first: a ticket counts as settled as soon as none of its rows is missing
            if failure is not None:
                ticket.fail(at, failure)
        if outcome.wrapped and isinstance(ticket.block, list):
            answers = list(map(PredictionResult, ticket.block[start:stop], answers, itertools.repeat(outcome.model_id)))
        if None not in failures.values():
            ticket.fill(start, stop, answers, outcome.model_id)
            continue
        for at in (at for at in range(start, stop) if failures.get(at, at) is not None):  # the others are to come
            ticket.fill(at, at + 1, answers[at - start : at - start + 1], outcome.model_id)


def _hand_out_rows(answers: list[Any], pieces: Iterable[tuple[Ticket | None, int, int]]) -> None:
    """The same where there is nothing but answers: of rows of like length, each comes from elsewhere."""
    at = 0
    for ticket, start, stop in pieces:
        end = at + stop - start
        if ticket is not None:
            ticket.answers[start:stop] = answers[at:end]
            ticket.missing -= stop - start
        at = end


def answers_of(ticket: Ticket) -> Block:
    """The answers of a settled ticket; a table comes back with the columns `inference` and `model_id`."""
    if ticket.error is not None:
        raise ticket.error
    if not is_table(ticket.block):
        return ticket.answers
    try:
        return with_answers(ticket.block, ticket.pieces)
    except Exception as exc:
        what = "the answers of several batches make no column"
        raise StepError(f"step {ticket.step!r}: {what}: {type(exc).__name__}: {safe_str(exc)}") from exc


def not_packed(rows: list[Any], handling: Handling, step: str, model_id: str | None) -> dict[int, Failure]:
    """The failures of rows, or answers, that cannot be sent to another process, by position; where handled."""
    found = {at: exc for at, row in enumerate(rows) if (exc := why_not_packed(row)) is not None}
    return {
        at: Failure.of(exc, step, kind=NOT_PICKLABLE, model_id=model_id)
        for at, exc in found.items()
        if handling.handles(exc)
    }
