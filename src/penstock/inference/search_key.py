"""What tells one search for a batch size from another: the model, how it is set up, its device and who runs it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from penstock.inference.handler import ModelHandler
from penstock.version import __version__

logger = logging.getLogger(__name__)

_LIBRARIES = ("torch", "transformers", "sentence_transformers")
_AROUND = {"_preprocess_fns", "_postprocess_fns", "_no_batching", "_output_column", "_output_prefix", "calling"}


def search_key(handler: ModelHandler[Any, Any, Any]) -> str | None:
    """The key of what a search finds for this handler, whose model is loaded in this process; None where it is not on a
    device. Equal in another process and another run, if nothing has changed that the size could depend on."""
    if not handler.new_shapes_cost():
        return None
    try:
        return _key(handler)
    except Exception as exc:  # settings that refer to themselves, say: nothing is kept then
        logger.debug("no key for kept batch sizes: %s: %s", type(exc).__name__, exc)
        return None


def _key(handler: ModelHandler[Any, Any, Any]) -> str:
    known = {
        "handler": _name(type(handler)),
        "model": str(handler.model_id()),
        "by_length": handler.measures_length(),
        "settings": {name: _plain(value) for name, value in vars(handler).items() if name not in _AROUND},
        "device": _device_name(handler),
        "penstock": __version__,
        **{name: str(getattr(sys.modules.get(name), "__version__", None)) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _device_name(handler: ModelHandler[Any, Any, Any]) -> str | None:
    """Of the GPU, by torch, if the model has brought it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    device = handler.accelerator()
    try:
        name = torch.cuda.get_device_name(device if device is not None and device.startswith("cuda:") else None)
    except (RuntimeError, AssertionError, ValueError):  # the number of a GPU that this process does not see under it
        name = torch.cuda.get_device_name()
    return str(name)


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
