"""Where a PyTorch model comes from, and on which device it goes.

torch is imported where a model is loaded, not where it is only described.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, cast

from penstock.errors import InputError, MissingPackageError, UsageError
from penstock.handlers.catalog import imported
from penstock.handlers.model_files import open_model_file
from penstock.io.files import hiding_secrets, is_local, store_of

if TYPE_CHECKING:
    import torch

_KNOWN_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|npu|hpu|meta)(:\d+)?")  # torch is asked about others

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSource:
    """Where the model comes from: one of three kinds of file. Checked when made."""

    loaded_when_called: ClassVar = ("model_class",)  # a worker whose model lives elsewhere need not import torch for it

    state_dict_path: str | None
    model_class: Callable[..., torch.nn.Module] | None
    model_params: Mapping[str, Any] | None
    torch_script_model_path: str | None
    exported_program_path: str | None
    load_model_args: Mapping[str, Any]
    trusted: bool

    def __post_init__(self) -> None:
        paths = {
            "state_dict_path": self.state_dict_path,
            "torch_script_model_path": self.torch_script_model_path,
            "exported_program_path": self.exported_program_path,
        }
        given = [name for name, path in paths.items() if path is not None]
        given += ["model_class"] * (self.model_class is not None)
        if given not in (["state_dict_path", "model_class"], ["torch_script_model_path"], ["exported_program_path"]):
            raise UsageError(
                f"got {' and '.join(given) or 'no model'}; expected one of: state_dict_path and model_class together "
                "(with model_params for its arguments), torch_script_model_path alone, exported_program_path alone"
            )
        if not isinstance(self.model_class, type) and hasattr(self.model_class, "forward"):
            name = type(self.model_class).__name__
            raise UsageError(f"model_class: expected a class, got a {name}; pass the class itself: model_class={name}")
        if self.model_params and self.model_class is None:
            raise UsageError(f"model_params are the arguments of model_class, but {given[0]} needs no class; leave them out")
        self._check_trust()

    def _check_trust(self) -> None:
        if self.load_model_args.get("weights_only", True) is not True:
            raise UsageError(
                "load_model_args: weights_only=False would run code from the file; leave it out, and save the weights "
                "alone: torch.save(model.state_dict(), path)"
            )
        if self.state_dict_path is None and not self.trusted:
            told = (
                "exported_program_path: torch.export.load() can run code from the file"
                if self.exported_program_path is not None
                else "torch_script_model_path: a TorchScript file is a program, which can do more than compute answers"
            )
            raise UsageError(
                f"{told}; pass trusted=True if you made it or trust who did, or use state_dict_path and model_class, which "
                "never run code from the file"
            )

    @property
    def path(self) -> str:
        """The file that the model is loaded from, whichever kind it is."""
        return str(self.state_dict_path or self.torch_script_model_path or self.exported_program_path)

    def at(self, path: str) -> WeightsSource:
        """Another file of the same kind, loaded in the same way."""
        if self.state_dict_path is not None:
            return replace(self, state_dict_path=path)
        if self.torch_script_model_path is not None:
            return replace(self, torch_script_model_path=path)
        return replace(self, exported_program_path=path)

    def load(self, device: torch.device) -> torch.nn.Module:
        """The model on the device, in evaluation mode. Raises InputError or UsageError when the file does not fit."""
        import torch

        with hiding_secrets([self.path]), open_model_file(self.path) as file:
            if self.model_class is not None:
                return self._model_with_weights(self.model_class, file, device).eval().requires_grad_(False).to(device)
            if self.torch_script_model_path is not None:
                options = {"map_location": device, **self.load_model_args}
                return self._read("a TorchScript model", torch.jit.load, file, options).eval()
            program = self._read("an exported program", torch.export.load, file, self.load_model_args)
            return _on_device(program, device).module()

    def _model_with_weights(
        self, model_class: Callable[..., torch.nn.Module], file: BinaryIO, device: torch.device
    ) -> torch.nn.Module:
        """Weights are read to the device one by one; the model, made on the CPU, takes them over there."""
        from penstock.handlers.pytorch_first_weights import FirstWeights

        model, first = FirstWeights.of(lambda: model_class(**(self.model_params or {})))
        weights = self._weights(file, device)
        try:
            first.load(model, weights)
        except (RuntimeError, TypeError) as exc:
            raise UsageError(
                f"the weights in {self.path!r} do not fit {type(model).__name__}; check state_dict_path, model_class "
                f"and model_params: {exc}"
            ) from exc
        return model

    def _weights(self, file: BinaryIO, device: torch.device) -> Any:
        """The state dict, on the device."""
        import torch

        if not self.path.endswith(".safetensors"):
            options = {"map_location": device, **self.load_model_args, "weights_only": True}
            return self._read("a state dict", torch.load, file, options)
        if self.load_model_args:
            raise UsageError(
                f"load_model_args={dict(self.load_model_args)} are for torch.load, but {self.path!r} is a file of "
                "safetensors, which takes none; leave them out"
            )
        if importlib.util.find_spec("safetensors") is None:
            raise MissingPackageError("safetensors", "torch")
        return self._read("a state dict in safetensors", _read_safetensors, file, {"path": self.path, "device": device})

    def _read(self, what: str, read: Callable[..., Any], file: BinaryIO, options: Mapping[str, Any]) -> Any:
        try:
            return read(file, **options)
        except pickle.UnpicklingError as exc:
            found = re.search(r"GLOBAL (\S+)", str(exc))
            raise InputError(
                f"{self.path!r} holds more than plain weights{f' ({found[1]})' if found else ''}, and loading that "
                "could run code from the file; save the weights alone: torch.save(model.state_dict(), path)"
            ) from exc
        except Exception as exc:
            raise InputError(
                f"{self.path!r} could not be read as {what}: {type(exc).__name__}: {exc}; check the path, and that its "
                "kind goes with the argument: state_dict_path, torch_script_model_path or exported_program_path"
            ) from exc


def _read_safetensors(file: BinaryIO, path: str, device: torch.device) -> Mapping[str, torch.Tensor]:
    """A local file is mapped into memory, and each tensor copied from there to the device."""
    from safetensors.torch import load, load_file

    store, inner = store_of(path, InputError)
    if is_local(store):
        return cast(Mapping[str, "torch.Tensor"], load_file(inner, device=str(device)))
    return {name: tensor.to(device) for name, tensor in load(file.read()).items()}


def _on_device(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    """The program with its weights, and what its graph creates, on the device. Programs are exported on the CPU."""
    if device.type == "cpu":
        return program
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, device)


@functools.cache
def usable_device(name: str) -> torch.device:
    """The device of this name, or the CPU where this process can use no CUDA device; warns once for each process."""
    torch = imported("torch", "torch", "torch")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        log.warning("no CUDA device can be used here, so the model runs on the CPU instead of %r", name)
        return torch.device("cpu")
    return device


def device_name(device: str | None) -> str:
    """What torch calls this device: "CPU" (also for None), "GPU", or any torch device. UsageError for others."""
    name = {"CPU": "cpu", "GPU": "cuda"}.get(str(device or "CPU").upper(), str(device))
    if _KNOWN_DEVICE.fullmatch(name):
        return name
    try:
        imported("torch", "torch", "torch").device(name)
    except RuntimeError as exc:
        raise UsageError(f"device={device!r}: expected 'CPU', 'GPU' or a torch device such as 'cuda:1': {exc}") from exc
    return name
