"""Arrays as columns and back: the same as pyarrow's own ways, without what these import."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from penstock.arrow_columns import array_column, numbers_of, repeated_text

KINDS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "bool"]


@pytest.mark.parametrize("kind", [*KINDS, "datetime64[us]", "U3"])
def test_one_axis(kind):
    values = np.array([0, 1, 2, 3]).astype(kind)
    assert array_column(values).equals(pa.array(values))
    assert array_column(values[:0]).equals(pa.array(values[:0]))
    assert array_column(values[::2]).equals(pa.array(values[::2]))


def test_more_axes_are_lists_of_a_fixed_size():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    column = array_column(values)
    assert column.type == pa.list_(pa.list_(pa.float32(), 4), 3)
    assert column.to_pylist() == values.tolist()
    assert array_column(values.transpose(1, 0, 2)).to_pylist() == values.transpose(1, 0, 2).tolist()


def test_nan_stays_nan():
    column = array_column(np.array([1.0, np.nan]))
    assert column.null_count == 0
    assert np.isnan(column[1].as_py())


@pytest.mark.parametrize("kind", KINDS)
def test_columns_as_arrays(kind):
    values = np.array([0, 1, 0, 3, 4]).astype(kind)
    column = pa.array(values)
    chunks = pa.chunked_array([column[1:3], column[:0], column[4:]])
    for given, expected in [(column, values), (column[2:4], values[2:4]), (chunks, values[[1, 2, 4]])]:
        found = numbers_of(given)
        assert found.dtype == values.dtype
        assert found.tolist() == expected.tolist()


def test_nulls_of_numbers_are_nan():
    for column in (pa.array([1, None]), pa.chunked_array([[1.0], [None]])):
        assert np.isnan(numbers_of(column)[1])


def test_what_is_no_number():
    assert numbers_of(pa.array(["a", None])).tolist() == ["a", None]
    assert numbers_of(pa.chunked_array([], pa.float64())).tolist() == []


@pytest.mark.parametrize("text", ["model-1", "Ä", ""])
def test_a_text_in_every_row(text):
    assert repeated_text(text, 3).to_pylist() == [text] * 3
    assert repeated_text(text, 0).to_pylist() == []


JOB = """
import sys
import numpy as np
import penstock as ps
from penstock.arrow_columns import array_column
import pyarrow as pa, pyarrow.parquet as pq

class Squares(ps.ModelHandler):
    def load_model(self):
        return 2

    def model_id(self):
        return "squares"

    def takes_columns(self):
        return "numpy"

    def run_inference_columns(self, columns, model, inference_args=None):
        return np.stack([columns["x"], columns["x"] ** model], axis=1)

    def run_inference(self, batch, model, inference_args=None):
        raise NotImplementedError

pq.write_table(pa.Table.from_arrays([array_column(np.arange(1000.0))], ["x"]), "in.parquet")
with ps.Pipeline(workers=0) as p:
    p | ps.ReadFromParquet("in.parquet") | ps.RunInference(Squares(columns="x")) | ps.WriteToParquet("out")
print("pandas" in sys.modules)
"""


def test_a_job_of_columns_imports_no_pandas(tmp_path):
    pytest.importorskip("pandas")
    ran = subprocess.run([sys.executable, "-c", JOB], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]
    assert len(list((tmp_path / "out").glob("*.parquet"))) >= 1
