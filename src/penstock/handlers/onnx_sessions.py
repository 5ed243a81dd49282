"""Sessions of ONNX Runtime: where the model comes from, what runs it, and with how many threads.

onnxruntime is imported where a model is loaded, not where it is only described.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from penstock.errors import InputError, UsageError
from penstock.handlers.model_files import open_model_file
from penstock.handlers.pytorch_running import on_gpu
from penstock.handlers.threads import thread_share
from penstock.io.files import hiding_secrets

Provider: TypeAlias = str | tuple[str, Mapping[str, Any]]
Providers: TypeAlias = tuple[tuple[str, dict[str, Any]], ...]

_SHORT = {"cpu": "CPU", "cuda": "CUDA", "tensorrt": "Tensorrt"}
_ON_GPU = ("CUDAExecutionProvider", "TensorrtExecutionProvider")

log = logging.getLogger(__name__)


def providers_named(providers: Sequence[Provider] | None, options: Sequence[Mapping[str, Any]] | None) -> Providers:
    """The providers by ONNX Runtime's names, each with its options; none: not said."""
    if providers is None:
        if options is not None:
            raise UsageError("provider_options are for the providers; give providers=[...], too")
        return ()
    if isinstance(providers, str) or not providers:
        raise UsageError(f'providers={providers!r}: expected a list of names, such as ["CUDA", "CPU"]')
    if options is not None and len(options) != len(providers):
        raise UsageError(f"{len(options)} provider_options for {len(providers)} providers; give one dict for each")
    made = []
    for at, each in enumerate(providers):
        name, own = (each, {}) if isinstance(each, str) else each
        made.append((_full_name(name), {**own, **(options[at] if options is not None else {})}))
    return tuple(made)


def is_gpu(providers: Providers) -> bool:
    """Whether the model is for a GPU."""
    if providers:
        return providers[0][0] in _ON_GPU
    return _has_gpu_build() and on_gpu("cuda")


def runs_on_gpu(providers: Providers) -> bool:
    """Whether there is a GPU that the model is for, and a build that can use it."""
    return is_gpu(providers) and _has_gpu_build() and on_gpu("cuda")


def check_options(options: object) -> None:
    """UsageError unless they are a dict or a function: SessionOptions themselves cannot travel to the model's process."""
    if options is not None and not isinstance(options, Mapping) and not callable(options):
        raise UsageError(
            f"session_options={options!r} cannot be pickled, and the model may live in another process; give a dict of its "
            'attributes, such as {"intra_op_num_threads": 2}, or a function that makes them'
        )


def load_session(uri: str, options: Any, providers: Providers) -> Any:
    """The session; InputError where the file is no model, UsageError where nothing that was asked for can run it."""
    import onnxruntime

    chosen = _usable(providers, onnxruntime)
    made = _session_options(options, onnxruntime)
    with hiding_secrets([uri]), open_model_file(uri) as file:
        # From its path where it has one: large weights are in a file beside it.
        source = str(uri) if "://" not in str(uri) else file.read()
        try:
            session = onnxruntime.InferenceSession(
                source, made, providers=[name for name, _ in chosen], provider_options=[own for _, own in chosen]
            )
        except Exception as exc:
            raise InputError(
                f"{str(uri)!r} could not be loaded as an ONNX model: {type(exc).__name__}: {exc}; check the path, and that "
                "the file was whole when it was copied"
            ) from exc
    if chosen[0][0] not in session.get_providers():
        log.warning("%s could not start here: the model runs on %s", chosen[0][0], ", ".join(session.get_providers()))
    return session


def _usable(providers: Providers, onnxruntime: Any) -> Providers:
    there, known = onnxruntime.get_available_providers(), onnxruntime.get_all_providers()
    wanted = providers or (*((("CUDAExecutionProvider", {}),) if is_gpu(()) else ()), ("CPUExecutionProvider", {}))
    wrong = [name for name, _ in wanted if name not in known and name not in there]
    if wrong:
        raise UsageError(f"providers: {wrong} are not providers of ONNX Runtime; expected some of {there}")
    usable = tuple(each for each in wanted if each[0] in there)
    if not usable:
        raise UsageError(
            f"providers: none of {[name for name, _ in wanted]} is in this build of ONNX Runtime, which has {there}; "
            "install the build that has it (onnxruntime-gpu for CUDA and TensorRT), or add 'CPU'"
        )
    if usable[0] != wanted[0]:
        log.warning("%s is not in this build of ONNX Runtime: the model runs on %s", wanted[0][0], usable[0][0])
    return usable


def _session_options(given: Any, onnxruntime: Any) -> Any:
    options = onnxruntime.SessionOptions() if given is None or isinstance(given, Mapping) else given()
    if (share := thread_share()) is not None and options.intra_op_num_threads == 0:
        options.intra_op_num_threads = share
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if "." in name:
            options.add_session_config_entry(name, str(value))
        elif hasattr(options, name):
            setattr(options, name, value)
        else:
            raise UsageError(f"session_options: onnxruntime.SessionOptions has no {name!r}; check the spelling")
    return options


def _full_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise UsageError(f'providers: {name!r} is not a name; expected one such as "CUDA", or ("CUDA", {{"device_id": 0}})')
    return name if name.endswith("Provider") else f"{_SHORT.get(name.lower(), name)}ExecutionProvider"


@functools.cache
def _has_gpu_build() -> bool:
    try:
        importlib.metadata.version("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
