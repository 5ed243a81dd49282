"""Spooled rows into a table, within a transaction that is open: by COPY to Postgres, by one executemany to SQLite."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from penstock.errors import OutputError
from penstock.io.sql_rows import STEP, kinds_of
from penstock.rows import shorten

TEXT = pa.large_string()
TAB, LINE_END, NOTHING = (pa.scalar(text, TEXT) for text in ("\t", "\n", ""))
ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))  # of COPY's text format, in this order
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)  # what SQLite takes for one
OF_NUMBERS = ("null", "bool", "int", "float", "decimal")  # kinds that need no look at the values
STAGE, ORDER = '"penstock_part"', '"penstock_order"'


@dataclass(frozen=True)
class Into:
    """Where rows go. All names are quoted but those in `names`."""

    table: str
    names: Sequence[str]  # the columns that rows of the part have
    columns: Sequence[str]
    keys: Sequence[str]  # of upsert_by
    texts: frozenset[str]  # the columns that are text
    arrays: frozenset[str]  # the columns that are arrays in Postgres
    numbers: frozenset[str]  # the columns that hold numbers

    @property
    def listed(self) -> str:
        """The columns, for a statement."""
        return ", ".join(self.columns)

    def on_conflict(self) -> str:
        """What a statement says of rows whose key is there: they are updated. Empty without upsert_by."""
        if not self.keys:
            return ""
        changes = ", ".join(f"{column} = excluded.{column}" for column in self.columns if column not in self.keys)
        return f" ON CONFLICT ({', '.join(self.keys)}) DO {f'UPDATE SET {changes}' if changes else 'NOTHING'}"


def copy_to_postgres(connection: sa.Connection, into: Into, batches: Iterable[pa.RecordBatch]) -> None:
    """Rows as text, so that Postgres reads each value as the type of its column. A time without a zone is UTC."""
    with connection.connection.cursor() as cursor:
        cursor.execute("SET LOCAL TIME ZONE 'UTC'")
        if into.keys:
            cursor.execute(
                f"CREATE TEMP TABLE {STAGE} ON COMMIT DROP AS SELECT {into.listed} FROM {into.table} WITH NO DATA"
            )
            cursor.execute(f"ALTER TABLE {STAGE} ADD COLUMN {ORDER} bigint GENERATED ALWAYS AS IDENTITY")
        target = STAGE if into.keys else into.table
        with cursor.copy(f"COPY {target} ({into.listed}) FROM STDIN WITH (ENCODING 'UTF8')") as copy:
            for batch in batches:
                copy.write(copy_text(batch, into))
        if into.keys:
            keys = ", ".join(into.keys)
            last = f"SELECT DISTINCT ON ({keys}) {into.listed} FROM {STAGE} ORDER BY {keys}, {ORDER} DESC"
            cursor.execute(f"INSERT INTO {into.table} ({into.listed}) {last}{into.on_conflict()}")


def copy_text(batch: pa.RecordBatch, into: Into) -> memoryview:
    """The rows of a batch in COPY's text format."""
    kinds = kinds_of(batch.schema)
    columns = [_copy_column(batch, name, kinds.get(name, "null"), name in into.arrays) for name in into.names]
    rows = pc.binary_join_element_wise(*columns, TAB, null_handling="replace", null_replacement="\\N")
    lines = pc.binary_join_element_wise(rows, NOTHING, LINE_END)
    _, offsets, data = lines.buffers()
    end = memoryview(offsets).cast("q")[len(lines)]
    return memoryview(data)[:end]


def _copy_column(batch: pa.RecordBatch, name: str, kind: str, is_array: bool) -> pa.Array:
    if kind == "null":
        return pa.nulls(batch.num_rows, TEXT)
    column = batch.column(name)
    if kind == "bytes":
        return pa.array([None if value is None else f"\\\\x{value.hex()}" for value in column.to_pylist()], TEXT)
    if kind == "json" and is_array:
        column = pa.array([None if v is None else _postgres_array(json.loads(v)) for v in column.to_pylist()], TEXT)
    elif column.type != TEXT:
        return column.cast(TEXT)
    for character, escaped in ESCAPES:
        column = pc.replace_substring(column, character, escaped)
    return column


def _postgres_array(value: Any) -> str:
    if isinstance(value, list):
        return f"{{{','.join(map(_postgres_array, value))}}}"
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def insert_into_sqlite(connection: sa.Connection, into: Into, batches: Iterable[pa.RecordBatch]) -> None:
    """Insert rows, or update those whose key is there, inside the transaction of the connection."""
    places = ", ".join("?" * len(into.columns))
    cursor = connection.connection.cursor()
    cursor.executemany(
        f"INSERT INTO {into.table} ({into.listed}) VALUES ({places}){into.on_conflict()}",
        (row for batch in batches for row in _sqlite_rows(batch, into)),
    )


def _sqlite_rows(batch: pa.RecordBatch, into: Into) -> Iterator[tuple[Any, ...]]:
    kinds = kinds_of(batch.schema)
    columns = []
    for name in into.names:
        if name not in kinds:
            columns.append([None] * batch.num_rows)
        elif kinds[name].startswith(("date", "time")):  # text, as SQLite's own functions and SQLAlchemy read it
            columns.append(batch.column(name).cast(TEXT).to_pylist())
        else:
            columns.append(batch.column(name).to_pylist())
            if kinds[name] == "decimal" and name not in into.texts:
                _check_exact(name, columns[-1])
        if name in into.numbers and kinds.get(name, "null") not in OF_NUMBERS:
            _check_numbers(name, columns[-1])
    return zip(*columns, strict=True)


def _check_exact(name: str, decimals: Iterable[str | None]) -> None:
    """SQLite has whole numbers of 64 bits and floats, and makes the nearest one of text in a column for numbers."""
    for text in decimals:
        exact = Decimal(text or 0)
        if exact.is_finite() and exact != Decimal(repr(float(exact))) and not (exact == int(exact) and abs(exact) < 1 << 63):
            raise OutputError(
                f"{STEP}: column {name!r} holds {text}, which SQLite cannot hold as a number: make the column TEXT, or put "
                "a ps.Map before it that makes text or floats of its values"
            )


def _check_numbers(name: str, values: Iterable[Any]) -> None:
    """SQLite takes anything into any column, and makes a number of text only if it is one."""
    for value in values:
        if value is not None and not (isinstance(value, str) and NUMBER.fullmatch(value)):
            raise OutputError(
                f"{STEP}: column {name!r} holds {shorten(value)}, and the table has numbers there: put a ps.Map before it "
                "that makes the values fit, or make the table yourself, with a column of another type"
            )
