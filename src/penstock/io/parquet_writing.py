"""Writing Parquet: rows or tables to row groups of a good size, in parts of one schema."""

from __future__ import annotations

import base64
import contextlib
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.blocks import Block
from penstock.errors import OutputError
from penstock.io.files import is_local, short_name, store_of
from penstock.io.parts import FilePart, FileSink, FileWriter, Places
from penstock.io.sink import Part

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS, GROUP_BYTES = 128 << 10, 32 << 20  # when a row group is written
SCHEMA_KEY = "ARROW:schema"  # where Arrow keeps its schema in a file


class ParquetWriter(FileWriter[Any]):
    """A part in row groups of a good size. Its schema is the one given, or else what fits the first group; but a list has a
    fixed size only if that is one for all rows, which is known when the part ends. Until then, row groups have lists: on
    disk both are the same, and which of them it is stands in the schema at the end of the file."""

    def __init__(self, places: Places, schema: pa.Schema | None, compression: str) -> None:
        super().__init__(places)
        self._is_given = schema is not None
        self._schema = schema  # what the part says of itself
        self._group_schema = schema
        self._compression: Any = compression
        self._kept: list[pa.Table] = []
        self._kept_rows = self._kept_bytes = 0
        self._parquet: Any = None
        self._arrow_file: Any = None  # the file aside once more, as Arrow writes it itself
        self._footer: list[Any] = []  # once it is written

    def add(self, block: Block) -> None:
        from penstock.io.list_sizes import sizes_kept
        from penstock.io.parquet_rows import checked_table, fitted, table_of_rows

        rounds = self._is_given  # a float type that the user names is what floats are to become
        table = table_of_rows(block, self._group_schema, rounds=rounds) if isinstance(block, list) else checked_table(block)
        if self._group_schema is not None:
            self._schema = self._schema if self._is_given else sizes_kept(self._schema, table)
            table = fitted(table, self._group_schema, rounds=rounds)
        self._keep(table)
        if self._kept_rows >= GROUP_ROWS or self._kept_bytes >= GROUP_BYTES:
            self._write_groups(is_last=False)

    def end(self) -> None:
        if self._kept:
            self._write_groups(is_last=True)
        if self._parquet is not None:
            assert self._schema is not None
            if self._schema != self._group_schema:
                self._parquet.add_key_value_metadata({SCHEMA_KEY: base64.b64encode(self._schema.serialize())})
            self._parquet.close()
            if self._arrow_file is not None:
                self._arrow_file.close()
                self.file.seek(0, os.SEEK_END)
            self.rows_written = self._footer[0].num_rows

    def close(self) -> FilePart | None:
        part = super().close()
        return part and part._replace(schema=packed(self._schema))

    def abort(self) -> None:
        if self._parquet is not None:
            with contextlib.suppress(Exception):  # what it still writes is thrown away
                self._parquet.close()
        if self._arrow_file is not None:
            with contextlib.suppress(OSError):
                self._arrow_file.close()
        super().abort()

    def _keep(self, *tables: pa.Table) -> None:
        self._kept += tables
        self._kept_rows += sum(table.num_rows for table in tables)
        self._kept_bytes += sum(table.nbytes for table in tables)

    def _write_groups(self, *, is_last: bool) -> None:
        """Write what was kept, but for the rows after the last whole row group."""
        import pyarrow as pa

        from penstock.io.list_sizes import schema_without_sizes, sizes_kept
        from penstock.io.parquet_rows import fitted, joined

        table = joined(self._kept)
        if self._group_schema is None:
            self._schema = sizes_kept(table.schema, table)
            self._group_schema = schema_without_sizes(table.schema)
        table = fitted(table, self._group_schema, rounds=False)
        rows = max(1, min(GROUP_ROWS, GROUP_BYTES * table.num_rows // max(1, table.nbytes)))
        whole = table.num_rows if is_last else table.num_rows // rows * rows
        try:
            self._opened().write_table(table.slice(0, whole), row_group_size=rows)
        except pa.ArrowException as exc:
            raise OutputError(
                f"WriteToParquet: rows cannot be written: {exc}; pass another schema=pyarrow.schema(...)"
            ) from exc
        self._kept, self._kept_rows, self._kept_bytes = [], 0, 0
        if whole < table.num_rows:
            self._keep(table.slice(whole))

    def _opened(self) -> Any:
        import pyarrow.parquet as pq

        if self._parquet is None:
            assert self._group_schema is not None
            self._parquet = pq.ParquetWriter(
                self._target(),
                self._group_schema,
                compression=self._compression,
                use_dictionary=_repeating(self._group_schema),
                write_statistics=[path for field in self._group_schema for path in _comparable(field.name, field.type)],
                metadata_collector=self._footer,
            )
        return self._parquet

    def _target(self) -> Any:
        """What Arrow is to write to. What goes through a file of Python's is copied once more, and digested there."""
        import pyarrow as pa

        fs, inner = store_of(self.places.aside, OutputError)
        file = self.file
        if self.places.journaled or not is_local(fs):
            return file
        self._arrow_file = pa.OSFile(inner, "wb")
        return self._arrow_file


def _repeating(schema: pa.Schema) -> list[str]:
    """The columns whose values may repeat: a dictionary of floats, or of embeddings, costs far more than it saves."""
    import pyarrow.types as types

    def repeats(kind: Any) -> bool:
        return not (types.is_floating(kind) or types.is_nested(kind))

    return [field.name for field in schema if repeats(field.type)]


def _comparable(path: str, kind: pa.DataType) -> list[str]:
    """The columns of a file, by their paths, whose least and greatest value help readers: none that is inside of lists."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return [inner for field in kind for inner in _comparable(f"{path}.{field.name}", field.type)]
    return [] if types.is_nested(kind) else [path]


class ParquetSink(FileSink[Any]):
    """Parts of one schema: what readers of the folder take for the schema of all is that of one of them."""

    suffix = ".parquet"
    takes_columns = True

    def __init__(self, path: str, overwrite: bool, schema: pa.Schema | None, compression: str) -> None:
        super().__init__(path, overwrite)
        self.schema = schema
        self.compression = compression
        self._columns: dict[str, tuple[pa.DataType, str]] = {}  # of the parts so far: each with a part that has its type

    def begin(self, fs: Any, folder: str, run: str) -> None:
        super().begin(fs, folder, run)
        self._columns = {}

    def open(self, part: Part) -> ParquetWriter:
        return ParquetWriter(self.places(part), self.schema, self.compression)

    def unify(self, tokens: Sequence[FilePart]) -> list[FilePart]:
        """A part without a column, or without any value in it, is rewritten with the type that the column has in others; one
        with lists of a fixed size, where others have not, with lists."""
        schemas: dict[bytes, pa.Schema] = {}
        for token in tokens:
            if token.schema is not None and token.schema not in schemas:
                schemas[token.schema] = unpacked(token.schema)
                self._add_columns(schemas[token.schema], token)
        wanted = {name: kind for name, (kind, _) in self._columns.items()}
        fitting = {key for key, schema in schemas.items() if dict(zip(schema.names, schema.types, strict=True)) == wanted}
        return [token if token.schema is None or token.schema in fitting else self._rewritten(token) for token in tokens]

    def _add_columns(self, schema: pa.Schema, token: FilePart) -> None:
        import pyarrow as pa

        from penstock.io.merged_types import merged

        here = short_name(token.final)
        types = {field.name: field.type for field in schema}
        is_first = not self._columns  # else no part had a column before that is new here
        for name in dict.fromkeys([*self._columns, *types]):
            kind = types.get(name, pa.null())
            before, there = self._columns.get(name, (kind if is_first else pa.null(), here))
            both = merged(before, kind)
            if both is None:
                again = "" if token.xxh128 is None else ", and start over with fresh=True (--fresh)"
                raise OutputError(
                    f"{self.describe()}: column {name!r} is {before} in {there} and {kind} in {here}, and one "
                    f"output has one schema: pass schema=pyarrow.schema(...) with a type that holds all of its values{again}"
                )
            self._columns[name] = both, (there if both == before else here)

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
    """The schema that packed() has made these bytes of."""
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(zlib.decompress(data)))
