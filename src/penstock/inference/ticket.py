"""Rows on their way through a model: what a caller holds until it has their answers."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from penstock.answers import as_rows, pick, put_together
from penstock.blocks import Block, row_count
from penstock.errors import PenstockError, StepError
from penstock.failures import NOT_PICKLABLE, Failure, Handling
from penstock.inference.columns import chunked_column
from penstock.models.outcome import Outcome
from penstock.rows import PredictionResult, safe_str
from penstock.transport.packing import why_not_packed
from penstock.transport.tensors import received

Part: TypeAlias = tuple[str, int, int]  # a model's name, and which rows are for it: from, to


class Ticket:
    """Rows that were submitted together. The answers are there when `missing` is 0; `error` when they will never be.
    A row that failed has a failure instead of an answer.

    In a session it is filled under the lock of the sessions, by whichever thread ran the rows; the caller looks without the
    lock whether it is settled."""

    __slots__ = (
        *("alone", "as_columns", "block", "error", "failures", "gathering", "lengths", "missing", "model_id", "other_ids"),
        *("parts", "prepared", "sizes", "stale", "step", "weights"),
        *("_listed", "_pieces", "_rows"),
    )

    def __init__(
        self,
        block: Block,
        sizes: Sequence[int] | None = None,
        parts: Sequence[Part] | None = None,
        prepared: str | None = None,
        *,
        weights: list[int] | None = None,
        lengths: list[int] | None = None,
        alone: bool = False,
        as_columns: bool = False,
    ) -> None:
        self.block = block  # what the model is given
        self.as_columns = as_columns  # whether its answers become columns: of tensors the numbers will do
        self.parts = parts  # of several models, whose rows these are, one after the other; None: of one
        self.prepared = prepared  # with what the rows were, where the model and that may change
        self.stale: int | None = None  # some rows are to be prepared again, for the version of this number
        self.weights, self.lengths = weights, lengths  # of the rows, where batches are limited by them
        self.alone = alone  # they are one batch as they are
        self.sizes = sizes  # bytes of each row as it came, where batches are formed by them
        self.step = ""  # whose rows they are: its lane says so when it takes them
        self.missing = self._rows = row_count(block)
        self.gathering = 0  # rows that are in no batch before other rows are submitted, where the caller forms batches
        self.error: PenstockError | None = None
        self.failures: dict[int, Failure] = {}  # by position
        self.model_id: str | None = None  # of the model that answered
        self.other_ids: dict[int, str | None] = {}  # by position: of rows that another model has answered
        self._listed: list[Any] | None = None  # answers that came one by one
        self._pieces: list[tuple[Sequence[int], Any]] = []  # those that came together, with the positions of their rows

    @property
    def settled(self) -> bool:
        return not self.missing or self.error is not None

    def fill_list(self, start: int, stop: int, answers: list[Any], model_id: str | None) -> None:
        """The answers to rows start to stop."""
        if self._listed is None:
            whole = stop - start == self._rows
            self._listed = answers if whole else [None] * self._rows
        if self._listed is not answers:
            self._listed[start:stop] = answers
        if model_id != self.model_id:
            self._note_model(range(start, stop), model_id)
        self.missing -= stop - start  # last: at 0 the ticket is settled, for threads that look without the lock

    def fill(self, positions: Sequence[int], answers: Any, model_id: str | None) -> None:
        """The answers to these rows, of any kind."""
        if isinstance(answers, list):
            for at, start, stop in _runs(positions):
                self.fill_list(start, stop, answers[at : at + stop - start], model_id)
            return
        if positions:
            self._pieces.append((positions, received(answers, as_tensors=not self.as_columns)))
            self._note_model(positions, model_id)
        self.missing -= len(positions)  # last, as above

    def fail(self, at: int, failure: Failure) -> None:
        """Under the name of the ticket's own step: several may share the model."""
        self.failures[at] = failure if failure.step == self.step else dataclasses.replace(failure, step=self.step)

    def reset(self) -> None:
        """Its rows are submitted once more: what was answered does not count."""
        if not self.settled:
            self.missing = self._rows
            self._pieces, self._listed = [], None
            self.failures = {}
            self.stale = None

    def answers(self) -> Any:
        """The answers of a settled ticket, one for each row; of a row that failed None, or anything in an array."""
        if self.error is not None:
            raise self.error
        if self._pieces and self._listed is None:
            try:
                whole = not isinstance(self.block, list) and not self.failures
                column = chunked_column(self._rows, self._pieces) if whole else None
                return put_together(self._rows, self._pieces) if column is None else column
            except Exception as exc:
                what = f"the answers of several batches do not fit together: {type(exc).__name__}: {safe_str(exc)}"
                raise StepError(f"step {self.step!r}: {what}") from exc
        if self._listed is None:
            return [None] * self._rows
        for positions, answers in self._pieces:  # some rows were answered one by one, and some were not
            for at, answer in zip(positions, as_rows(answers), strict=True):
                self._listed[at] = answer
        return self._listed

    def model_ids(self, positions: Sequence[int]) -> dict[str | None, int]:
        """How many of these rows each model has answered."""
        others = Counter(self.other_ids[at] for at in positions if at in self.other_ids)
        return {self.model_id: len(positions) - others.total(), **others}

    def by_model(self, positions: Sequence[int], names: Sequence[str] | None) -> Counter[tuple[str, str | None]]:
        """How many of these rows each model has answered, by its name and its id. names: of the model of each row."""
        return Counter(("" if names is None else names[at], self.other_ids.get(at, self.model_id)) for at in positions)

    def _note_model(self, positions: Sequence[int], model_id: str | None) -> None:
        if self.model_id is None:
            self.model_id = model_id
        elif model_id != self.model_id:
            self.other_ids |= dict.fromkeys(positions, model_id)


