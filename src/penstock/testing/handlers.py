"""check_handler(): whether a model handler keeps its contract. For authors of handlers, in their own tests."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import cloudpickle

from penstock.inference.calls import columns_for
from penstock.inference.columns import as_column
from penstock.inference.handler import ModelHandler, measures_examples
from penstock.inference.handler_checks import columns_form
from penstock.rows import PredictionResult, many

T = TypeVar("T")
Handler = ModelHandler[Any, Any, Any]
InferenceArgs = Mapping[str, Any] | None


def check_handler(
    handler: Handler,
    examples: Sequence[Any],
    *,
    inference_args: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Raise AssertionError, with what is wrong, unless the handler keeps its contract over these examples.

    The handler is pickled, and its copy is checked:

    - It loads its model and gives one picklable prediction per example, in order, for batches of 1, of 2 and of all: a list,
      an array with the rows first, or a dict of such arrays. Where it says `wraps_answers`, these are no PredictionResults.
    - The same answers come however rows are batched, floats within `tolerance` (relative and absolute).
    - If it prepares, prepare() gives a list of one picklable value per example, each the same alone as among others;
      run_inference() is then given these values. If it measures lengths, there is a whole number for each row.
    - If columns= is set, check_columns() accepts a table of these columns, and examples_of() gives one example per row,
      each the same alone as among others. If it takes columns, run_inference_columns() takes that table, in which arrays of
      one shape are lists of a fixed size. The answers are the same as without a table.

    Give at least three examples whose answers differ, as the handler gets them: after preprocessing, without keys. For a
    handler of columns, give dicts; where columns= is one name, the values of that column are accepted, too.
    """
    if len(examples) < 3:
        raise AssertionError(f"check_handler() got {len(examples)} examples; give at least 3, with different answers")
    handler = _after_travel("the handler", handler)
    _attempt("takes_columns()", columns_form, handler)
    table = _table_of(handler, examples)
    in_table = None if table is None or handler.input_columns() is None else _examples_of(handler, table)
    given = in_table if in_table is not None and _are_records(handler, examples) else list(examples)
    _check_declarations(handler, given, inference_args)
    rows = _prepared(handler, given, inference_args)
    _check_lengths(handler, given, rows)
    model = _attempt("load_model()", handler.load_model)
    alone = _predict_in_batches(handler, model, rows, inference_args, 1)
    for size in (2, len(rows)):
        together = _predict_in_batches(handler, model, rows, inference_args, size)
        _check_same(f"in batches of {size}", alone, together, tolerance)
    _check_same("after pickling", alone, [_after_travel("a prediction", each) for each in alone], 0.0)
    if table is not None and handler.takes_columns() and not handler.prepares():
        answers = _predict_table(handler, model, table, inference_args)
    elif in_table is not None and in_table is not given:
        rows = _prepared(handler, in_table, inference_args)
        answers = _predict_in_batches(handler, model, rows, inference_args, len(rows))
    else:
        return
    _check_same("as a table", [_in_table(each) for each in alone], list(map(_inference, answers)), tolerance)


# Before the model.


def _check_declarations(handler: Handler, examples: Sequence[Any], inference_args: InferenceArgs) -> None:
    _attempt("validate_inference_args()", handler.validate_inference_args, inference_args)
    try:
        inspect.signature(handler.run_inference).bind(examples, None, inference_args)
    except TypeError as exc:
        raise AssertionError(f"run_inference() must accept (batch, model, inference_args): {exc}") from exc
    size: object = _attempt("get_num_bytes()", handler.get_num_bytes, list(examples))
    if not isinstance(size, int) or size < 0:
        raise AssertionError(f"get_num_bytes() returned {size!r}; expected an int of at least 0")


def _are_records(handler: Handler, examples: Sequence[Any]) -> bool:
    names = set(handler.input_columns() or ())
    return all(isinstance(example, dict) and example.keys() >= names for example in examples)


def _table_of(handler: Handler, examples: Sequence[Any]) -> Any:
    """The examples as a table of the input columns; None where the handler takes none, or Arrow cannot hold them."""
    import pyarrow as pa

    names = handler.input_columns()
    if names is None and not handler.takes_columns():
        return None
    try:
        if _are_records(handler, examples):
            wanted = list(examples[0]) if names is None else names
            return pa.table({name: as_column([example.get(name) for example in examples]) for name in wanted})
        return pa.table({names[0]: as_column(list(examples))}) if names is not None and len(names) == 1 else None
    except (pa.ArrowException, TypeError):  # such as of tensors
        return None


def _examples_of(handler: Handler, table: Any) -> list[Any]:
    _attempt("check_columns()", handler.check_columns, table.schema)
    examples = list(_attempt("examples_of()", handler.examples_of, table))
    _check_count("examples_of()", len(examples), table.num_rows, "example per row")
    for at, example in enumerate(examples):
        alone = list(_attempt("examples_of()", handler.examples_of, table.slice(at, 1)))
        if len(alone) != 1 or not _same(alone[0], example, 0.0):
            raise AssertionError(
                f"examples_of() makes {example!r} of row {at} of a table, but {alone!r} of the row alone; an example must "
                "not depend on the other rows"
            )
    return examples


def _prepared(handler: Handler, examples: Sequence[Any], inference_args: InferenceArgs) -> list[Any]:
    """What run_inference() is given, after its way to the model: the examples, or the values that prepare() gives."""
    if not handler.prepares():
        return list(examples)
    tool = _attempt("load_prepare()", handler.load_prepare)
    made = _prepare(handler, examples, tool, inference_args)
    values = [_after_travel("a prepared value", value) for value in made]
    for at, value in enumerate(values):
        alone = _prepare(handler, [examples[at]], tool, inference_args)[0]
        if not _same(alone, value, 0.0):
            raise AssertionError(
                f"prepare() gives {value!r} for example {at} among others, but {alone!r} for it alone; a value must not "
                "depend on the other examples"
            )
    return values


