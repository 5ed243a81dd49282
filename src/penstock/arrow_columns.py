"""NumPy's arrays as columns and columns as arrays, without pa.array() and to_numpy(), which import pandas where it is
installed: 0.4 s in every process."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa

# What NumPy calls the types of Arrow that are numbers.
NUMBERS = {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
NUMBERS |= {"halffloat": "float16", "float": "float32", "double": "float64"}


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


def repeated_text(text: str, rows: int) -> pa.DictionaryArray:
    """The same text in every row; it is kept once."""
    data = text.encode()
    ends = pa.py_buffer(array("i", [0, len(data)]))
    texts = pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(data)])
    numbers = pa.Array.from_buffers(pa.int32(), rows, [None, pa.py_buffer(bytes(4 * rows))])
    return pa.DictionaryArray.from_arrays(numbers, texts)


def numbers_of(column: pa.Array | pa.ChunkedArray) -> Any:
    """As its to_numpy(): nulls of numbers are NaN. Not to be written to: it may be the column's own memory."""
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
    return np.frombuffer(chunk.buffers()[1], kind, len(chunk), chunk.offset * kind.itemsize)
