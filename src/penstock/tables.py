"""Rows that are dicts as the table that holds just these rows, if there is one."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
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
    if not names or set(map(type, names)) != {str} or any(tuple(row) != names for row in rows):
        return None
    try:
        columns = [_column(list(map(itemgetter(name), rows))) for name in names]
        return None if any(column is None for column in columns) else pa.table(columns, names=list(names))
    except (pa.ArrowException, OverflowError, UnicodeError):  # a number of more bits, half of a surrogate pair
        return None


def _column(values: list[Any]) -> Any:
    import pyarrow as pa

    kind = _type_of(values)
    return None if kind is None else pa.array(values, kind)


def _type_of(values: list[Any], axes: int = MOST_AXES) -> pa.DataType | None:
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
