"""Arrays and tensors of many rows as one Arrow column, without an object for each number."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa

from penstock.arrow_columns import array_column

NUMBERS = ("b", "f", "i", "u")  # the kinds of NumPy's types that Arrow has, too


def holds_arrays(kinds: set[type]) -> bool:
    """Whether values of these types are all arrays of NumPy, or all tensors."""
    if len(kinds) != 1:
        return False
    (kind,) = kinds
    return (kind.__module__, kind.__name__) == ("numpy", "ndarray") or hasattr(kind, "detach")


def numpy_of(value: Any) -> Any:
    """A tensor as an array, if NumPy has its type; any other value as it is."""
    if hasattr(value, "detach"):
        with contextlib.suppress(TypeError):  # NumPy has no bfloat16
            return value.detach().cpu().numpy()
    return value


def column_of_arrays(values: list[Any]) -> pa.Array | None:
    """Arrays or tensors of one type of numbers and as many axes, or None: lists of a fixed size if all are there in one
    shape, else lists. None for what has another form."""
    arrays = [numpy_of(value) for value in values]
    forms = {(array.dtype, array.ndim) for array in arrays if array is not None}
    if len(forms) != 1:
        return None
    ((dtype, axes),) = forms
    is_known = getattr(dtype, "kind", "") in NUMBERS and dtype.isnative
    return _column(arrays) if axes and is_known else None


def _column(arrays: list[Any]) -> pa.Array | None:
    import numpy as np

    there = [array for array in arrays if array is not None]
    shapes = {array.shape for array in there}
    if len(shapes) == 1 and len(there) == len(arrays) and there[0].size:
        return array_column(np.stack(arrays))
    if len(items_of := {shape[1:] for shape in shapes}) == 1 and 0 not in items_of.pop():
        items = array_column(np.concatenate(there))
    else:
        items = _column([item for array in there for item in array]) if there else None
    if items is None:  # nothing is in any of them
        return None
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    nulls = pa.array([array is None for array in arrays]) if len(there) < len(arrays) else None
    return pa.ListArray.from_arrays(offsets, items, mask=nulls)
