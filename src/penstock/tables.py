"""Arrow tables of rows: that which holds just the given dicts, if there is one; and a table without some of its rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

MOST_AXES = 8  # of lists in lists


def table_of(rows: list[Any]) -> pa.Table | None:
    """A table whose to_pylist() are these rows: the same keys in the same order, the same types and values. None where
    that is not certain: for rows that are no dicts or have different keys, and for a column whose values are not all of
    one of str, int (of 64 bits), float, bool and bytes, or lists of one of them, or None."""
    import pyarrow as pa

    if not rows or set(map(type, rows)) != {dict}:
        return None
    names = tuple(rows[0])
    if not names or set(map(type, names)) != {str} or set(map(tuple, rows)) != {names}:
        return None
    try:
        columns = [_column(values) for values in zip(*map(dict.values, rows), strict=True)]
        return None if any(column is None for column in columns) else pa.table(columns, names=list(names))
    except (pa.ArrowException, OverflowError, UnicodeError):  # a number of more bits, half of a surrogate pair
        return None


def _column(values: Sequence[Any]) -> Any:
    import pyarrow as pa

    kind = _type_of(values)
    return None if kind is None else pa.array(values, kind)


def _type_of(values: Sequence[Any], axes: int = MOST_AXES) -> pa.DataType | None:
    import pyarrow as pa

    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.null()
    if len(kinds) > 1:
        return None
    if kinds == {list}:
        item = _type_of(list(chain.from_iterable(filter(None, values))), axes - 1) if axes else None
        return None if item is None else pa.list_(item)
    known = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_(), bytes: pa.binary()}
    return known.get(kinds.pop())


def own_table(table: Any) -> Any:
    """The table with copies of what could be changed in place: NumPy and PyTorch make arrays that are a column's own memory,
    of all but texts."""
    for at, field in enumerate(table.schema):
        if not _is_text(field.type):
            table = table.set_column(at, field, own_column(table.column(at)))
    return table


def own_column(column: Any) -> Any:
    """A copy of an array of Arrow's, in memory of its own."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([pa.concat_arrays([chunk]) for chunk in column.chunks], column.type)
    return pa.concat_arrays([column]) if isinstance(column, pa.Array) else column


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_null)
    return any(test(kind) for test in tests)


def without_rows(data: Any, positions: Collection[int]) -> Any:
    """A table, or an array of Arrow's, but for the rows at these positions."""
    import pyarrow as pa

    keep = bytearray(b"\1") * len(data)
    for at in positions:
        keep[at] = 0
    return data.filter(pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(keep)]).cast(pa.bool_()))
