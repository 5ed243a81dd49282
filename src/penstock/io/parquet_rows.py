"""Rows on their way to Parquet, as Arrow tables: every value as it is, or an error that names it."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from penstock.arrow_columns import column_of_arrays, holds_arrays, numpy_of
from penstock.errors import OutputError
from penstock.io.arrow_types import contains, is_list, is_lossless
from penstock.io.merged_types import decoded
from penstock.io.records import LEAVES, columns_of, listed, plain
from penstock.rows import shorten
from penstock.tables import table_of

STEP = "WriteToParquet"
REMEDY = "make the values alike in a step before, or pass schema=pyarrow.schema(...) with a type that holds them all"
REPEATED = 16  # times, for a text to be worth a look before it is written down
NUMBERS = ({int}, {float}, {int, float})


def table_of_rows(rows: list[Any], schema: pa.Schema | None, *, rounds: bool) -> pa.Table:
    """The rows in columns. Those that the schema has are of its types, or of types that fitted() can make them of."""
    columns = columns_of(rows, STEP)
    if odd := [name for name in columns if not isinstance(name, str)]:
        raise OutputError(f"{STEP}: columns are named by str, got {listed(odd)}: rename them in a step before it")
    wanted = {} if schema is None else {field.name: field.type for field in schema}
    return pa.table({name: _array(name, values, wanted.get(name), rounds) for name, values in columns.items()})


def checked_table(table: pa.Table) -> pa.Table:
    """The table, if Parquet can hold it so that it can be read again."""
    names = table.column_names
    if not names:
        raise OutputError(
            f"{STEP}: a table has {table.num_rows} rows and no columns, which Parquet cannot hold; add a column"
        )
    if len(set(names)) < len(names):
        raise OutputError(f"{STEP}: two columns have one name ({listed(names)}); rename one of them in a step before")
    for at, field in enumerate(table.schema):
        if types.is_dictionary(field.type) and any(chunk.dictionary.null_count for chunk in table.column(at).chunks):
            plain_column = table.column(at).cast(field.type.value_type)  # Parquet has no null among a dictionary's values
            table = table.set_column(at, field, plain_column.cast(field.type))
    return table


def joined(tables: list[pa.Table]) -> pa.Table:
    """Tables as one, in types that hold the values of all."""
    if all(table.schema.equals(tables[0].schema) for table in tables):
        return pa.concat_tables(tables)
    tables = _decoded_alike(tables)
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as exc:
        raise OutputError(f"{STEP}: rows do not fit together: {exc}; {REMEDY}") from exc
    for name, one in ((field.name, field.type) for part in tables for field in part.schema):
        if not is_lossless(one, wide := table.schema.field(name).type, rounds=False):
            raise _refused(name, f"holds values of {one}, which would be written as {wide}")
    return table


def _decoded_alike(tables: list[pa.Table]) -> list[pa.Table]:
    """The tables, without a dictionary in a column that has another type in another of them."""
    kinds: dict[str, set[pa.DataType]] = {}
    for field in (field for table in tables for field in table.schema):
        kinds.setdefault(field.name, set()).add(field.type)
    mixed = {name for name, found in kinds.items() if len(found) > 1}
    schemas = [
        pa.schema([field.with_type(decoded(field.type)) if field.name in mixed else field for field in table.schema])
        for table in tables
    ]
    return [
        table if table.schema.equals(schema) else table.cast(schema) for table, schema in zip(tables, schemas, strict=True)
    ]


def fitted(table: pa.Table, schema: pa.Schema, *, rounds: bool) -> pa.Table:
    """The table in the columns and types of the schema, no value changed; a missing column is null."""
    if extra := [name for name in table.column_names if name not in schema.names]:
        raise OutputError(
            f"{STEP}: rows have the column {listed(extra)}, which earlier rows or schema= do not have "
            f"({listed(schema.names)}); drop it in a step before, or pass schema=pyarrow.schema(...) with it"
        )
    columns = []
    for field in schema:
        column = table.column(field.name) if field.name in table.column_names else pa.nulls(table.num_rows)
        try:
            columns.append(_cast(column, field.type, rounds))
        except pa.ArrowException as exc:
            raise OutputError(
                f"{STEP}: column {field.name!r} holds {column.type}, expected {field.type}: {exc}; {REMEDY}"
            ) from exc
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: Any, wanted: pa.DataType, rounds: bool) -> Any:
    """The column as that type. Raises pa.ArrowException if a value would be another."""
    if column.type == wanted:
        return column
    if not is_lossless(column.type, wanted, rounds=rounds):
        raise pa.ArrowInvalid("values of the one type are not values of the other")
    cast = column.cast(wanted)
    if rounds and contains(wanted, types.is_floating) and _infinities(cast) > _infinities(column):
        raise pa.ArrowInvalid(f"a number is too large for {wanted}")
    return cast


def _infinities(column: Any) -> int:
    """How many there are in a column of floats, or of lists of them."""
    while is_list(column.type):
        column = pc.list_flatten(column)
    return pc.sum(pc.is_inf(column)).as_py() or 0 if types.is_floating(column.type) else 0


def _array(name: str, values: list[Any], wanted: pa.DataType | None, rounds: bool) -> Any:
    """A column of these values. If a type is wanted: of that type, or of one that _cast() makes it of."""
    kinds = set(map(type, values)) - {type(None)}
    try:
        array = _column_of(values, kinds)
        if array is None:
            values = values if kinds <= LEAVES else [plain(value, _arrow_value) for value in values]
            array = pa.array(values)
            if _is_doubtful(array.type, kinds, values):
                _check_kept(name, values, array, False)
        if wanted is not None:
            _cast(array, wanted, rounds)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as exc:
        if wanted is None:
            raise _refused(name, f"{exc}; expected values of one type that Arrow knows") from exc
        return _array_of(name, [plain(value, _arrow_value) for value in values], wanted, rounds)
    return array


def _column_of(values: list[Any], kinds: set[type]) -> Any:
    """A column of what pa.array() would take longer for, or would not take; else None."""
    if kinds == {str}:
        return _repeated(values)
    if kinds == {dict}:
        return _struct_of(values)
    return column_of_arrays(values) if holds_arrays(kinds) else None


def _repeated(values: list[str | None]) -> Any:
    """Texts of which many are the same, as those of failures: memory for all is taken at once. Else None."""
    distinct = {value: at for at, value in enumerate(dict.fromkeys(values))}
    if len(distinct) > len(values) // REPEATED:
        return None
    return pa.array(list(distinct), pa.string()).take(pa.array([distinct[value] for value in values], pa.int32()))


def _struct_of(values: list[Any]) -> Any:
    """Dicts as a column, field by field, where that is sure to be what pa.array() makes of them; else None."""
    table = table_of(values)
    batches = [] if table is None else table.to_batches()
    return batches[0].to_struct_array() if len(batches) == 1 else None


def _array_of(name: str, values: list[Any], wanted: pa.DataType, rounds: bool) -> Any:
    """A column of values that Arrow cannot make a type of, or makes another one of that cannot be cast."""
    try:
        array = pa.array(values, type=wanted)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as exc:
        raise _refused(name, f"its type is {wanted}: {exc}") from exc
    _check_kept(name, values, array, rounds)
    return array


def _is_doubtful(made: pa.DataType, kinds: set[type], values: list[Any]) -> bool:
    """Whether Arrow may have changed a value: it makes dates of times, naive times of zoned ones, bytes of text and numbers
    of bools where a column, or a field in it, holds both."""
    if kinds == {datetime}:
        return len({value.tzinfo is None for value in values if value is not None}) > 1
    if len(kinds) > 1 and kinds not in NUMBERS:
        return True
    if types.is_temporal(made):
        return not kinds <= {date, timedelta}  # those of pandas have nanoseconds, a time of day may have a zone
    return types.is_nested(made) and contains(made, _is_mixable)


def _is_mixable(kind: Any) -> bool:
    return any((types.is_temporal(kind), types.is_binary(kind)))


def _check_kept(name: str, values: list[Any], array: Any, rounds: bool) -> None:
    for value, got in zip(values, array.to_pylist(), strict=True):
        if not _is_kept(value, got, rounds):
            raise _refused(
                name, f"{shorten(value)} ({type(value).__name__}) would be written as {array.type}, {shorten(got)}"
            )


def _is_kept(value: Any, got: Any, rounds: bool) -> bool:
    if isinstance(value, dict):
        found = dict(got) if isinstance(got, list) else got  # a map
        return all(key in found and _is_kept(item, found[key], rounds) for key, item in value.items())
    if isinstance(value, list):
        return len(value) == len(got) and all(_is_kept(*pair, rounds) for pair in zip(value, got, strict=True))
    if hasattr(value, "dtype"):
        import numpy as np

        if value.dtype.kind in "mM":
            return True  # Arrow takes them in their own unit, or not at all
        return np.array_equal(value, np.asarray(got, value.dtype), equal_nan=value.dtype.kind == "f")
    if rounds and isinstance(value, float) and isinstance(got, float):
        return math.isinf(value) == math.isinf(got)
    return value != value or (value == got and isinstance(value, bool) == isinstance(got, bool))


def _refused(name: str, why: str) -> OutputError:
    return OutputError(f"{STEP}: column {name!r}: {why}; {REMEDY}")


def _arrow_value(value: Any) -> Any:
    """An array or tensor as what Arrow takes, its type of number kept: 1-D arrays, lists of them, NumPy scalars."""
    value = numpy_of(value)
    if type(value).__module__ != "numpy" or value.dtype == object:
        return plain(value.tolist(), _arrow_value)
    if value.dtype.kind in "US" or (value.ndim == 0 and value.dtype == bool):  # Arrow takes NumPy's bools for numbers
        return value.tolist()
    if value.ndim > 1 or (value.ndim and value.dtype.kind in "mM"):  # Arrow does not look at the unit of an array of times
        return [_arrow_value(item) for item in value]
    return value[()] if value.ndim == 0 and hasattr(value, "__array_interface__") else value
