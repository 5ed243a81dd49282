"""Columns of an Arrow table as tensors, without an object for each row: Arrow -> NumPy -> torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import RowError
from penstock.handlers.array_columns import Array, column_array, matrix_array

if TYPE_CHECKING:
    import pyarrow as pa
    import torch


def matrix_tensor(table: pa.Table, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
    """matrix_array() as a tensor of this float type."""
    return _tensor(matrix_array(table, names, _numpy_floats(dtype)), dtype)


def column_tensor(table: pa.Table, name: str, dtype: torch.dtype) -> torch.Tensor:
    """column_array() as a tensor; its floats are of this type."""
    array = column_array(table, name, _numpy_floats(dtype))
    return _tensor(array, dtype) if array.dtype.kind == "f" else _tensor(_known_to_torch(array, name), None)


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


def _known_to_torch(integers: Array, name: str) -> Array:
    """Unsigned numbers as int64, but for uint8: of the others, torch can do little."""
    if integers.dtype.kind != "u" or integers.dtype == np.uint8:
        return integers
    most = np.iinfo(np.int64).max
    if integers.dtype == np.uint64 and integers.size and integers.max() > most:
        raise RowError(f"column {name!r}: {integers.max()} is over {most}; torch's largest type of whole numbers is int64")
    return integers.astype(np.int64)


def _numpy_floats(dtype: torch.dtype) -> np.dtype[Any]:
    """What NumPy's numbers are, on their way: those of the model, or such as hold them."""
    import torch

    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)


def _tensor(array: Array, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor that a model may change: it does not share the memory of a table."""
    import torch

    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if dtype is None else tensor.to(dtype)
