"""Vectors in Parquet: lists of a fixed size where all have one, lists where they differ, and their values unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import OutputError
from penstock.io import parquet_writing
from penstock.io.merged_types import merged
from penstock.io.parquet import WriteToParquet
from penstock.io.parquet_writing import ParquetSink
from penstock.io.sink import Part
from test_parquet import rows, source_of, written

F32 = pa.float32()
LIST = pa.list_(F32)
TEXT, CODED = pa.string(), pa.dictionary(pa.int32(), pa.string())


def fixed(size: int, item: pa.DataType = F32) -> pa.DataType:
    return pa.list_(item, size)


def column(values: list[Any], kind: pa.DataType) -> pa.Table:
    return pa.table({"x": pa.array(values, kind)})


THREE, FIVE, ANY = column([[1, 2, 3]] * 2, fixed(3)), column([[1, 2, 3, 4, 5]], fixed(5)), column([[1], []], LIST)
SQUARE = column([[[1, 2], [3, 4]]], fixed(2, fixed(2)))
WIDE = column([[[1, 2, 3], [4, 5, 6]]], fixed(2, fixed(3)))
IN_STRUCT = column([{"v": [1, 2, 3], "n": 1}], pa.struct({"v": fixed(3), "n": pa.int64()}))
LONGER_IN_STRUCT = column([{"v": [1, 2, 3, 4, 5], "n": 1}], pa.struct({"v": fixed(5), "n": pa.int64()}))

TOGETHER: dict[str, tuple[list[pa.Table], pa.DataType]] = {
    "the same size": ([THREE, THREE], fixed(3)),
    "two sizes": ([THREE, FIVE], LIST),
    "a size and lists": ([THREE, ANY], LIST),
    "lists and a size": ([ANY, THREE], LIST),
    "a null": ([column([[1, 2, 3], None], fixed(3)), THREE], LIST),
    "a null later": ([THREE, column([None], fixed(3))], LIST),
    "a column of nulls": ([THREE, column([None, None], pa.null())], LIST),
    "no such column": ([pa.table({"y": [1]}), THREE.append_column("y", pa.array([2, 3]))], LIST),
    "squares": ([SQUARE, SQUARE], fixed(2, fixed(2))),
    "inner sizes": ([SQUARE, WIDE], fixed(2, LIST)),
    "outer sizes": ([column([[[1, 2]]], fixed(1, fixed(2))), SQUARE], pa.list_(fixed(2))),
    "an inner null": ([SQUARE, column([[[1, 2], None]], fixed(2, fixed(2)))], fixed(2, LIST)),
    "in structs": ([IN_STRUCT, IN_STRUCT], IN_STRUCT.schema.field("x").type),
    "sizes in structs": ([IN_STRUCT, LONGER_IN_STRUCT], pa.struct({"v": LIST, "n": pa.int64()})),
    "a struct that is null": (
        [IN_STRUCT, column([None], IN_STRUCT.schema.field("x").type)],
        pa.struct({"v": LIST, "n": pa.int64()}),
    ),
    "empty ones": ([column([[], []], fixed(0))] * 2, LIST),
    "large lists": ([THREE, column([[1]], pa.large_list(F32))], pa.large_list(F32)),
    "codes": ([column(["a"], CODED), column(["b", None, "a"], CODED)], CODED),
    "codes and text": ([column(["a"], CODED), column(["b", None], TEXT)], TEXT),
    "text and codes": ([column(["b", None], TEXT), column(["a", "b"], CODED)], TEXT),
    "codes of two widths": ([column(["a"], CODED), column(["b"], pa.dictionary(pa.int8(), TEXT))], TEXT),
    "codes in structs": (
        [column([{"m": "a"}], pa.struct({"m": CODED})), column([{"m": "b"}], pa.struct({"m": TEXT}))],
        pa.struct({"m": TEXT}),
    ),
}
CASES = pytest.mark.parametrize(("blocks", "kind"), TOGETHER.values(), ids=TOGETHER.keys())


def values_of(blocks: list[pa.Table]) -> list[Any]:
    return [row.get("x") for block in blocks for row in block.to_pylist()]


@CASES
def test_blocks_of_one_row_group(tmp_path: Path, blocks: list[pa.Table], kind: pa.DataType) -> None:
    out = written(tmp_path, *blocks)
    assert out["x"].to_pylist() == values_of(blocks)
    assert out.schema.field("x").type == kind
    assert [row["x"] for row in rows(source_of(tmp_path))] == values_of(blocks)


FIRST_DECIDES = {
    "large lists": LIST,
    "codes and text": CODED,
    "codes of two widths": CODED,
    "codes in structs": pa.struct({"m": CODED}),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_blocks_of_several_row_groups(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writing, "GROUP_ROWS", 1)
    blocks, kind = TOGETHER[case]
    if case == "no such column":
        blocks = blocks[::-1]  # the first group says which columns there are
    out = written(tmp_path, *blocks)
    assert out["x"].to_pylist() == values_of(blocks)
    assert out.schema.field("x").type == FIRST_DECIDES.get(case, kind)
    assert pq.read_metadata(tmp_path / "part-00000.parquet").num_row_groups == len(out)


def parts(folder: Path, outputs: list[list[Any]], **options: Any) -> None:
    """One part for each list of blocks, published as a run does."""
    sink = WriteToParquet(folder, overwrite=True, **options).sink
    assert isinstance(sink, ParquetSink)
    sink.prepare("run")
    tokens = []
    for number, blocks in enumerate(outputs):
        writer = sink.open(Part(run="run", name=f"{number:05}", attempt=1))
        for block in blocks:
            writer.write(block)
        tokens.append(writer.close())
    for token in sink.unify(tokens):
        sink.publish(token)
    sink.finish("run", True)


@CASES
def test_parts_of_one_output(tmp_path: Path, blocks: list[pa.Table], kind: pa.DataType) -> None:
    parts(tmp_path, [[block] for block in blocks])
    files = sorted(tmp_path.glob("part-*"))
    assert [pq.read_schema(file).field("x").type for file in files] == [kind] * len(blocks)
    assert ds.dataset(tmp_path).to_table()["x"].to_pylist() == values_of(blocks)
    assert [row["x"] for row in rows(source_of(tmp_path))] == values_of(blocks)


def test_a_given_size_is_kept_and_another_refused(tmp_path: Path) -> None:
    schema = pa.schema({"x": fixed(3)})
    out = written(
        tmp_path / "a", THREE, column([[4, 5, 6]], LIST), [{"x": np.ones(3, "f4")}, {"x": [7, 8, 9]}], schema=schema
    )
    assert out.schema == schema
    assert out["x"].to_pylist()[2:] == [[4, 5, 6], [1, 1, 1], [7, 8, 9]]
    with pytest.raises(OutputError, match=r"column 'x' holds fixed_size_list<item: float>\[5\], expected .*\[3\]"):
        written(tmp_path / "b", FIVE, schema=schema)
    with pytest.raises(OutputError, match=r"column 'x': its type is fixed_size_list"):
        written(tmp_path / "c", [{"x": np.ones(5, "f4")}], schema=schema)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u1", "i8", "u8", "?"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 1, 3)])
def test_arrays_come_back_equal(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**8, (7, *shape), "u1")
    arrays = (numbers % 2).astype(dtype) if dtype == "?" else (numbers // 2).astype(dtype)
    item = pa.from_numpy_dtype(arrays.dtype)
    kind = item
    for size in reversed(shape):
        kind = fixed(size, kind)
    out = written(tmp_path / "rows", [{"x": array} for array in arrays])
    assert out.schema.field("x").type == kind
    made = pa.FixedSizeListArray.from_arrays(pa.array(arrays.reshape(-1)), arrays[0].size)
    table = written(tmp_path / "table", pa.table({"x": made}))
    for found in (out, table):
        flat = found["x"].combine_chunks()
        while pa.types.is_fixed_size_list(flat.type):
            flat = flat.flatten()
        assert flat.type == item
        assert np.array_equal(flat.to_numpy(zero_copy_only=False).reshape(arrays.shape), arrays)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], "f4")
    half = odd.astype("f2")
    out = written(tmp_path, [{"x": odd, "h": half}])
    assert out["x"].combine_chunks().flatten().to_numpy().tobytes() == odd.tobytes()
    assert out["h"].combine_chunks().flatten().to_numpy().tobytes() == half.tobytes()


ARRAYS = st.lists(
    st.none()
    | st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda shape: np.arange(shape[0] * shape[1], dtype="f4").reshape(shape)
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(blocks=st.lists(ARRAYS, min_size=1, max_size=3))
def test_arrays_of_any_shapes_are_the_lists_that_they_hold(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[Any]]
) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    out = written(folder, *([{"id": 1, "x": array} for array in arrays] for arrays in blocks))
    assert out["x"].to_pylist() == [None if array is None else array.tolist() for arrays in blocks for array in arrays]


def test_tensors_and_lists_after_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    out = written(tmp_path / "a", [{"x": torch.ones(2, 3, requires_grad=True)}], [{"x": np.zeros((2, 3), "f4")}])
    assert out.schema.field("x").type == fixed(2, fixed(3))
    out = written(tmp_path / "b", THREE.slice(0, 1), [{"x": torch.ones(2)}, {"x": None}], [{"x": np.ones(0, "f4")}])
    assert (out.schema.field("x").type, out["x"].to_pylist()) == (LIST, [[1, 2, 3], [1, 1], None, []])


def test_a_later_list_of_numbers_that_the_vectors_type_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writing, "GROUP_ROWS", 1)
    out = written(tmp_path, [{"x": np.ones(2, "f4")}], [{"x": [0.5, 0.25, 4.0]}], [{"x": np.ones(1, "f2")}])
    assert (out.schema.field("x").type, out["x"].to_pylist()) == (LIST, [[1, 1], [0.5, 0.25, 4], [1]])
    with pytest.raises(OutputError, match=r"column 'x': .*0\.1"):
        written(tmp_path / "b", [{"x": np.ones(2, "f4")}], [{"x": [0.1]}])


def test_a_null_among_the_values_of_a_dictionary(tmp_path: Path) -> None:
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0], pa.int32()), pa.array([None, "a"], TEXT))
    out = written(tmp_path, pa.table({"x": coded}), pa.table({"x": coded}))
    assert (out.schema.field("x").type, out["x"].to_pylist()) == (CODED, [None, "a", None, None] * 2)


def test_row_groups_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writing, "GROUP_BYTES", 32 << 10)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(200 * 100, dtype="f4")), 100)})
    assert written(tmp_path, table.slice(0, 150), table.slice(150)).equals(table)
    metadata = pq.read_metadata(tmp_path / "part-00000.parquet")
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert max(groups) * 400 <= 32 << 10
    assert len(groups) == 3
    assert not metadata.row_group(0).column(0).is_stats_set


KINDS = st.recursive(
    st.sampled_from([F32, pa.int64(), TEXT, CODED, pa.null()]),
    lambda kinds: (
        kinds.map(pa.list_)
        | kinds.map(pa.large_list)
        | st.tuples(kinds, st.integers(1, 3)).map(lambda pair: fixed(pair[1], pair[0]))
        | st.dictionaries(st.sampled_from("ab"), kinds, min_size=1).map(pa.struct)
    ),
    max_leaves=4,
)


@given(one=KINDS, other=KINDS)
def test_merged_types_hold_what_both_hold(one: pa.DataType, other: pa.DataType) -> None:
    both = merged(one, other)
    assert (both is None) == (merged(other, one) is None)
    if both is not None:
        assert merged(both, one) == both
        assert merged(both, other) == both


class Powers(ps.ModelHandler[Any, Any, None]):
    """Answers that are vectors, of a model without a name."""

    def load_model(self) -> None: ...

    def takes_columns(self) -> bool:
        return True

    def run_inference_columns(self, table: pa.Table, model: None, inference_args: Any = None) -> Any:
        return np.power.outer(table.column("id").to_numpy(), np.arange(4)).astype("f4")


@pytest.mark.parametrize("workers", [0, 2])
def test_vectors_from_a_model_to_a_file(tmp_path: Path, workers: int) -> None:
    pq.write_table(pa.table({"id": range(2000), "text": ["x"] * 2000}), tmp_path / "in.parquet", row_group_size=300)
    with ps.Pipeline(workers=workers) as p:
        p | ps.ReadFromParquet(tmp_path / "in.parquet") | ps.RunInference(Powers()) | ps.WriteToParquet(tmp_path / "out")
    out = pq.read_table(tmp_path / "out")
    assert out.schema.field("inference").type == fixed(4)
    assert out["model_id"].null_count == out.num_rows == 2000
    assert out["inference"].to_pylist() == [[1, i, i**2, np.float32(i**3)] for i in range(2000)]