def hand_out(outcome: Outcome, pieces: Iterable[tuple[Ticket | None, int, int]]) -> None:
    """Give the answers and the failures of one batch to the tickets whose rows were in it; None: nobody wants these."""
    at = 0
    if outcome.stale is not None:
        for ticket, start, stop in pieces:
            if ticket is not None:
                ticket.stale = outcome.stale  # first: a settled ticket is looked at without the lock
                ticket.missing -= stop - start
        return
    if type(outcome.answers) is list and not outcome.failures and not outcome.wrapped:
        for ticket, start, stop in pieces:  # of rows of like length, each comes from elsewhere
            end = at + stop - start
            if ticket is not None:
                ticket.fill_list(start, stop, outcome.answers[at:end], outcome.model_id)
            at = end
        return
    found: dict[Ticket, list[tuple[range, range]]] = {}
    for ticket, start, stop in pieces:
        end = at + stop - start
        if ticket is not None:
            found.setdefault(ticket, []).append((range(start, stop), range(at, end)))
        at = end
    for ticket, runs in found.items():
        if len(runs) == 1 and _is_columns(ticket, outcome):
            _give_run(ticket, outcome, *runs[0])
        else:
            _give(ticket, outcome, [at for run, _ in runs for at in run], [at for _, run in runs for at in run])


def _is_columns(ticket: Ticket, outcome: Outcome) -> bool:
    """Whether these are arrays that answer a table, and no row is to run again."""
    return not isinstance(ticket.block, list) and type(outcome.answers) is not list and None not in outcome.failures.values()


def _give_run(ticket: Ticket, outcome: Outcome, places: range, own: range) -> None:
    """_give() of rows that follow each other: the array whole, with anything where a row failed."""
    failed = {at: failure for at, failure in outcome.failures.items() if at in own and failure is not None}
    for at, failure in failed.items():  # first: a ticket counts as settled as soon as none is missing
        ticket.fail(places.start + at - own.start, failure)
    if len(failed) == len(own):
        ticket.missing -= len(own)
    else:
        ticket.fill(places, pick(outcome.answers, own), outcome.model_id)


def _give(ticket: Ticket, outcome: Outcome, places: list[int], own: list[int]) -> None:
    """To one ticket what of a batch is its own: at these places of the ticket, from these of the batch."""
    if outcome.failures:  # first: a ticket counts as settled as soon as none is missing
        place_of = dict(zip(own, places, strict=True))
        for at, failure in outcome.failures.items():
            place = place_of.pop(at, None)
            if place is not None and failure is not None:  # None: it runs again, and is answered later
                ticket.fail(place, failure)
                ticket.missing -= 1
        own, places = list(place_of), list(place_of.values())
    if not places:
        return
    answers = pick(outcome.answers, _range_or(own))
    if outcome.wrapped and isinstance(ticket.block, list):
        rows = pick(ticket.block, _range_or(places))
        answers = list(map(PredictionResult, rows, answers, itertools.repeat(outcome.model_id)))
    ticket.fill(_range_or(places), answers, outcome.model_id)


def _range_or(positions: list[int]) -> Sequence[int]:
    """A range, if that is what they are."""
    follows = positions[-1] - positions[0] == len(positions) - 1
    return range(positions[0], positions[-1] + 1) if follows and positions == sorted(positions) else positions


def _runs(positions: Sequence[int]) -> list[tuple[int, int, int]]:
    """Positions that follow each other: where in the sequence they begin, from and to."""
    if isinstance(positions, range):
        return [(0, positions.start, positions.stop)]
    runs: list[tuple[int, int, int]] = []
    for at, place in enumerate(positions):
        if runs and runs[-1][2] == place:
            runs[-1] = (runs[-1][0], runs[-1][1], place + 1)
        else:
            runs.append((at, place, place + 1))
    return runs


def not_packed(rows: list[Any], handling: Handling, step: str, model_id: str | None = None) -> dict[int, Failure]:
    """The failures of rows, or answers, that cannot be sent to another process, by position; where handled."""
    found = {at: exc for at, row in enumerate(rows) if (exc := why_not_packed(row)) is not None}
    return {
        at: Failure.of(exc, step, kind=NOT_PICKLABLE, model_id=model_id)
        for at, exc in found.items()
        if handling.handles(exc)
    }
