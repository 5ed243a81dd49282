"""One call of a model, and whether what it returned is one answer per row."""

from __future__ import annotations

from sys import getrefcount
from typing import Any, NamedTuple

from penstock.answers import as_arrays, count_of, is_arrow, is_handed_over, own_answers, uneven
from penstock.batching.limits import up_to_bucket
from penstock.blocks import Block, join, row_count, slice_rows
from penstock.errors import PredictionCountError
from penstock.failures import Handling
from penstock.inference.columns import as_column, numpy_columns
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import columns_form
from penstock.retry import Retry
from penstock.row_copies import own_rows
from penstock.rows import many
from penstock.tables import own_table


class How(NamedTuple):
    """How rows are called, and what becomes of those that fail: as whoever submitted them says."""

    args: Any  # of the model, besides the rows
    step: str  # whose rows they are
    handling: Handling | None = None
    retry: Retry | None = None
    prepared: str | None = None  # with what the rows were, where the model and that may change


def call_model(
    handler: ModelHandler[Any, Any, Any], model: Any, batch: Block, args: Any, step: str, sent: bool = False
) -> Any:
    """The answers to a batch (penstock.answers), one for each of its rows. sent: they are copied before the next call."""
    made: object
    if isinstance(batch, list):
        giver = "run_inference()"
        made = handler.run_inference(list(batch), model, args)  # a list of its own: it may use it up
    else:
        giver = "run_inference_columns()"
        made = handler.run_inference_columns(columns_for(handler, batch), model, args)
    references = getrefcount(made)  # before anything else has it
    needs_copy = not (sent or handler.is_native() or is_handed_over(made, references))
    answers = checked_answers(made, row_count(batch), step, giver)
    if needs_copy:
        answers = own_answers(answers)
    return answers if isinstance(batch, list) else _as_columns(answers)


def columns_for(handler: ModelHandler[Any, Any, Any], table: Any) -> Any:
    """A table as the handler takes it. What it may change in place, no other step sees."""
    may_change = handler.changes_rows()
    if columns_form(handler) == "numpy":
        return numpy_columns(table, own=may_change)
    return own_table(table) if may_change else table


def own_unless_native(handler: ModelHandler[Any, Any, Any], answers: Any) -> Any:
    """Copies of the answers, where Python of the user's may have a buffer that it fills anew for each batch."""
    return answers if handler.is_native() else own_answers(answers)


def checked_answers(made: Any, rows: int, step: str, giver: str = "run_inference()") -> Any:
    """What a handler returned, if it is one answer for each row."""
    answers = made if type(made) is list else _in_order(made, step, giver)
    if (lengths := uneven(answers)) is not None:
        raise PredictionCountError(
            f"step {step!r}: {giver} returned arrays of different lengths, {lengths}, for {rows} rows"
        )
    if (count := count_of(answers)) != rows:
        raise PredictionCountError(
            f"step {step!r}: {giver} returned {count} predictions for {rows} examples; it must return one per example, in "
            "the same order"
        )
    return answers


def _in_order(made: Any, step: str, giver: str) -> Any:
    """What a handler returned, unless its items are no answers: letters, keys, columns, or in any order."""
    if made is None:
        raise PredictionCountError(
            f"step {step!r}: {giver} returned None; it must return one prediction per row, in the same order: is there a "
            "return at its end?"
        )
    if (arrays := as_arrays(made)) is not None:
        return arrays
    if is_arrow(made) and hasattr(made, "to_pylist") and not hasattr(made, "columns"):
        return made
    what = f"step {step!r}: {giver} returned a {type(made).__name__}; it must return one prediction per row"
    if isinstance(made, (set, frozenset)):
        raise PredictionCountError(f"{what}, in the same order: a list, or an array whose first axis is the rows")
    try:
        return list(many(made, giver))
    except TypeError as exc:
        advice = "a list, or an array whose first axis is the rows; of several outputs, a dict of such arrays"
        raise PredictionCountError(f"{what}: {advice}") from exc


def _as_columns(answers: Any) -> Any:
    """Answers to a table: those that came one by one must make a column, or a row is to blame."""
    return as_column(answers) if isinstance(answers, list) else answers


def filled(batch: Block, buckets: tuple[int, ...]) -> Block:
    """The batch, filled up to one of the numbers of rows that are allowed with copies of its last row, if it has any."""
    missing = up_to_bucket(buckets, row_count(batch)) - row_count(batch)
    if not missing:
        return batch
    last = slice_rows(batch, row_count(batch) - 1, row_count(batch))
    uncopied: dict[int, Exception] = {}
    own_rows(last, uncopied)
    if uncopied:
        return batch
    return join([batch, *(own_rows(last) for _ in range(missing))])
