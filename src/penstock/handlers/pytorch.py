"""Handlers for PyTorch models: a state dict with its class, TorchScript, or an exported program.

rows -> one tensor (or a dict of tensors) -> device -> model -> CPU -> one PredictionResult per row
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

from penstock.errors import MissingPackageError, PredictionCountError, RowError, UsageError

try:
    import torch
except ModuleNotFoundError as exc:
    raise MissingPackageError("torch", "torch") from exc

from penstock.handlers.pytorch_loading import ModelSource, device_name, usable_device
from penstock.handlers.pytorch_running import Move, run_on
from penstock.inference.handler import ModelHandler
from penstock.io.files import without_secrets
from penstock.rows import PredictionResult

ExampleT = TypeVar("ExampleT")
InferenceArgs: TypeAlias = Mapping[str, Any] | None
InferenceFn: TypeAlias = Callable[
    [Sequence[ExampleT], torch.nn.Module, torch.device, InferenceArgs, str | None], Iterable[PredictionResult]
]

# Inference functions: what a handler calls for each batch.


def default_tensor_inference_fn(
    batch: Sequence[torch.Tensor],
    model: torch.nn.Module,
    device: torch.device,
    inference_args: InferenceArgs = None,
    model_id: str | None = None,
) -> Iterable[PredictionResult]:
    """model(rows stacked into one tensor, **inference_args)."""
    return _run_stacked(model, batch, device, inference_args, model_id)


def default_keyed_tensor_inference_fn(
    batch: Sequence[dict[str, torch.Tensor]],
    model: torch.nn.Module,
    device: torch.device,
    inference_args: InferenceArgs = None,
    model_id: str | None = None,
) -> Iterable[PredictionResult]:
    """model(**rows stacked into one tensor for each key, **inference_args)."""
    return _run_stacked_by_key(model, batch, device, inference_args, model_id)


def make_tensor_model_fn(model_fn: str) -> InferenceFn[torch.Tensor]:
    """An inference_fn that calls the model's method of this name, such as "generate", in place of the model."""
    return functools.partial(_run_method, _run_stacked, model_fn)


def make_keyed_tensor_model_fn(model_fn: str) -> InferenceFn[dict[str, torch.Tensor]]:
    """Like make_tensor_model_fn(), for rows that are dicts of tensors."""
    return functools.partial(_run_method, _run_stacked_by_key, model_fn)


def _run_method(
    run: Callable[..., list[PredictionResult]],
    model_fn: str,
    batch: Sequence[Any],
    model: torch.nn.Module,
    device: torch.device,
    inference_args: InferenceArgs = None,
    model_id: str | None = None,
) -> list[PredictionResult]:
    return run(getattr(model, model_fn), batch, device, inference_args, model_id)


def _run_stacked(
    call: Callable[..., Any],
    batch: Sequence[torch.Tensor],
    device: torch.device,
    inference_args: InferenceArgs,
    model_id: str | None,
) -> list[PredictionResult]:
    stacked = _stack(batch)
    answers = run_on(device, lambda move: call(move(stacked), **(inference_args or {})), lambda out: _split(out, len(batch)))
    return _results(batch, answers, model_id)


def _run_stacked_by_key(
    call: Callable[..., Any],
    batch: Sequence[dict[str, torch.Tensor]],
    device: torch.device,
    inference_args: InferenceArgs,
    model_id: str | None,
) -> list[PredictionResult]:
    keys = batch[0].keys()
    for row in batch:
        if row.keys() != keys:
            raise RowError(
                f"the rows of one batch must have the same keys, but saw {list(keys)} and {list(row)}; "
                "give every row the same keys, in with_preprocess_fn() for example"
            )
    stacked = {key: _stack([row[key] for row in batch]) for key in keys}

    def run(move: Move) -> Any:
        return call(**{key: move(tensor) for key, tensor in stacked.items()}, **(inference_args or {}))

    return _results(batch, run_on(device, run, lambda out: _split(out, len(batch))), model_id)


# Rows to tensors, and back.


