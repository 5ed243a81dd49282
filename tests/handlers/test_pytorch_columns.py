"""The PyTorch handlers over columns: Arrow tables to tensors, and which rows do not fit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import penstock as ps
from penstock.errors import BadRowsError, RowError, UsageError
from penstock.handlers.pytorch import (
    PytorchModelHandlerKeyedTensor,
    PytorchModelHandlerTensor,
    default_tensor_inference_fn,
)
from penstock.handlers.pytorch_columns import column_tensor, matrix_tensor
from penstock.inference.columns import Output
from penstock.inference.handler import output_of
from penstock.testing import check_handler

ROWS = [{"id": str(at), "x": float(at), "n": at * 2, "flag": at % 2 == 0, "vector": [at, at + 0.5]} for at in range(5)]
TABLE = pa.Table.from_pylist(ROWS)


class Sums(torch.nn.Module):
    """One number per row, with weights of some type."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0, dtype=getattr(torch, dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self.weight.dtype, f"{x.dtype} for weights of {self.weight.dtype}"
        return (x * self.weight).reshape(len(x), -1).sum(1)


class Named(torch.nn.Module):
    def __init__(self, outputs: str = "dict") -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 2)
        self.outputs = outputs

    def forward(self, n: torch.Tensor, vector: torch.Tensor, shift: float = 0.0) -> Any:
        rows = self.table(n) + vector + shift
        return {"rows": rows, "sum": rows.sum(1)} if self.outputs == "dict" else (rows, rows.sum(1))


def saved(model: torch.nn.Module, path: Path) -> str:
    torch.save(model.state_dict(), path)
    return str(path)


@pytest.fixture
def sums(tmp_path: Path) -> Any:
    def make(columns: Any, dtype: str = "float32", **settings: Any) -> PytorchModelHandlerTensor:
        path = saved(Sums(dtype), tmp_path / f"{dtype}.pt")
        params = {"dtype": dtype}
        return PytorchModelHandlerTensor(
            state_dict_path=path, model_class=Sums, model_params=params, columns=columns, **settings
        )

    return make


def answers_of(handler: Any, table: pa.Table) -> Any:
    return handler.run_inference_columns(table, handler.load_model())


# Columns to tensors.


def test_several_columns_are_a_matrix_and_one_is_itself(sums: Any) -> None:
    assert matrix_tensor(TABLE, ["x", "n", "flag"], torch.float32)[3].tolist() == [3.0, 6.0, 0.0]
    assert matrix_tensor(TABLE, ["x"], torch.float32).shape == (5, 1)
    assert column_tensor(TABLE, "x", torch.float32).shape == (5,)
    assert column_tensor(TABLE, "flag", torch.float32).dtype == torch.bool
    assert column_tensor(TABLE, "vector", torch.float32).tolist() == [row["vector"] for row in ROWS]
    assert answers_of(sums(["x", "n", "flag"]), TABLE).tolist() == [2.0, 6.0, 14.0, 18.0, 26.0]
    assert answers_of(sums("vector"), TABLE).tolist() == [at * 4 + 1.0 for at in range(5)]


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (pa.int64(), torch.int64),
        (pa.int16(), torch.int16),
        (pa.uint8(), torch.uint8),
        (pa.uint32(), torch.int64),
        (pa.int8(), torch.int8),
        (pa.float16(), torch.float32),
        (pa.float64(), torch.float32),
        (pa.decimal128(9, 2), torch.float32),
    ],
)
def test_whole_numbers_stay_and_floats_are_the_model_s(kind: pa.DataType, seen: torch.dtype) -> None:
    values = pa.array([0, 1, 1], kind) if kind != pa.float16() else pa.array(np.array([0, 1, 1], np.float16))
    lists = pa.FixedSizeListArray.from_arrays(pa.concat_arrays([values, values]), 2)
    table = pa.table({"x": pa.chunked_array([values.slice(0, 1), values.slice(1)]), "lists": lists})
    one, many = (column_tensor(table, name, torch.float32) for name in ("x", "lists"))
    assert (one.dtype, one.tolist()) == (seen, [0, 1, 1])
    assert (many.dtype, many.tolist()) == (seen, [[0, 1], [1, 0], [1, 1]])
    assert matrix_tensor(table, ["x"], torch.float64).tolist() == [[0.0], [1.0], [1.0]]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_floats_are_those_that_the_model_computes_with(dtype: str, sums: Any) -> None:
    for columns in (["x", "n"], "vector", "x"):
        answers = answers_of(sums(columns, dtype), TABLE)
        assert answers.dtype == getattr(torch, dtype)
    check_handler(sums(["x", "n"], dtype), ROWS)


