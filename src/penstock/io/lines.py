"""Lines of text. A plain file is read in byte ranges: a range owns the lines that start in it.

Lines end with "\\n" or "\\r\\n"; the last one may end with the file. No other character ends a line.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.blocks import MAX_BYTES, MAX_ROWS, Block, row_count, rows_of
from penstock.errors import InputError, OutputError
from penstock.io.files import InputFile, checked_path, compression_of, is_bad_data, open_input, pack
from penstock.io.parts import BYTE_ORDER_MARK, FileSink, FileWriter, WriteFiles
from penstock.io.sink import Part
from penstock.io.source import FileSource, ReadFiles, Source, SplitGoal

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
SAMPLE_BYTES = 64 << 10  # by which the number of lines is guessed
COUNTED_BYTES = 64 << 10  # an input up to this size is small enough to be read twice
LEAST_SPLIT_BYTES = 4 << 10  # a smaller split is not worth its overhead, however many are asked for
OTHER_FORMATS = (  # how files begin that are no text, and what to do with them
    (b"PAR1", "it is a Parquet file: use ReadFromParquet"),
    (b"\x1f\x8b", "it is compressed with gzip: give it a name that ends in .gz"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstd: give it a name that ends in .zst"),
    (b"PK\x03\x04", "it is a zip archive, or a spreadsheet: export the table as CSV, or unpack it"),
)


@dataclass(frozen=True, slots=True)
class LineRange:
    """The lines of a file that start at bytes start to stop. A compressed file is one range."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LineRun:
    """Whole lines that stand together in a file, from a byte of it (counted after decompression)."""

    path: str
    offset: int
    data: bytes

    def text(self) -> str:
        """The lines as text, without the byte order mark of a file. Raises InputError for what is not UTF-8."""
        data = self.data
        if self.offset == 0 and data.startswith(BYTE_ORDER_MARK):
            data = data[len(BYTE_ORDER_MARK) :]
        try:
            return data.decode()
        except UnicodeDecodeError as exc:
            line_start = data.rfind(b"\n", 0, exc.start) + 1 + len(self.data) - len(data)
            remedy = "convert the file to UTF-8, for example with iconv"
            if self.offset == 0:
                remedy = next((told for magic, told in OTHER_FORMATS if data.startswith(magic)), remedy)
            raise InputError(
                f"{self.path}, in the line at byte {self.offset + line_start}: not UTF-8 ({exc.reason}: "
                f"0x{data[exc.start]:02x}); {remedy}"
            ) from exc

    def lines(self) -> list[str]:
        """The lines without their ends."""
        text = self.text()
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        lines = text.split("\n")
        return lines if lines[-1] else lines[:-1]

    def offset_of(self, line: int) -> int:
        """The byte where the n-th line of the run starts, counted from 0."""
        return self.offset + sum(len(one) + 1 for one in self.data.split(b"\n", line)[:line])


def cut_for(files: Sequence[InputFile], goal: SplitGoal) -> list[tuple[LineRange, ...]]:
    """Splits as they are asked for. How many lines there are is guessed."""
    total = sum(file.size for file in files)
    if total > LEAST_SPLIT_BYTES:
        goal = goal.for_rows(round(total / _line_bytes(files)))
    return cut_lines(files, goal.target_bytes(total, LEAST_SPLIT_BYTES))


def cut_lines(files: Iterable[InputFile], target: int) -> list[tuple[LineRange, ...]]:
    """Splits of about `target` bytes: large plain files in even ranges, small ones together, empty ones left out."""
    return pack((piece for file in files for piece in _ranges(file, target)), target)