def _stack(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    try:
        return torch.stack(list(rows))
    except (RuntimeError, TypeError) as exc:
        seen = {_kind(row) for row in rows}
        if len(seen) == 1 and isinstance(rows[0], torch.Tensor):
            raise
        raise RowError(
            f"the rows of one batch must be tensors of one shape, but saw {', '.join(sorted(seen))}; "
            "pad or convert them in with_preprocess_fn(), or give max_batch_size=1"
        ) from exc


def _kind(row: object) -> str:
    return f"Tensor{tuple(row.shape)}" if isinstance(row, torch.Tensor) else type(row).__name__


def _results(batch: Sequence[Any], answers: Sequence[Any], model_id: str | None) -> list[PredictionResult]:
    return [PredictionResult(example, answer, model_id) for example, answer in zip(batch, answers, strict=True)]


def _split(output: Any, rows: int) -> Sequence[Any]:
    """A model's output as exactly one answer per row.

    A tensor gives its rows; a dict one dict per row; a tuple, or a list of tensors, one tuple per row; any other list
    holds the rows' answers already. Answers are on the CPU and own their memory: a view would be pickled, and kept
    alive, with its whole batch.
    """
    if isinstance(output, torch.Tensor):
        _check_rows(f"a tensor of shape {tuple(output.shape)}", output.shape[0] if output.dim() else 0, rows)
        return cast(Sequence[Any], torch.unbind_copy(output.detach().cpu()))
    if isinstance(output, Mapping) and output:
        parts = [_split(part, rows) for part in output.values()]
        return [dict(zip(output, answers, strict=True)) for answers in zip(*parts, strict=True)]
    if isinstance(output, tuple) or _is_list_of_tensors(output):
        return list(zip(*(_split(part, rows) for part in output), strict=True))
    _check_rows(f"a {type(output).__name__}", len(output) if hasattr(output, "__len__") else 0, rows)
    return [_on_cpu(answer) for answer in output]


def _is_list_of_tensors(output: object) -> bool:
    return isinstance(output, list) and all(isinstance(part, torch.Tensor) for part in output)


def _check_rows(seen: str, answers: int, rows: int) -> None:
    if answers != rows:
        raise PredictionCountError(
            f"the model returned {seen} for a batch of {rows} rows, but each output must hold one answer per row, "
            "rows first; keep what is per row with inference_fn=..., or change the model's output"
        )


def _on_cpu(answer: Any) -> Any:
    if isinstance(answer, torch.Tensor):
        return answer.detach().cpu().clone()
    if isinstance(answer, Mapping):
        return {key: _on_cpu(part) for key, part in answer.items()}
    if isinstance(answer, (list, tuple)):
        return [_on_cpu(part) for part in answer]
    return answer


# The handlers.


class _PytorchModelHandler(ModelHandler[ExampleT, PredictionResult, torch.nn.Module], Generic[ExampleT]):
    """What both handlers share: all but how rows become tensors."""

    _default_inference_fn: ClassVar[Callable[..., Iterable[PredictionResult]]]

    def __init__(
        self,
        *,
        state_dict_path: str | None = None,
        model_class: Callable[..., torch.nn.Module] | None = None,
        model_params: Mapping[str, Any] | None = None,
        torch_script_model_path: str | None = None,
        exported_program_path: str | None = None,
        device: str | None = None,
        inference_fn: InferenceFn[ExampleT] | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_batch_duration_secs: float | None = None,
        max_batch_weight: int | None = None,
        element_size_fn: Callable[[ExampleT], int] | None = None,
        env_vars: Mapping[str, str] | None = None,
        large_model: bool = False,
        model_copies: int | None = None,
        load_model_args: Mapping[str, Any] | None = None,
        trusted: bool = False,
    ) -> None:
        """Describe a model: state_dict_path with model_class(**model_params), or one of the two other paths.

        device: "CPU" (also when None), "GPU" (the CPU where there is none) or any torch device.
        inference_fn(batch, model, device, inference_args, model_id): gives the PredictionResults of a batch.
        load_model_args: for torch.load, torch.jit.load or torch.export.load.
        trusted: needed by exported_program_path alone, because such a file can run code when it is loaded.
        """
        super().__init__(
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_batch_duration_secs=max_batch_duration_secs,
            max_batch_weight=max_batch_weight,
            element_size_fn=element_size_fn,
            env_vars=env_vars,
            large_model=large_model,
            model_copies=model_copies,
        )
        self._source = ModelSource(
            state_dict_path=state_dict_path,
            model_class=model_class,
            model_params=model_params,
            torch_script_model_path=torch_script_model_path,
            exported_program_path=exported_program_path,
            load_model_args=load_model_args or {},
            trusted=trusted,
        )
        self._device = device_name(device)
        self._inference_fn = inference_fn or self._default_inference_fn

    def load_model(self) -> torch.nn.Module:
        """The model in evaluation mode, on its device."""
        return self._source.load(usable_device(self._device))

    def run_inference(
        self, batch: Sequence[ExampleT], model: torch.nn.Module, inference_args: InferenceArgs = None
    ) -> Iterable[PredictionResult]:
        return self._inference_fn(batch, model, usable_device(self._device), inference_args, self.model_id())

    def check_columns(self, schema: Any) -> None:
        if self._inference_fn is self._default_inference_fn:
            raise UsageError(
                f"the rows are dicts of plain values, {list(schema.names)}, but the model takes tensors; make them with "
                ".with_preprocess_fn(lambda row: torch.tensor(...)), or with a ps.Map before the model"
            )

    def changes_rows(self) -> bool:
        """Not where all it does with them is to stack them."""
        plain = type(self).run_inference is _PytorchModelHandler.run_inference
        return not (plain and self._inference_fn is self._default_inference_fn)

    def prepares_ahead(self) -> bool:
        on_gpu = self._device.startswith("cuda") and torch.cuda.is_available()
        return on_gpu and self._inference_fn is self._default_inference_fn

    def accelerator(self) -> str | None:
        return {"cuda": "gpu"}.get(self._device, self._device if self._device.startswith("cuda") else None)

    def model_id(self) -> str:
        return without_secrets(self._source.path)

    def model_files(self) -> Sequence[str]:
        return (self._source.path,)

    def get_metrics_namespace(self) -> str:
        return "Penstock_PyTorch"


class PytorchModelHandlerTensor(_PytorchModelHandler[torch.Tensor]):
    """Examples are tensors of one shape; the model gets them stacked into one."""

    _default_inference_fn = staticmethod(default_tensor_inference_fn)

    def get_num_bytes(self, batch: Sequence[torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in batch)


class PytorchModelHandlerKeyedTensor(_PytorchModelHandler[dict[str, torch.Tensor]]):
    """Examples are dicts of tensors; the model gets each key as one named argument, stacked over the rows."""

    _default_inference_fn = staticmethod(default_keyed_tensor_inference_fn)

    def get_num_bytes(self, batch: Sequence[dict[str, torch.Tensor]]) -> int:
        return sum(tensor.nbytes for row in batch for tensor in row.values())
