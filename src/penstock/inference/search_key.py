"""What tells one search for a batch size from another: the model, how it is set up, its device and who runs it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.inference.handler import ModelHandler
from penstock.version import __version__

logger = logging.getLogger(__name__)

GPUS = Path("/proc/driver/nvidia/gpus")  # one folder each
_LIBRARIES = ("torch", "transformers", "sentence_transformers", "jax", "onnxruntime", "tensorflow")
_AROUND = {"_preprocess_fns", "_postprocess_fns", "_no_batching", "_output_column", "_output_prefix", "calling"}


def search_key(handler: ModelHandler[Any, Any, Any]) -> str | None:
    """The key of what a search finds for this handler, whose model is loaded in this process; None where it is not on a
    device. Equal in another process and another run, if nothing has changed that the size could depend on."""
    if not handler.new_shapes_cost():
        return None
    try:
        return _key(handler)
    except Exception as exc:  # settings that refer to themselves, or a GPU without a name: nothing is kept then
        logger.debug("no key for kept batch sizes: %s: %s", type(exc).__name__, exc)
        return None


def _key(handler: ModelHandler[Any, Any, Any]) -> str:
    known = {
        "handler": _name(type(handler)),
        "model": str(handler.model_id()),
        "by_length": handler.measures_length(),
        "settings": {name: _plain(value) for name, value in vars(handler).items() if name not in _AROUND},
        "device": _device_names(handler),
        "penstock": __version__,
        **{name: str(getattr(sys.modules.get(name), "__version__", None)) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _device_names(handler: ModelHandler[Any, Any, Any]) -> list[str]:
    """Of the GPU, by torch, if the model has brought it; else of all that JAX, or the driver, knows of. LookupError for a
    GPU that nobody can name."""
    device = handler.accelerator()
    by_torch = _name_by_torch(device)
    if by_torch is not None:
        return [by_torch]
    names = _names_by_jax() or ([] if device is None else _names_by_driver())
    if device is not None and not names:
        raise LookupError(f"no name is known of the device {device!r}")
    return names


def _name_by_torch(device: str | None) -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        name = torch.cuda.get_device_name(device if device is not None and device.startswith("cuda:") else None)
    except (RuntimeError, AssertionError, ValueError):  # the number of a GPU that this process does not see under it
        name = torch.cuda.get_device_name()
    return str(name)


def _names_by_jax() -> list[str]:
    """None where JAX has not started: asking it would start it, and that takes most of a GPU's memory."""
    started = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    if started is None or not started():
        return []
    return sorted({f"{device.platform} {device.device_kind}" for device in sys.modules["jax"].devices()})


def _names_by_driver() -> list[str]:
    found = [re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE) for path in GPUS.glob("*/information")]
    return sorted({each[1].strip() for each in found if each is not None})


def _plain(value: Any) -> Any:
    """A setting as JSON, the same in every process: of what has no plain value, its name or type."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if type(value).__module__ == "torch" and type(value).__name__ in {"dtype", "device"}:
        return str(value)
    return _name(value if hasattr(value, "__qualname__") else type(value))


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"