def _ranges(file: InputFile, target: int) -> Iterator[tuple[LineRange, int]]:
    count = -(-file.size // target)
    if file.compression is not None:
        count = min(1, count)
    for i in range(count):
        start, stop = file.size * i // count, file.size * (i + 1) // count
        yield LineRange(file.path, start, stop), stop - start


def _line_bytes(files: Sequence[InputFile]) -> float:
    """About how long a line is: the mean of those at the beginning of the first file that can be cut."""
    for file in files:
        if file.size and file.compression is None:
            with contextlib.suppress(OSError), open_input(file.path) as opened:  # whoever reads it for the run will say so
                sample = opened.read(SAMPLE_BYTES)
                return (sample.rfind(b"\n") + 1 or len(sample)) / (sample.count(b"\n") or 1)
    return 1.0


def line_runs(piece: LineRange) -> Iterator[LineRun]:
    """The lines of a range, in order, as runs of about CHUNK_BYTES: never the whole file in memory."""
    try:
        with open_input(piece.path) as file:
            stop = piece.stop if compression_of(piece.path) is None else sys.maxsize
            for offset, data in _whole_lines(file, piece.start, stop):
                yield LineRun(piece.path, offset, data)
    except OSError as exc:
        if not is_bad_data(exc):
            raise
        raise InputError(f"{piece.path}: cannot be decompressed: {exc}; the file is damaged or misnamed") from exc


def _whole_lines(file: Any, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Bytes from the first line that starts at `start` or later to the end of the last one that starts before `stop`.

    A line starts at 0 and after every newline. So what is ours begins after the first newline at start - 1 or later,
    and ends with the first newline at stop - 1 or later: one range ends where the next begins, by the same rule.
    """
    at = _seek_line(file, start, stop) if start else 0  # the place in the file of the next chunk
    kept: list[bytes] = []  # the beginning of a line whose end has not been read
    kept_at = at
    while (at < stop or kept) and (chunk := file.read(CHUNK_BYTES)):
        end = chunk.find(b"\n", max(0, stop - 1 - at)) + 1 if at + len(chunk) >= stop else 0
        cut = end or chunk.rfind(b"\n") + 1
        if cut:
            yield kept_at, b"".join([*kept, chunk[:cut]])
            kept, kept_at = [], at + cut
        if end:
            return
        if cut < len(chunk):
            kept.append(chunk[cut:])
        at += len(chunk)
    if kept:
        yield kept_at, b"".join(kept)


def _seek_line(file: Any, start: int, stop: int) -> int:
    """Go to the first line that starts at `start` or later, and return its place; `stop` or more if none is ours."""
    at: int = start - 1
    file.seek(at)
    while at < stop and (chunk := file.read(CHUNK_BYTES)):
        found: int = chunk.find(b"\n") + 1
        if found:
            file.seek(at + found)
            return at + found
        at += len(chunk)
    return max(at, stop)


def blocks_of(parsed: Iterable[tuple[list[T], int]]) -> Iterator[list[T]]:
    """Lists of rows, each with about its size in bytes, as blocks of at most MAX_ROWS rows and about MAX_BYTES."""
    rows: list[T] = []
    size = 0
    for more, nbytes in parsed:
        rows = rows + more if rows else more
        size += nbytes
        full = len(rows) // MAX_ROWS * MAX_ROWS
        for start in range(0, full, MAX_ROWS):
            yield rows[start : start + MAX_ROWS]
        if full:
            rows, size = rows[full:], nbytes
        if rows and size >= MAX_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def count_small(source: Source[Any]) -> int | None:
    """The rows of a small input, which is read for that: so a small run need not start processes."""
    files = source.inputs()
    if sum(file.size for file in files) > COUNTED_BYTES or any(file.compression for file in files):
        return None
    return sum(row_count(block) for split in source.splits(SplitGoal()) for block in source.read(split))


class TextSource(FileSource[str]):
    """The lines of text files."""

    def splits(self, goal: SplitGoal) -> Sequence[tuple[LineRange, ...]]:
        return cut_for([file for file in self.inputs() if self.is_wanted(file.path)], goal)

    def paths_of(self, split: tuple[LineRange, ...]) -> set[str]:
        return {piece.path for piece in split}

    def count(self) -> int | None:
        return count_small(self)

    def read(self, split: tuple[LineRange, ...]) -> Iterator[Block]:
        return blocks_of((run.lines(), len(run.data)) for piece in split for run in line_runs(piece))


class TextWriter(FileWriter[Any]):
    """Writes one part: each row, a text, on a line of its own."""

    def add(self, block: Block) -> None:
        rows = rows_of(block)
        try:
            text = "\n".join(rows)
        except TypeError:
            rows = [row if isinstance(row, str) else _as_text(row) for row in rows]
            text = "\n".join(rows)
        try:
            data = text.encode()
        except UnicodeEncodeError as exc:
            raise OutputError(_unfit_text(rows)) from exc
        if text.count("\n") >= len(rows) or "\r\n" in text or text.endswith("\r"):
            raise OutputError(_unfit_text(rows))
        self.write_text(data + b"\n")
        self.rows_written += data.count(b"\n") + 1


def _as_text(row: object) -> str:
    """A row that is no text, as Beam writes it: bytes as they are, anything else by str()."""
    if not isinstance(row, bytes):
        return str(row)
    try:
        return row.decode()
    except UnicodeDecodeError as exc:
        raise OutputError(f"WriteToText: the bytes {row[:60]!r} are not UTF-8: decode them first with ps.Map(...)") from exc


def _unfit_text(rows: list[str]) -> str:
    for row in rows:
        if "\n" in row or row.endswith("\r"):
            return (
                f"WriteToText: the row {row[:60]!r} has a line end in it and would not be read back as it is: "
                "put ps.Map(lambda s: s.replace('\\r', ' ').replace('\\n', ' ')) before it, or use WriteToJsonl"
            )
    return "WriteToText: a row has lone surrogates, which UTF-8 cannot hold: clean it first, or use WriteToJsonl"


class TextSink(FileSink[Any]):
    """Text files."""

    suffix = ".txt"

    def open(self, part: Part) -> TextWriter:
        return TextWriter(self.places(part))


class ReadFromText(ReadFiles[str]):
    """One row for each line, without its line end; blank lines are rows too.

    `pattern` is a file, a folder or a glob, local or on any store that fsspec knows. Files ending in .gz or .zst are
    decompressed, each read as one piece; others are read in byte ranges. The text must be UTF-8.
    """

    def __init__(self, pattern: str | os.PathLike[str]) -> None:
        super().__init__(TextSource(checked_path(pattern, "ReadFromText")))


class WriteToText(WriteFiles[Any]):
    """Each row as one line of UTF-8 in `path`/part-00000.txt and so on, in order. What is no text is written by str(row).
    A row with a line end in it is an error.

    An output that is there already is an error, unless `overwrite` is set: then a run that succeeds replaces it.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        super().__init__(TextSink(checked_path(path, "WriteToText"), overwrite))
