"""Handlers for PyTorch models: a state dict with its class, TorchScript, or an exported program.

rows or columns -> one tensor (or a dict of tensors) -> device -> model -> CPU -> one tensor of answers (or a dict of them)

torch is imported where the model is loaded: describing it needs none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, Unpack

from penstock.blocks import byte_size
from penstock.errors import RowError, UsageError
from penstock.handlers.array_columns import check_types
from penstock.handlers.catalog import check_installed
from penstock.handlers.number_columns import check_names, table_of_numbers, table_of_records
from penstock.handlers.pytorch_columns import column_rows, column_tensor, matrix_tensor
from penstock.handlers.pytorch_loading import usable_device
from penstock.handlers.pytorch_models import (
    InferenceArgs,
    Inputs,
    PytorchHandler,
    PytorchSettings,
    answers_of,
    column_answers_of,
    float_dtype_of,
    run_model,
    split,
)
from penstock.handlers.pytorch_padding import Padding
from penstock.rows import PredictionResult

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

check_installed("pytorch")

ExampleT = TypeVar("ExampleT")
InferenceFn: TypeAlias = (
    "Callable[[Sequence[ExampleT], torch.nn.Module, torch.device, InferenceArgs, str | None], Iterable[PredictionResult]]"
)

# Inference functions: what a handler calls for each batch.


def default_tensor_inference_fn(
    batch: Sequence[torch.Tensor],
    model: torch.nn.Module,
    device: torch.device,
    inference_args: InferenceArgs = None,
    model_id: str | None = None,
) -> Iterable[PredictionResult]:
    """model(rows stacked into one tensor, **inference_args)."""
    return _run_rows(_stacked, "", batch, model, device, inference_args, model_id)


def default_keyed_tensor_inference_fn(
    batch: Sequence[dict[str, torch.Tensor]],
    model: torch.nn.Module,
    device: torch.device,
    inference_args: InferenceArgs = None,
    model_id: str | None = None,
) -> Iterable[PredictionResult]:
    """model(**rows stacked into one tensor for each key, **inference_args)."""
    return _run_rows(_stacked_by_key, "", batch, model, device, inference_args, model_id)


def make_tensor_model_fn(model_fn: str) -> InferenceFn[torch.Tensor]:
    """An inference_fn that calls the model's method of this name, such as "generate", instead of the model."""
    return functools.partial(_run_rows, _stacked, model_fn)


def make_keyed_tensor_model_fn(model_fn: str) -> InferenceFn[dict[str, torch.Tensor]]:
    """Like make_tensor_model_fn(), for rows that are dicts of tensors."""
    return functools.partial(_run_rows, _stacked_by_key, model_fn)


def _run_rows(
    stack: Callable[[Sequence[Any]], Inputs],
    model_fn: str,
    batch: Sequence[Any],
    model: torch.nn.Module,
    device: torch.device,
    inference_args: InferenceArgs = None,
    model_id: str | None = None,
) -> list[PredictionResult]:
    call = getattr(model, model_fn) if model_fn else model
    answers = run_model(call, stack(batch), device, inference_args, lambda output: split(output, len(batch)))
    return [PredictionResult(example, answer, model_id) for example, answer in zip(batch, answers, strict=True)]


# Rows to tensors.


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    try:
        return torch.stack(list(rows))
    except (RuntimeError, TypeError) as exc:
        seen = {f"Tensor{tuple(row.shape)}" if isinstance(row, torch.Tensor) else type(row).__name__ for row in rows}
        if len(seen) == 1 and isinstance(rows[0], torch.Tensor):
            raise
        raise RowError(
            f"the rows of one batch must be tensors of one shape, but saw {', '.join(sorted(seen))}; "
            "pad or convert them in with_preprocess_fn(), or give max_batch_size=1"
        ) from exc


