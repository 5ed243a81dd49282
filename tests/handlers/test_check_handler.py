"""check_handler() over small handlers that keep the contract, and over those that break one rule of it each."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import UsageError
from penstock.rows import PredictionResult
from penstock.testing import check_handler

WORDS = ["a", "bb", "ccc", "dddd", "bb"]


class Lengths(ps.ModelHandler[Any, Any, None]):
    """Prepares words: the model gets their lengths and doubles them."""

    wraps_answers = True

    def load_model(self) -> None:
        return None

    def load_prepare(self) -> Any:
        return len

    def prepare(self, examples: Any, tool: Any, inference_args: Any = None) -> Any:
        return [{"length": tool(example)} for example in examples]

    def measures_length(self) -> bool:
        return True

    def get_lengths(self, batch: Any) -> Any:
        return [row["length"] for row in batch]

    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return [row["length"] * 2 for row in batch]


class Arrays(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return np.array([row["length"] for row in batch])


class DictsOfArrays(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        lengths = np.array([row["length"] for row in batch])
        return {"length": lengths, "pair": np.stack([lengths, lengths * 2], axis=1)}


class Object:
    """A value that compares by identity."""

    def __init__(self, word: str) -> None:
        self.word = word


class Objects(Lengths):
    def prepare(self, examples: Any, tool: Any, inference_args: Any = None) -> Any:
        return [Object(example) for example in examples]

    def get_lengths(self, batch: Any) -> Any:
        return [len(row.word) for row in batch]

    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return self.get_lengths(batch)


class Doubled(ps.ModelHandler[Any, Any, None]):
    """Takes columns of numbers, and dicts of them."""

    def load_model(self) -> None:
        return None

    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return [row["x"] * 2 for row in batch]

    def takes_columns(self) -> bool | str:
        return True

    def run_inference_columns(self, table: Any, model: None, inference_args: Any = None) -> Any:
        return pa.compute.multiply(table["x"], 2)


class FromNumPy(Doubled):
    def takes_columns(self) -> bool | str:
        return "numpy"

    def run_inference_columns(self, table: Any, model: None, inference_args: Any = None) -> Any:
        return table["x"] * 2


RECORDS = [{"word": word, "x": float(at), "id": at} for at, word in enumerate(WORDS)]


@pytest.mark.parametrize("handler_class", [Lengths, Arrays, DictsOfArrays, Objects])
def test_handlers_that_keep_the_contract(handler_class: Any) -> None:
    check_handler(handler_class(), WORDS)
    check_handler(handler_class(columns="word"), WORDS)
    check_handler(handler_class(columns="word"), RECORDS)


@pytest.mark.parametrize("handler_class", [Doubled, FromNumPy])
def test_handlers_of_columns_that_keep_the_contract(handler_class: Any) -> None:
    check_handler(handler_class(), [{"x": row["x"]} for row in RECORDS])
    check_handler(handler_class(columns=["x"]), RECORDS)


class Sums(ps.ModelHandler[Any, Any, None]):
    """Takes matrices of numbers, and lists or arrays of them."""

    def load_model(self) -> None:
        return None

    def takes_columns(self) -> str:
        return "numpy"

    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return [float(np.sum(row["vector"])) for row in batch]

    def run_inference_columns(self, table: Any, model: None, inference_args: Any = None) -> Any:
        return table["vector"].sum(axis=1)


def test_a_handler_of_matrices_gets_those_that_the_engine_gives() -> None:
    vectors = [{"vector": np.arange(at, at + 3, dtype=np.float32)} for at in range(4)]
    check_handler(Sums(), vectors)
    check_handler(Sums(columns=["vector"]), vectors)
    read = ps.Pipeline(workers=0) | ps.Create([{"at": 0}]) | ps.MapBatches(_vectors, format="arrow")
    assert (read | ps.RunInference(Sums(columns=["vector"], output_column="sum"))).collect()[1]["sum"] == 12


def _vectors(table: pa.Table) -> pa.Table:
    return pa.table({"vector": pa.array([[0, 1, 2], [3, 4, 5]], pa.list_(pa.float32(), 3))})


@pytest.mark.parametrize("form", ["pandas", "Arrow", 1, ["numpy"]])
def test_a_form_of_columns_that_there_is_not(form: Any) -> None:
    class Odd(Doubled):
        def takes_columns(self) -> Any:
            return form

    with pytest.raises(AssertionError, match=r"takes_columns\(\) raised UsageError: Odd.takes_columns\(\) returned .*numpy"):
        check_handler(Odd(columns=["x"]), RECORDS)
    with pytest.raises(UsageError, match=r'Odd.takes_columns\(\) returned .*; expected True or "arrow"'):
        ps.Pipeline() | ps.Create(RECORDS) | ps.RunInference(Odd(columns=["x"]))


def test_a_length_function_of_the_user_s_sees_examples() -> None:
    class ByExample(ps.ModelHandler[Any, Any, None]):
        def load_model(self) -> None:
            return None

        def prepare(self, examples: Any, tool: Any, inference_args: Any = None) -> Any:
            return [0] * len(examples)

        def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
            return batch

    check_handler(ByExample(batch_length_fn=len), WORDS)
    with pytest.raises(AssertionError, match=r"get_lengths\(\) returned -1"):
        check_handler(ByExample(batch_length_fn=lambda word: -1), WORDS)


# Each of these breaks one rule.


class NoList(Lengths):
    def prepare(self, examples: Any, tool: Any, inference_args: Any = None) -> Any:
        return tuple(super().prepare(examples, tool))


class TooFew(Lengths):
    def prepare(self, examples: Any, tool: Any, inference_args: Any = None) -> Any:
        return list({each: {"length": tool(each)} for each in examples}.values())


class Neighbours(Lengths):
    def prepare(self, examples: Any, tool: Any, inference_args: Any = None) -> Any:
        return [{"length": max(map(tool, examples))} for _ in examples]


class Unsendable(Lengths):
    def prepare(self, examples: Any, tool: Any, inference_args: Any = None) -> Any:
        return [{"length": len(example), "lock": _LOCK} for example in examples]


_LOCK = threading.Lock()


class Failing(Lengths):
    def prepare(self, examples: Any, tool: Any, inference_args: Any = None) -> Any:
        raise ValueError("no tool")


class ToolIsGone(Lengths):
    def load_prepare(self) -> Any:
        raise FileNotFoundError("tokenizer.json")


class WantsExamples(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return [len(example + "") for example in batch]


class WrongLengths(Lengths):
    def get_lengths(self, batch: Any) -> Any:
        return [1]


class WrapsItself(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return [PredictionResult(row, row["length"]) for row in batch]


class WholeNumber(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return np.array(len(batch))


class ShortArray(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return np.zeros((1, len(batch)))


class UnevenDict(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return {"a": np.zeros(len(batch)), "b": np.zeros(1)}


class DictOfLists(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return {"a": [0] * len(batch)}


class Letters(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return "x" * len(batch)


class BatchMean(Lengths):
    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        lengths = np.array([row["length"] for row in batch])
        return lengths - lengths.mean()


@pytest.mark.parametrize(
    ("handler_class", "message"),
    [
        (NoList, r"prepare\(\) returned a tuple; expected a list of one value per example"),
        (TooFew, r"prepare\(\) returned 4 values; expected one value per example, 5"),
        (Neighbours, r"prepare\(\) gives {'length': 4} for example 0 among others, but {'length': 1} for it alone"),
        (Unsendable, "pickling a prepared value raised TypeError"),
        (Failing, r"prepare\(\) raised ValueError: no tool"),
        (ToolIsGone, r"load_prepare\(\) raised FileNotFoundError"),
        (WantsExamples, r"run_inference\(\) on a batch of 1 raised TypeError"),
        (WrongLengths, r"get_lengths\(\) returned 1 lengths; expected one length per row, 5"),
        (WrapsItself, "returned PredictionResults; with wraps_answers, these are made of its answers"),
        (WholeNumber, "on a batch of 1 raised TypeError: iteration over a 0-d array"),
        (ShortArray, "on a batch of 2 returned 1 predictions; expected one prediction per example, 2"),
        (UnevenDict, "arrays of a dict must have one length, the number of rows, but saw {'a': 2, 'b': 1}"),
        (DictOfLists, "a dict must hold arrays with the rows first"),
        (Letters, "returned a str; expected an iterable of rows"),
        (BatchMean, "example 0 is answered .* in batches of 2"),
    ],
)
def test_what_breaks_a_rule_is_found(handler_class: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_handler(handler_class(), WORDS)


class OtherInTables(Doubled):
    def run_inference_columns(self, table: Any, model: None, inference_args: Any = None) -> Any:
        return [value * 3 for value in table["x"].to_pylist()]


class FewerInTables(Doubled):
    def run_inference_columns(self, table: Any, model: None, inference_args: Any = None) -> Any:
        return [0.0]


class RefusesColumns(Doubled):
    def check_columns(self, schema: Any) -> None:
        raise UsageError(f"no columns {schema.names}")


class FewerExamples(Doubled):
    def examples_of(self, table: Any) -> Any:
        return table.to_pylist()[:2]


class NeighbouringExamples(Doubled):
    def examples_of(self, table: Any) -> Any:
        return [{"x": sum(table["x"].to_pylist())} for _ in range(len(table))]


@pytest.mark.parametrize(
    ("handler_class", "message"),
    [
        (OtherInTables, "example 1 is answered 3.0 as a table, but 2.0"),
        (FewerInTables, r"run_inference_columns\(\) returned 1 answers; expected one answer per row, 5"),
        (RefusesColumns, r"check_columns\(\) raised UsageError: no columns \['x'\]"),
        (FewerExamples, r"examples_of\(\) returned 2 examples; expected one example per row, 5"),
        (
            NeighbouringExamples,
            r"examples_of\(\) makes {'x': 10.0} of row 0 of a table, but \[{'x': 0.0}\] of the row alone",
        ),
    ],
)
def test_what_breaks_a_rule_of_columns_is_found(handler_class: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_handler(handler_class(columns=["x"]), RECORDS)


def test_a_column_of_other_examples_is_found() -> None:
    class Reversed(Lengths):
        def examples_of(self, table: Any) -> Any:
            return [word + "!" for word in table.column(0).to_pylist()]

    with pytest.raises(AssertionError, match="example 0 is answered 4 as a table, but 2"):
        check_handler(Reversed(columns="word"), WORDS)
