"""File sinks: nothing is visible until it is published, and nothing is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.blocks import rows_of
from penstock.errors import InputError, OutputError
from penstock.failures import Failure
from penstock.io.csv import ReadFromCsv, WriteToCsv
from penstock.io.jsonl import ReadFromJsonl, WriteToJsonl
from penstock.io.lines import ReadFromText, WriteToText
from penstock.io.parquet import ReadFromParquet, WriteToParquet
from penstock.io.sink import Part, Sink, Write, Writer, part_name
from penstock.io.source import Read, SplitGoal
from penstock.rows import PredictionResult
from penstock.steps.bundle import Assignment, SinkOperator
from penstock.steps.stage import Outlet
from penstock.testing import check_sink

FORMATS: list[tuple[Any, Any, Callable[[int], Any]]] = [
    (WriteToText, ReadFromText, lambda i: f"row {i} ä"),
    (WriteToJsonl, ReadFromJsonl, lambda i: {"i": i, "l": [1, None]}),
    (WriteToCsv, ReadFromCsv, lambda i: {"i": str(i), "t": 'a "b"\nc'}),
    (WriteToParquet, ReadFromParquet, lambda i: {"i": i, "l": [1.5]}),
]


def read_back(read: Read[Any]) -> list[Any]:
    try:
        splits = read.source.splits(SplitGoal())
    except InputError:
        return []
    return [row for split in splits for block in read.source.read(split) for row in rows_of(block)]


def write_part(sink: Sink[Any], name: str, *blocks: Any, run: str = "run") -> Any:
    writer = sink.open(Part(run=run, name=name, attempt=1))
    for block in blocks:
        writer.write(block)
    return writer.close()


def write_all(write: Write[Any], *blocks: Any, run: str = "run") -> None:
    """A whole run with one part for each block."""
    write.sink.prepare(run)
    for i, block in enumerate(blocks):
        write.sink.publish(write_part(write.sink, f"{i:05}", block, run=run))
    write.sink.finish(run, True)


@pytest.mark.parametrize(("write", "read", "row"), FORMATS)
def test_every_format_keeps_the_contract_of_a_sink(tmp_path: Path, write: Any, read: Any, row: Any) -> None:
    folder = tmp_path / "new" / "out [1]*"
    rows = [[row(10 * n + i) for i in range(5)] for n in range(5)]
    check_sink(write(folder).sink, rows.__getitem__, lambda: read_back(read(folder)), again=lambda: write(folder).sink)
    suffix = write(folder).sink.suffix
    assert sorted(os.listdir(folder)) == [f"part-0000{n}{suffix}" for n in range(3)]


@pytest.mark.parametrize(("write", "read", "row"), FORMATS)
def test_a_store_that_is_not_local(write: Any, read: Any, row: Any) -> None:
    folder = f"memory://out-{write.__name__}"
    sink = write(folder).sink
    rows = [[row(10 * n + i) for i in range(5)] for n in range(5)]
    check_sink(sink, rows.__getitem__, lambda: read_back(read(folder)), again=lambda: write(folder).sink)
    assert len(fsspec.filesystem("memory").find(f"/out-{write.__name__}")) == 3
    assert sink.aside("run") == ()


@pytest.mark.parametrize(("write", "read", "row"), FORMATS)
def test_a_table_is_written_as_its_rows(tmp_path: Path, write: Any, read: Any, row: Any) -> None:
    if write is WriteToText:
        write_all(write(tmp_path), pa.table({"i": [1]}))
        assert read_back(read(tmp_path)) == ["{'i': 1}"]
        return
    write_all(write(tmp_path), pa.table({"i": ["1", "2"]}), pa.table({"i": ["3"]}))
    assert read_back(read(tmp_path)) == [{"i": "1"}, {"i": "2"}, {"i": "3"}]


VECTORS = pa.table(
    {
        "vector": pa.array([[0.5, 1.5], None], pa.list_(pa.float32(), 2)),
        "half": pa.FixedSizeListArray.from_arrays(pa.array(np.array([0.5, 1, 2, 3], "f2")), 2),
        "flags": pa.array([[True], [None]], pa.list_(pa.bool_(), 1)),
        "bytes": pa.array([[1, 255], [0, 3]], pa.list_(pa.uint8(), 2)),
        "square": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int64(), 2), 1)),
        "struct": pa.array([{"v": [1, 2], "t": "x"}, None], pa.struct({"v": pa.list_(pa.float32(), 2), "t": pa.string()})),
        "model_id": pa.array(["m", None]).dictionary_encode(),
    }
)


def test_vectors_of_a_table_are_lists_in_json_and_have_no_place_in_csv(tmp_path: Path) -> None:
    write_all(WriteToJsonl(tmp_path / "json"), VECTORS)
    first = {"vector": [0.5, 1.5], "half": [0.5, 1.0], "flags": [True], "bytes": [1, 255], "square": [[1, 2]]}
    second = {"vector": None, "half": [2.0, 3.0], "flags": [None], "bytes": [0, 3], "square": [[3, 4]]}
    assert read_back(ReadFromJsonl(tmp_path / "json")) == [
        {**first, "struct": {"v": [1.0, 2.0], "t": "x"}, "model_id": "m"},
        {**second, "struct": None, "model_id": None},
    ]
    for name in VECTORS.column_names[:-1]:
        with pytest.raises(OutputError, match=rf"column '{name}' holds a (list|dict), which CSV has no way to write"):
            write_all(WriteToCsv(tmp_path / name), VECTORS.select([name]))
    write_all(WriteToCsv(tmp_path / "csv"), VECTORS.select(["model_id"]))
    assert read_back(ReadFromCsv(tmp_path / "csv"))[0] == {"model_id": "m"}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match=r"file/out: cannot be written: Not a directory; choose a folder"):
        WriteToText(tmp_path / "file" / "out").sink.prepare("run")
    with pytest.raises(OutputError, match="file: is a file; expected a folder"):
        WriteToText(tmp_path / "file").sink.prepare("run")


def test_earlier_output_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    write_all(WriteToText(tmp_path), ["a"], ["b"])
    with pytest.raises(OutputError, match=r"2 part file\(s\) are there already, .*part-00000.txt; pass overwrite=True"):
        WriteToText(tmp_path).sink.prepare("second")
    assert sorted(os.listdir(tmp_path)) == ["part-00000.txt", "part-00001.txt"]


def test_overwrite_replaces_all_earlier_parts(tmp_path: Path) -> None:
    write_all(WriteToText(tmp_path), ["a"], ["b"], ["c"])
    (tmp_path / "part-notes.md").write_text("stays")
    write_all(WriteToText(tmp_path, overwrite=True), ["new"], run="second")
    assert sorted(os.listdir(tmp_path)) == ["part-00000.txt", "part-notes.md"]
    assert (tmp_path / "part-00000.txt").read_text() == "new\n"


@pytest.mark.parametrize("name", ["part-time.txt", "part-00000-of-00001.txt"])
def test_overwrite_removes_no_files_that_others_wrote(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("somebody's\n")
    with pytest.raises(OutputError, match=f"{name} is there, which was not written by Penstock"):
        write_all(WriteToText(tmp_path, overwrite=True), ["new"])
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("start", ["", "file://"])
@pytest.mark.parametrize("published", [False, True])
def test_a_folder_whose_name_begins_alike_is_left_alone(tmp_path: Path, start: str, published: bool) -> None:
    """fsspec takes what follows a "::" for another address: so X/out::v2 was X/out."""
    write_all(WriteToText(tmp_path / "out"), ["somebody's"])
    sink = WriteToText(f"{start}{tmp_path}/out::v2").sink
    assert sink.aside("second") == (f"{tmp_path}/out::v2/.penstock-second",), "this is removed if the run is killed"
    sink.prepare("second")
    token = write_part(sink, "00000", ["new"], run="second")
    if published:
        sink.publish(token)
    else:
        sink.clean("second")
    sink.finish("second", published)
    assert read_back(ReadFromText(tmp_path / "out")) == ["somebody's"]
    assert read_back(ReadFromText(tmp_path / "out::v2")) == ["new"] * published


@pytest.mark.parametrize("path", ["memory://colons/out::v2", "dir://out::memory://colons"])
def test_colons_in_the_address_of_another_store(path: str) -> None:
    write_all(WriteToText("memory://colons/out"), ["somebody's"])
    if path.startswith("dir"):
        with pytest.raises(OutputError, match="files cannot be put there by name"):
            write_all(WriteToText(path, overwrite=True), ["new"])
    else:
        write_all(WriteToText(path), ["new"])
        assert read_back(ReadFromText(f"{path}/part-00000.txt")) == ["new"]
    assert fsspec.filesystem("memory").find("/colons") == ["/colons/out/part-00000.txt"]
    fsspec.filesystem("memory").rm("/colons", recursive=True)


@given(st.lists(st.lists(st.integers(0, 10**8) | st.integers(99_990, 100_010), min_size=2, max_size=2)))
def test_names_of_parts_sort_in_the_order_of_the_rows(keys: list[list[int]]) -> None:
    names = [f"part-{part_name(key)}.txt" for key in keys]
    assert [name for _, name in sorted(zip(keys, names, strict=True))] == sorted(names)


def test_parts_are_read_in_order_beyond_five_digits(tmp_path: Path) -> None:
    sink = WriteToText(tmp_path).sink
    sink.prepare("run")
    for number in (9, 99_999, 100_000, 1_000_000):
        runner = SinkOperator("write", sink, Outlet("sink", 0, (), ""))
        runner.work = Assignment("run", (number,), 1, 0)
        runner.start()
        runner.push([str(number)])
        runner.finish()
        sink.publish(runner.token)
    sink.finish("run", True)
    assert read_back(ReadFromText(tmp_path)) == ["9", "99999", "100000", "1000000"]
    assert min(os.listdir(tmp_path)) == "part-00009.txt"
    write_all(WriteToText(tmp_path, overwrite=True), ["new"], run="second")
    assert os.listdir(tmp_path) == ["part-00000.txt"]


def test_a_failed_run_leaves_earlier_output_alone(tmp_path: Path) -> None:
    write_all(WriteToText(tmp_path), ["a"], ["b"])
    sink = WriteToText(tmp_path, overwrite=True).sink
    sink.prepare("second")
    write_part(sink, "00000", ["new"], run="second")
    sink.finish("second", False)
    assert read_back(ReadFromText(tmp_path)) == ["a", "b"]
    assert sorted(os.listdir(tmp_path)) == ["part-00000.txt", "part-00001.txt"]


def test_a_lost_part_is_an_error_and_not_the_earlier_one(tmp_path: Path) -> None:
    write_all(WriteToText(tmp_path), ["a"])
    sink = WriteToText(tmp_path, overwrite=True).sink
    sink.prepare("second")
    token = write_part(sink, "00000", ["new"], run="second")
    os.remove(token[0])
    with pytest.raises(OutputError, match="the finished part is gone"):
        sink.publish(token)


def test_two_steps_cannot_write_the_same_parts(tmp_path: Path) -> None:
    WriteToText(tmp_path).sink.prepare("run")
    WriteToJsonl(tmp_path).sink.prepare("run")
    with pytest.raises(OutputError, match=r"two steps write \.txt files there"):
        WriteToText(tmp_path).sink.prepare("run")


def test_aside_is_a_local_folder_with_the_parts(tmp_path: Path) -> None:
    sink = WriteToText(tmp_path).sink
    sink.prepare("run")
    aside, final, size, digest, *_ = write_part(sink, "00012", ["a"])
    assert sink.aside("run") == (str(tmp_path / ".penstock-run"),)
    assert (aside, final) == (str(tmp_path / ".penstock-run" / "00012-1.txt"), str(tmp_path / "part-00012.txt"))
    assert (size, digest) == (2, None), "a digest is for runs that can be resumed"
    assert sink.describe() == str(tmp_path)


def test_blocks_without_rows_leave_no_part(tmp_path: Path) -> None:
    sink = WriteToParquet(tmp_path).sink
    sink.prepare("run")
    assert write_part(sink, "00000", [], pa.table({"x": pa.array([], pa.int64())})) is None
    assert os.listdir(tmp_path / ".penstock-run") == [".claim.parquet"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"\xff\xfe", r"the bytes b'\\xff\\xfe' are not UTF-8"),
        ("two\nlines", r"the row 'two\\nlines' has a line end in it"),
        ("ends\r", "has a line end in it"),
        ("\ud800", "lone surrogates"),
    ],
)
def test_rows_that_are_not_lines(tmp_path: Path, row: object, message: str) -> None:
    for block in ([row], ["good", row], [row, "good"]):
        with pytest.raises(OutputError, match=message):
            write_all(WriteToText(tmp_path), block, run=f"run{len(os.listdir(tmp_path))}")


def test_a_byte_order_mark_in_a_row_is_text(tmp_path: Path) -> None:
    rows = ["\ufeffmarked", "\ufeff", "plain"]
    write_all(WriteToText(tmp_path / "text"), rows, rows)
    assert read_back(ReadFromText(tmp_path / "text")) == rows * 2
    records = [{"\ufeffname": "\ufeffvalue"}]
    write_all(WriteToCsv(tmp_path / "csv"), records)
    assert read_back(ReadFromCsv(tmp_path / "csv")) == records


@dataclass
class Label:
    name: str
    score: Any


def test_json_of_many_kinds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rows = [
        ("key", PredictionResult("ä", torch.tensor([1.5, 2.0]), "m")),
        {"label": Label("a", np.float32(0.5)), "array": np.arange(4).reshape(2, 2), "float": np.float64(1)},
        [None, True, "\ud800", np.int64(3)],
    ]
    write_all(WriteToJsonl(tmp_path), rows)
    assert [json.loads(line) for line in (tmp_path / "part-00000.jsonl").read_text().splitlines()] == [
        ["key", {"example": "ä", "inference": [1.5, 2.0], "model_id": "m"}],
        {"label": {"name": "a", "score": 0.5}, "array": [[0, 1], [2, 3]], "float": 1.0},
        [None, True, "\ud800", 3],
    ]


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    nan, infinity = float("nan"), float("inf")
    rows = [{"x": nan, "y": [1.5, -infinity], "z": {"v": np.array([nan, 2.0])}}, infinity, {nan: 1}, {"text": "NaN"}]
    failed = ({"x": nan}, Failure("step", "raised", "ValueError", "it is NaN", ""))
    write_all(WriteToJsonl(tmp_path), [*rows, failed])
    lines = (tmp_path / "part-00000.jsonl").read_text().splitlines()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    values = [json.loads(line, parse_constant=refuse) for line in lines]
    assert values[:4] == [{"x": None, "y": [1.5, None], "z": {"v": [None, 2.0]}}, None, {"nan": 1}, {"text": "NaN"}]
    assert values[4][0] == {"x": None}


def test_what_is_not_json(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    cases = [
        ({"x": {1, 2}}, "a value of type set"),
        ({"x": np.datetime64(1, "ns")}, "a value of type datetime64"),
        ({"x": np.array([1], "m8[s]")}, "a value of type timedelta64"),
        ({"x": memoryview(b"x")}, "a value of type memoryview"),
        ({(1, 2): 3}, "keys must be"),
        (loop, "recursion"),
    ]
    for i, (row, message) in enumerate(cases):
        with pytest.raises(OutputError, match=rf"a row of type (dict|list) is not JSON: .*{message}.*; expected dicts"):
            write_all(WriteToJsonl(tmp_path), [row], run=str(i))
    with pytest.raises(OutputError, match=r"two keys of a dict are the same text \(1, '1'\): rename one"):
        write_all(WriteToJsonl(tmp_path), [{"x": {1: 2, "1": 3}}], run="keys")


class Eager(Writer[str]):
    """Writes at once where readers look."""

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, block: Any) -> None:
        with open(self.path, "a") as file:
            file.writelines(f"{row}\n" for row in block)

    def close(self) -> str | None:
        return self.path if os.path.exists(self.path) else None

    def abort(self) -> None:
        if os.path.exists(self.path):
            os.remove(self.path)


class EagerSink(Sink[str]):
    def __init__(self, path: str) -> None:
        self.path = path

    def open(self, part: Part) -> Eager:
        return Eager(f"{self.path}/{part.name}.txt")

    def publish(self, token: Any) -> None: ...


class FourMethods(Sink[str]):
    """All that a sink must have, with those of its writer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, part: Part) -> Writer[str]:
        return LinesAside(f"{self.path}-{part.run}-{part.name}-{part.attempt}", f"{self.path}-{part.name}.txt")

    def publish(self, token: tuple[str, str]) -> None:
        if os.path.exists(token[0]) or not os.path.exists(token[1]):
            os.replace(*token)


