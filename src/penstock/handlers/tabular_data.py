"""Rows and Arrow tables as what models of tables take: one float matrix, or one pandas frame.

Rows that are dicts go the way of tables, so that a row gives the same answer whichever way it came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.arrow_columns import NUMBERS, numbers_of
from penstock.errors import RowError, UsageError
from penstock.handlers.catalog import imported
from penstock.handlers.number_columns import is_number, table_of_numbers, table_of_records

if TYPE_CHECKING:
    import pandas as pd

Matrix = np.ndarray[Any, np.dtype[Any]]


def matrix_of_rows(rows: Sequence[Any], columns: Sequence[str] | None) -> Matrix:
    """Rows that are 1-D arrays of one length, or dicts of numbers, as one matrix."""
    if isinstance(rows[0], Mapping):
        return matrix_of_table(table_of_numbers(rows, columns), columns)
    shapes = {_shape_of(row) for row in rows}
    [shape, *others] = shapes
    if others or isinstance(shape, str) or len(shape) != 1:
        seen = ", ".join(sorted(map(str, shapes)))
        raise RowError(
            f"the rows of one batch must be 1-D arrays of one length, or dicts, but saw the shapes {seen}{_about_keys(rows)}"
        )
    return np.array(rows)


def _shape_of(row: Any) -> tuple[int, ...] | str:
    try:
        shape: tuple[int, ...] = np.shape(row)
        return shape
    except ValueError:  # lists of different lengths, or values beside lists
        return f"of a {type(row).__name__} that is no array"


def _about_keys(rows: Sequence[Any]) -> str:
    has_keys = all(type(row) is tuple and len(row) == 2 and hasattr(row[1], "__len__") for row in rows)
    return "; rows that are (key, example) need a KeyedModelHandler around this handler" if has_keys else ""


def matrix_of_table(table: pa.Table, columns: Sequence[str] | None) -> Matrix:
    """The columns as a matrix of 64-bit floats, filled column by column; nulls become NaN."""
    names = table.column_names if columns is None else columns
    matrix = np.empty((table.num_rows, len(names)))
    for at, column in enumerate(_select(table, names).columns):
        if not is_number(column.type):
            raise RowError(_no_numbers(names[at], column.type))
        is_plain = str(column.type) in NUMBERS  # NumPy makes 64-bit floats of these on the way into the matrix
        matrix[:, at] = numbers_of(column if is_plain else column.cast(pa.float64(), safe=False))
    return matrix


def check_numbers(schema: pa.Schema, columns: Sequence[str] | None) -> None:
    """UsageError when a column that the model takes holds no numbers."""
    for name in schema.names if columns is None else columns:
        kind = schema.field(schema.names.index(name)).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind  # in rows, these are numbers
        if not is_number(kind) and not isinstance(kind, pa.BaseExtensionType):
            raise UsageError(_no_numbers(name, kind))


def rows_not_finite(matrix: Matrix) -> Sequence[Sequence[int]]:
    """The rows that hold NaN or infinity, those with the same ones in the same columns together."""
    if matrix.dtype.kind != "f":
        return []
    rows = np.flatnonzero(~np.isfinite(matrix).all(axis=1))
    found = matrix[rows]
    marks = np.isnan(found) + 2 * np.isposinf(found) + 3 * np.isneginf(found)
    kinds: dict[bytes, list[int]] = {}
    for row, mark in zip(rows.tolist(), marks, strict=True):
        kinds.setdefault(mark.tobytes(), []).append(row)
    return list(kinds.values())


def without_rows_in_place(matrix: Matrix, positions: Collection[int]) -> Matrix:
    """All rows but these, moved together in the memory of the matrix, which cannot be used any more: to copy a large one
    takes longer than the model's call."""
    kept = start = 0
    for at in (*sorted(positions), len(matrix)):
        matrix[kept : kept + at - start] = matrix[start:at]
        kept, start = kept + at - start, at + 1
    return matrix[:kept]


def frame_of_rows(rows: Sequence[Any], columns: Sequence[str] | None) -> pd.DataFrame:
    """Rows that are frames of one row, Series or dicts as one frame."""
    pandas = _pandas()
    if isinstance(rows[0], Mapping):
        return frame_of_table(table_of_records(rows, columns), columns)
    if all(isinstance(row, pandas.Series) for row in rows):
        frame = pandas.DataFrame(list(rows)).infer_objects()
    else:
        _check_frames(rows)
        frame = pandas.concat(rows, ignore_index=True)
    if {row.shape[-1] for row in rows} != {frame.shape[1]}:
        raise RowError(f"the rows of one batch must have the same columns, but saw these in only some: {list(frame)}")
    if columns is None:
        return frame  # type: ignore[no-any-return]
    _check_names(columns, list(frame.columns))
    return frame[list(columns)]  # type: ignore[no-any-return]


def frame_of_table(table: pa.Table, columns: Sequence[str] | None) -> pd.DataFrame:
    """The columns as a frame, with pandas' types."""
    _pandas()
    frame: pd.DataFrame = _select(table, table.column_names if columns is None else columns).to_pandas()
    return frame


def _check_frames(rows: Sequence[Any]) -> None:
    frame_class = _pandas().DataFrame
    for row in rows:
        if not isinstance(row, frame_class) or len(row) != 1:
            seen = f"a frame of {len(row)} rows" if isinstance(row, frame_class) else type(row).__name__
            raise RowError(
                "the rows of one batch must all be pandas DataFrames of one row, or all Series, or all dicts, "
                f"but saw {seen}"
            )


def _select(table: pa.Table, names: Sequence[str]) -> pa.Table:
    _check_names(names, table.column_names)
    return table.select(list(names))


def _check_names(wanted: Sequence[str], seen: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in seen]
    if missing:
        raise RowError(f"columns {missing} are missing: saw {list(seen)}; check columns=[...] and the rows")


def _no_numbers(name: str, kind: pa.DataType) -> str:
    return (
        f"column {name!r} holds {kind}, but the model takes numbers; leave it out with columns=[...], convert it in a step "
        "before, or use the handler for pandas"
    )


def _pandas() -> Any:
    return imported("pandas", "pandas", "pandas")