def test_lists_of_lists_are_more_axes() -> None:
    nested = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    sized = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(pa.array(nested.reshape(-1)), 2), 3)
    shaped = pa.FixedShapeTensorArray.from_numpy_ndarray(nested)
    table = pa.table({"lists": pa.array(nested.tolist()), "sized": sized, "shaped": shaped})
    for name in table.column_names:
        assert column_tensor(table, name, torch.float32).tolist() == nested.tolist()
        assert column_tensor(table.slice(1, 2), name, torch.float32).tolist() == nested[1:3].tolist()


def test_a_model_may_change_its_input_and_the_table_stays(sums: Any) -> None:
    table = pa.table({"x": pa.array([1.0, 2.0], pa.float32()), "n": pa.array([1, 2])})
    for name in ("x", "n"):
        column_tensor(table, name, torch.float32).add_(5)
    assert table.to_pydict() == {"x": [1.0, 2.0], "n": [1, 2]}


def test_encoded_numbers_and_tables_of_many_chunks_or_none(sums: Any) -> None:
    encoded = pa.table({"x": pa.array([1.5, 2.5, 1.5]).dictionary_encode()})
    handler = sums(["x"])
    handler.check_columns(encoded.schema)
    assert answers_of(handler, pa.concat_tables([encoded, encoded])).tolist() == [3.0, 5.0, 3.0] * 2
    assert column_tensor(TABLE.slice(0, 0), "vector", torch.float32).shape[0] == 0


# Nulls, and rows that do not fit.


def test_nulls_are_nan() -> None:
    table = pa.table({"x": [1.5, None], "n": [None, 2], "none": pa.nulls(2), "v": [[1.0, None], [2.0, 3.0]]})
    matrix = matrix_tensor(table, ["x", "n", "none"], torch.float32)
    assert torch.nan_to_num(matrix, -1.0).tolist() == [[1.5, -1.0, -1.0], [-1.0, 2.0, -1.0]]
    assert torch.nan_to_num(column_tensor(table, "x", torch.float32), -1.0).tolist() == [1.5, -1.0]
    assert torch.nan_to_num(column_tensor(table, "v", torch.float32), -1.0).tolist() == [[1.0, -1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("values", "bad", "message"),
    [
        ([1, None, 3, None], [1, 3], "column 'x' is null in this row, and int64 has no NaN"),
        ([True, None], [1], "bool has no NaN"),
        ([[1.0, 2.0], None, [3.0, 4.0]], [1], "column 'x' is null in this row, or in a list of it; expected a list of"),
        ([[1, 2], [3, None], [None, 4]], [1, 2], "int64 has no NaN"),
        ([[[1.0], [2.0]], [[1.0], None]], [1], "or in a list of it"),
    ],
)
def test_rows_with_nulls_that_no_number_can_stand_for_are_named(values: Any, bad: list[int], message: str) -> None:
    with pytest.raises(BadRowsError) as raised:
        column_tensor(pa.table({"x": values}), "x", torch.float32)
    assert list(raised.value.errors) == bad
    assert message in str(raised.value.errors[bad[0]])


def test_lists_of_several_lengths_are_rows_of_several_shapes() -> None:
    with pytest.raises(RowError, match=r"lists of column 'x' in one batch must have one length, but saw \[1, 2\]; pad"):
        column_tensor(pa.table({"x": [[1.0], [1.0, 2.0]]}), "x", torch.float32)
    with pytest.raises(RowError, match="torch's largest type of whole numbers is int64"):
        column_tensor(pa.table({"x": pa.array([2**64 - 1], pa.uint64())}), "x", torch.float32)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["x", "nope"], r"columns \['nope'\] are missing: the table has \['id', 'x', 'n', 'flag', 'vector'\]"),
        (["x", "id"], "column 'id' holds string, but the model takes numbers"),
        ("id", "column 'id' holds string, but the model takes numbers"),
        (["x", "vector"], "'vector' holds list<.*>, but each of several columns .* give it alone, as columns='vector'"),
    ],
)
def test_columns_that_no_row_of_the_table_can_fit(columns: Any, message: str, sums: Any) -> None:
    with pytest.raises(UsageError, match=message):
        sums(columns).check_columns(TABLE.schema)


def test_columns_that_fit_are_accepted(sums: Any) -> None:
    for columns in (["x", "n", "flag"], "vector", "x", "n"):
        sums(columns).check_columns(TABLE.schema)


# Rows that are dicts, and the handler as a whole.


def test_dicts_and_tables_give_the_same(sums: Any) -> None:
    for columns in (["x", "n"], ["x"], "vector", "x"):
        handler = sums(columns)
        assert handler.takes_columns()
        check_handler(handler, ROWS)
        rows = handler.run_inference(ROWS, handler.load_model())
        assert rows.tolist() == answers_of(handler, TABLE).tolist()


def test_dicts_without_numbers_are_named(sums: Any) -> None:
    rows = [*ROWS, ROWS[0] | {"x": "blue"}, {"n": 1}]
    handler = sums(["x", "n"])
    with pytest.raises(BadRowsError) as raised:
        handler.run_inference(rows, handler.load_model())
    assert list(raised.value.errors) == [6], "a key is missing"
    with pytest.raises(BadRowsError) as raised:
        handler.run_inference(rows[:6], handler.load_model())
    assert "column 'x' is 'blue' (str) in this row" in str(raised.value.errors[5])


@pytest.mark.parametrize("outputs", ["dict", "tuple"])
def test_named_arguments(outputs: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Named(outputs)
    path = saved(model, tmp_path / "named.pt")
    params = {"outputs": outputs}
    handler = PytorchModelHandlerKeyedTensor(
        state_dict_path=path, model_class=Named, model_params=params, columns=["n", "vector"]
    )
    expected = (model.table(torch.tensor(TABLE["n"].to_pylist())) + torch.tensor(TABLE["vector"].to_pylist())).detach()
    answers = answers_of(handler, TABLE)
    names = ["rows", "sum"] if outputs == "dict" else ["0", "1"]
    assert list(answers) == names
    torch.testing.assert_close(answers[names[0]], expected)
    torch.testing.assert_close(answers[names[1]], expected.sum(1))
    check_handler(handler, ROWS, inference_args={"shift": 1.0})


def own_inference_fn(batch: Any, model: Any, device: Any, inference_args: Any = None, model_id: Any = None) -> Any:
    return default_tensor_inference_fn(batch, model, device, inference_args, "mine")


def test_an_own_inference_fn_gets_the_columns_as_rows_of_tensors(sums: Any, tmp_path: Path) -> None:
    handler = sums(["x", "n"], inference_fn=own_inference_fn)
    assert not handler.takes_columns()
    examples = handler.examples_of(TABLE.select(["x", "n"]))
    assert [example.tolist() for example in examples] == [[row["x"], row["n"]] for row in ROWS]
    results = list(handler.run_inference(examples, handler.load_model()))
    assert [(each.inference.item(), each.model_id) for each in results] == [(at * 6.0, "mine") for at in range(5)]
    check_handler(handler, ROWS)
    large = pa.table({"x": np.zeros(10_000), "n": np.zeros(10_000)})
    assert len(pickle.dumps(handler.examples_of(large)[7])) < 2_000, "an example is sent without the others"

    path = saved(Named(), tmp_path / "named.pt")
    keyed = PytorchModelHandlerKeyedTensor(
        state_dict_path=path, model_class=Named, columns=["n", "vector"], inference_fn=default_tensor_inference_fn
    )
    rows = keyed.examples_of(TABLE)
    assert [(row["n"].item(), row["vector"].tolist()) for row in rows] == [(row["n"], row["vector"]) for row in ROWS]


def test_rows_that_no_batch_could_hold_are_examples_of_their_own(sums: Any) -> None:
    """A block of rows is no batch: what one row has says nothing of the others."""
    table = pa.table({"x": [[1.0], None, [1.0, 2.0]], "n": [1, None, 3]})
    lists = sums("x", inference_fn=own_inference_fn).examples_of(table.select(["x"]))
    assert [None if each is None else each.tolist() for each in lists] == [[1.0], None, [1.0, 2.0]]
    numbers = sums("n", inference_fn=own_inference_fn).examples_of(table.select(["n"]))
    assert [each if each is None else (each.item(), each.dtype) for each in numbers] == [
        (1, torch.int64),
        None,
        (3, torch.int64),
    ]


def test_an_own_inference_fn_loses_only_the_rows_that_it_raises_for(sums: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(4), "x": [[1.0, 2.0], None, [3.0, 4.0], [1.0]]}), tmp_path / "in.parquet")
    handler = sums("x", inference_fn=own_inference_fn, max_batch_size=1)
    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(tmp_path / "in.parquet")
    good, failures = rows | ps.RunInference(handler).with_exception_handling()
    assert {each.example["id"]: float(each.inference) for each in good.collect()} == {0: 6.0, 2: 14.0, 3: 2.0}
    assert [row["id"] for row, _ in failures.failed_inferences.collect()] == [1]


