"""Batches of one caller that run one after the other: what is the same for all of them is done once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.answers import as_rows, own_answers
from penstock.batching.entry import Span
from penstock.blocks import Block, gather, row_count, slice_rows
from penstock.forks import end_if_forked, this_process
from penstock.inference.calls import How, checked_answers
from penstock.inference.model import ModelCopy
from penstock.models.outcome import Outcome
from penstock.row_copies import are_constant

if TYPE_CHECKING:
    from penstock.inference.lane import Request
    from penstock.inference.residents import Resident


def outcomes_in_a_row(copy: Resident, rows: Block, size: int, how: How) -> list[Outcome]:
    """Of batches of so many rows; or one for all of them, where none of them is unlike the others."""
    if row_count(rows) <= size:
        return [copy.outcomes(rows, how)]
    first = copy.outcomes(slice_rows(rows, 0, size), how)
    if type(first.answers) is not list or not isinstance(copy, ModelCopy) or not _leaves_rows(copy, rows):
        return [first, *(copy.outcomes(batch, how) for batch in _batches(rows, size, size))]
    answers, raised = _plain_answers(copy, rows, size, how.args, first.answers)
    made = Outcome(answers, model_id=copy.model_id())
    if raised is None and first.is_plain() and first.model_id == made.model_id:
        return [first._replace(answers=answers)]
    outcomes = [first, *(made._replace(answers=each) for each in _batches(answers, size, size))]
    for batch in _batches(rows, len(answers), size):
        outcomes.append(copy.outcomes(batch, how, raised=raised))
        raised = None
    return outcomes


def _leaves_rows(copy: ModelCopy, rows: Block) -> bool:
    """Whether a call is just that, and leaves the rows as they were submitted."""
    return copy.is_plain and isinstance(rows, list) and (are_constant(rows) or not copy.handler.changes_rows())


def _plain_answers(
    copy: ModelCopy, rows: Any, size: int, args: Any, first: list[Any]
) -> tuple[list[Any], BaseException | None]:
    """The answers of all batches, up to the first call that fails, and what that has raised. `first`: those of the first
    batch, which has run."""
    assert copy.loaded is not None
    run, model, began = copy.handler.run_inference, copy.loaded.model, this_process()
    answers, is_native = list(first), copy.handler.is_native()
    try:
        for at in range(size, len(rows), size):
            batch = rows[at : at + size]
            count = len(batch)  # now: the list is the handler's own, which may use it up
            made: Any = run(batch, model, args)
            end_if_forked(began, copy.step)
            if type(made) is not list or len(made) != count:
                made = as_rows(checked_answers(made, count, copy.step))
            if not (is_native or are_constant(made)):  # it may be filled anew by the next call
                made = own_answers(made)
            answers += made
    except BaseException as exc:
        end_if_forked(began, copy.step)
        return answers, exc
    return answers, None


def _batches(rows: Block, first: int, size: int) -> list[Block]:
    return [slice_rows(rows, at, min(at + size, row_count(rows))) for at in range(first, row_count(rows), size)]


def rows_in_spans(batch: list[Span[Request]]) -> Block:
    return gather([(entry.item.ticket.block, start, stop) for entry, start, stop in batch])


def batch_rows(spans: list[Span[Request]], rows: int) -> int:
    """How many rows each batch has, of those that left in a row: several are in one entry."""
    whole = sum(stop - start for _, start, stop in spans)
    return whole if len(spans) > 1 or spans[0].entry.alone else min(whole, rows)


def one_by_one(spans: list[Span[Request]], rows: int, first: int | None = None) -> list[list[Span[Request]]]:
    """Batches that left in a row; the first ones of them."""
    (entry, start, stop), *others = spans
    if others or stop - start <= rows:
        return [spans]
    return [[Span(entry, at, min(at + rows, stop))] for at in range(start, stop, rows)[:first]]
