"""check_handler(): whether a model handler keeps its contract. For authors of handlers, in their own tests."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import cloudpickle

from penstock.inference.handler import ModelHandler
from penstock.rows import PredictionResult

T = TypeVar("T")
Handler = ModelHandler[Any, Any, Any]


def check_handler(
    handler: Handler,
    examples: Sequence[Any],
    *,
    inference_args: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Raise AssertionError, with what is wrong, unless the handler keeps its contract over these examples.

    The handler is pickled, and its copy is checked. It must load its model; give one picklable prediction per example,
    in order, for batches of 1, of 2 and of all; give the same answers however rows are batched, floats within
    `tolerance` (relative and absolute); and, where it takes columns and the examples are dicts, for a table too.

    Give at least three examples whose answers differ, as run_inference() gets them: after preprocessing, without keys.
    """
    if len(examples) < 3:
        raise AssertionError(f"check_handler() got {len(examples)} examples; give at least 3, with different answers")
    handler = _after_travel("the handler", handler)
    _check_declarations(handler, examples, inference_args)
    model = _attempt("load_model()", handler.load_model)
    alone = _predict_in_batches(handler, model, examples, inference_args, 1)
    for size in (2, len(examples)):
        together = _predict_in_batches(handler, model, examples, inference_args, size)
        _check_same(f"in batches of {size}", alone, together, tolerance)
    _check_same("after pickling", alone, [_after_travel("a prediction", each) for each in alone], 0.0)
    if handler.takes_columns() and all(isinstance(example, dict) for example in examples):
        answers = _predict_table(handler, model, examples, inference_args)
        _check_same("as a table", [_inference(each) for each in alone], answers, tolerance)


def _check_declarations(handler: Handler, examples: Sequence[Any], inference_args: Mapping[str, Any] | None) -> None:
    _attempt("validate_inference_args()", handler.validate_inference_args, inference_args)
    try:
        inspect.signature(handler.run_inference).bind(examples, None, inference_args)
    except TypeError as exc:
        raise AssertionError(f"run_inference() must accept (batch, model, inference_args): {exc}") from exc
    size: object = _attempt("get_num_bytes()", handler.get_num_bytes, list(examples))
    if not isinstance(size, int) or size < 0:
        raise AssertionError(f"get_num_bytes() returned {size!r}; expected an int of at least 0")


def _predict_in_batches(
    handler: Handler, model: Any, examples: Sequence[Any], inference_args: Mapping[str, Any] | None, size: int
) -> list[Any]:
    predictions: list[Any] = []
    for start in range(0, len(examples), size):
        batch = list(examples[start : start + size])
        what = f"run_inference() on a batch of {len(batch)}"
        answers = _attempt(what, _predict, handler, batch, model, inference_args)
        if len(answers) != len(batch):
            raise AssertionError(f"{what} returned {len(answers)} predictions; expected one per example")
        _check_examples(what, batch, answers)
        predictions += answers
    return predictions


def _predict(handler: Handler, batch: list[Any], model: Any, inference_args: Mapping[str, Any] | None) -> list[Any]:
    return list(handler.run_inference(batch, model, inference_args))


def _check_examples(what: str, batch: list[Any], answers: list[Any]) -> None:
    for at, (example, answer) in enumerate(zip(batch, answers, strict=True)):
        if isinstance(answer, PredictionResult) and not _same(example, answer.example, 0.0):
            raise AssertionError(
                f"{what}: prediction {at} is for the example {answer.example!r}, but {example!r} was sent there; "
                "predictions must come in the order of the examples"
            )


def _predict_table(
    handler: Handler, model: Any, examples: Sequence[Any], inference_args: Mapping[str, Any] | None
) -> list[Any]:
    import pyarrow as pa

    table = pa.Table.from_pylist(list(examples))
    answers = _attempt("run_inference_columns()", handler.run_inference_columns, table, model, inference_args)
    rows = list(answers.to_pylist() if hasattr(answers, "to_pylist") else answers)
    if len(rows) != len(examples):
        raise AssertionError(f"run_inference_columns() returned {len(rows)} answers for {len(examples)} rows")
    return rows


def _check_same(how: str, expected: Sequence[Any], seen: Sequence[Any], tolerance: float) -> None:
    for at, (one, other) in enumerate(zip(expected, seen, strict=True)):
        if not _same(one, other, tolerance):
            raise AssertionError(
                f"example {at} is answered {_inference(other)!r} {how}, but {_inference(one)!r} in a batch of 1; "
                "answers must come in the order of the examples and must not depend on the other rows of a batch"
            )


def _inference(prediction: Any) -> Any:
    return prediction.inference if isinstance(prediction, PredictionResult) else prediction


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
