"""Parquet files: columns in, columns out. Splits are row groups, or ranges of rows inside a large one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from penstock.blocks import Block
from penstock.errors import InputError, UsageError
from penstock.io import files
from penstock.io.parquet_writing import ParquetSink
from penstock.io.parts import WriteFiles
from penstock.io.records import checked_names, listed
from penstock.io.source import FileSource, ReadFiles, SplitGoal

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_ROWS, BLOCK_BYTES = 64 << 10, 16 << 20  # what read() yields at most, about
BATCH_ROWS = 4096  # decoded at once, where the width of a row is not known: text that repeats is far larger than in the file
FOOTER_THREADS = 16
MOST_RANGES = 8  # of one row group, if no more are asked for: every worker may have to read the group from its start
ENOUGH_GROUPS = 8  # for each split that is worked on at a time: where there are so many, only huge ones are cut
COMPRESSIONS = ("brotli", "gzip", "lz4", "none", "snappy", "zstd")


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows start to stop of one row group."""

    path: str
    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ParquetSplit:
    """Ranges of rows, and the columns that all files have in common."""

    ranges: tuple[RowRange, ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Footer:
    """What a file says of itself: its columns that are wanted, and the rows and bytes of each row group."""

    path: str
    schema: pa.Schema
    groups: tuple[tuple[int, int], ...]

    def byte_size(self) -> int:
        """What its rows take in memory, about, and at least: a file says of values that repeat what they take in it."""
        width = sum(map(_least_width, self.schema.types))
        return sum(max(size, rows * width) for rows, size in self.groups)


class ParquetSource(FileSource[dict[str, Any]]):
    """The rows of Parquet files, as tables. Footers are read in the user's process, again if files change."""

    gives_columns = True

    def __init__(self, pattern: str, columns: tuple[str, ...] | None) -> None:
        super().__init__(pattern)
        self.columns = columns
        self._known: tuple[Sequence[files.InputFile], list[Footer]] | None = None
        self._open: _OpenFile | None = None  # in a worker: what was read last, since the next split often follows it

    def splits(self, goal: SplitGoal) -> Sequence[ParquetSplit]:
        footers = self._footers()
        schema = _common_schema(footers)
        footers = [footer for footer in footers if self.is_wanted(footer.path)]
        goal = goal.for_rows(sum(rows for footer in footers for rows, _ in footer.groups))
        target = goal.target_bytes(sum(size for footer in footers for _, size in footer.groups), least=1)
        most = max(goal.min_splits, MOST_RANGES)
        groups = sum(len(footer.groups) for footer in footers)
        largest = goal.max_bytes if groups >= ENOUGH_GROUPS * goal.at_once else target
        pieces = (piece for footer in footers for piece in _ranges(footer, largest, most))
        return [ParquetSplit(packed, schema) for packed in files.pack(pieces, target)]

    def paths_of(self, split: ParquetSplit) -> set[str]:
        return {piece.path for piece in split.ranges}

    def read(self, split: ParquetSplit) -> Iterator[Block]:
        file, self._open = self._open, None
        for path, ranges in groupby(split.ranges, key=attrgetter("path")):
            with _told(path):
                if file is None or file.path != path:
                    file = _OpenFile(path)
                yield from _tables(file, ranges, split.schema)
        self._open = file

    def count(self) -> int | None:
        return sum(rows for footer in self._footers() for rows, _ in footer.groups)

    def byte_size(self) -> int:
        return sum(footer.byte_size() for footer in self._footers())

    def _footers(self) -> list[Footer]:
        from concurrent.futures import ThreadPoolExecutor

        found = self.inputs()
        if self._known is None or self._known[0] != found:
            try:
                with ThreadPoolExecutor(FOOTER_THREADS) as pool:
                    self._known = found, list(pool.map(self._footer, found))
            except OSError as exc:
                raise InputError(f"{self.pattern}: cannot be read: {exc}; check the right to read it") from exc
        return self._known[1]

    def _footer(self, file: files.InputFile) -> Footer:
        import pyarrow as pa

        with _told(file.path):
            parquet = _OpenFile(file.path).parquet
            metadata, schema = parquet.metadata, parquet.schema_arrow
        wanted = schema.names if self.columns is None else self.columns
        if twice := sorted({name for name in wanted if schema.names.count(name) > 1}):
            raise InputError(
                f"{file.path}: has several columns of the name {listed(twice)}; write it again with different names"
                + ("" if self.columns else ", or choose others with columns=[...]")
            )
        if not schema.names and _has_rows(parquet):
            raise InputError(
                f"{file.path}: has rows and no columns, so there is nothing to read; write it again with a column"
            )
        if missing := [name for name in wanted if name not in schema.names]:
            raise InputError(f"{file.path}: has no column {listed(missing)}; its columns are {listed(schema.names)}")
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = tuple((group.num_rows, _group_bytes(group, self.columns)) for group in groups)
        return Footer(file.path, pa.schema([(name, schema.field(name).type) for name in wanted]), sizes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None, "_open": None}


def _least_width(kind: pa.DataType) -> int:
    """Bytes of one value, at least; of text and lists, those of its place."""
    try:
        return -(-int(kind.bit_width) // 8)
    except ValueError:
        return 4


def _width(kind: pa.DataType) -> int | None:
    """Bytes of one value; None where they differ."""
    import pyarrow.types as types

    if types.is_fixed_size_list(kind):
        inner = _width(kind.value_type)
        return None if inner is None else inner * kind.list_size
    return _least_width(kind) if types.is_primitive(kind) or types.is_decimal(kind) else None


def _has_rows(parquet: Any) -> bool:
    """Whether a file without columns has rows: by its own word, or by that of pandas, whose plain index is no column."""
    told = json.loads((parquet.schema_arrow.metadata or {}).get(b"pandas", b"{}"))
    indexes = [index for index in told.get("index_columns", ()) if isinstance(index, dict) and index.get("kind") == "range"]
    return bool(parquet.metadata.num_rows or any(index["start"] != index["stop"] for index in indexes))


def _group_bytes(group: Any, columns: tuple[str, ...] | None) -> int:
    if columns is None:
        return int(group.total_byte_size)
    chunks = [group.column(i) for i in range(group.num_columns)]
    wanted = set(columns)
    return sum(c.total_uncompressed_size for c in chunks if wanted & {c.path_in_schema, c.path_in_schema.split(".")[0]})


def _common_schema(footers: Sequence[Footer]) -> pa.Schema:
    """The schema of all files; a column without any value in one file fits every type."""
    import pyarrow as pa

    schema = footers[0].schema
    for footer in footers[1:]:
        same_names = set(schema.names) == set(footer.schema.names)
        try:
            merged = pa.unify_schemas([schema, footer.schema], promote_options="default")
        except pa.ArrowException:
            merged = None
        if not same_names or merged is None:
            raise InputError(
                f"{footers[0].path} and {footer.path} have different columns: {_differences(schema, footer.schema)}; "
                "read them apart, or choose columns that are alike with columns=[...]"
            )
        schema = merged
    return schema


def _differences(first: pa.Schema, second: pa.Schema) -> str:
    def type_in(schema: pa.Schema, name: str) -> str:
        return str(schema.field(name).type) if name in schema.names else "missing"

    names = dict.fromkeys([*first.names, *second.names])
    pairs = [(name, type_in(first, name), type_in(second, name)) for name in names]
    return ", ".join(f"{name!r} ({one} and {other})" for name, one, other in pairs if one != other)


def _ranges(footer: Footer, target: int, most: int) -> Iterator[tuple[RowRange, int]]:
    """A file's row groups, those of more than `target` bytes in even ranges of rows, each with about its bytes."""
    for number, (rows, size) in enumerate(footer.groups):
        count = min(rows, most, max(1, -(-size // target)))
        for i in range(count):
            yield RowRange(footer.path, number, rows * i // count, rows * (i + 1) // count), size // count


class _OpenFile:
    """An open file, and how far one of its row groups was read: ranges that follow each other go on from there. It is
    closed when nobody has it any more."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq

        fs, inner = files.store_of(path, InputError)
        self.path = path
        self.parquet = pq.ParquetFile(inner if files.is_local(fs) else fs.open(inner, "rb"))
        self._reading: tuple[int, list[str]] | None = None  # the row group and its columns
        self._batches: Iterator[Any] = iter(())
        self._last: Any = None  # the batch that was read last
        self._at = 0  # the row of the group after it

    def batches(self, wanted: RowRange, names: list[str]) -> Iterator[Any]:
        if self._reading != (wanted.group, names) or wanted.start < self._at - (self._last.num_rows if self._last else 0):
            self._start(wanted.group, names)
        while True:
            if self._last is not None:
                begin = self._at - self._last.num_rows
                first, last = max(wanted.start - begin, 0), min(wanted.stop - begin, self._last.num_rows)
                if first < last:
                    yield self._last.slice(first, last - first)
            if self._at >= wanted.stop:
                return
            self._last = next(self._batches, None)
            if self._last is None:
                raise InputError(f"{self.path}: has fewer rows than it said, {self._at:,} in row group {wanted.group}")
            self._at += self._last.num_rows

    def _start(self, number: int, names: list[str]) -> None:
        import pyarrow as pa

        rows = self._rows_at_once(number, names)
        # With one CPU, a thread of Arrow's would only take turns with this one.
        in_threads = pa.cpu_count() > 1
        self._batches = iter(self.parquet.iter_batches(rows, row_groups=[number], columns=names, use_threads=in_threads))
        self._reading, self._last, self._at = (number, names), None, 0

    def _rows_at_once(self, number: int, names: list[str]) -> int:
        """How many rows are decoded together: a whole block of numbers, since every array that is made costs some time."""
        schema, group = self.parquet.schema_arrow, self.parquet.metadata.row_group(number)
        widths = [_width(schema.field(name).type) for name in names]
        known = [width for width in widths if width is not None]
        if len(known) == len(widths):
            return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, sum(known))))
        return max(1, min(BATCH_ROWS, BLOCK_BYTES * int(group.num_rows) // max(1, int(group.total_byte_size))))


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """What Arrow finds wrong with the bytes of a file is an InputError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as exc:
        if isinstance(exc, OSError) and not files.is_bad_data(exc):
            raise
        raise InputError(
            f"{path}: not a whole Parquet file: {exc}; write it again, or name Parquet files only: folder/*.parquet"
        ) from exc


def _tables(file: _OpenFile, ranges: Iterable[RowRange], schema: pa.Schema) -> Iterator[pa.Table]:
    batches: list[Any] = []
    rows = size = 0
    for batch in (batch for one in ranges for batch in file.batches(one, schema.names)):
        if batches and (rows + batch.num_rows > BLOCK_ROWS or size + batch.nbytes > BLOCK_BYTES):
            yield _table(batches, schema)
            batches, rows, size = [], 0, 0
        batches.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if batches:
        yield _table(batches, schema)


def _table(batches: list[Any], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    table = pa.Table.from_batches(batches)
    found = [(table.column(field.name), field.type) for field in schema]
    return pa.Table.from_arrays(
        [column if column.type == kind else column.cast(kind) for column, kind in found], schema=schema
    )


class ReadFromParquet(ReadFiles[dict[str, Any]]):
    """The rows of Parquet files: tables for steps that take columns, dicts for others. Files as for ReadFromText.

    `columns` reads these columns only. All files must have the same columns, with the same types.
    """

    def __init__(self, pattern: str | os.PathLike[str], *, columns: Sequence[str] | None = None) -> None:
        path = files.checked_path(pattern, "ReadFromParquet")
        names = None if columns is None else checked_names(columns, "ReadFromParquet(columns")
        super().__init__(ParquetSource(path, names))


class WriteToParquet(WriteFiles[Any]):
    """Each row (a dict, NamedTuple, dataclass, or a table's row) in `path`/part-00000.parquet and so on, in order.

    Without a `schema`, the first rows of each part decide on its columns and types: give one where parts may differ. No
    value is changed to fit, but that short float types of a schema round. A field that a row does not have is null. Arrays
    and tensors become lists, of a fixed size if all in the output have one shape and none is null. `overwrite` as in
    WriteToText.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        schema: pa.Schema | None = None,
        compression: str = "zstd",
        overwrite: bool = False,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise UsageError(f"WriteToParquet(compression={compression!r}): expected one of {listed(COMPRESSIONS)}")
        if schema is not None and not hasattr(schema, "names"):
            raise UsageError(f"WriteToParquet(schema={schema!r}): expected a pyarrow.schema(...)")
        super().__init__(ParquetSink(files.checked_path(path, "WriteToParquet"), overwrite, schema, compression))
