"""Parquet: splits by row groups and row ranges, tables out, and files that are not what they say."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError, OutputError, UsageError
from penstock.io import parquet
from penstock.io.parquet import ReadFromParquet, WriteToParquet
from penstock.io.parquet_writing import GROUP_ROWS
from penstock.io.sink import Part
from penstock.io.source import Source, SplitGoal
from penstock.rows import PredictionResult
from penstock.testing import check_source


def table(start: int, stop: int) -> pa.Table:
    return pa.table({"id": range(start, stop), "text": [f"row {i}" for i in range(start, stop)]})


def source_of(path: Path | str, **options: Any) -> Source[dict[str, Any]]:
    return ReadFromParquet(path, **options).source


def rows(source: Source[dict[str, Any]]) -> list[dict[str, Any]]:
    tables = [block for split in source.splits(SplitGoal()) for block in source.read(split)]
    return [row for block in tables for row in block.to_pylist()]


def written(folder: Path, *blocks: Any, **options: Any) -> pa.Table:
    """One part, after the whole way through the sink."""
    sink = WriteToParquet(folder, overwrite=True, **options).sink
    sink.prepare("run")
    writer = sink.open(Part(run="run", name="00000", attempt=1))
    for block in blocks:
        writer.write(block)
    sink.publish(writer.close())
    sink.finish("run", True)
    return pq.read_table(folder / "part-00000.parquet")


def test_parquet_keeps_the_contract_of_a_source(tmp_path: Path) -> None:
    pq.write_table(table(0, 9000), tmp_path / "a.parquet", row_group_size=2500)
    pq.write_table(table(9000, 9000), tmp_path / "b.parquet")
    pq.write_table(table(9000, 9100), tmp_path / "c.parquet", row_group_size=7)
    source = source_of(tmp_path)
    check_source(source, table(0, 9100).to_pylist())
    assert source.count() == 9100


@settings(max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), min_size=1, max_size=3),
    max_bytes=st.integers(1, 2000),
    min_splits=st.integers(1, 12),
)
def test_every_row_is_in_one_split(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], max_bytes: int, min_splits: int
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    at = 0
    for index, (count, group) in enumerate(sizes):
        pq.write_table(table(at, at + count), folder / f"{index}.parquet", row_group_size=group)
        at += count
    source = source_of(folder)
    goal = SplitGoal(max_bytes=max_bytes, min_splits=min_splits)
    read = [block for split in source.splits(goal) for block in source.read(split)]
    assert [i for block in read for i in block["id"].to_pylist()] == list(range(at))


def test_one_small_row_group_is_cut_as_finely_as_asked(tmp_path: Path) -> None:
    pq.write_table(table(0, 1000), tmp_path / "one.parquet")
    source = source_of(tmp_path / "one.parquet")
    assert len(source.splits(SplitGoal())) == 1
    splits = source.splits(SplitGoal(min_splits=20))
    sizes = [sum(block.num_rows for block in source.read(split)) for split in splits]
    assert sizes == [50] * 20


@pytest.mark.parametrize(("groups", "splits"), [(4, range(100, 140)), (40, range(40, 41)), (400, range(100, 140))])
def test_row_groups_are_cut_only_where_they_are_few(tmp_path: Path, groups: int, splits: range) -> None:
    pq.write_table(table(0, 4000), tmp_path / "a.parquet", row_group_size=4000 // groups)
    source = source_of(tmp_path / "a.parquet")
    found = source.splits(SplitGoal(min_splits=128, at_once=2))
    assert len(found) in splits
    assert [i for split in found for block in source.read(split) for i in block["id"].to_pylist()] == list(range(4000))


@given(seed=st.integers(0, 10**6), group=st.integers(20, 400))
def test_ranges_are_read_in_any_order_by_one_reader(tmp_path_factory: pytest.TempPathFactory, seed: int, group: int) -> None:
    path = tmp_path_factory.mktemp("parquet") / "one.parquet"
    pq.write_table(table(0, 400), path, row_group_size=group)
    source = source_of(path)
    splits = source.splits(SplitGoal(min_splits=20, at_once=20))
    found = {}
    for at in random.Random(seed).sample(range(len(splits)), len(splits)):
        found[at] = [i for block in source.read(splits[at]) for i in block["id"].to_pylist()]
    assert [i for at in sorted(found) for i in found[at]] == list(range(400))


def test_blocks_are_tables_of_bounded_size(tmp_path: Path) -> None:
    pq.write_table(pa.table({"i": range(300_000)}), tmp_path / "long.parquet")
    pq.write_table(pa.table({"i": range(6000), "s": ["x" * 10_000] * 6000}), tmp_path / "same.parquet")
    for name in ("long", "same"):
        source = source_of(tmp_path / f"{name}.parquet")
        blocks = [block for split in source.splits(SplitGoal()) for block in source.read(split)]
        assert all(isinstance(block, pa.Table) for block in blocks)
        assert max(block.num_rows for block in blocks) <= parquet.BLOCK_ROWS
        assert max(block.nbytes for block in blocks) <= 3 * parquet.BLOCK_BYTES
    assert len(blocks) > 1


def test_numbers_are_decoded_a_block_at_a_time_and_texts_in_smaller_pieces(tmp_path: Path) -> None:
    numbers = {"i": range(100_000), "f": np.zeros(100_000, np.float32), "b": [True, False] * 50_000}
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(200_000, np.float32)), 2)
    pq.write_table(pa.table({**numbers, "v": vectors}), tmp_path / "numbers.parquet")
    pq.write_table(pa.table({**numbers, "s": ["same"] * 100_000}), tmp_path / "texts.parquet")
    for name, rows_at_once in (("numbers", parquet.BLOCK_ROWS), ("texts", parquet.BATCH_ROWS)):
        source = source_of(tmp_path / f"{name}.parquet")
        [split] = source.splits(SplitGoal())
        chunks = [chunk for block in source.read(split) for chunk in block["i"].chunks]
        assert max(map(len, chunks)) == rows_at_once
        assert pa.chunked_array(chunks).to_pylist() == list(numbers["i"])


def test_many_small_files_share_a_split(tmp_path: Path) -> None:
    for i in range(30):
        pq.write_table(table(i, i + 1), tmp_path / f"{i:02}.parquet")
    assert len(source_of(tmp_path).splits(SplitGoal())) == 1


def test_columns_are_chosen_in_their_order(tmp_path: Path) -> None:
    nested = [{"b": i} for i in range(5)]
    pq.write_table(pa.table({"x": range(5), "n": nested, "dot.ted": range(5), "y": range(5)}), tmp_path / "a.parquet")
    source = source_of(tmp_path, columns=["y", "n", "dot.ted"])
    (split,) = source.splits(SplitGoal())
    (block,) = source.read(split)
    assert block.column_names == ["y", "n", "dot.ted"]
    check_source(source, [{"y": i, "n": {"b": i}, "dot.ted": i} for i in range(5)])


def test_a_missing_column_lists_those_there_are(tmp_path: Path) -> None:
    pq.write_table(table(0, 3), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: has no column 'idx'; its columns are 'id', 'text'"):
        source_of(tmp_path, columns=["idx"]).splits(SplitGoal())
    with pytest.raises(UsageError, match=r"columns='id'\): expected a list of names"):
        source_of(tmp_path, columns="id")


@pytest.mark.parametrize("keep", [0, 3, 100, -1, -300])
def test_a_truncated_file_is_found_before_anything_starts(tmp_path: Path, keep: int) -> None:
    pq.write_table(table(0, 1000), tmp_path / "a.parquet")
    broken = tmp_path / "b.parquet"
    broken.write_bytes((tmp_path / "a.parquet").read_bytes()[:keep])
    with pytest.raises(InputError, match=r"b\.parquet: not a whole Parquet file: .*write it again"):
        source_of(tmp_path).splits(SplitGoal())


def test_damaged_pages_are_an_error_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(0, 10_000), path)
    data = path.read_bytes()
    path.write_bytes(data[:4000] + b"\xff" * 4000 + data[8000:])
    with pytest.raises(InputError, match=r"a\.parquet: not a whole Parquet file"):
        rows(source_of(path))


def test_missing_inputs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nope\.parquet: there is no such file"):
        source_of(tmp_path / "nope.parquet").splits(SplitGoal())
    with pytest.raises(InputError, match=r"\*\.parquet: no file matches"):
        source_of(tmp_path / "*.parquet").count()


def test_different_schemas_name_both_files_and_the_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1.5], "z": ["a"]}), tmp_path / "b.parquet")
    columns = r"'x' \(int64 and double\), 'y' \(string and missing\), 'z' \(missing and string\)"
    with pytest.raises(InputError, match=rf"a\.parquet and .*b\.parquet .*: {columns}; read them apart"):
        source_of(tmp_path).splits(SplitGoal())


def test_order_of_columns_and_columns_of_nulls_do_not_matter(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": [None], "l": [[]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": ["b"], "l": [[1.5]], "x": [2]}), tmp_path / "b.parquet")
    source = source_of(tmp_path)
    check_source(source, [{"x": 1, "y": None, "l": []}, {"x": 2, "y": "b", "l": [1.5]}])
    blocks = [block for split in source.splits(SplitGoal()) for block in source.read(split)]
    assert blocks[0].schema == blocks[1].schema


def test_a_changed_file_is_looked_at_again(tmp_path: Path) -> None:
    pq.write_table(table(0, 10), tmp_path / "a.parquet")
    source = source_of(tmp_path)
    assert source.count() == 10
    pq.write_table(table(0, 500), tmp_path / "a.parquet")
    assert source.count() == 500
    assert len(rows(source)) == 500
    assert len(pickle.dumps(source)) < 500


def test_a_store_that_is_not_local(tmp_path: Path) -> None:
    pq.write_table(table(0, 100), tmp_path / "a.parquet", row_group_size=30)
    fsspec.filesystem("memory").pipe_file("/pq/a.parquet", (tmp_path / "a.parquet").read_bytes())
    check_source(source_of("memory://pq/*.parquet"), table(0, 100).to_pylist())


def test_small_blocks_make_large_row_groups(tmp_path: Path) -> None:
    blocks = [table(i * 100, i * 100 + 100) for i in range(1500)]
    assert written(tmp_path / "out", *blocks).equals(pa.concat_tables(blocks))
    metadata = pq.read_metadata(tmp_path / "out" / "part-00000.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [131_072, 18_928]


class Point(NamedTuple):
    x: int
    tags: list[str]


def test_rows_of_many_kinds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rows_in = [
        PredictionResult({"v": np.ones(2, "f4")}, torch.tensor([1.0, 2.0], requires_grad=True), "m"),
        PredictionResult({"v": np.zeros(2, "f4")}, torch.tensor([3.0, 4.0]), None),
    ]
    out = written(tmp_path / "a", rows_in)
    assert out.schema.field("inference").type == pa.list_(pa.float32(), 2)
    assert out.to_pylist()[1] == {"example": {"v": [0.0, 0.0]}, "inference": [3.0, 4.0], "model_id": None}
    short = torch.ones(1, dtype=torch.bfloat16)
    out = written(tmp_path / "b", [{"m": np.eye(2), "s": np.float32(2), "z": np.array(3), "b": short, "p": Point(1, [])}])
    assert out.to_pylist() == [{"m": [[1, 0], [0, 1]], "s": 2.0, "z": 3, "b": [1.0], "p": {"x": 1, "tags": []}}]
    assert out.schema.field("s").type == pa.float32()


def test_the_rows_of_the_first_group_agree_on_types(tmp_path: Path) -> None:
    out = written(tmp_path / "out", [{"x": None}, {"x": 1}], [{"x": 2.5, "y": "new"}], pa.table({"x": [3]}))
    assert out.to_pylist() == [
        {"x": None, "y": None},
        {"x": 1.0, "y": None},
        {"x": 2.5, "y": "new"},
        {"x": 3.0, "y": None},
    ]


def test_later_groups_must_fit(tmp_path: Path) -> None:
    first = pa.table({"x": range(GROUP_ROWS)})
    out = written(tmp_path / "a", first, [{"x": 7}, {"x": None}], pa.table({"x": pa.array([8], pa.int8())}))
    assert out["x"].to_pylist()[-3:] == [7, None, 8]
    with pytest.raises(OutputError, match="column 'x' holds string, expected int64"):
        written(tmp_path / "b", first, pa.table({"x": ["text"]}))
    with pytest.raises(OutputError, match="rows have the column 'y', which earlier rows or schema= do not have"):
        written(tmp_path / "c", first, [{"x": 1, "y": 2}])


def test_a_given_schema_decides(tmp_path: Path) -> None:
    schema = pa.schema({"x": pa.float32(), "y": pa.string()})
    out = written(tmp_path / "a", [{"x": 1}], pa.table({"x": [2]}), schema=schema)
    assert out.schema == schema
    with pytest.raises(OutputError, match="column 'y': "):
        written(tmp_path / "b", [{"x": 1, "y": 3}], schema=schema)
    with pytest.raises(OutputError, match="'z', which earlier rows or schema= do not have"):
        written(tmp_path / "c", [{"x": 1, "z": 3}], schema=schema)


def test_rows_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"expects rows with named fields .*, got int: put ps\.Map\(lambda"):
        written(tmp_path / "a", [1])
    with pytest.raises(OutputError, match=r"expects rows with named fields .*, got {}: put ps"):
        written(tmp_path / "a2", [{}])
    with pytest.raises(OutputError, match=r"column 'x': .*expected values of one type"):
        written(tmp_path / "b", [{"x": 1}, {"x": "one"}])
    with pytest.raises(OutputError, match=r"column 'x': .*object"):
        written(tmp_path / "c", [{"x": object()}])
    with pytest.raises(OutputError, match=r"rows do not fit together: .*int64 vs string"):
        written(tmp_path / "d", [{"x": 1}], [{"x": "one"}])
    with pytest.raises(OutputError, match="columns are named by str, got 1"):
        written(tmp_path / "e", [{1: 2}])
    with pytest.raises(UsageError, match=r"compression='zip'\): expected one of"):
        WriteToParquet(tmp_path / "f", compression="zip")


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"])
    pq.write_table(twice, tmp_path / "in.parquet")
    with pytest.raises(
        InputError, match=r"in\.parquet: has several columns of the name 'a'; .* or choose others with columns="
    ):
        source_of(tmp_path / "in.parquet").splits(SplitGoal())
    with pytest.raises(InputError, match="has several columns of the name 'a'; write it again with different names$"):
        source_of(tmp_path / "in.parquet", columns=["a"]).splits(SplitGoal())
    assert rows(source_of(tmp_path / "in.parquet", columns=["b"])) == [{"b": 3}]
    with pytest.raises(OutputError, match=r"two columns have one name \('a', 'a', 'b'\); rename one"):
        written(tmp_path / "out", twice)


def test_rows_without_columns(tmp_path: Path) -> None:
    pd.DataFrame(index=range(5)).to_parquet(tmp_path / "five.parquet")
    with pytest.raises(InputError, match=r"five\.parquet: has rows and no columns"):
        source_of(tmp_path / "five.parquet").splits(SplitGoal())
    pd.DataFrame().to_parquet(tmp_path / "none.parquet")
    assert rows(source_of(tmp_path / "none.parquet")) == []
    with pytest.raises(OutputError, match="a table has 2 rows and no columns"):
        written(tmp_path / "out", pa.table({"a": [1, 2]}).select([]))
