"""The spool: a part of the rows for a database, in a local file, until it is copied into the table.

It is Arrow IPC streams, one after another: a new one begins where rows have other columns, or other kinds in them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from penstock.blocks import Block
from penstock.errors import OutputError
from penstock.io.parts import FileWriter, Places
from penstock.io.records import listed
from penstock.io.sink import Part
from penstock.io.sql_rows import STEP, batches_of, kinds_of


class SqlPart(NamedTuple):
    """A finished part, spooled: what publish() is given."""

    run: str
    part: str
    rows: int
    spool: str
    xxh128: str | None  # of parts of a journaled run
    kinds: Mapping[str, Sequence[str]] = {}  # the columns that its rows have, in order: of each, the kinds of its values


class SpoolWriter(FileWriter[Any]):
    """One part being spooled."""

    def __init__(self, part: Part, path: str, *, columns: Collection[str] | None, keys: Collection[str]) -> None:
        super().__init__(Places(path, "", part.journaled))
        self._part = part
        self._columns = columns  # of the table; None: it is not there yet
        self._keys = keys
        self._stream: Any = None
        self._schema: pa.Schema | None = None
        self._kinds: dict[str, set[str]] = {}

    def add(self, block: Block) -> None:
        for batch in batches_of(block):
            if self._schema is None or not batch.schema.equals(self._schema, check_metadata=True):
                self._check(batch)
                for name, kind in kinds_of(batch.schema).items():
                    self._kinds.setdefault(name, set()).add(kind)
                self.end()
                self._schema = batch.schema
                self._stream = pa.ipc.new_stream(self.file, batch.schema)
            if empty := [key for key in self._keys if batch.column(key).null_count]:
                raise OutputError(f"{STEP}: {empty[0]!r} is None in a row; upsert_by needs a value in each")
            self._stream.write_batch(batch)
            self.rows_written += batch.num_rows

    def end(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def close(self) -> SqlPart | None:  # type: ignore[override]  # a file that is spooled has no final name
        file = super().close()
        kinds = {name: sorted(kinds) for name, kinds in self._kinds.items()}
        return file and SqlPart(self._part.run, self._part.name, self.rows_written, file.aside, file.xxh128, kinds)

    def _check(self, batch: pa.RecordBatch) -> None:
        names = batch.schema.names
        if self._columns is not None:
            refuse_unknown(names, self._columns)
        if missing := [key for key in self._keys if key not in names]:
            raise OutputError(f"{STEP}: rows without {missing[0]!r}, which upsert_by names; their columns: {listed(names)}")


def spooled(path: str) -> Iterator[pa.RecordBatch]:
    """The batches of a spool, in order, one at a time in memory."""
    with pa.OSFile(path) as file:
        size = file.size()
        while file.tell() < size:
            with pa.ipc.open_stream(file) as stream:
                yield from stream


def refuse_unknown(names: Collection[str], columns: Collection[str]) -> None:
    """OutputError for names that are no columns of the table."""
    if unknown := [name for name in names if name not in columns]:
        raise OutputError(
            f"{STEP}: rows have the column {listed(unknown)}, which the table does not have ({listed(columns)}); "
            "drop it in a step before, or add it to the table"
        )
