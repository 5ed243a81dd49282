"""CSV: rows are dicts of text, and a row that does not fit its header is an error that names the line."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import InputError, OutputError, UsageError
from penstock.io.csv import ReadFromCsv, WriteToCsv
from penstock.io.sink import Part
from penstock.io.source import Source, SplitGoal
from penstock.rows import PredictionResult
from penstock.testing import FaultyModelHandler, check_source


def rows(source: Source[dict[str, str]]) -> list[dict[str, str]]:
    return [row for split in source.splits(SplitGoal()) for block in source.read(split) for row in block]


def written(folder: Path, *blocks: Any, **options: Any) -> str:
    """One part's text, after the whole way through the sink."""
    sink = WriteToCsv(folder, overwrite=True, **options).sink
    sink.prepare("run")
    writer = sink.open(Part(run="run", name="00000", attempt=1))
    for block in blocks:
        writer.write(block)
    sink.publish(writer.close())
    sink.finish("run", True)
    return (folder / "part-00000.csv").read_bytes().decode()


def test_csv_keeps_the_contract_of_a_source(tmp_path: Path) -> None:
    expected = [{"id": str(i), "text": f'line "{i}"\nand, more' if i % 3 else "plain"} for i in range(4000)]
    for name, part in (("a.csv", expected[:3000]), ("b.csv", expected[3000:])):
        with open(tmp_path / name, "w", newline="") as file:
            table = csv.DictWriter(file, ["id", "text"])
            table.writeheader()
            table.writerows(part)
    check_source(ReadFromCsv(tmp_path).source, expected)
    assert len(ReadFromCsv(tmp_path).source.splits(SplitGoal(max_bytes=1))) == 2


@pytest.mark.parametrize("start", ["", "\n" * 9000, "\ufeff"], ids=["plain", "blank lines", "byte order mark"])
def test_without_line_ends_in_fields_a_file_is_cut(tmp_path: Path, start: str) -> None:
    expected = [{"id": str(i), "text": f'line "{i}", and more' * (i % 4)} for i in range(4000)]
    for name, columns in (("a.csv", ["id", "text"]), ("b.csv", ["text", "id"])):  # each has its own order
        with open(tmp_path / name, "w", newline="") as file:
            file.write(start)
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(expected)
    source = ReadFromCsv(tmp_path, multiline=False).source
    check_source(source, [*expected, *expected])
    assert len(source.splits(SplitGoal(max_bytes=20_000))) > 8
    names = ReadFromCsv(tmp_path / "a.csv", multiline=False, header=["x", "y"]).source
    assert [row["x"] for row in rows(names)] == ["id", *map(str, range(4000))]


