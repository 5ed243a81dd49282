"""What the PyTorch handlers share: settings, loading, devices, and the model's outputs as answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypedDict, TypeVar, cast

from penstock.errors import PredictionCountError
from penstock.handlers.array_answers import NO_ROWS, by_name
from penstock.handlers.catalog import check_versions
from penstock.handlers.pytorch_loading import WeightsSource, device_name, usable_device
from penstock.handlers.pytorch_precision import Precision
from penstock.handlers.pytorch_running import on_gpu, run_on, take_device_seconds
from penstock.handlers.row_shapes import naming_rows
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import checked_path
from penstock.inference.handler_settings import HandlerSettings
from penstock.io.files import without_secrets
from penstock.rows import PredictionResult

if TYPE_CHECKING:
    import torch

ExampleT = TypeVar("ExampleT")
T = TypeVar("T")
InferenceArgs: TypeAlias = Mapping[str, Any] | None
Inputs: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"


class SourceSettings(TypedDict, total=False):
    """Where the model comes from: state_dict_path with model_class(**model_params), or one of the two other paths."""

    state_dict_path: str | None
    model_class: Callable[..., torch.nn.Module] | None
    model_params: Mapping[str, Any] | None
    torch_script_model_path: str | None
    exported_program_path: str | None
    load_model_args: Mapping[str, Any] | None  # for torch.load, torch.jit.load or torch.export.load
    trusted: bool  # needed by the two latter: such files are programs, or can run code when they are loaded


class PytorchSettings(SourceSettings, HandlerSettings, total=False):
    """All settings that the handlers share."""

    device: str | None  # "CPU" (also when None), "GPU" (the CPU where there is none) or any torch device
    dtype: Any  # what the weights become, such as "bfloat16"; None: they stay what they are
    autocast: Any  # what torch.autocast() computes with, where it may; None: it is not used
    compile: bool | Mapping[str, Any]  # torch.compile() the model, with these arguments


class PytorchHandler(ModelHandler[ExampleT, PredictionResult, "torch.nn.Module"], Generic[ExampleT]):
    """A handler of one PyTorch model; subclasses say how rows become its input."""

    def __init__(self, settings: PytorchSettings) -> None:
        rest: dict[str, Any] = dict(settings)
        self._device = device_name(rest.pop("device", None))
        wanted = rest.pop("dtype", None), rest.pop("autocast", None), rest.pop("compile", False)
        self._precision = Precision.of(*wanted)
        source = {name: rest.pop(name, None) for name in SourceSettings.__annotations__}
        source |= {"load_model_args": source["load_model_args"] or {}, "trusted": bool(source["trusted"])}
        super().__init__(**rest)
        self._source = WeightsSource(**source)

    def load_model(self) -> torch.nn.Module:
        """The model in evaluation mode, on its device."""
        check_versions("pytorch")
        return self._precision.applied(self._source.load(usable_device(self._device)))

    def _calling(self, model: torch.nn.Module) -> Callable[..., Any]:
        """The model, to be called with a batch."""
        self._quicken(model)
        return self._precision.calling(model, usable_device(self._device))

    def _quicken(self, model: torch.nn.Module) -> None:
        if self._precision.compiles is None:
            from penstock.handlers.pytorch_linear import quicken

            quicken(model)

    def prepares_ahead(self) -> bool:
        return on_gpu(self._device)

    def new_shapes_cost(self) -> bool:
        return self._precision.compiles is not None or super().new_shapes_cost()

    def device_seconds(self) -> float | None:
        return take_device_seconds()

    def accelerator(self) -> str | None:
        return {"cuda": "gpu"}.get(self._device, self._device if self._device.startswith("cuda") else None)

    def model_id(self) -> str:
        return without_secrets(self._source.path)

    def model_files(self) -> Sequence[str]:
        return (self._source.path,)

    def update_model_path(self, model_path: str) -> None:
        """Another file of the kind that was given: a state dict of the same model_class, a TorchScript model or an exported
        program."""
        self._source = self._source.at(checked_path(model_path))

    def get_metrics_namespace(self) -> str:
        return "Penstock_PyTorch"


def run_model(
    call: Callable[..., Any],
    inputs: Inputs,
    device: torch.device,
    inference_args: InferenceArgs,
    fetch: Callable[[Any], T],
) -> T:
    """fetch() of what the model, or a method of it, gives for a whole batch: one tensor, or named ones."""

    def run(moved: Inputs) -> Any:
        with naming_rows(moved):
            if isinstance(moved, dict):
                return call(**moved, **(inference_args or {}))
            return call(moved, **(inference_args or {}))

    return run_on(device, inputs, run, fetch)


def float_dtype_of(model: torch.nn.Module) -> torch.dtype:
    """What floats the model computes with: those of its weights, or float32 where it has none."""
    import torch

    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


# ModelOutputs to answers.


def answers_of(output: Any, rows: int) -> Any:
    """A model's output with the rows first: one tensor; a dict of tensors; or a list of what split() gives. Tensors are on
    the CPU and own their memory: a view would be pickled, and kept alive, with all that it is a view of."""
    import torch

    output = by_name(output)
    if isinstance(output, torch.Tensor):
        return _checked(output, rows)
    if isinstance(output, Mapping) and output:
        named = all(isinstance(name, str) and isinstance(part, torch.Tensor) for name, part in output.items())
        return {name: _checked(part, rows, f"[{name!r}]") for name, part in output.items()} if named else split(output, rows)
    return split(output, rows)


def column_answers_of(output: Any, rows: int) -> Any:
    """answers_of() for a table, where the parts of a tuple are named by their numbers: "0", "1", ..."""
    output = by_name(output)
    if isinstance(output, tuple) or _is_list_of_tensors(output):
        output = {str(at): part for at, part in enumerate(output)}
    return answers_of(output, rows)


def split(output: Any, rows: int, name: str = "") -> Sequence[Any]:
    """A model's output as exactly one answer per row.

    A tensor gives its rows; a dict, a named tuple or a dataclass one dict per row; a tuple, or a list of tensors that are
    no single numbers, one tuple per row; any other list holds the rows' answers already. Answers are on the CPU and own
    their memory. An error says the name of the output that has another number of rows.
    """
    import torch

    output = by_name(output)
    if isinstance(output, torch.Tensor):
        return cast(Sequence[Any], torch.unbind_copy(_checked(output, rows, name)))
    if isinstance(output, Mapping) and output:
        parts = [split(part, rows, f"{name}[{key!r}]") for key, part in output.items()]
        return [dict(zip(output, answers, strict=True)) for answers in zip(*parts, strict=True)]
    if isinstance(output, tuple) or _is_list_of_tensors(output):
        parts = [split(part, rows, f"{name}[{at}]") for at, part in enumerate(output)]
        return list(zip(*parts, strict=True))
    count = len(output) if hasattr(output, "__len__") and not isinstance(output, NO_ROWS) else 0
    _check_rows(f"a {type(output).__name__}", count, rows, name)
    return [_on_cpu(answer) for answer in output]


def _checked(output: torch.Tensor, rows: int, name: str = "") -> torch.Tensor:
    _check_rows(f"a tensor of shape {tuple(output.shape)}", output.shape[0] if output.dim() else 0, rows, name)
    return _owned(output)


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.device.type == "cpu" else tensor.cpu()


def _is_list_of_tensors(output: object) -> bool:
    import torch

    return isinstance(output, list) and all(isinstance(part, torch.Tensor) and part.dim() for part in output)


def _check_rows(seen: str, answers: int, rows: int, name: str) -> None:
    if answers != rows:
        where = f" as output{name}" if name else ""
        raise PredictionCountError(
            f"the model returned {seen}{where} for a batch of {rows} rows, but each output must hold one answer per row, "
            "rows first; keep what is per row with inference_fn=..., or change the model's output"
        )


def _on_cpu(answer: Any) -> Any:
    import torch

    if isinstance(answer, torch.Tensor):
        return _owned(answer)
    if isinstance(answer, Mapping):
        return {key: _on_cpu(part) for key, part in answer.items()}
    if type(answer) in (list, tuple):
        return type(answer)(_on_cpu(part) for part in answer)
    return answer
