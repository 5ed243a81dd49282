"""Columns of an Arrow table as tensors, without an object for each row.

Arrow -> NumPy -> torch; floats become the floats that the model computes with, lists of one length more axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.errors import BadRowsError, RowError, UsageError
from penstock.handlers.number_columns import is_number

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


def matrix_tensor(table: pa.Table, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
    """Columns of numbers as one matrix of this float type, with a row for each row; nulls become NaN."""
    kind = _numpy_floats(dtype)
    matrix = np.empty((table.num_rows, len(names)), kind)
    for at, name in enumerate(names):
        matrix[:, at] = _floats(_decoded(table.column(name)), name, kind)
    return _tensor(matrix, dtype)


def column_tensor(table: pa.Table, name: str, dtype: torch.dtype) -> torch.Tensor:
    """One column: numbers as a tensor [rows], lists of one length as [rows, length], lists of those with more axes. Floats
    become this type, and nulls among them NaN; whole numbers and bools stay what they are. BadRowsError for rows whose list
    is null, or that have a null among whole numbers or bools, which have no NaN."""
    kind = table.schema.field(name).type
    values, shape = _leaves(_decoded(table.column(name)), name)
    if isinstance(kind, pa.FixedShapeTensorType):
        shape = (len(table), *_shape_of(kind, name))
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        _refuse_nulls(values, shape, f"column {name!r} is null in this row, and {values.type} has no NaN")
        return _tensor(_integers(values, name).reshape(shape), None)
    return _tensor(_floats(values, name, _numpy_floats(dtype)).reshape(shape), dtype)


def column_rows(table: pa.Table, name: str, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """The rows of column_tensor(), each with memory of its own. Lists may have any length; a row that has no tensor, for a
    null in it, is None."""
    import torch

    try:
        return list(torch.unbind_copy(column_tensor(table, name, dtype)))
    except RowError:
        if len(table) == 1:
            return [None]
    return [row for at in range(len(table)) for row in column_rows(table.slice(at, 1), name, dtype)]


def check_types(schema: pa.Schema, names: Sequence[str], *, lists: bool) -> None:
    """UsageError when a column holds no numbers; nor, where `lists` may be, lists of them."""
    for name in names:
        seen = kind = _value_type(schema.field(schema.names.index(name)).type)
        while lists and _is_list(kind):
            kind = kind.value_type
        if _is_list(kind):
            raise UsageError(
                f"column {name!r} holds {seen}, but each of several columns must hold one number per row; give it alone, "
                f"as columns={name!r}, or use PytorchModelHandlerKeyedTensor"
            )
        if not is_number(kind):
            raise UsageError(f"column {name!r} holds {seen}, but the model takes numbers; name others in columns=[...]")


def _leaves(values: pa.Array, name: str) -> tuple[pa.Array, tuple[int, ...]]:
    """The numbers in a column, and the shape that they have."""
    shape: tuple[int, ...] = (len(values),)
    while _is_list(values.type):
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
    floats: Array = values.cast(pa.from_numpy_dtype(kind), safe=False).to_numpy(zero_copy_only=False)
    return floats


def _integers(values: pa.Array, name: str) -> Array:
    kind = values.type
    if pa.types.is_unsigned_integer(kind) and kind != pa.uint8():  # of the others, torch can do little
        try:
            values = values.cast(pa.int64())
        except pa.ArrowInvalid as exc:
            raise RowError(f"column {name!r}: {exc}; torch's largest type of whole numbers is int64") from exc
    integers: Array = values.to_numpy(zero_copy_only=False)
    return integers


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


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _numpy_floats(dtype: torch.dtype) -> np.dtype[Any]:
    """What NumPy's numbers are, on their way: those of the model, or such as hold them."""
    import torch

    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)


def _tensor(array: Array, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor that a model may change: it does not share the memory of a table."""
    import torch

    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if dtype is None else tensor.to(dtype)