@settings(max_examples=200)
@given(bad=st.integers(0, 299), size=st.integers(4096, 9000))
def test_a_line_end_in_a_field_never_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, bad: int, size: int) -> None:
    """Wherever the file is cut: before, in or after the field."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_text("a,b\n" + "".join(f'{i},"{"x" * 50}{chr(10) * (i == bad)}{"x,y" * 20}"\n' for i in range(300)))
    source = ReadFromCsv(path, multiline=False).source
    with pytest.raises(InputError, match=r"a\.csv, line .*multiline=True"):
        [row for split in source.splits(SplitGoal(max_bytes=size)) for block in source.read(split) for row in block]


def test_given_names_delimiter_byte_order_mark_and_compression(tmp_path: Path) -> None:
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress("\ufeff1\tone\r\n\r\n2\t\r\n".encode()))
    source = ReadFromCsv(tmp_path / "*.tsv.gz", delimiter="\t", header=["id", "name"]).source
    check_source(source, [{"id": "1", "name": "one"}, {"id": "2", "name": ""}])


def test_files_with_nothing_in_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "b.csv").write_text("id\n")
    (tmp_path / "c.csv").write_text("\n\nid\n7")
    check_source(ReadFromCsv(tmp_path).source, [{"id": "7"}])


@pytest.mark.parametrize(("line", "seen"), [("3", 1), ("3,4,5", 3)])
def test_a_row_of_another_length_names_the_line(tmp_path: Path, line: str, seen: int) -> None:
    (tmp_path / "bad.csv").write_text(f'a,b\n"1\n1",2\n{line}\n')
    with pytest.raises(InputError, match=rf"bad\.csv, line 4: {seen} columns, expected 2 \('a', 'b'\)"):
        rows(ReadFromCsv(tmp_path / "bad.csv").source)


@pytest.mark.parametrize("text", ['a,b\n1,"2"x\n', 'a,b\n1,"never closed\n'])
def test_quotes_are_strict(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(InputError, match=r"bad\.csv, line 2: not CSV: .*; expected quoted fields"):
        rows(ReadFromCsv(tmp_path / "bad.csv").source)


def test_a_long_field_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("a\n" + "x" * 300_000)
    assert rows(ReadFromCsv(tmp_path / "long.csv").source) == [{"a": "x" * 300_000}]


def test_bad_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"a\ncaf\xe9\n")
    with pytest.raises(InputError, match=r"latin\.csv, in the line at byte 2: not UTF-8"):
        rows(ReadFromCsv(tmp_path / "latin.csv").source)


def test_headers_must_agree(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("y,x\n3,4\n")
    assert rows(ReadFromCsv(tmp_path).source) == [{"x": "1", "y": "2"}, {"y": "3", "x": "4"}]
    (tmp_path / "c.csv").write_text("x,z\n1,2\n")
    with pytest.raises(InputError, match=r"c\.csv has the columns 'x', 'z', but .*a\.csv has 'x', 'y'"):
        rows(ReadFromCsv(tmp_path).source)


def test_a_name_twice_in_a_header(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("x,x\n1,2\n")
    with pytest.raises(InputError, match=r"twice\.csv: the header names a column twice"):
        rows(ReadFromCsv(tmp_path / "twice.csv").source)


@pytest.mark.parametrize(
    "options",
    [{"delimiter": ",,"}, {"delimiter": '"'}, {"header": False}, {"header": ["a", "a"]}, {"multiline": "no"}],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"ReadFromCsv\((delimiter|header|multiline)=.*: expected"):
        ReadFromCsv("a.csv", **options)
    with pytest.raises(UsageError, match=r"WriteToCsv\(columns='ab'\): expected a list of names"):
        WriteToCsv("out", columns="ab")


field = st.text(alphabet=st.sampled_from('ab,"\r\n ä\x00'), max_size=6)


@settings(max_examples=150)
@given(table=st.lists(st.tuples(field, field), min_size=1, max_size=8))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, str]]) -> None:
    folder = tmp_path_factory.mktemp("csv") / "out"
    expected = [{"a": a, "b,": b} for a, b in table]
    written(folder, expected[:3], expected[3:])
    assert rows(ReadFromCsv(folder).source) == expected


def test_one_empty_field_is_a_row(tmp_path: Path) -> None:
    written(tmp_path / "out", [{"a": ""}, {"a": None}])
    assert rows(ReadFromCsv(tmp_path / "out").source) == [{"a": ""}, {"a": ""}]


def test_header_and_values(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    answers = [PredictionResult(1, np.float32(0.5), "m"), PredictionResult("x", np.array(2), None)]
    assert written(tmp_path / "a", answers) == "example,inference,model_id\n1,0.5,m\nx,2,\n"
    moment = np.datetime64("2024-02-29T12:30:00.000000005")
    assert written(tmp_path / "c", [{"x": moment}]) == "x\n2024-02-29T12:30:00.000000005\n"
    assert written(tmp_path / "b", [{"x": 1, "y": True}], columns=["y", "x"]) == "y,x\nTrue,1\n"


def test_rows_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="other columns than 'x': missing 'x', not expected 'y'"):
        written(tmp_path / "a", [{"x": 1}], [{"y": 1}])
    with pytest.raises(OutputError, match="other columns than 'x', 'y': missing 'y', not expected none"):
        written(tmp_path / "b", [{"x": 1}], columns=["x", "y"])
    with pytest.raises(OutputError, match=r"WriteToCsv expects rows with named fields .*, got int: put ps\.Map"):
        written(tmp_path / "c", [1])
    with pytest.raises(OutputError, match="column 'x' holds a list, which CSV has no way to write"):
        written(tmp_path / "d", [{"x": [1, 2]}])
    for value in ({1}, bytearray(b"x"), memoryview(b"x"), range(2), object()):
        with pytest.raises(OutputError, match=f"column 'x' holds a {type(value).__name__}, which CSV has no way to write"):
            written(tmp_path / type(value).__name__, [{"x": value}])
    with pytest.raises(OutputError, match="column 'example' holds a dict.*; of a model's answers, name the new column with"):
        written(tmp_path / "f", [PredictionResult({"x": 1}, 2, "m")])
    with pytest.raises(OutputError, match="text that UTF-8 cannot hold"):
        written(tmp_path / "e", [{"x": "\ud800"}])


@pytest.mark.parametrize("journaled", [False, True])
def test_parts_of_other_columns_are_refused(tmp_path: Path, journaled: bool) -> None:
    """Before anything is published; or, split by split, before the first that does not fit."""
    late = [{"a": 1, "b": 2}] * 5000
    options: dict[str, Any] = {"run_dir": tmp_path / "run"} if journaled else {}
    message = (
        r"out: part-\d+\.csv has other columns than part-00000\.csv: missing none, not expected 'b'; make all rows alike"
    )
    for _ in range(2):  # once more it is resumed, and refused again
        p = ps.Pipeline(workers=0, **options)
        p | ps.Create([{"a": 1}] * 5000 + late) | ps.WriteToCsv(tmp_path / "out")
        with pytest.raises(
            OutputError, match=message + (".*start over with fresh=True" if journaled else " in a step before it$")
        ):
            p.run()
    assert {part.read_text()[:2] for part in (tmp_path / "out").glob("part-*")} == ({"a\n"} if journaled else set())


def test_parts_may_have_their_columns_in_any_order(tmp_path: Path) -> None:
    p = ps.Pipeline(workers=0)
    p | ps.Create([{"a": 1, "b": 2}] * 5000 + [{"b": 2, "a": 1}] * 5000) | ps.WriteToCsv(tmp_path / "out")
    p.run()
    assert len(list((tmp_path / "out").iterdir())) > 1
    assert rows(ReadFromCsv(tmp_path / "out").source) == [{"a": "1", "b": "2"}] * 10_000


@pytest.mark.parametrize(
    ("multiline", "reshuffled", "hinted"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_explain_says_that_one_worker_does_it_all(multiline, reshuffled, hinted, tmp_path):
    """A CSV file is one split, unless no field holds a line end."""
    (tmp_path / "rows.csv").write_text("x\n" + "".join(f"{n}\n" for n in range(100_000)))
    pipeline = ps.Pipeline(workers=2)
    rows = pipeline | ps.ReadFromCsv(str(tmp_path / "rows.csv"), multiline=multiline)
    rows = rows | ps.Reshuffle() if reshuffled else rows
    _ = rows | ps.RunInference(FaultyModelHandler({})) | ps.WriteToJsonl(str(tmp_path / "out"))
    assert ("one split, so one worker does all of this stage" in pipeline.explain()) == hinted