def test_settings_of_columns_reach_the_handler(sums: Any) -> None:
    handler = sums("x", output_column="score")
    assert (handler.input_columns(), output_of(handler)) == (("x",), Output("score", None))
    with pytest.raises(UsageError, match="give one of them"):
        sums("x", output_column="a", output_prefix="b")
    with pytest.raises(UsageError, match="max_batchsize.*did you mean max_batch_size"):
        sums("x", max_batchsize=3)


# In a pipeline.


def test_columns_in_a_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = saved(Named(), tmp_path / "named.pt")
    pq.write_table(TABLE, tmp_path / "in.parquet")
    handler = PytorchModelHandlerKeyedTensor(
        state_dict_path=path, model_class=Named, columns=["n", "vector"], output_prefix="named_"
    )
    with ps.Pipeline(workers=0) as pipeline:
        rows = pipeline | ps.ReadFromParquet(tmp_path / "in.parquet")
        rows | ps.RunInference(handler) | ps.WriteToParquet(tmp_path / "out")
    made = pq.read_table(tmp_path / "out")
    assert made.column_names == [*TABLE.column_names, "named_rows", "named_sum", "named_model_id"]
    assert made.schema.field("named_rows").type == pa.list_(pa.float32(), 2)
    expected = answers_of(handler, TABLE)
    torch.testing.assert_close(torch.tensor(made["named_rows"].to_pylist()), expected["rows"])
    assert set(made["named_model_id"].to_pylist()) == {path}


def test_dicts_in_a_pipeline(sums: Any) -> None:
    def run(handler: Any) -> list[Any]:
        return (ps.Pipeline(workers=0) | ps.Create(ROWS) | ps.RunInference(handler)).collect()

    results = run(sums(["x", "n"]))
    assert [(each.example["id"], float(each.inference)) for each in results] == [(str(at), at * 6.0) for at in range(5)]
    rows = run(sums(["x", "n"], output_column="score"))
    assert [(row["id"], float(row["score"])) for row in rows] == [(str(at), at * 6.0) for at in range(5)]
    own = run(sums(["x", "n"], inference_fn=own_inference_fn))
    assert [(each.example["id"], float(each.inference)) for each in own] == [(str(at), at * 6.0) for at in range(5)]


def test_tensors_in_a_pipeline(sums: Any) -> None:
    examples = [torch.tensor([float(at), 1.0]) for at in range(5)]
    results = (ps.Pipeline(workers=0) | ps.Create(examples) | ps.RunInference(sums(None))).collect()
    assert [float(each.inference) for each in results] == [at * 2 + 2.0 for at in range(5)]
    assert all(torch.is_tensor(each.inference) for each in results)
    assert [each.example.tolist() for each in results] == [each.tolist() for each in examples]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_workers_of_a_model_in_a_host_do_not_import_torch(tmp_path, precision):
    class Sums(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width))

        def forward(self, x):
            return {"sum": (x * self.weight).sum(1).to(precision), "twice": x.double() * 2}

    def looked(table):
        import sys

        return table.append_column("has_torch", pa.array(["torch" in sys.modules] * table.num_rows))

    torch.save(Sums(2).state_dict(), tmp_path / "model.pt")
    pq.write_table(pa.table({"x": range(200), "y": [0.5] * 200}), tmp_path / "in.parquet", row_group_size=50)
    model = {"model_class": Sums, "model_params": {"width": 2}, "state_dict_path": str(tmp_path / "model.pt")}
    handler = PytorchModelHandlerTensor(columns=["x", "y"], output_prefix="o_", large_model=True, **model)
    with ps.Pipeline(workers=2) as p:
        answered = p | ps.ReadFromParquet(tmp_path / "in.parquet") | ps.RunInference(handler)
        answered | ps.MapBatches(looked, format="arrow") | ps.WriteToParquet(tmp_path / "out")
    got = pq.read_table(tmp_path / "out")
    assert set(got["has_torch"].to_pylist()) == {False}
    assert got.schema.field("o_sum").type == pa.float32()
    assert got.schema.field("o_twice").type == pa.list_(pa.float64(), 2)
    assert got["o_sum"].to_pylist() == torch.tensor([at + 0.5 for at in range(200)]).to(precision).tolist()
    assert got["o_twice"].to_pylist() == [[2.0 * at, 1.0] for at in range(200)]
    of_tensors = ps.RunInference(PytorchModelHandlerTensor(large_model=True, **model))
    (made,) = (ps.Pipeline(workers=0) | ps.Create([torch.tensor([1.0, 0.5])]) | of_tensors).collect()
    assert (made.inference["sum"].dtype, made.inference["sum"].item()) == (precision, 1.5)
