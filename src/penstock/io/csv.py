"""CSV files, each read as one piece: a quoted field may hold line ends, so a file cannot be cut without reading it.

Where the user says that none does, files are cut like other lines. A field that does all the same is an error, wherever the
file was cut: its record ends on another line than it begins on, or does not end in its piece.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from penstock.blocks import MAX_BYTES, Block, rows_of
from penstock.errors import InputError, OutputError, UsageError
from penstock.io.files import checked_path, pack, short_name
from penstock.io.lines import LineRange, blocks_of, count_small, cut_for, line_runs
from penstock.io.parts import FilePart, FileSink, FileWriter, Places, WriteFiles
from penstock.io.records import LEAVES, as_lists, checked_names, listed, named_fields, plain
from penstock.io.sink import Part
from penstock.io.source import FileSource, ReadFiles, SplitGoal
from penstock.rows import PredictionResult

MAX_FIELD_CHARS = 64 << 20  # a longer field is a quote that was never closed
ROWS_AT_ONCE = 256
NO_CELLS = (dict, list, set, frozenset, range, bytes, bytearray, memoryview)  # what str() gives of them is no value


@dataclass(frozen=True, slots=True)
class CsvSplit:
    """Whole files, or ranges of them, with the columns that all of them must have."""

    files: tuple[LineRange, ...]
    columns: tuple[str, ...]
    columns_from: str  # where those names were found
    multiline: bool  # fields may hold line ends: these are whole files


class CsvSource(FileSource[dict[str, str]]):
    """The rows of CSV files, as dicts of text."""

    def __init__(self, pattern: str, delimiter: str, names: tuple[str, ...] | None, multiline: bool) -> None:
        super().__init__(pattern)
        self.delimiter = delimiter
        self.multiline = multiline
        self.names = names  # None: the first row of each file has them

    def splits(self, goal: SplitGoal) -> Sequence[CsvSplit]:
        files = [file for file in self.inputs() if file.size]
        columns, found_in = self._columns([LineRange(file.path, 0, file.size) for file in files])
        files = [file for file in files if self.is_wanted(file.path)]
        if self.multiline:
            pieces = [(LineRange(file.path, 0, file.size), file.size) for file in files]
            packed = pack(pieces, goal.target_bytes(sum(file.size for file in files)))
        else:
            packed = cut_for(files, goal)
        return [CsvSplit(each, columns, found_in, self.multiline) for each in packed]

    def paths_of(self, split: CsvSplit) -> set[str]:
        return {file.path for file in split.files}

    def read(self, split: CsvSplit) -> Iterator[Block]:
        return blocks_of(group for file in split.files for group in self._groups(file, split))

    def count(self) -> int | None:
        return count_small(self)

    def _columns(self, files: Sequence[LineRange]) -> tuple[tuple[str, ...], str]:
        if self.names is not None:
            return self.names, "header="
        for file in files:
            if header := next(self._records(file, self.multiline), None):
                return tuple(header[1]), file.path
        return (), self.pattern

    def _groups(self, file: LineRange, split: CsvSplit) -> Iterator[tuple[list[dict[str, str]], int]]:
        """The rows of one file, a few hundred at a time, with about their bytes."""
        records = self._records(file, split.multiline)
        columns = list(split.columns)
        if self.names is None and file.start <= _first_line(file.path):
            columns = self._header(records, file.path, split)
        elif self.names is None:
            beginning = self._records(LineRange(file.path, 0, sys.maxsize), split.multiline)
            columns = self._header(beginning, file.path, split)
        rows: list[dict[str, str]] = []
        size = 0
        for number, record in records:
            if len(record) != len(columns):
                raise InputError(
                    f"{_place(file, number)}: {len(record)} columns, expected {len(columns)} ({listed(columns)}); "
                    f"correct the line, or check delimiter={self.delimiter!r}"
                )
            rows.append(dict(zip(columns, record, strict=True)))
            size += sum(map(len, record)) + 64 * len(record)
            if len(rows) == ROWS_AT_ONCE or size > MAX_BYTES:
                yield rows, size
                rows, size = [], 0
        yield rows, size

    def _header(self, records: Iterator[tuple[int, list[str]]], path: str, split: CsvSplit) -> list[str]:
        header = next(records, (0, list[str]()))[1]
        if len(set(header)) < len(header):
            raise InputError(f"{path}: the header names a column twice ({listed(header)}); pass header=[names]")
        if header and set(header) != set(split.columns):
            raise InputError(
                f"{path} has the columns {listed(header)}, but {split.columns_from} has {listed(split.columns)}; "
                "read them apart, or pass header=[names] if the files have no header"
            )
        return header

    def _records(self, file: LineRange, multiline: bool) -> Iterator[tuple[int, list[str]]]:
        """Every record but blank lines, with the number of its last line."""
        if csv.field_size_limit() < MAX_FIELD_CHARS:
            csv.field_size_limit(MAX_FIELD_CHARS)  # of the whole process; the default is 128 KiB
        reader = csv.reader(_lines(file), delimiter=self.delimiter, strict=True)
        allowed = "" if multiline else ", and without line breaks (or pass multiline=True)"
        try:
            for number, record in enumerate(reader, start=1):
                if reader.line_num != number and not multiline:
                    raise csv.Error("a field continues on the next line")
                if record:
                    yield reader.line_num, record
        except csv.Error as exc:
            raise InputError(
                f"{_place(file, reader.line_num)}: not CSV: {exc}; "
                f'expected quoted fields as "...", with quotes inside them doubled{allowed}'
            ) from exc


def _place(file: LineRange, line: int) -> str:
    return f"{file.path}, line {line}" + (f" of those from byte {file.start:,} on" if file.start else "")


def _first_line(path: str) -> int:
    """The byte at which the first line stands that is not blank."""
    for run in line_runs(LineRange(path, 0, sys.maxsize)):
        if rest := run.data.lstrip(b"\r\n"):
            return run.offset + len(run.data) - len(rest)
    return sys.maxsize


def _lines(file: LineRange) -> Iterator[str]:
    """Lines with their ends, as csv.reader wants them."""
    for run in line_runs(file):
        text = run.text()
        *lines, last = text.split("\n")
        for line in lines:
            yield line + "\n"
        if last:
            yield last


class CsvWriter(FileWriter[Any]):
    """A part with a header. The columns are those given, or those of the first row."""

    def __init__(self, places: Places, columns: tuple[str, ...] | None) -> None:
        super().__init__(places)
        self._columns = columns
        self._names: set[str] = set()  # of the header, once it is written
        self._lines: list[str] = []
        # The end "\r\n" makes csv quote fields that hold either; it is written as "\n".
        self._csv = csv.writer(SimpleNamespace(write=self._lines.append), lineterminator="\r\n")

    def add(self, block: Block) -> None:
        records = [named_fields(row, "WriteToCsv") for row in rows_of(block)]
        if self._columns is None:
            self._columns = tuple(records[0])
        if not self._names:
            self._names = set(self._columns)
            self._csv.writerow(self._columns)
        header = len(self._lines)
        for record in records:
            self._csv.writerow(self._values(record, self._columns))
        self.rows_written += len(self._lines) - header
        try:
            data = "".join(line[:-2] + "\n" for line in self._lines).encode()
        except UnicodeEncodeError as exc:
            raise OutputError(f"WriteToCsv: text that UTF-8 cannot hold ({exc.reason}): clean it first") from exc
        self._lines.clear()
        self.write_text(data)

    def close(self) -> FilePart | None:
        part = super().close()
        return part and part._replace(schema=self._columns)

    def _values(self, record: dict[Any, Any], columns: Sequence[str]) -> list[Any]:
        if record.keys() != self._names:
            missing, extra = [c for c in columns if c not in record], [c for c in record if c not in columns]
            raise OutputError(
                f"WriteToCsv: a row has other columns than {listed(columns)}: missing {listed(missing)}, "
                f"not expected {listed(extra)}; make all rows alike in a step before it"
            )
        return [_cell(column, record[column]) for column in columns]


def _has_no_text(kind: type) -> bool:
    told: tuple[object, object] = kind.__str__, kind.__repr__
    return told == (object.__str__, object.__repr__)


def _cell(column: str, value: Any) -> Any:
    if type(value) in LEAVES:
        return value
    value = plain(value, as_lists)
    if isinstance(value, NO_CELLS) or _has_no_text(type(value)):
        is_answer = column in PredictionResult._fields
        raise OutputError(
            f"WriteToCsv: column {column!r} holds a {type(value).__name__}, which CSV has no way to write: "
            "take it apart in a step before, or use WriteToJsonl or WriteToParquet"
            + ("; of a model's answers, name the new column with output_column= on its handler" if is_answer else "")
        )
    return value


class CsvSink(FileSink[Any]):
    """CSV files, each part with a header. `columns`: which, and in this order; None: those of the part's first row. All
    parts have the same columns: readers of the folder expect that."""

    suffix = ".csv"

    def __init__(self, path: str, overwrite: bool, columns: tuple[str, ...] | None) -> None:
        super().__init__(path, overwrite)
        self.columns = columns
        self._first: FilePart | None = None  # whose columns all others have

    def begin(self, fs: Any, folder: str, run: str) -> None:
        super().begin(fs, folder, run)
        self._first = None

    def unify(self, tokens: Sequence[FilePart]) -> Sequence[FilePart]:
        for token in tokens:
            self._first = self._first or token
            here, others = token.schema, self._first.schema
            if set(here) != set(others):
                again = "" if token.xxh128 is None else ", and start over with fresh=True (--fresh)"
                raise OutputError(
                    f"{self.describe()}: {short_name(token.final)} has other columns than {short_name(self._first.final)}: "
                    f"missing {listed(c for c in others if c not in here)}, not expected "
                    f"{listed(c for c in here if c not in others)}; make all rows alike in a step before it{again}"
                )
        return tokens

    def open(self, part: Part) -> CsvWriter:
        return CsvWriter(self.places(part), self.columns)


class ReadFromCsv(ReadFiles[dict[str, str]]):
    """One dict of text for each record: {column: field}. Blank lines are skipped. Files are found as by ReadFromText.

    The names of the columns are in the first record of each file, the same in all files, or given as `header=[names]`
    for files without a header. Fields are quoted with '"', and may hold line ends: so each file is one split, and
    many files are read at the same time, one large file is not. `multiline=False` says that no field holds a line end (it is
    an error if one does), and a large file is cut into pieces.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        delimiter: str = ",",
        header: bool | Sequence[str] = True,
        multiline: bool = True,
    ) -> None:
        path = checked_path(pattern, "ReadFromCsv")
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
            raise UsageError(f"ReadFromCsv(delimiter={delimiter!r}): expected one character, such as ',' or '\\t'")
        if not isinstance(multiline, bool):
            raise UsageError(f"ReadFromCsv(multiline={multiline!r}): expected True or False")
        names = None if header is True else checked_names(header, "ReadFromCsv(header", "True, or a list of names")
        super().__init__(CsvSource(path, delimiter, names, multiline))


class WriteToCsv(WriteFiles[Any]):
    """Each row (a dict, NamedTuple or dataclass) as one record in `path`/part-00000.csv and so on, in order.

    Every part has a header: `columns`, or else the fields of the part's first row. All rows must have just these, in all
    parts.
    None is written as nothing, like empty text; other values as str() tells them. `overwrite` as in WriteToText.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, overwrite: bool = False
    ) -> None:
        names = None if columns is None else checked_names(columns, "WriteToCsv(columns")
        super().__init__(CsvSink(checked_path(path, "WriteToCsv"), overwrite, names))
