"""Rows on their way to a database: Arrow batches in which each column is one of a few kinds of values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

from penstock.blocks import MAX_BYTES, MAX_ROWS, Block
from penstock.errors import OutputError
from penstock.io.records import as_lists, columns_of, plain

STEP = "WriteToSql"
KIND = b"penstock.kind"  # in the metadata of a field: which of these it is

ARROW_TYPES: dict[str, pa.DataType] = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.large_string(),
    "bytes": pa.large_binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "datetime": pa.timestamp("us"),
    "datetime with zone": pa.timestamp("us", "UTC"),
    "decimal": pa.large_string(),  # exact, whatever its precision
    "uuid": pa.large_string(),
    "json": pa.large_string(),
}
PYTHON_TYPES: list[tuple[type | tuple[type, ...], str]] = [  # the first that fits
    (bool, "bool"),
    (int, "int"),
    (float, "float"),
    (str, "text"),
    ((bytes, bytearray), "bytes"),
    (date, "date"),  # and datetime, by its zone
    (time, "time"),
    (Decimal, "decimal"),
    (UUID, "uuid"),
    ((dict, list, tuple), "json"),
]
AS_IS = {bool: "bool", int: "int", float: "float", str: "text", bytes: "bytes"}  # nothing inside to look at


def batches_of(block: Block) -> Iterator[pa.RecordBatch]:
    """The rows of a block in batches of a few megabytes. Raises OutputError for what no database can hold."""
    table = _table_of_rows(block) if isinstance(block, list) else _table_of_columns(block)
    fitting = MAX_BYTES * table.num_rows // max(1, table.nbytes)
    yield from table.combine_chunks().to_batches(max_chunksize=max(1, min(MAX_ROWS, fitting)))


def kinds_of(schema: pa.Schema) -> dict[str, str]:
    """The columns of a batch, each with its kind."""
    return {field.name: field.metadata[KIND].decode() for field in schema}


def _table_of_rows(rows: list[Any]) -> pa.Table:
    return _table((name, *_of_values(name, values)) for name, values in columns_of(rows, STEP).items())


def _table_of_columns(table: pa.Table) -> pa.Table:
    return _table((name, *_of_column(name, column)) for name, column in zip(table.column_names, table.columns, strict=True))


def _table(columns: Iterable[tuple[Any, str, Any]]) -> pa.Table:
    fields, arrays = [], []
    for name, kind, array in columns:
        if not isinstance(name, str) or not name:
            raise OutputError(f"{STEP}: columns are named by str, got {name!r}: rename it in a step before")
        fields.append(pa.field(name, ARROW_TYPES[kind], metadata={KIND: kind}))
        arrays.append(array)
    if len({field.name for field in fields}) < len(fields):
        raise OutputError(f"{STEP}: two columns have one name: {', '.join(field.name for field in fields)}")
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _of_values(name: str, values: list[Any]) -> tuple[str, pa.Array]:
    types = set(map(type, values)) - {type(None)}
    if len(types) == 1 and (kind := AS_IS.get(next(iter(types)))):
        return kind, _array(name, kind, values)
    values = [plain(value, _of_array) for value in values]
    kinds = {_kind_of(name, value) for value in values}
    kind = widest(name, kinds)
    return kind, _array(name, kind, values)


def _kind_of(name: str, value: Any) -> str:
    if value is None:
        return "null"
    kind = next((kind for types, kind in PYTHON_TYPES if isinstance(value, types)), None)
    if kind is None:
        raise _refused(name, f"holds a {type(value).__name__}, which has no SQL type")
    if getattr(value, "nanosecond", 0):
        raise _refused(name, f"holds {value!r}, and databases hold microseconds")
    if isinstance(value, time) and value.tzinfo is not None:
        raise _refused(name, f"holds {value!r}, a time of day with a zone, which has no SQL type")
    if isinstance(value, datetime):
        return "datetime" if value.tzinfo is None else "datetime with zone"
    return kind


def widest(name: str, kinds: set[str]) -> str:
    """The kind that holds the values of all."""
    known = sorted(kinds - {"null"})
    if len(known) < 2:
        return known[0] if known else "null"
    if kinds <= {"null", "int", "float", "decimal"}:
        return "decimal" if "decimal" in kinds else "float"
    raise _refused(name, f"holds {' and '.join(known)}, expected values of one type")


def _array(name: str, kind: str, values: list[Any]) -> pa.Array:
    try:
        if kind == "json":
            values = [None if value is None else to_json(plain(value, _of_array)) for value in values]
        elif kind in ("decimal", "uuid"):
            values = [None if value is None else str(value) for value in values]
        return pa.array(values, ARROW_TYPES[kind])
    except (pa.ArrowException, OverflowError, RecursionError, TypeError, ValueError) as exc:
        raise _refused(name, f"holds what cannot be written as {kind} ({exc})") from exc


def _of_array(value: Any) -> Any:
    """An array, a tensor or one of their numbers as lists and numbers; a time of NumPy as Python's, if that can hold it."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    made = value.astype("datetime64[us]").tolist() if kind == "M" and _is_whole(value) else as_lists(value)
    return made if type(made) is type(value) else plain(made, _of_array)


def _is_whole(value: Any) -> bool:
    """Whether a time of NumPy is one of whole microseconds."""
    return value.ndim == 0 and str(value.astype("datetime64[us]").astype(value.dtype)) == str(value)


def _of_column(name: str, column: pa.ChunkedArray) -> tuple[str, Any]:
    types = pa.types
    kind_of = column.type
    if types.is_dictionary(kind_of):
        return _of_column(name, column.cast(kind_of.value_type))
    if isinstance(kind_of, pa.BaseExtensionType):
        return _of_column(name, column.cast(kind_of.storage_type))
    if types.is_nested(kind_of):
        return "json", _array(name, "json", column.to_pylist())
    kind = next((kind for is_kind, kind in _ARROW_KINDS if is_kind(kind_of)), None)
    if kind is None:
        raise _refused(name, f"holds {kind_of}, which has no SQL type")
    if kind == "datetime" and kind_of.tz is not None:
        kind = "datetime with zone"
    try:
        return kind, column.cast(ARROW_TYPES[kind])
    except pa.ArrowException as exc:
        raise _refused(name, f"holds {kind_of} that cannot be written as {kind} ({exc})") from exc


_ARROW_KINDS: list[tuple[Callable[[pa.DataType], bool], str]] = [
    (pa.types.is_null, "null"),
    (pa.types.is_boolean, "bool"),
    (pa.types.is_integer, "int"),
    (pa.types.is_floating, "float"),
    (pa.types.is_string, "text"),
    (pa.types.is_large_string, "text"),
    (pa.types.is_string_view, "text"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_large_binary, "bytes"),
    (pa.types.is_fixed_size_binary, "bytes"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_timestamp, "datetime"),
    (pa.types.is_decimal, "decimal"),
]


def _no_json(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} inside")


to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_no_json).encode


def _refused(name: str, what: str) -> OutputError:
    return OutputError(f"{STEP}: column {name!r} {what}: put a ps.Map before it that makes the values fit")
