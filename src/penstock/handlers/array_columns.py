"""Columns of an Arrow table as NumPy arrays, without an object for each row.

Floats become the floats that the model computes with, lists of one length more axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.arrow_columns import numbers_of
from penstock.errors import BadRowsError, RowError, UsageError
from penstock.handlers.number_columns import is_number
from penstock.io.arrow_types import is_list

Array = np.ndarray[Any, np.dtype[Any]]


def matrix_array(table: pa.Table, names: Sequence[str], kind: np.dtype[Any]) -> Array:
    """Columns of numbers as one matrix of this float type, with a row for each row; nulls become NaN."""
    matrix = np.empty((table.num_rows, len(names)), kind)
    for at, name in enumerate(names):
        matrix[:, at] = _floats(_decoded(table.column(name)), name, kind)
    return matrix


def column_array(table: pa.Table, name: str, kind: np.dtype[Any]) -> Array:
    """One column: numbers as an array [rows], lists of one length as [rows, length], lists of those with more axes. Floats
    become this type, and nulls among them NaN; whole numbers and bools stay what they are. BadRowsError for rows whose list
    is null, or that have a null among whole numbers or bools, which have no NaN."""
    seen = table.schema.field(name).type
    values, shape = _leaves(_decoded(table.column(name)), name)
    if isinstance(seen, pa.FixedShapeTensorType):
        shape = (len(table), *_shape_of(seen, name))
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        _refuse_nulls(values, shape, f"column {name!r} is null in this row, and {values.type} has no NaN")
        integers: Array = numbers_of(values)
        return integers.reshape(shape)
    return _floats(values, name, kind).reshape(shape)


def check_types(schema: pa.Schema, names: Sequence[str], *, lists: bool, instead: str) -> None:
    """UsageError when a column holds no numbers; nor, where `lists` may be, lists of them. `instead` says what takes lists
    in one of several columns."""
    for name in names:
        seen = kind = _value_type(schema.field(schema.names.index(name)).type)
        while lists and is_list(kind):
            kind = kind.value_type
        if is_list(kind):
            raise UsageError(
                f"column {name!r} holds {seen}, but each of several columns must hold one number per row; give it alone, "
                f"as columns={name!r}, or {instead}"
            )
        if not is_number(kind):
            raise UsageError(f"column {name!r} holds {seen}, but the model takes numbers; name others in columns=[...]")


def _leaves(values: pa.Array, name: str) -> tuple[pa.Array, tuple[int, ...]]:
    """The numbers in a column, and the shape that they have."""
    shape: tuple[int, ...] = (len(values),)
    while is_list(values.type):
        _refuse_nulls(values, shape, f"column {name!r} is null in this row, or in a list of it; expected a list of numbers")
        shape = (*shape, _length(values, name))
        values = values.flatten()
    return values, shape


def _shape_of(kind: pa.FixedShapeTensorType, name: str) -> tuple[int, ...]:
    if kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation):
        raise UsageError(f"column {name!r} holds tensors in another order of axes, {kind}; write them row by row")
    return tuple(kind.shape)


def _length(lists: pa.Array, name: str) -> int:
    if pa.types.is_fixed_size_list(lists.type):
        return int(lists.type.list_size)
    lengths = lists.value_lengths().unique().to_pylist() or [0]
    if len(lengths) > 1:
        raise RowError(
            f"the lists of column {name!r} in one batch must have one length, but saw {sorted(lengths)[:5]}; pad them in a "
            "step before, or give max_batch_size=1"
        )
    return int(lengths[0])


def _refuse_nulls(values: pa.Array, shape: tuple[int, ...], message: str) -> None:
    if values.null_count:
        per_row = int(np.prod(shape[1:]))
        nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) // per_row
        raise BadRowsError({int(at): RowError(message) for at in np.unique(nulls)})


def _floats(values: pa.Array, name: str, kind: np.dtype[Any]) -> Array:
    if not is_number(values.type):
        raise RowError(f"column {name!r} holds {values.type}, but the model takes numbers; name others in columns=[...]")
    floats: Array = numbers_of(values.cast(pa.from_numpy_dtype(kind), safe=False))
    return floats


def _decoded(column: pa.ChunkedArray) -> pa.Array:
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # of no chunks, or too large for one
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], column.type)
    if isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _value_type(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind
