"""Text and JSON Lines: every line once, in order, however the files are cut."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.blocks import MAX_ROWS, Block
from penstock.errors import InputError, UsageError
from penstock.io import lines
from penstock.io.csv import ReadFromCsv
from penstock.io.files import InputFile, list_files, open_input
from penstock.io.jsonl import ReadFromJsonl
from penstock.io.lines import LineRange, ReadFromText, TextSource, cut_lines, line_runs
from penstock.io.source import Source, SplitGoal
from penstock.testing import check_source


def text(path: Path) -> Source[str]:
    return ReadFromText(path).source


def jsonl(path: Path) -> Source[object]:
    return ReadFromJsonl(path).source


def rows(source: Source[object], goal: SplitGoal | None = None) -> list[object]:
    return [row for split in source.splits(goal or SplitGoal()) for block in source.read(split) for row in block]


def write_compressed(path: Path, codec: str, data: bytes) -> None:
    with pa.CompressedOutputStream(str(path), codec) as stream:
        stream.write(data)


line_bytes = st.text(alphabet=st.sampled_from("ab\rä€𝄞\u2028\x0b\x85"), max_size=12).map(str.encode)


@settings(max_examples=300)
@given(
    contents=st.lists(st.tuples(st.lists(line_bytes, max_size=8), st.booleans()), min_size=1, max_size=4),
    target=st.integers(1, 40),
    chunk=st.integers(1, 16),
)
def test_every_line_is_owned_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[list[bytes], bool]], target: int, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    files, expected = [], []
    for index, (parts, ends) in enumerate(contents):
        data = b"\n".join(parts) + (b"\n" if ends and parts else b"")
        (folder / str(index)).write_bytes(data)
        files.append(InputFile(str(folder / str(index)), len(data), "", None))
        expected += data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK_BYTES", chunk)
        splits = cut_lines(files, target)
        runs = [run for split in splits for piece in split for run in line_runs(piece)]
    read = [line for run in runs for line in run.data.split(b"\n")[: -1 if run.data.endswith(b"\n") else None]]
    assert read == expected
    for split in splits:
        assert sum(piece.stop - piece.start for piece in split) <= target
    for run in runs:
        assert Path(run.path).read_bytes()[run.offset :].startswith(run.data)


@settings(max_examples=100)
@given(data=st.binary(max_size=60), cut=st.integers(0, 60))
def test_a_cut_anywhere_loses_and_doubles_nothing(tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "file"
    path.write_bytes(data)
    cut = min(cut, len(data))
    pieces = [LineRange(str(path), 0, cut), LineRange(str(path), cut, len(data))]
    assert b"".join(run.data for piece in pieces if piece.start < piece.stop for run in line_runs(piece)) == data


def test_text_keeps_the_contract_of_a_source(tmp_path: Path) -> None:
    expected = [f"line {i} " + "x" * (i % 97) for i in range(20_000)]
    (tmp_path / "a.txt").write_text("\n".join(expected[:9000]) + "\n")
    (tmp_path / "b.txt").write_text("\n".join(expected[9000:]))
    check_source(text(tmp_path / "*.txt"), expected)
    assert len(text(tmp_path).splits(SplitGoal(min_splits=6))) >= 6


def test_jsonl_keeps_the_contract_of_a_source(tmp_path: Path) -> None:
    expected = [{"id": i, "text": "€" * (i % 50)} for i in range(3000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in expected))
    check_source(jsonl(tmp_path / "rows.jsonl"), expected)


def test_line_ends_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "mixed.txt"
    path.write_bytes("\ufeffone\r\n\n two \u2028 still two\nthree\rstill three\r\r\nlast".encode())
    assert rows(text(path)) == ["one", "", " two \u2028 still two", "three\rstill three\r", "last"]


def test_jsonl_takes_any_value_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "values.jsonl"
    path.write_bytes('\ufeff{"a": 1}\r\n\n[1, 2]\n   \n"text"\nnull\n3.5'.encode())
    assert rows(jsonl(path)) == [{"a": 1}, [1, 2], "text", None, 3.5]


def test_blocks_are_bounded_in_rows(tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("x\n" * (3 * MAX_ROWS + 5))
    source = text(path)
    sizes = [len(block) for split in source.splits(SplitGoal()) for block in source.read(split)]
    assert sizes == [MAX_ROWS, MAX_ROWS, MAX_ROWS, 5]


def test_blocks_are_bounded_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "wide.txt"
    path.write_text(("x" * 100_000 + "\n") * 300)
    source = text(path)
    blocks = [block for split in source.splits(SplitGoal()) for block in source.read(split)]
    assert sum(map(len, blocks)) == 300
    assert max(sum(map(len, block)) for block in blocks) < 11 << 20


def test_splits_have_about_as_many_lines_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(("x" * 99 + "\n") * 10_000)
    counts = [len(rows) for rows in _lines_of_splits(text(tmp_path), SplitGoal(min_splits=128, min_rows=1_000, at_once=2))]
    assert counts == [1_000] * 10
    assert len(_lines_of_splits(text(tmp_path), SplitGoal(min_splits=128, min_rows=10**6, at_once=2))) == 2
    assert len(_lines_of_splits(text(tmp_path), SplitGoal(min_splits=128))) == 128


def _lines_of_splits(source: Source[str], goal: SplitGoal) -> list[list[object]]:
    return [[row for block in source.read(split) for row in block] for split in source.splits(goal)]


def test_small_files_share_a_split(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i:03}.txt").write_text(f"{i}\n")
    source = text(tmp_path)
    splits = source.splits(SplitGoal())
    assert len(splits) == 1
    assert [len(block) for block in source.read(splits[0])] == [100]


def test_compressed_files_are_read_whole(tmp_path: Path) -> None:
    expected = [f"row {i}" for i in range(5000)]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n".join(expected[:1000]).encode() + b"\n"))
    two_members = [gzip.compress(f"{line}\n".encode()) for line in expected[1000:1002]]
    (tmp_path / "b.txt.gz").write_bytes(b"".join(two_members))
    write_compressed(tmp_path / "c.txt.zst", "zstd", "\n".join(expected[1002:]).encode())
    check_source(text(tmp_path), expected)


@pytest.mark.parametrize(("name", "codec"), [("a.txt.gz", "gzip"), ("a.txt.zst", "zstd")])
def test_damaged_compressed_file(tmp_path: Path, name: str, codec: str) -> None:
    path = tmp_path / name
    write_compressed(path, codec, os.urandom(5000))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.txt\.(gz|zst): cannot be decompressed"):
        rows(text(path))


def test_bad_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"good\nalso good\ncaf\xe9 au lait\n")
    with pytest.raises(InputError, match=r"latin\.txt, in the line at byte 15: not UTF-8 .*0xe9.*convert the file"):
        rows(text(path))


@pytest.mark.parametrize(
    ("begin", "remedy"),
    [
        (b"PAR1\x15\x04\x88", "it is a Parquet file: use ReadFromParquet"),
        (gzip.compress(b"one\ntwo\n", mtime=0), r"it is compressed with gzip: give it a name that ends in \.gz"),
        (b"PK\x03\x04\xff", "it is a zip archive, or a spreadsheet"),
    ],
)
def test_a_file_of_another_format_is_known(tmp_path: Path, begin: bytes, remedy: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(begin)
    for source in (text(path), ReadFromCsv(str(path)).source):
        with pytest.raises(InputError, match=f"rows.csv, .*: not UTF-8 .*; {remedy}"):
            rows(source)


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_bad_json_names_the_line_and_shows_it(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(start + b'{"a": 1}\r\n\n{"a": 2,}\n')
    with pytest.raises(InputError, match=rf"bad\.jsonl, in the line at byte {len(start) + 11}: not JSON .*'{{\"a\": 2,}}'"):
        rows(jsonl(path))


def test_deep_json_is_an_error_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    with pytest.raises(InputError, match=r"deep\.jsonl, in the line at byte 0: not JSON"):
        rows(jsonl(tmp_path / "deep.jsonl"))


def test_missing_inputs_name_the_pattern(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nope\.txt: there is no such file or folder; check the path"):
        text(tmp_path / "nope.txt").splits(SplitGoal())
    with pytest.raises(InputError, match=r"\*\.txt: no file matches; check"):
        text(tmp_path / "*.txt").splits(SplitGoal())
    with pytest.raises(InputError, match="the folder has no files"):
        text(tmp_path).splits(SplitGoal())
    with pytest.raises(InputError, match="Protocol not known: nostore"):
        ReadFromText("nostore://a/b").source.splits(SplitGoal())


@pytest.mark.parametrize("wrong", [3, "", b"a.txt", ["a.txt"], None])
def test_what_is_not_a_path(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"ReadFromText\(.*\): expected a path"):
        ReadFromText(wrong)  # type: ignore[arg-type]


def test_a_link_is_an_input_and_a_device_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a longer line than the link is")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.txt").symlink_to("empty")
    assert rows(text(tmp_path / "link.txt")) == ["a longer line than the link is"]
    assert len(rows(text(tmp_path / "*.txt"))) == len(rows(text(tmp_path))) == 2
    with pytest.raises(InputError, match="/dev/null: expected a regular file"):
        ReadFromText("/dev/null").source.splits(SplitGoal())


def test_hidden_files_do_not_count(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden.txt", "_SUCCESS", ".penstock-run/part.txt", "deep/c.txt", "_tmp/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert rows(text(tmp_path)) == ["a.txt", "b.txt", "deep/c.txt"]
    assert rows(text(tmp_path / "*")) == ["a.txt", "b.txt"]
    assert rows(text(tmp_path / "**/*.txt")) == ["a.txt", "b.txt", "deep/c.txt"]
    assert rows(text(tmp_path / "_*")) == ["_SUCCESS"]
    assert rows(text(tmp_path / ".hidden.txt")) == [".hidden.txt"]


def test_a_name_with_wildcards_in_it_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "what[1].txt").write_text("yes")
    assert rows(text(tmp_path / "what[1].txt")) == ["yes"]


def test_colons_in_a_local_name_are_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("of b\n")
    (tmp_path / "b::c.txt").write_text("of c\n")
    assert rows(ReadFromText(tmp_path).source) == ["of b", "of c"]
    assert rows(ReadFromText(tmp_path / "b::c.txt").source) == ["of c"]
    assert rows(ReadFromText(f"file://{tmp_path}/b::c.txt").source) == ["of c"]


def test_colons_join_addresses_where_one_wraps_another(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("wrapped\n")
    with open_input(f"simplecache::file://{tmp_path}/in.txt") as file:
        assert file.read() == b"wrapped\n"


def test_empty_files_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    check_source(text(tmp_path), [])
    assert text(tmp_path).splits(SplitGoal()) == []


def test_relative_paths_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("here")
    read = ReadFromText("a.*")
    assert read.default_label() == "ReadFromText(a.*)"
    assert rows(read.source) == ["here"]
    assert ReadFromJsonl("data/").default_label() == "ReadFromJsonl(data)"


def test_a_store_that_is_not_local() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe({"/lines/b.txt": b"three\n", "/lines/a.txt": b"one\ntwo\n", "/lines/c.txt.gz": gzip.compress(b"four")})
    read = ReadFromText("memory://lines/*")
    check_source(read.source, ["one", "two", "three", "four"])
    assert list_files("memory://lines")[0].path == "memory:///lines/a.txt"
    assert read.default_label() == "ReadFromText(*)"


class Forgetful(TextSource):
    """Loses a row whenever it is cut."""

    def read(self, split: tuple[LineRange, ...]) -> Iterator[Block]:
        return (block[split[0].start > 0 :] for block in super().read(split))


def test_check_source_finds_a_source_that_loses_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(5000)))
    with pytest.raises(AssertionError, match=r"Forgetful, cut into 2 splits .*: row \d+ is '\d+', expected '\d+'"):
        check_source(Forgetful(str(tmp_path)))
    with pytest.raises(AssertionError, match="5000 rows, expected 4999"):
        check_source(text(tmp_path), [str(i) for i in range(4999)])
