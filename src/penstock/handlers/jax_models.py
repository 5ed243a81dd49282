"""Parameters of JAX models from files, the devices they go to, and the compiled function."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import InputError, UsageError
from penstock.handlers.array_answers import ModelOutputs, by_name
from penstock.handlers.catalog import imported
from penstock.handlers.model_files import open_model_file
from penstock.handlers.threads import thread_share
from penstock.io.files import hiding_secrets
from penstock.transport.interpreters import is_own_process


@dataclass(frozen=True)
class JaxModel:
    """A function of parameters and inputs, compiled once for each shape, and its parameters on a device."""

    call: Callable[..., Any]
    params: Any
    device: Any
    wide: bool  # whether JAX computes with 64 bits


def import_jax(device: str | None) -> Any:
    """The module, which starts as many threads as this process may have. Where the CPU is asked for, in a process of ours,
    it starts there alone: by itself it takes most of the memory of every GPU that it sees, in each process."""
    share = thread_share()
    if share is not None:
        os.environ.setdefault("NPROC", str(share))  # what XLA reads when it starts
    import jax

    if is_own_process() and device_kind(device) == "cpu" and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    return jax


def device_kind(device: str | None) -> str:
    return (device or "cpu").partition(":")[0]


def load_params(uri: str, separator: str | None) -> Any:
    """The parameters in a .safetensors file, or in a folder that Orbax wrote. InputError when it is neither."""
    path = str(uri)
    if os.path.isdir(path):
        return _load_orbax(path)
    with hiding_secrets([path]), open_model_file(path) as file:
        safetensors = imported("safetensors.flax", "safetensors", "jax")
        try:
            params = safetensors.load(file.read())
        except Exception as exc:
            raise InputError(
                f"{path!r} could not be read: {type(exc).__name__}: {exc}; expected a .safetensors file, or a folder that "
                "Orbax wrote: for others give load_params="
            ) from exc
    return params if separator is None else _nested(params, separator)


def _load_orbax(folder: str) -> Any:
    orbax = imported("orbax.checkpoint", "orbax-checkpoint", "orbax")
    try:
        with orbax.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(os.path.abspath(folder))
    except Exception as exc:
        raise InputError(
            f"{folder!r} could not be read: {type(exc).__name__}: {exc}; expected a folder that Orbax's "
            "StandardCheckpointer wrote: for others give load_params="
        ) from exc


def _nested(flat: Mapping[str, Any], separator: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = name.split(separator)
        place = made
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return made


def device_named(name: str | None, jax: Any) -> Any:
    """The device by JAX's own words, such as "cpu", "gpu:1" or "tpu"; None: the CPU, as for other handlers."""
    number = (name or "").partition(":")[2]
    try:
        return jax.devices(device_kind(name))[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as exc:
        there = [f"{device.platform}:{device.id}" for device in jax.devices()]
        raise UsageError(f"device={name!r} is not here: JAX sees {there}; {exc}") from exc


def fetched(output: Any) -> Any:
    """A model's output on the CPU, with NumPy's arrays; what has names is a dict."""
    output = by_name(output)
    if isinstance(output, Mapping):
        return {str(name): fetched(part) for name, part in output.items()}
    if isinstance(output, (tuple, list)):
        return ModelOutputs(fetched(part) for part in output)
    return np.asarray(output)
