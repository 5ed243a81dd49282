"""A handler for JAX models: a pure function, and its parameters from a file.

rows or columns -> arrays, filled up to one of few numbers of rows -> the compiled function -> arrays of answers
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np

from penstock.errors import BadRowsError, RowError, UsageError
from penstock.handlers.array_answers import ModelOutputs, check_count
from penstock.handlers.array_inputs import FLOATS, Inputs, InputSpec
from penstock.handlers.arrays import ArrayModelHandler, InferenceArgs, each_of, filled
from penstock.handlers.catalog import check_installed, check_versions
from penstock.handlers.jax_models import JaxModel, device_kind, device_named, fetched, import_jax, load_params
from penstock.handlers.row_shapes import naming_rows
from penstock.inference.handler_settings import HandlerSettings

check_installed("jax")

__all__ = ["JaxModelHandler"]

LEAST_ROWS = 8  # of a batch, where there are no buckets: below this one shape is as quick as another


class JaxModelHandler(ArrayModelHandler):
    """Examples are arrays of one shape, which the function gets stacked; or dicts of arrays, which it gets as a dict.

    columns="x": one column: numbers as [rows], lists of one length as [rows, length]. columns=["x", "y"]: one matrix of
    these columns; with named_inputs=True a dict of them, each as a column alone. Floats are 32 bits wide, as JAX has them,
    unless jax_enable_x64 is set; nulls among them become NaN.

    The function is compiled once for each number of rows: batches are filled up with copies of their last row to a power of
    two, or to the next of batch_size_buckets, and the answers to copies are cut off.
    """

    def __init__(
        self,
        apply_fn: Callable[..., Any],
        params_path: str,
        *,
        named_inputs: bool = False,
        separator: str | None = None,
        load_params: Callable[[str], Any] | None = None,
        device: str | None = None,
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe apply_fn(params, inputs, **inference_args), a pure function that jax.jit can compile. It gives an array,
        a dict or a tuple of arrays, with the rows first.

        params_path: a .safetensors file, or a folder that Orbax wrote.
        separator: parameters of a .safetensors file are nested dicts, their names split at this text; None: one flat dict.
        load_params(path): reads the parameters of any other file.
        device: by JAX's own words: "cpu", "gpu", "tpu" or "gpu:1"; None: the CPU.
        """
        super().__init__(params_path, None, settings)
        if not callable(apply_fn):
            raise UsageError(f"apply_fn={apply_fn!r}: expected a function of parameters and inputs")
        self._apply_fn = apply_fn
        self._named_inputs = named_inputs
        self._separator, self._load_params = separator, load_params
        self._device = device

    def load_model(self) -> JaxModel:
        check_versions("jax")
        jax = import_jax(self._device)
        device = device_named(self._device, jax)
        read = self._load_params or (lambda path: load_params(path, self._separator))
        with jax.default_device(device):  # where arrays are made that name no device: readers make some
            params = jax.device_put(read(self._model_uri), device)
        return JaxModel(jax.jit(self._apply_fn), params, device, bool(jax.config.jax_enable_x64))

    def _takes_names(self, specs: Sequence[InputSpec]) -> bool:
        return self._named_inputs

    def _float_type(self, model: JaxModel) -> np.dtype[Any]:
        return np.dtype(np.float64) if model.wide else FLOATS

    def _run(self, model: JaxModel, inputs: Inputs, rows: int, inference_args: InferenceArgs) -> Any:
        if not model.wide:
            each_of(inputs, _refuse_long)
        size = self._padded_rows(rows)
        output = self._call(model, each_of(inputs, lambda array: filled(array, size)), inference_args)
        return _cut(output, size, rows)

    def _call(self, model: JaxModel, inputs: Inputs, inference_args: InferenceArgs) -> Any:
        import jax

        moved = jax.device_put(inputs, model.device)
        with naming_rows(inputs):
            return fetched(model.call(model.params, moved, **(inference_args or {})))

    def _padded_rows(self, rows: int) -> int:
        buckets = sorted(self._batch_size_buckets)
        if buckets and rows <= buckets[-1]:
            return int(buckets[bisect.bisect_left(buckets, rows)])
        return int(max(LEAST_ROWS, 1 << (rows - 1).bit_length()))

    def new_shapes_cost(self) -> bool:
        return True

    def accelerator(self) -> str | None:
        kind, _, number = (self._device or "").partition(":")
        if kind not in ("gpu", "cuda"):
            return None
        return f"cuda:{number}" if number else "gpu"

    def share_model_across_processes(self) -> bool:
        """Also on a TPU, or another device that only JAX knows: one process alone can have it."""
        return super().share_model_across_processes() or device_kind(self._device) not in ("cpu", "gpu", "cuda")

    def get_metrics_namespace(self) -> str:
        return "Penstock_JAX"


def _refuse_long(array: Any) -> Any:
    """BadRowsError for rows with whole numbers that 32 bits do not hold: JAX would take the lower ones, without a word."""
    if array.dtype in (np.int64, np.uint64) and array.size:
        limits = np.iinfo(np.int32 if array.dtype == np.int64 else np.uint32)
        outside = ((array < limits.min) | (array > limits.max)).reshape(len(array), -1).any(axis=1)
        told = f"a whole number of this row is not within {limits.min} and {limits.max}, which JAX holds"
        error = RowError(f"{told}; set the variable JAX_ENABLE_X64 with env_vars=")
        if outside.any():
            raise BadRowsError({int(at): error for at in np.flatnonzero(outside)})
    return array


def _cut(output: Any, size: int, rows: int, name: str = "") -> Any:
    """Without the answers to the rows that filled the batch up. PredictionCountError where there are not so many."""
    if isinstance(output, dict):
        return {key: _cut(part, size, rows, f"{name}[{key!r}]") for key, part in output.items()}
    if isinstance(output, tuple):
        return ModelOutputs(_cut(part, size, rows, f"{name}[{at}]") for at, part in enumerate(output))
    check_count(output, size, name, f" ({rows}, and copies of the last one that fill the batch up)" if size > rows else "")
    return output[:rows]