def _stacked_by_key(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    keys = rows[0].keys()
    for row in rows:
        if row.keys() != keys:
            raise RowError(
                f"the rows of one batch must have the same keys, but saw {list(keys)} and {list(row)}; "
                "give every row the same keys, in with_preprocess_fn() for example"
            )
    return {key: _stacked([row[key] for row in rows]) for key in keys}


def _as_floats(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# The handlers.


class _PytorchModelHandler(PytorchHandler[ExampleT], Generic[ExampleT]):
    """What both handlers share: all but how rows and columns become tensors."""

    _default_inference_fn: ClassVar[Callable[..., Iterable[PredictionResult]]]

    def __init__(self, *, inference_fn: InferenceFn[ExampleT] | None = None, **settings: Unpack[PytorchSettings]) -> None:
        """Describe a model: state_dict_path with model_class(**model_params), or one of the two other paths.

        device: "CPU" (also when None), "GPU" (the CPU where there is none) or any torch device.
        inference_fn(batch, model, device, inference_args, model_id): gives the PredictionResults of a batch.
        columns: the columns that the model takes, where rows have names; see the class.
        output_column, output_prefix: what the columns of the answers are called; a prefix is for models that give dicts.
        load_model_args: for torch.load, torch.jit.load or torch.export.load.
        trusted: you trust the file to run code: torch_script_model_path and exported_program_path need it.
        dtype: what the weights become, such as "bfloat16". autocast: what torch.autocast() computes with, where it may.
        compile: True, or arguments of torch.compile(). Of these, only dtype and compile are for an inference_fn, too.
        """
        super().__init__(settings)
        if inference_fn is not None and self._precision.autocast is not None:
            raise UsageError(
                "autocast= is for the model itself, but inference_fn= calls it as it likes; leave autocast= out, and call "
                "the model under torch.autocast() there"
            )
        self._inference_fn = inference_fn or self._default_inference_fn
        # A function of the user's, and a run_inference() that calls super's, deal with PredictionResults.
        is_plain = type(self).run_inference is _PytorchModelHandler.run_inference
        self.wraps_answers = is_plain and self._inference_fn is self._default_inference_fn

    def run_inference(self, batch: Sequence[ExampleT], model: torch.nn.Module, inference_args: InferenceArgs = None) -> Any:
        device = usable_device(self._device)
        if not self.wraps_answers:
            self._quicken(model)
            return self._inference_fn(batch, model, device, inference_args, self.model_id())
        if self._are_records(batch):
            inputs = self._columns_as_inputs(self._table_of(batch), float_dtype_of(model))
        else:
            inputs = self._rows_as_inputs(batch)
            if self._columns is not None and not self.takes_columns():  # made of columns, before the model was there
                inputs = {name: _as_floats(each, float_dtype_of(model)) for name, each in inputs.items()}
        call = self._calling(model)
        return run_model(call, inputs, device, inference_args, lambda output: answers_of(output, len(batch)))

    def _are_records(self, batch: Sequence[Any]) -> bool:
        """Whether rows are dicts of the columns, not yet of tensors."""
        names = self.input_columns()
        if names is None or not isinstance(batch[0], Mapping):
            return False
        return not all(_is_tensor(batch[0].get(name)) for name in names)

    def _table_of(self, rows: Sequence[Any]) -> pa.Table:
        return table_of_records(rows, self.input_columns())

    def _rows_as_inputs(self, batch: Sequence[Any]) -> Inputs:
        raise NotImplementedError

    def _columns_as_inputs(self, table: pa.Table, dtype: torch.dtype) -> Inputs:
        """What the model takes, of a table with the input columns; its floats are of this type."""
        raise NotImplementedError

    def takes_columns(self) -> bool:
        return self._columns is not None and self.wraps_answers

    def examples_of(self, table: pa.Table) -> Sequence[Any]:
        """Dicts of the columns. Where a function of the user's gets them: tensors, whose floats are float32, lists of any
        length; None for a null where there is no NaN."""
        rows: list[Any] = table.to_pylist() if self.takes_columns() else self._tensors_of(table)
        return rows

    def _tensors_of(self, table: pa.Table) -> list[Any]:
        raise NotImplementedError

    def run_inference_columns(self, table: pa.Table, model: torch.nn.Module, inference_args: InferenceArgs = None) -> Any:
        check_names(self.input_columns(), table.column_names)
        inputs, rows = self._columns_as_inputs(table, float_dtype_of(model)), table.num_rows
        device = usable_device(self._device)
        call = self._calling(model)
        return run_model(call, inputs, device, inference_args, lambda output: column_answers_of(output, rows))

    def check_columns(self, schema: pa.Schema) -> None:
        names = self.input_columns()
        if names is not None:
            check_names(names, schema.names)
            check_types(schema, names, lists=self._takes_lists(), instead="use PytorchModelHandlerKeyedTensor")
        elif self._inference_fn is self._default_inference_fn:
            raise UsageError(
                f"the rows are dicts of plain values, {list(schema.names)}, but the model takes tensors; name the columns "
                "that it takes with columns=[...], or make tensors with .with_preprocess_fn(lambda row: torch.tensor(...))"
            )

    def _takes_lists(self) -> bool:
        return True

    def is_native(self) -> bool:
        """Only TorchScript: the class of another model is Python."""
        return type(self).__module__ == __name__ and self.wraps_answers and self._source.torch_script_model_path is not None

    def is_thread_safe(self, model: torch.nn.Module) -> bool:
        return self.is_native()

    def changes_rows(self) -> bool:
        """Not where all it does with them is to stack them."""
        return not self.wraps_answers

    def prepares_ahead(self) -> bool:
        return self._inference_fn is self._default_inference_fn and super().prepares_ahead()


class PytorchModelHandlerTensor(_PytorchModelHandler["torch.Tensor"]):
    """Examples are tensors of one shape; the model gets them stacked into one.

    columns=["a", "b"]: columns of numbers; the model gets one matrix of its own floats, [rows, 2]; of ["a"], [rows, 1].
    columns="a": one column; numbers are [rows], lists of one length [rows, length]. Floats become the model's own, whole
    numbers stay what they are.
    Nulls become NaN. Where whole numbers stay what they are, a row with a null fails, and so does one whose list is null.
    """

    _default_inference_fn = staticmethod(default_tensor_inference_fn)

    def _rows_as_inputs(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return _stacked(batch)

    def _tensors_of(self, table: pa.Table) -> list[torch.Tensor | None]:
        import torch

        if isinstance(self._columns, str):
            return column_rows(table, self._columns, torch.float32)
        return list(torch.unbind_copy(self._columns_as_inputs(table, torch.float32)))

    def _columns_as_inputs(self, table: pa.Table, dtype: torch.dtype) -> torch.Tensor:
        assert self._columns is not None
        if isinstance(self._columns, str):
            return column_tensor(table, self._columns, dtype)
        return matrix_tensor(table, self._columns, dtype)

    def _table_of(self, rows: Sequence[Any]) -> pa.Table:
        return super()._table_of(rows) if self._takes_lists() else table_of_numbers(rows, self.input_columns())

    def _takes_lists(self) -> bool:
        return isinstance(self._columns, str)

    def get_num_bytes(self, batch: Sequence[torch.Tensor]) -> int:
        return byte_size(list(batch)) if self._are_records(batch) else sum(tensor.nbytes for tensor in batch)


class PytorchModelHandlerKeyedTensor(_PytorchModelHandler["dict[str, torch.Tensor]"]):
    """Examples are dicts of tensors; the model gets each key as one named argument, stacked over the rows.

    pad={"input_ids": 0}: these keys may have different lengths. Rows of like length share a batch, which is filled up at the
    end with these values to its longest row, or to the next of length_buckets. The model gets a mask, too: 1 where a row has
    a value, under the name of mask=; of rows that have that key already, it is theirs, filled up with 0.

    columns=["a", "b"]: the model gets each column as one named argument: numbers as [rows], lists of one length as
    [rows, length]. Floats become the model's own, nulls among them NaN; whole numbers stay what they are, and a row with a
    null among them fails, as does one whose list is null.
    """

    _default_inference_fn = staticmethod(default_keyed_tensor_inference_fn)

    def __init__(
        self,
        *,
        inference_fn: InferenceFn[dict[str, torch.Tensor]] | None = None,
        pad: Mapping[str, float] | None = None,
        mask: str | None = "attention_mask",
        **settings: Unpack[PytorchSettings],
    ) -> None:
        """Like PytorchModelHandlerTensor.

        pad: keys of different lengths, and what fills each up. mask: what the mask is called; None: there is none. A model
            without a mask must know padding by its values, or the answer to a row depends on the others in its batch; if
            it does not, leave pad= out, and give max_batch_size=1.
        """
        self._padding = None if pad is None else Padding(values=dict(pad), mask=mask)
        super().__init__(inference_fn=inference_fn, **settings)
        if pad is not None and inference_fn is not None:
            raise UsageError("pad= is for the model itself, but inference_fn= gets rows as they are; pad them there")

    def takes_columns(self) -> bool:
        """Not where lists of several lengths are to be padded: each row is then a tensor."""
        return self._padding is None and super().takes_columns()

    def measures_length(self) -> bool:
        return self._padding is not None or super().measures_length()

    def get_lengths(self, batch: Sequence[Any]) -> Sequence[int]:
        if self._padding is None or self._batch_length_fn is not None:
            return super().get_lengths(batch)
        return [self._padding.length_of(row) for row in batch]

    def _rows_as_inputs(self, batch: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if self._padding is None:
            return _stacked_by_key(batch)
        padded, rest = self._padding.padded(batch, self.padded_length)
        return {**padded, **_stacked_by_key(rest)}

    def _tensors_of(self, table: pa.Table) -> list[dict[str, torch.Tensor | None]]:
        import torch

        names = self.input_columns() or ()
        rows = zip(*(column_rows(table, name, torch.float32) for name in names), strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _columns_as_inputs(self, table: pa.Table, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if self._padding is not None:
            made = self._rows_as_inputs(self._tensors_of(table))  # None, of a null, is refused there
            return {name: _as_floats(each, dtype) for name, each in made.items()}
        return {name: column_tensor(table, name, dtype) for name in self.input_columns() or ()}

    def get_num_bytes(self, batch: Sequence[dict[str, torch.Tensor]]) -> int:
        if self._are_records(batch):
            return byte_size(list(batch))
        return sum(tensor.nbytes for row in batch for tensor in row.values())
