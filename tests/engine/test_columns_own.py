"""What a handler or a function is given it may change, and what it returns it may use again: no other row is changed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import penstock as ps
from penstock.inference.calls import call_model

ROWS = 96


@pytest.fixture
def numbers(tmp_path):
    pq.write_table(table_of(ROWS), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def table_of(rows):
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * rows, dtype=np.float32)), 2)
    return pa.table({"x": np.arange(rows, dtype=np.float64), "vector": vectors})


def squares(column):
    """Of numbers, or of the first number of vectors; they are computed in place."""
    column *= column
    return column if column.ndim == 1 else column[:, 0]


class InPlace(ps.ModelHandler):
    """Squares a column, in the memory that it is given."""

    def __init__(self, form, columns, **settings):
        super().__init__(columns=columns, max_batch_size=16, output_column="square", **settings)
        self.form = form

    def takes_columns(self):
        return "numpy" if self.form == "numpy" else "arrow"

    def load_model(self):
        return None

    def run_inference_columns(self, table, model, inference_args=None):
        (name,) = self.input_columns()
        if self.form == "numpy":
            return squares(table[name])
        column = table[name].chunk(0)
        if pa.types.is_fixed_size_list(column.type):
            return squares(torch.from_numpy(column.flatten().to_numpy()).reshape(-1, 2)).numpy()
        return squares(torch.from_numpy(column.to_numpy())).numpy()


def checked(made, numbers, name):
    expected = pq.read_table(numbers)
    assert made.select(["x", "vector"]).equals(expected)
    values = expected[name].to_pylist()
    assert made["square"].to_pylist() == [(value if name == "x" else value[0]) ** 2 for value in values]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    ("form", "name", "settings"),
    [
        *(("numpy", "x", {}), ("numpy", "vector", {}), ("arrow", "x", {}), ("arrow", "vector", {})),
        ("numpy", "x", {"large_model": True}),
    ],
)
def test_a_handler_that_computes_in_place_leaves_its_columns_as_they_were(numbers, tmp_path, form, name, settings):
    with ps.Pipeline(workers=0) as p:
        answered = p | ps.ReadFromParquet(numbers) | ps.RunInference(InPlace(form, name, **settings))
        answered | ps.WriteToParquet(tmp_path / "out")
    checked(pq.read_table(tmp_path / "out"), numbers, name)


def test_a_handler_that_only_reads_gets_columns_that_cannot_be_changed(numbers):
    class Reading(InPlace):
        def changes_rows(self):
            return False

    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(numbers) | ps.RunInference(Reading("numpy", "x"))
    with pytest.raises(ps.RowError, match="ValueError: output array is read-only"):
        rows.collect()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_function_that_computes_in_place_changes_no_other_branch(numbers, tmp_path):
    def in_place(table):
        column = torch.from_numpy(table["x"].chunk(0).to_numpy())
        return table.append_column("square", pa.array(squares(column).numpy().copy()))

    with ps.Pipeline(workers=0) as p:
        read = p | ps.ReadFromParquet(numbers)
        read | ps.MapBatches(in_place, format="arrow") | "squared" >> ps.WriteToParquet(tmp_path / "squared")
        read | "read" >> ps.WriteToParquet(tmp_path / "out")
    assert pq.read_table(tmp_path / "out").equals(pq.read_table(numbers))


class UsesAgain(ps.ModelHandler):
    """Has one buffer for its answers, which each batch fills anew."""

    def __init__(self, kind, **settings):
        super().__init__(max_batch_size=16, output_column="square", **settings)
        self.kind = kind

    def load_model(self):
        return {"numbers": np.zeros(16), "list": [], "pairs": np.zeros((16, 2))}

    def run_inference(self, batch, model, inference_args=None):
        x = np.array([row["x"] for row in batch] if isinstance(batch[0], dict) else batch)
        model["numbers"][: len(x)] = model["pairs"][: len(x), 0] = x * x
        numbers, model["list"][:] = model["numbers"][: len(x)], (x * x).tolist()
        made = {
            "array": lambda: numbers,
            "tensor": lambda: torch.from_numpy(numbers),
            "arrow": lambda: pa.array(numbers),
            "masked": lambda: np.ma.array(numbers, mask=False, copy=False),
            "dict": lambda: {"of": numbers},
            "list": lambda: model["list"],
            "views": lambda: list(model["pairs"][: len(x)]),
            "dicts": lambda: [{"of": pair} for pair in model["pairs"][: len(x)]],
            "results": lambda: list(map(ps.PredictionResult, batch, model["pairs"])),
        }
        return made[self.kind]()


KINDS = ["array", "tensor", "arrow", "masked", "dict", "list", "views", "dicts", "results"]


def number_in(answer):
    answer = answer["of"] if isinstance(answer, dict) else answer
    return float(answer[0]) if getattr(answer, "ndim", 0) or isinstance(answer, list) else float(answer)


HOSTED = {"large_model": True}


@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in KINDS), ("array", HOSTED), ("views", HOSTED)])
def test_a_handler_may_fill_one_buffer_for_each_batch(kind, settings):
    rows = ps.Pipeline(workers=0) | ps.Create([{"x": float(at)} for at in range(ROWS)])
    answered = (rows | ps.RunInference(UsesAgain(kind, **settings))).collect()
    assert [number_in(row["square"]) for row in answered] == [float(at * at) for at in range(ROWS)]


@pytest.mark.parametrize("kind", ["array", "tensor", "arrow", "dict", "views"])
def test_a_handler_of_columns_may_fill_one_buffer_for_each_batch(numbers, kind):
    class OfColumns(UsesAgain):
        def takes_columns(self):
            return "numpy"

        def run_inference_columns(self, columns, model, inference_args=None):
            return self.run_inference(columns["x"], model)

    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(numbers)
    answered = (rows | ps.RunInference(OfColumns(kind, columns="x"))).collect()
    assert [number_in(row["square"]) for row in answered] == [float(at * at) for at in range(ROWS)]


@pytest.mark.parametrize("keeps", ["nothing", "array", "view"])
def test_only_an_array_that_the_handler_keeps_is_copied(keeps):
    class MakesArrays(ps.ModelHandler):
        def run_inference(self, batch, model, inference_args=None):
            made = np.array(batch)
            model.append((made, made.ctypes.data) if keeps == "array" else (made[:1], made.ctypes.data))
            if keeps == "nothing":
                model[-1] = (None, made.ctypes.data)
            return made

    model = []
    answers = call_model(MakesArrays(), model, [1.0, 2.0], None, "step")
    assert answers.tolist() == [1.0, 2.0]
    assert (answers.ctypes.data == model[0][1]) == (keeps == "nothing")


def test_values_that_are_prepared_in_one_buffer():
    class Prepares(ps.ModelHandler):
        def load_prepare(self):
            return np.zeros((4096, 1))

        def prepare(self, examples, tool, inference_args=None):
            tool[: len(examples), 0] = examples
            return list(tool[: len(examples)])

        def load_model(self):
            return None

        def run_inference(self, batch, model, inference_args=None):
            return [float(value[0]) for value in batch]

    rows = ps.Pipeline(workers=0) | ps.Create(range(ROWS)) | ps.RunInference(Prepares(min_batch_size=64))
    assert rows.collect() == list(map(float, range(ROWS)))


@pytest.mark.parametrize("kind", ["columns", "matrix", "table", "frame", "list"])
def test_a_function_may_fill_one_buffer_for_each_batch(kind):
    pandas = pytest.importorskip("pandas")
    buffer, rows = np.zeros((2, 16)), [{}]

    def squared(batch):
        buffer[:] = [row["x"] ** 2 for row in batch]
        rows[:] = [{"x": number} for number in buffer[0].tolist()]
        made = {
            "columns": lambda: {"x": buffer[0]},
            "matrix": lambda: {"x": buffer.T},
            "table": lambda: pa.table({"x": buffer[0]}),
            "frame": lambda: pandas.DataFrame({"x": buffer[0]}, copy=False),
            "list": lambda: rows,
        }
        return made[kind]()

    rows_in = ps.Pipeline(workers=0) | ps.Create([{"x": float(at)} for at in range(ROWS)])
    made = rows_in | ps.MapBatches(squared, batch_size=16)
    assert [number_in(np.asarray(row["x"])) for row in made.collect()] == [float(at * at) for at in range(ROWS)]