class LinesAside(Writer[str]):
    def __init__(self, aside: str, final: str) -> None:
        self.token = aside, final
        self.lines: list[str] = []

    def write(self, block: Any) -> None:
        self.lines += [f"{row}\n" for row in rows_of(block)]

    def close(self) -> tuple[str, str] | None:
        Path(self.token[0]).write_text("".join(self.lines))
        return self.token if self.lines else None


def test_four_methods_are_enough(tmp_path: Path) -> None:
    def run() -> Any:
        p = ps.Pipeline(run_dir=tmp_path / "run", workers=0)
        p | ReadFromText(str(tmp_path / "in.txt")) | ps.Write(FourMethods(tmp_path / "out"))
        return p.run()

    def lines() -> list[str]:
        return [line for path in sorted(tmp_path.glob("out-*.txt")) for line in path.read_text().splitlines()]

    check_sink(FourMethods(tmp_path / "out"), lambda n: [f"{n}a", f"{n}b"], lines)
    for path in tmp_path.glob("out-*"):
        path.unlink()
    (tmp_path / "in.txt").write_text("x\n" * 4000)
    assert not run().was_finished
    assert lines() == ["x"] * 4000
    assert run().was_finished


def test_a_sink_has_eight_methods_at_most() -> None:
    assert len([name for name, value in vars(Sink).items() if callable(value) and not name.startswith("_")]) <= 8


def test_check_sink_finds_a_sink_that_shows_rows_too_early(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match="EagerSink, what a reader sees before anything was published: 8 rows, expected 0"
    ):
        check_sink(EagerSink(str(tmp_path)), lambda n: [str(n), "x"], lambda: read_back(ReadFromText(tmp_path)))


@pytest.mark.parametrize("journaled", [False, True])
def test_an_archive_that_is_not_there(tmp_path: Path, journaled: bool) -> None:
    p = ps.Pipeline(workers=0, **({"run_dir": tmp_path / "run"} if journaled else {}))
    p | ps.Create([{"a": 1}]) | ps.WriteToJsonl(f"zip://a::{tmp_path}/missing.zip")
    with pytest.raises(OutputError, match=r"zip://a::.*: there is no .*missing\.zip; write to a folder of a plain store"):
        p.run()
    with pytest.raises(InputError, match=r"zip://a::.*missing\.zip: cannot be listed: .*; check the path"):
        (ps.Pipeline(workers=0) | ps.ReadFromJsonl(f"zip://a::{tmp_path}/missing.zip")).collect()
