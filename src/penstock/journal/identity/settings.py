"""Settings and rows as digests: of plain data by value, of objects by what they would be pickled as.

They are the same in every process and every run, until something changes. What lives, such as a lock, is known by its type.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import inspect
import json
import re
import sys
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from penstock.inference.handler import ModelHandler
from penstock.journal.identity.code import (
    DIGEST_BYTES,
    SCRIPTS,
    digest_of,
    function_source,
    is_users,
    names_in,
    stands_in_file,
)

ROWS_AT_ONCE = 1000
_JSON = {bool, float, int, str, type(None)}
_PLAIN = _JSON | {bytes, complex, type(Ellipsis), type(NotImplemented)}
_CONTAINERS = dict, frozenset, list, set, tuple
_BY_TYPE = {"os", "random", "numpy.random", "numpy.random.mtrand", "numpy.random._generator"}  # modules of what lives
MOST_NESTED = 100  # containers in each other, far from the limit of Python's stack

# Settings of handlers that may change on resume, by name, without a leading "_": of batches, of the place where the model
# lives, of trouble, and credentials. The last three are described with the way of a row around the model.
_FREE = {
    *("batch_size", "min_batch_size", "max_batch_size", "max_batch_duration_secs", "max_batch_weight", "element_size_fn"),
    *("batch_length_fn", "max_padded_cost", "lookahead_rows", "lookahead_bytes", "batch_size_buckets", "length_buckets"),
    *("large_model", "model_copies", "device", "device_map", "map_location", "env_vars", "max_concurrent_batches"),
    *("num_workers", "num_threads", "metrics_namespace", "retry_safe", "backoff", "show_progress_bar", "cache_dir"),
    *("token", "auth_token", "access_token", "hf_token", "use_auth_token", "api_key", "password", "secret", "credentials"),
    *("rules", "credentials", "max_in_flight", "max_concurrent_requests", "httpx_args", "run_place", "namespace"),
    *("preprocess_fns", "postprocess_fns", "no_batching"),
}
_FREE_PATTERN = re.compile(r"(^|_)(timeouts?|retry|retries|attempts|api_key|password)(_|$)")


class SettingDigests:
    """Makes digests, and notes in which modules the functions and classes that it comes by are defined."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._made: dict[int, tuple[str, Any]] = {}  # by id, with the value, so that no id is used twice
        self._inside: list[int] = []  # the ids of what is around

    def of(self, value: Any) -> str:
        """A short text: equal values of one type have equal ones."""
        if type(value) is bytes:
            return digest_of("bytes", hashlib.blake2b(value, digest_size=DIGEST_BYTES).hexdigest())
        if type(value) in _PLAIN:
            return digest_of(type(value).__name__, hex(value) if type(value) is int else value)
        if id(value) in self._made:
            return self._made[id(value)][0]
        if id(value) in self._inside:
            return f"around {len(self._inside) - self._inside.index(id(value))}"
        if len(self._inside) > MOST_NESTED:
            return digest_of("deep", _name_of(type(value)))
        self._inside.append(id(value))
        try:
            made = digest_of(*self._parts(value))
        except Exception:  # not to be pickled; whatever a foreign object does when it is looked at, no run fails for it
            made = digest_of("type", _name_of(type(value)))
        self._inside.pop()
        self._made[id(value)] = made, value
        return made

    def rows(self, rows: Any) -> str:
        """The digest of rows in memory. Most are what JSON can write, far faster than we would."""
        if not isinstance(rows, (list, tuple)):
            return self.of(rows)
        return digest_of(len(rows), *(self._piece(rows[at : at + ROWS_AT_ONCE]) for at in range(0, len(rows), ROWS_AT_ONCE)))

    def _piece(self, rows: Any) -> str:
        piece = list(rows)
        try:
            return digest_of(json.dumps(piece, sort_keys=True)) if _is_json(piece) else self.of(piece)
        except (ValueError, RecursionError):  # a number of thousands of digits; rows that hold themselves
            return self.of(piece)

    def _parts(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (dict, MappingProxyType):
            return ["dict", *sorted((self.of(key), self.of(each)) for key, each in value.items())]
        if kind in (list, tuple):
            if set(map(type, value)) <= _PLAIN:
                with contextlib.suppress(ValueError):  # a number of thousands of digits
                    return [kind.__name__, "plain", ascii(value)]
            return [kind.__name__, *map(self.of, value)]
        if kind in (set, frozenset):
            return [kind.__name__, *sorted(map(self.of, value))]
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
            return ["module", value.__name__]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if kind.__module__ in _BY_TYPE:
            return ["type", _name_of(kind)]
        if isinstance(wrapped := inspect.getattr_static(value, "__wrapped__", None), FunctionType):  # lru_cache
            return ["wrapped", _name_of(kind), self.of(wrapped)]
        torch: Any = sys.modules.get("torch")
        if torch and isinstance(value, torch.Tensor):
            array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return ["tensor", str(value.dtype), tuple(value.shape), self.of(array.tobytes())]
        return self._reduced(value)

    def _reduced(self, value: Any) -> list[Any]:
        """An object by what pickle would write of it."""
        registered = copyreg.dispatch_table.get(type(value))
        reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
        if isinstance(reduced, str):  # a global
            return ["global", _name_of(type(value)), str(getattr(value, "__module__", "")), reduced]
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        if isinstance(state, dict):
            state = counted(value, state)
        return ["object", *map(self.of, (make, arguments, state, list(items or ()), dict(pairs or ())))]

    def _function(self, function: FunctionType) -> list[Any]:
        cells = [_content_of(cell) for cell in function.__closure__ or ()]
        parts = ["function", _name_of(function), self.of(cells)]
        module = function.__globals__.get("__name__")
        if not is_users(module):
            wrapped = inspect.getattr_static(function, "__wrapped__", None)
            return [*parts, self.of(wrapped)]
        self.modules.add(str(module))
        source, imports = function_source(function)
        parts += [source, self.of(function.__defaults__), self.of(function.__kwdefaults__)]
        if stands_in_file(function):
            return parts
        self.modules |= set(imports)  # there is no file with what it uses, so that is followed
        used = {name: function.__globals__.get(name) for name in sorted(names_in(function.__code__))}
        return [*parts, *((name, self.of(each)) for name, each in used.items() if self._is_followed(each))]

    def _is_followed(self, value: Any) -> bool:
        if isinstance(value, (FunctionType, type, ModuleType)):
            return is_users(value.__name__ if isinstance(value, ModuleType) else value.__module__)
        return value is not None and (type(value) in _PLAIN or type(value) in _CONTAINERS)

    def _class(self, cls: type) -> list[Any]:
        parts = ["class", _name_of(cls)]
        if not is_users(cls.__module__):
            return parts
        self.modules.add(cls.__module__)
        parts += map(self.of, cls.__bases__)
        own = {name: _unwrapped(each) for name, each in sorted(vars(cls).items())}
        functions = [each for each in own.values() if isinstance(each, FunctionType)]
        if any(map(stands_in_file, functions)):
            return parts
        followed = {name: each for name, each in own.items() if not name.startswith("__") and self._is_followed(each)}
        return [*parts, *map(self.of, functions), *((name, self.of(each)) for name, each in followed.items())]


def is_free(name: str) -> bool:
    """Whether a setting of a handler may change on resume: how and where the model runs, and no answers."""
    return name.lstrip("_") in _FREE or _FREE_PATTERN.search(name) is not None


def counted(thing: Any, state: dict[Any, Any]) -> dict[Any, Any]:
    """Without what cached_property left there, and what may change of a handler."""
    cls = type(thing)
    return {
        name: value
        for name, value in state.items()
        if not isinstance(inspect.getattr_static(cls, str(name), None), functools.cached_property)
        if not (isinstance(thing, ModelHandler) and is_free(str(name)))
    }


def attributes_of(thing: Any) -> dict[str, Any]:
    """What makes an object what it is, by name: what it says itself for pickling, else its attributes."""
    try:
        state = thing.__getstate__()
    except Exception:  # not to be pickled
        return {}
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # the second: of slots
    if not all(part is None or isinstance(part, dict) for part in parts):
        return {"state": state}
    return counted(thing, {str(name): value for part in parts for name, value in (part or {}).items()})


def _unwrapped(member: Any) -> Any:
    """The function of a method, property or the like."""
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", None) or getattr(member, "func", None) or getattr(member, "__wrapped__", member)


def _name_of(thing: Any) -> str:
    """A function's or class's full name. A wrapper may have taken its __module__ from the function that it wraps."""
    module = thing.__globals__.get("__name__") if isinstance(thing, FunctionType) else thing.__module__
    return f"{SCRIPTS[0] if module in SCRIPTS else module}.{thing.__qualname__}"


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return NotImplemented


def _is_json(value: Any) -> bool:
    """Whether JSON writes nothing else in the same way: of other types it makes text, as keys, and lists."""
    if type(value) is dict:
        return set(map(type, value)) <= {str} and _is_json(list(value.values()))
    if type(value) is list:
        return set(map(type, value)) <= _JSON or all(map(_is_json, value))
    return type(value) in _JSON