def _prepare(handler: Handler, examples: Sequence[Any], tool: Any, inference_args: InferenceArgs) -> list[Any]:
    values: object = _attempt("prepare()", handler.prepare, list(examples), tool, inference_args)
    if not isinstance(values, list):
        raise AssertionError(f"prepare() returned a {type(values).__name__}; expected a list of one value per example")
    _check_count("prepare()", len(values), len(examples), "value per example")
    return values


def _check_lengths(handler: Handler, examples: list[Any], rows: list[Any]) -> None:
    if not handler.measures_length():
        return
    measured = examples if measures_examples(handler) else rows
    lengths = list(_attempt("get_lengths()", handler.get_lengths, measured))
    _check_count("get_lengths()", len(lengths), len(rows), "length per row")
    for length in lengths:
        if not isinstance(length, int) or length < 0:
            raise AssertionError(f"get_lengths() returned {length!r}; expected whole numbers of at least 0")


# The model.


def _predict_in_batches(
    handler: Handler, model: Any, rows: Sequence[Any], inference_args: InferenceArgs, size: int
) -> list[Any]:
    predictions: list[Any] = []
    for start in range(0, len(rows), size):
        batch = list(rows[start : start + size])
        what = f"run_inference() on a batch of {len(batch)}"
        made = _attempt(what, handler.run_inference, list(batch), model, inference_args)
        answers = _attempt(what, _rows_of, made, what)
        _check_count(what, len(answers), len(batch), "prediction per example")
        if not handler.prepares():
            _check_examples(what, batch, answers)
        if handler.wraps_answers and any(isinstance(answer, PredictionResult) for answer in answers):
            raise AssertionError(f"{what} returned PredictionResults; with wraps_answers, these are made of its answers")
        predictions += answers
    return predictions


def _rows_of(answers: Any, what: str) -> list[Any]:
    """One answer per row, of a list, an array, or a dict of arrays."""
    if isinstance(answers, Mapping):
        if not answers or not all(hasattr(part, "dtype") and part.ndim for part in answers.values()):
            raise TypeError("a dict must hold arrays with the rows first; of anything else, return one dict per row")
        lengths = {name: len(part) for name, part in answers.items()}
        if len(set(lengths.values())) > 1:
            raise TypeError(f"the arrays of a dict must have one length, the number of rows, but saw {lengths}")
        return [dict(zip(answers, row, strict=True)) for row in zip(*answers.values(), strict=True)]
    if isinstance(answers, (set, frozenset)):
        raise TypeError("a set has no order")
    return list(answers.to_pylist() if hasattr(answers, "to_pylist") else many(answers, what))


def _check_examples(what: str, batch: list[Any], answers: list[Any]) -> None:
    for at, (example, answer) in enumerate(zip(batch, answers, strict=True)):
        if isinstance(answer, PredictionResult) and not _same(example, answer.example, 0.0):
            raise AssertionError(
                f"{what}: prediction {at} is for the example {answer.example!r}, but {example!r} was sent there; "
                "predictions must come in the order of the examples"
            )


def _predict_table(handler: Handler, model: Any, table: Any, inference_args: InferenceArgs) -> list[Any]:
    what = "run_inference_columns()"
    _attempt("check_columns()", handler.check_columns, table.schema)
    made = _attempt(what, handler.run_inference_columns, columns_for(handler, table), model, inference_args)
    rows = _attempt(what, _rows_of, made, what)
    _check_count(what, len(rows), table.num_rows, "answer per row")
    return rows


# Comparing.


def _check_count(what: str, seen: int, expected: int, each: str) -> None:
    if seen != expected:
        raise AssertionError(f"{what} returned {seen} {each.split()[0]}s; expected one {each}, {expected}")


def _check_same(how: str, expected: Sequence[Any], seen: Sequence[Any], tolerance: float) -> None:
    for at, (one, other) in enumerate(zip(expected, seen, strict=True)):
        if not _same(one, other, tolerance):
            raise AssertionError(
                f"example {at} is answered {_inference(other)!r} {how}, but {_inference(one)!r} in a batch of 1; "
                "answers must come in the order of the examples and must not depend on the other rows of a batch"
            )


def _inference(prediction: Any) -> Any:
    return prediction.inference if isinstance(prediction, PredictionResult) else prediction


def _in_table(prediction: Any) -> Any:
    """An answer as a table holds it: the parts of a tuple are fields with numbers for names."""
    answer = _inference(prediction)
    return {str(at): part for at, part in enumerate(answer)} if type(answer) is tuple else answer


def _same(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two values are equal, floats within the tolerance; arrays and tensors as the lists they hold."""
    one, other = _plain(one), _plain(other)
    if isinstance(one, float) and isinstance(other, (int, float)):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(left, right, tolerance) for left, right in pairs)
    if "__eq__" not in {name for each in type(one).__mro__[:-1] for name in vars(each)}:
        return bool(cloudpickle.dumps(one) == cloudpickle.dumps(other))
    return bool(one == other)


def _plain(value: Any) -> Any:
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    return value.tolist() if hasattr(value, "tolist") else value


def _after_travel(what: str, value: T) -> T:
    copied: T = _attempt(f"pickling {what}", lambda: cloudpickle.loads(cloudpickle.dumps(value)))
    return copied


def _attempt(what: str, action: Callable[..., T], *args: Any) -> T:
    try:
        return action(*args)
    except Exception as exc:
        raise AssertionError(f"{what} raised {type(exc).__name__}: {exc}") from exc
