"""Writing Parquet: rows or tables to row groups of a good size, in parts of one schema."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.blocks import Block
from penstock.errors import OutputError
from penstock.io.files import short_name, store_of
from penstock.io.parts import FilePart, FileSink, FileWriter, Places
from penstock.io.sink import Part

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS, GROUP_BYTES = 128 << 10, 32 << 20  # when a row group is written


class ParquetWriter(FileWriter[Any]):
    """A part in row groups of a good size. Its schema is the one given, or else what fits the first group."""

    def __init__(self, places: Places, schema: pa.Schema | None, compression: str) -> None:
        super().__init__(places)
        self._schema = schema
        self._is_given = schema is not None
        self._compression: Any = compression
        self._kept: list[pa.Table] = []
        self._kept_rows = self._kept_bytes = 0
        self._parquet: Any = None
        self._footer: list[Any] = []  # once it is written

    def add(self, block: Block) -> None:
        from penstock.io.parquet_rows import checked_table, fitted, table_of_rows

        rounds = self._is_given  # a float type that the user names is what floats are to become
        table = table_of_rows(block, self._schema, rounds=rounds) if isinstance(block, list) else checked_table(block)
        if self._schema is not None:
            table = fitted(table, self._schema, rounds=rounds)
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

    def close(self) -> FilePart | None:
        part = super().close()
        return part and part._replace(schema=packed(self._schema))

    def abort(self) -> None:
        if self._parquet is not None:
            with contextlib.suppress(Exception):  # what it still writes is thrown away
                self._parquet.close()
        super().abort()

    def _write_group(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from penstock.io.parquet_rows import joined

        table = joined(self._kept)
        try:
            if self._parquet is None:
                self._schema = table.schema if self._schema is None else self._schema
                self._parquet = pq.ParquetWriter(
                    self.file,
                    self._schema,
                    compression=self._compression,
                    use_dictionary=_repeating(self._schema),
                    metadata_collector=self._footer,
                )
            self._parquet.write_table(table, row_group_size=GROUP_ROWS)
        except pa.ArrowException as exc:
            raise OutputError(
                f"WriteToParquet: rows cannot be written: {exc}; pass another schema=pyarrow.schema(...)"
            ) from exc
        self._kept, self._kept_rows, self._kept_bytes = [], 0, 0


def _repeating(schema: pa.Schema) -> list[str]:
    """The columns whose values may repeat: a dictionary of floats, or of embeddings, costs far more than it saves."""
    import pyarrow.types as types

    def repeats(kind: Any) -> bool:
        return not (types.is_floating(kind) or types.is_nested(kind))

    return [field.name for field in schema if repeats(field.type)]


class ParquetSink(FileSink[Any]):
    """Parts of one schema: what readers of the folder take for the schema of all is that of one of them."""

    suffix = ".parquet"
    takes_columns = True

    def __init__(self, path: str, overwrite: bool, schema: pa.Schema | None, compression: str) -> None:
        super().__init__(path, overwrite)
        self.schema = schema
        self.compression = compression
        self._columns: dict[str, tuple[pa.DataType, str]] = {}  # of the parts so far: each with a part that has its type

    def prepare(self, run: str) -> dict[str, int]:
        self._columns = {}
        return super().prepare(run)

    def resume(self, run: str, note: Any, published: Sequence[Mapping[str, Any]]) -> None:
        self._columns = {}
        super().resume(run, note, published)

    def open(self, part: Part) -> ParquetWriter:
        return ParquetWriter(self.places(part), self.schema, self.compression)

    def unify(self, tokens: Sequence[FilePart]) -> list[FilePart]:
        """A part without a column, or without any value in it, is rewritten with the type that the column has in others."""
        schemas: dict[bytes, pa.Schema] = {}
        for token in tokens:
            if token.schema is not None and token.schema not in schemas:
                schemas[token.schema] = unpacked(token.schema)
                self._add_columns(schemas[token.schema], token)
        wanted = {name: kind for name, (kind, _) in self._columns.items()}
        fitting = {key for key, schema in schemas.items() if dict(zip(schema.names, schema.types, strict=True)) == wanted}
        return [token if token.schema is None or token.schema in fitting else self._rewritten(token) for token in tokens]

    def _add_columns(self, schema: pa.Schema, token: FilePart) -> None:
        from penstock.io.arrow_types import merged

        here = short_name(token.final)
        for field in schema:
            before, there = self._columns.get(field.name, (field.type, here))
            kind = merged(before, field.type)
            if kind is None:
                again = "" if token.xxh128 is None else ", and start over with fresh=True (--fresh)"
                raise OutputError(
                    f"{self.describe()}: column {field.name!r} is {before} in {there} and {field.type} in {here}, and one "
                    f"output has one schema: pass schema=pyarrow.schema(...) with a type that holds all of its values{again}"
                )
            self._columns[field.name] = kind, (there if kind == before else here)

    def _rewritten(self, token: FilePart) -> FilePart:
        """The part in the schema of all, aside under another name. Its rows are read a row group at a time."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        fs, aside = store_of(token.aside, OutputError)
        fs.invalidate_cache()
        inner = aside if fs.exists(aside) else store_of(token.final, OutputError)[1]
        fs.makedirs(aside.rpartition("/")[0], exist_ok=True)
        new = f"{token.aside.removesuffix(self.suffix)}-again{self.suffix}"
        with fs.open(inner, "rb") as file:
            part = pq.ParquetFile(file)
            columns = [(name, kind) for name, (kind, _) in self._columns.items()]
            schema = pa.schema(columns, metadata=part.schema_arrow.metadata)
            writer = ParquetWriter(Places(new, token.final, token.xxh128 is not None), schema, self.compression)
            for group in range(part.num_row_groups):
                writer.write(part.read_row_group(group))
        made = writer.close()
        assert made is not None, "a part has rows"
        return made._replace(again=True)


def packed(schema: Any) -> bytes:
    """A schema for a token, of which there may be many thousands."""
    return zlib.compress(schema.remove_metadata().serialize().to_pybytes())


def unpacked(data: bytes) -> pa.Schema:
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(zlib.decompress(data)))
