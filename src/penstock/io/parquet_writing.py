"""Writing Parquet: rows or tables to row groups of a good size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.blocks import Block
from penstock.errors import OutputError
from penstock.io.parts import FileSink, FileWriter, Places
from penstock.io.records import named_fields, plain
from penstock.io.sink import Part

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS, GROUP_BYTES = 128 << 10, 32 << 20  # when a row group is written


class ParquetWriter(FileWriter[Any]):
    """A part in row groups of a good size. Its schema is the one given, or else what fits the first group."""

    def __init__(self, places: Places, schema: pa.Schema | None, compression: str) -> None:
        super().__init__(places)
        self._schema = schema
        self._compression: Any = compression
        self._kept: list[pa.Table] = []
        self._kept_rows = self._kept_bytes = 0
        self._parquet: Any = None
        self._footer: list[Any] = []  # once it is written

    def add(self, block: Block) -> None:
        table = _table_of_rows(block, self._schema) if isinstance(block, list) else block
        if self._schema is not None:
            table = _fitted(table, self._schema)
        self._kept.append(table)
        self._kept_rows += table.num_rows
        self._kept_bytes += table.nbytes
        if self._kept_rows >= GROUP_ROWS or self._kept_bytes >= GROUP_BYTES:
            self._write_group()

    def end(self) -> None:
        if self._kept:
            self._write_group()
        if self._parquet is not None:
            self._parquet.close()
            self.rows_written = self._footer[0].num_rows

    def abort(self) -> None:
        if self._parquet is not None:
            with contextlib.suppress(Exception):  # what it still writes is thrown away
                self._parquet.close()
        super().abort()

    def _write_group(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pa.concat_tables(self._kept, promote_options="permissive")
            if self._parquet is None:
                self._schema = self._schema or table.schema
                self._parquet = pq.ParquetWriter(
                    self.file,
                    self._schema,
                    compression=self._compression,
                    use_dictionary=_repeating(self._schema),
                    metadata_collector=self._footer,
                )
            self._parquet.write_table(table, row_group_size=GROUP_ROWS)
        except pa.ArrowException as exc:
            raise OutputError(f"WriteToParquet: rows do not fit together: {exc}; pass schema=...") from exc
        self._kept, self._kept_rows, self._kept_bytes = [], 0, 0


def _repeating(schema: pa.Schema) -> list[str]:
    """The columns whose values may repeat: a dictionary of floats, or of embeddings, costs far more than it saves."""
    import pyarrow.types as types

    def repeats(kind: Any) -> bool:
        return not (types.is_floating(kind) or types.is_nested(kind))

    return [field.name for field in schema if repeats(field.type)]


def _table_of_rows(rows: list[Any], schema: pa.Schema | None) -> pa.Table:
    import pyarrow as pa

    records = [named_fields(row, "WriteToParquet") for row in rows]
    names = dict.fromkeys(records[0])
    if any(record.keys() != names.keys() for record in records):
        names = dict.fromkeys(name for record in records for name in record)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise OutputError(f"WriteToParquet: columns are named by str, got {listed(odd)}: rename them in a step before it")
    types = {} if schema is None else {field.name: field.type for field in schema}
    columns = {}
    for name in names:
        values = [plain(record.get(name), _arrow_value) for record in records]
        try:
            columns[name] = pa.array(values, type=types.get(name))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as exc:
            raise OutputError(
                f"WriteToParquet: column {name!r}: {exc}; expected values of one type that Arrow knows: "
                "put a ps.Map before it that makes them so, or pass schema=pyarrow.schema(...)"
            ) from exc
    return pa.table(columns)


def _arrow_value(value: Any) -> Any:
    """An array or tensor as what Arrow takes, its type of number kept: 1-D arrays, lists of them, NumPy scalars."""
    if hasattr(value, "detach"):
        with contextlib.suppress(TypeError):  # NumPy has no bfloat16
            value = value.detach().cpu().numpy()
    if type(value).__module__ != "numpy" or value.dtype == object:
        return plain(value.tolist(), _arrow_value)
    if value.ndim > 1:
        return [_arrow_value(item) for item in value]
    return value[()] if value.ndim == 0 and hasattr(value, "__array_interface__") else value


def _fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table in the columns and types of the schema; a missing column is null."""
    import pyarrow as pa

    if extra := [name for name in table.column_names if name not in schema.names]:
        raise OutputError(
            f"WriteToParquet: rows have the column {listed(extra)}, which earlier rows or schema= do not have "
            f"({listed(schema.names)}); drop it in a step before, or pass schema=pyarrow.schema(...) with it"
        )
    columns = []
    for field in schema:
        column = table.column(field.name) if field.name in table.column_names else pa.nulls(table.num_rows)
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowException as exc:
            raise OutputError(
                f"WriteToParquet: column {field.name!r} holds {column.type}, expected {field.type}: {exc}; "
                "make the rows alike in a step before, or pass schema=pyarrow.schema(...)"
            ) from exc
    return pa.Table.from_arrays(columns, schema=schema)


class ParquetSink(FileSink[Any]):
    suffix = ".parquet"

    def __init__(self, path: str, overwrite: bool, schema: pa.Schema | None, compression: str) -> None:
        super().__init__(path, overwrite)
        self.schema = schema
        self.compression = compression

    def open(self, part: Part) -> ParquetWriter:
        return ParquetWriter(self.places(part), self.schema, self.compression)


def listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names)) or "none"
