"""Arrays and tensors as columns and columns as arrays, without an object for each number, and without pa.array() and
to_numpy(), which import pandas where it is installed: 0.4 s in every process."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa

# What NumPy calls the types of Arrow that are numbers.
NUMBERS = {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
NUMBERS |= {"halffloat": "float16", "float": "float32", "double": "float64"}
KINDS = ("b", "f", "i", "u")  # of NumPy's types that Arrow has, too


def array_column(values: Any) -> pa.Array:
    """A NumPy array of any axes as a column of its first one: the others are lists of a fixed size."""
    column = _numbers(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _numbers(values: Any) -> pa.Array:
    kind, flags = values.dtype, values.flags
    if kind.kind in "iuf" and kind.itemsize <= 8 and kind.isnative and flags.c_contiguous and flags.aligned:
        return pa.Array.from_buffers(pa.from_numpy_dtype(kind), values.size, [None, pa.py_buffer(values)])
    return pa.array(values)


def holds_arrays(kinds: set[type]) -> bool:
    """Whether values of these types are all arrays of NumPy, or all tensors."""
    if len(kinds) != 1:
        return False
    (kind,) = kinds
    return (kind.__module__, kind.__name__) == ("numpy", "ndarray") or hasattr(kind, "detach")


def numpy_of(value: Any) -> Any:
    """A tensor as an array, where a type of floats that NumPy has not (bfloat16, float8) becomes float32, and so in arrays
    with such a type of another package; any other value as it is."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        try:
            return tensor.numpy()
        except TypeError:
            return tensor.float().numpy() if tensor.is_floating_point() else value
    return widened(value) if hasattr(value, "dtype") else value


def widened(array: Any) -> Any:
    """An array or number of a type that a package has given to NumPy (bfloat16, float8, int4), and that Arrow has not, in
    one that holds each of its values; any other as it is."""
    if getattr(array.dtype, "isbuiltin", 1) != 2:
        return array
    import numpy as np

    kind = next((kind for kind in ("uint8", "int8", "float32") if np.can_cast(array.dtype, kind)), None)
    return array if kind is None else array.astype(kind)


def column_of_arrays(values: list[Any]) -> pa.Array | None:
    """Arrays or tensors of one type of numbers and as many axes, or None: lists of a fixed size if all are there in one
    shape, else lists. None for what has another form."""
    arrays = [numpy_of(value) for value in values]
    forms = {(array.dtype, array.ndim) for array in arrays if array is not None}
    if len(forms) != 1:
        return None
    ((dtype, axes),) = forms
    is_known = getattr(dtype, "kind", "") in KINDS and dtype.isnative
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


def repeated_text(text: str, rows: int) -> pa.DictionaryArray:
    """The same text in every row; it is kept once."""
    data = text.encode()
    ends = pa.py_buffer(array("i", [0, len(data)]))
    texts = pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(data)])
    numbers = pa.Array.from_buffers(pa.int32(), rows, [None, pa.py_buffer(bytes(4 * rows))])
    return pa.DictionaryArray.from_arrays(numbers, texts)


def numbers_of(column: pa.Array | pa.ChunkedArray) -> Any:
    """As its to_numpy(): nulls of numbers are NaN. It cannot be written to where it is the column's own memory."""
    import numpy as np

    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    name = NUMBERS.get(str(column.type))
    if name is None or column.null_count or not chunks:
        return column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    parts = [_numbers_in(chunk, np.dtype(name)) for chunk in chunks]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _numbers_in(chunk: pa.Array, kind: Any) -> Any:
    import numpy as np

    if not len(chunk):
        return np.empty(0, kind)
    memory = memoryview(chunk.buffers()[1]).toreadonly()
    return np.frombuffer(memory, kind, len(chunk), chunk.offset * kind.itemsize)
