"""What handlers of numbers share: records as tables, which columns hold numbers, and which rows do not fit."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import BadRowsError, RowError, UsageError
from penstock.rows import shorten


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds numbers, or nothing at all."""
    types = pa.types
    tests = (types.is_floating, types.is_integer, types.is_boolean, types.is_decimal, types.is_null)
    return any(test(kind) for test in tests)


def check_names(wanted: Sequence[str] | None, seen: Sequence[str]) -> None:
    """UsageError when a table lacks columns that the settings name."""
    missing = [name for name in wanted or () if name not in seen]
    if missing:
        raise UsageError(f"columns {missing} are missing: the table has {list(seen)}; check columns=[...]")


def table_of_records(rows: Sequence[Any], columns: Sequence[str] | None) -> pa.Table:
    """Rows that are dicts as one table: of these columns, or of those that the first row has. BadRowsError for the rows that
    lack some, where it is known which they must have; else RowError."""
    names = list(rows[0]) if columns is None else columns
    wanted = set(names)
    bad: dict[int, Exception] = {}
    for at, row in enumerate(rows):
        if not isinstance(row, Mapping):
            bad[at] = RowError(f"the rows of one batch must all be dicts, but saw {type(row).__name__}")
        elif not row.keys() >= wanted or (columns is None and len(row) != len(wanted)):
            bad[at] = RowError(f"every row must have the keys {list(names)}, but saw {list(row)}; check columns=[...]")
    if bad:
        raise next(iter(bad.values())) if columns is None else BadRowsError(bad)
    try:
        return pa.table({name: pa.array([row[name] for row in rows]) for name in names})
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        raise RowError(f"the values of one column must have one type: {exc}") from exc


def table_of_numbers(rows: Sequence[Any], columns: Sequence[str] | None) -> pa.Table:
    """table_of_records() where all are numbers or None. BadRowsError for the rows that have something else."""
    try:
        table = table_of_records(rows, columns)
    except BadRowsError:
        raise
    except RowError:
        names = list(rows[0]) if columns is None else columns
        if all(isinstance(row, Mapping) and row.keys() >= set(names) for row in rows):
            _raise_for_values(rows, names)
        raise
    if not all(map(is_number, table.schema.types)):
        _raise_for_values(rows, table.column_names)
    return table


def _raise_for_values(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    bad: dict[int, Exception] = {}
    for at, row in enumerate(rows):
        for name in names:
            if not _is_number(row[name]):
                seen = f"{shorten(row[name], 60)} ({type(row[name]).__name__})"
                advice = "leave the column out with columns=[...], or convert it in a step before"
                bad[at] = RowError(f"column {name!r} is {seen} in this row, but the model takes numbers; {advice}")
                break
    if bad:
        raise BadRowsError(bad)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (numbers.Number, np.bool_))
