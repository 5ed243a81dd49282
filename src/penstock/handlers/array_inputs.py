"""Rows and columns as the inputs of a model of arrays (ONNX, TensorFlow, JAX), and which of them do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.errors import BadRowsError, RowError, UsageError
from penstock.handlers.array_columns import Array, column_array, matrix_array

Inputs: TypeAlias = "Array | dict[str, Array]"

FLOATS = np.dtype(np.float32)  # what floats of columns become, where the model does not say


@dataclass(frozen=True)
class InputSpec:
    """One input of a model, as its file describes it. Axes of any length are None; the first axis is the rows."""

    name: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int | None, ...] | None = None

    @property
    def rows(self) -> int | None:
        """How many rows a batch must have; None: any number."""
        return self.shape[0] if self.shape else None

    def fits_row(self, row: Array) -> bool:
        """Whether an array can be one row of this input: its type and its axes."""
        return (self.dtype is None or row.dtype == self.dtype) and self._fits_axes(row.shape)

    def fits(self, array: Array) -> bool:
        """Whether an array, whose first axis is the rows, has the axes of this input; its type may still be converted."""
        return self._fits_axes(array.shape[1:])

    def _fits_axes(self, axes: Sequence[int]) -> bool:
        if self.shape is None:
            return True
        wanted = self.shape[1:]
        return len(axes) == len(wanted) and all(one in (None, other) for one, other in zip(wanted, axes, strict=True))

    def __str__(self) -> str:
        kind = "any type" if self.dtype is None else "texts" if self.dtype == object else str(self.dtype)
        axes = "any shape" if self.shape is None else f"shape {_shown(self.shape[1:])}"
        return f"{kind} of {axes} for each row of input {self.name!r}"


def stacked(rows: Sequence[Any], spec: InputSpec | None, model_id: str) -> Array:
    """Rows that are arrays as one, with the rows first. BadRowsError for those that are not what the model takes."""
    arrays = [row if type(row) is np.ndarray else np.asarray(row) for row in rows]
    if spec is not None and spec.dtype == object:  # texts, which NumPy has in a type for each length
        arrays = [array.astype(object) if array.dtype.kind == "U" else array for array in arrays]
    dtype, shape = arrays[0].dtype, arrays[0].shape
    alike = all(array.dtype == dtype and array.shape == shape for array in arrays)
    if alike and (spec is None or spec.fits_row(arrays[0])):
        return np.stack(arrays)
    if spec is not None:
        told = f"the model in {model_id!r} takes {spec}, but the row is"
        bad: dict[int, Exception] = {
            at: RowError(f"{told} {array.dtype} of shape {_shown(array.shape)}; {_advice(array, spec)}")
            for at, array in enumerate(arrays)
            if not spec.fits_row(array)
        }
        if bad:
            raise BadRowsError(bad)
    seen = {(str(array.dtype), array.shape) for array in arrays}
    if len(seen) > 1:
        told = ", ".join(sorted(f"{kind}{_shown(shape)}" for kind, shape in seen)[:5])
        raise RowError(
            f"the rows of one batch must be arrays of one shape and type, but saw {told}; pad or convert them in "
            "with_preprocess_fn(), or give max_batch_size=1"
        )
    return np.stack(arrays)


def stacked_by_name(rows: Sequence[Any], specs: Sequence[InputSpec], model_id: str) -> dict[str, Array]:
    """Rows that are dicts of arrays as one array for each name."""
    names = [spec.name for spec in specs] if specs else list(rows[0])
    bad: dict[int, Exception] = {
        at: RowError(f"the model in {model_id!r} takes the inputs {names}, but the row has {_keys(row)}")
        for at, row in enumerate(rows)
        if not isinstance(row, Mapping) or not row.keys() >= set(names)
    }
    if bad:
        raise BadRowsError(bad)
    known: dict[str, InputSpec] = {spec.name: spec for spec in specs}
    return {name: stacked([row[name] for row in rows], known.get(name), model_id) for name in names}


def column_input(
    table: pa.Table, columns: str | Sequence[str], spec: InputSpec | None, floats: np.dtype[Any], model_id: str
) -> Array:
    """One column, or several columns of numbers as one matrix, as an input. Its floats are those that the input takes, or
    else `floats`."""
    floats = spec.dtype if spec is not None and spec.dtype is not None and spec.dtype.kind == "f" else floats
    if not isinstance(columns, str):
        array = matrix_array(table, columns, floats)
    elif spec is not None and spec.dtype == object:
        array = _texts(table.column(columns), columns)
    else:
        array = column_array(table, columns, floats)
    if spec is None:
        return array
    if spec.shape is not None and len(spec.shape) == array.ndim + 1 and spec.shape[-1] in (1, None):
        array = array[..., np.newaxis]
    array = _of_type(array, spec, columns, model_id)
    if not spec.fits(array):
        told = f"the model in {model_id!r} takes {spec}, but columns={columns!r} give"
        error = RowError(f"{told} shape {_shown(array.shape[1:])}; check columns=, and the length of lists")
        raise BadRowsError(dict.fromkeys(range(len(array)), error))
    return array


def _texts(column: pa.ChunkedArray, name: str) -> Array:
    """BadRowsError for rows that are null, because no model of texts takes that."""
    if column.null_count:
        error = RowError(f"column {name!r} is null in this row, and the model takes texts; replace nulls in a step before")
        raise BadRowsError(dict.fromkeys(np.flatnonzero(column.is_null().to_numpy()).tolist(), error))
    texts: Array = column.to_numpy()
    return texts


def _of_type(array: Array, spec: InputSpec, columns: Any, model_id: str) -> Array:
    """Whole numbers as the model's own numbers, if it has each of them; floats are no whole numbers."""
    if spec.dtype is None or array.dtype == spec.dtype:
        return array
    if array.dtype.kind in "iub" and spec.dtype.kind in "iuf":
        made: Array = array.astype(spec.dtype)
        lost = np.flatnonzero((made != array).reshape(len(array), -1).any(axis=1))
        if not len(lost):
            return made
        error = RowError(f"columns={columns!r}: a number of this row has no {spec.dtype}, which {model_id!r} takes")
        raise BadRowsError({int(at): error for at in lost})
    raise UsageError(
        f"the model in {model_id!r} takes {spec}, but columns={columns!r} hold {array.dtype}; convert them in a step before"
    )


def _advice(row: Array, spec: InputSpec) -> str:
    if spec.dtype is not None and row.dtype != spec.dtype:
        return f"convert it: row.astype({str(spec.dtype)!r})"
    return "pad or reshape it in with_preprocess_fn()"


def _shown(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if axis is None else str(axis) for axis in shape)}]"


def _keys(row: Any) -> str:
    return str(list(row)) if isinstance(row, Mapping) else f"no names ({type(row).__name__})"
