"""What of a model handler decides on its answers; how and where the model runs may change from run to run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from os import PathLike
from typing import Any

from penstock.inference.handler import ModelHandler
from penstock.inference.transform import RunInference
from penstock.io.files import checked_path
from penstock.journal.identity.definitions import is_users_class, name_of, state_of
from penstock.journal.identity.values import digests

# Settings by name, without a leading "_": of batches, of the place where the model lives, of trouble, and credentials.
_FREE = {
    *("batch_size", "min_batch_size", "max_batch_size", "max_batch_duration_secs", "max_batch_weight", "element_size_fn"),
    *("batch_length_fn", "max_padded_cost", "lookahead_rows", "lookahead_bytes", "batch_size_buckets", "length_buckets"),
    *("large_model", "model_copies", "device", "device_map", "map_location", "env_vars", "max_concurrent_batches"),
    *("num_workers", "num_threads", "metrics_namespace", "retry_safe", "backoff", "show_progress_bar", "cache_dir"),
    *("token", "auth_token", "access_token", "hf_token", "use_auth_token", "api_key", "password", "secret", "credentials"),
}
_FREE_PATTERN = re.compile(r"(^|_)(timeouts?|retry|retries|attempts|api_key|password)(_|$)")
_FREE_METHODS = {
    *("accelerator", "after_out_of_memory", "batch_elements_kwargs", "changes_rows", "get_lengths", "get_metrics_namespace"),
    *("get_num_bytes", "get_resource_hints", "is_out_of_memory", "measures_length", "model_files", "prepares_ahead"),
    *("share_model_across_processes", "validate_inference_args", "__init__"),
}
_AROUND = {"_preprocess_fns", "_postprocess_fns", "_no_batching"}  # described with the way of a row around the model
_OPTIONS = re.compile(r"(args|kwargs|params|options|config)$")  # settings that are dicts of settings


def is_left_out(cls: type, name: str) -> bool:
    """Whether an attribute or method, of a handler's class or of a handler, may change on resume."""
    return issubclass(cls, ModelHandler) and (_is_free(name) or name in _FREE_METHODS or name in _AROUND)


def _is_free(name: str) -> bool:
    return name.lstrip("_") in _FREE or _FREE_PATTERN.search(name) is not None


def handler_digests(step: RunInference[Any, Any]) -> dict[str, str]:
    """The digests of a step's handler, by attribute, with the functions around the model and the arguments of its calls."""
    path = step.path
    found = dict(_handler(path.model_handler, ""))
    before, after = path.before + path.before_model, path.after_model + path.after
    for name, functions in (("preprocess_fn", before), ("postprocess_fn", after)):
        for number, function in enumerate(functions):
            found |= digests(f"{name}[{number}]", function)
    layers = path.keys, len(path.before), len(path.after_model), path.prebatched
    if layers != (None, 0, 0, False):
        found |= digests("keys and layers", layers)
    found |= dict(_settings("inference_args", step.inference_args, set()))
    return found


def _handler(handler: ModelHandler[Any, Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    cls = type(handler)
    yield from digests(f"{prefix}class", cls.__name__ if is_users_class(cls) else name_of(cls)).items()
    if is_users_class(cls):
        yield from digests(f"{prefix}{cls.__name__}", cls, is_left_out).items()
    state = state_of(handler, is_left_out)
    files = set(map(str, handler.model_files()))
    for name, value in (state if isinstance(state, dict) else {"state": state}).items():
        yield from _attribute(f"{prefix}{str(name).lstrip('_')}", value, files)


def _attribute(name: str, value: Any, files: Set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, ModelHandler):
        yield from _handler(value, f"{name}.")
    elif isinstance(value, Mapping) and _OPTIONS.search(name):
        yield from _settings(name, value, files)
    elif is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("penstock."):
        for field in fields(value):  # settings that were put together: people know them by their own names
            yield from _attribute(field.name, getattr(value, field.name), files)
    elif not _is_nothing(value):
        is_file = (
            isinstance(value, (str, PathLike)) and str(value) in files
        )  # the same from whatever folder a run is started
        yield from digests(name, checked_path(value, name) if is_file else value, is_left_out).items()


def _settings(name: str, settings: Mapping[Any, Any] | None, files: Set[str]) -> Iterator[tuple[str, str]]:
    for key, value in (settings or {}).items():
        if not _is_free(str(key)):
            yield from _attribute(f"{name}.{key}", value, files)


def _is_nothing(value: Any) -> bool:
    """What a setting is that was left out; so a setting that a later version has in addition changes nothing."""
    return value is None or value is False or (isinstance(value, (str, tuple, list, dict)) and not value)
