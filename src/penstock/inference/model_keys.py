"""Which key has which model: keys that the user lists, or a file for each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import UsageError
from penstock.inference.handler import ModelHandler, describes_same_model
from penstock.inference.handler_copies import at_path
from penstock.io.files import exists, without_secrets

Handler = ModelHandler[Any, Any, Any]

ASK_AGAIN = 60.0  # seconds after which a store is asked once more for a file that it did not have
SHOWN = 5  # keys, in an error
DEFAULT = "/default"  # no key of a pattern has a slash


class OfKey:
    """Which model a key has."""

    def kinds(self) -> Sequence[Handler]:
        """Every handler there is; of models that differ in their files alone, one."""
        raise NotImplementedError

    def name(self, key: Any) -> str:
        raise NotImplementedError

    def handler(self, name: str) -> Handler:
        raise NotImplementedError

    def keys_of(self, name: str) -> Sequence[Any]:
        """The keys that are known to have this model."""
        return ()

    def named_kinds(self) -> Iterator[tuple[str, Handler]]:
        """Those that may differ from the first, by name."""
        return iter(())

    def same(self, other: OfKey) -> bool:
        raise NotImplementedError

    def files(self) -> Iterator[str]:
        raise NotImplementedError

    def compared(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


class Mapped(OfKey):
    """Keys that the user lists, some for each handler."""

    def __init__(self, mappings: Sequence[tuple[Sequence[Any], Handler]]) -> None:
        self._handlers: dict[str, Handler] = {}
        self._names: dict[Any, str] = {}
        known: dict[int, str] = {}  # names, by the handler's id: one that is given twice is one model
        for keys, handler in mappings:
            name = known.get(id(handler)) or _new_name(str(keys[0]), self._handlers)
            self._handlers[name] = handler
            known[id(handler)] = name
            for key in keys:
                if not isinstance(key, Hashable):
                    raise UsageError(f"KeyModelMapping({[key]!r}, ...): a {type(key).__name__} cannot be a key")
                if key in self._names:
                    raise UsageError(f"the key {key!r} is in two mappings, or twice in one; give each key one model, once")
                self._names[key] = name

    def kinds(self) -> Sequence[Handler]:
        return list(self._handlers.values())

    def name(self, key: Any) -> str:
        try:
            return self._names[key]
        except KeyError:
            known = ", ".join(map(repr, islice(self._names, SHOWN)))
            more = f" and {len(self._names) - SHOWN:,} more" if len(self._names) > SHOWN else ""
            raise LookupError(f"the handler has models for {known}{more}") from None

    def handler(self, name: str) -> Handler:
        return self._handlers[name]

    def keys_of(self, name: str) -> Sequence[Any]:
        return [key for key, own in self._names.items() if own == name]

    def named_kinds(self) -> Iterator[tuple[str, Handler]]:
        return iter(self._handlers.items())

    def same(self, other: OfKey) -> bool:
        if not isinstance(other, Mapped) or self._names != other._names:
            return False
        return all(same_handler(handler, other._handlers[name]) for name, handler in self._handlers.items())

    def files(self) -> Iterator[str]:
        return (file for handler in self._handlers.values() for file in handler.model_files())

    def compared(self) -> Mapping[str, Any]:
        return {"keys": self._names, **{f"model of {name!r}": handler for name, handler in self._handlers.items()}}

    def describe(self) -> str:
        models, keys = len(self._handlers), len(self._names)
        return f"{models:,} model{'s' * (models > 1)} for {keys:,} key{'s' * (keys > 1)}"


class Pattern(OfKey):
    """A file for each key, by its name: a local path, or a URL that fsspec knows."""

    def __init__(self, pattern: str, handler: Handler) -> None:
        self._pattern = pattern
        self._handler = handler
        self._seen: set[str] = set()
        self._missing: dict[str, float] = {}  # at a URL, and since when that is known
        self.handler("key")  # a handler that cannot be told another path says so now

    def kinds(self) -> Sequence[Handler]:
        return [self._handler]

    def name(self, key: Any) -> str:
        is_number = isinstance(key, Integral) and not isinstance(key, bool)
        name = str(int(key)) if is_number else key if isinstance(key, str) else ""
        if name in self._seen:
            return name
        if not name or re.search(r"[/\\\0]", name) or name in {".", ".."}:
            raise LookupError("a key is text or a whole number, and part of the name of one file")
        if not self._is_there(name):
            raise LookupError(f"there is no {without_secrets(self._path(name))}")
        self._seen.add(name)
        return name

    def _is_there(self, name: str) -> bool:
        """Whether a key has a file, as far as can be seen: where it cannot, the error of the load says why."""
        path, now = self._path(name), time.monotonic()
        if "://" not in path:
            return exists(path)
        if now < self._missing.get(name, -ASK_AGAIN) + ASK_AGAIN:
            return False
        if exists(path):
            return True
        self._missing[name] = now
        return False

    def handler(self, name: str) -> Handler:
        return at_path(self._handler, self._path(name))

    def same(self, other: OfKey) -> bool:
        return isinstance(other, Pattern) and self._pattern == other._pattern and same_handler(self._handler, other._handler)

    def files(self) -> Iterator[str]:
        pattern = self._pattern.removeprefix("file://")
        if "://" not in pattern:
            before, _, after = pattern.partition("{key}")
            folder, begin = os.path.split(before)
            yield from sorted(str(path) for path in Path(folder or ".").glob(f"{_plain(begin)}*{_plain(after)}"))

    def compared(self) -> Mapping[str, Any]:
        return {"pattern": without_secrets(self._pattern), "model": self._handler}

    def describe(self) -> str:
        return f"a model for each key, {without_secrets(self._pattern)}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": set(), "_missing": {}}

    def _path(self, name: str) -> str:
        """In the address of a web page, characters such as "?" would not be part of the name."""
        is_web = self._pattern.startswith(("http://", "https://"))
        return self._pattern.replace("{key}", quote(name, safe="") if is_web else name)


class Changed(OfKey):
    """The keys of another, and for each of its models what a function makes of its handler."""

    def __init__(self, of_key: OfKey, change: Callable[[Handler], Handler]) -> None:
        self._of_key = of_key
        self._change = change

    def kinds(self) -> Sequence[Handler]:
        return [self._change(kind) for kind in self._of_key.kinds()]

    def name(self, key: Any) -> str:
        return self._of_key.name(key)

    def handler(self, name: str) -> Handler:
        return self._change(self._of_key.handler(name))

    def files(self) -> Iterator[str]:
        return self._of_key.files()

    def describe(self) -> str:
        return self._of_key.describe()


def same_handler(one: Handler | None, other: Handler | None) -> bool:
    return one is other or (one is not None and other is not None and describes_same_model(one, other))


def _plain(text: str) -> str:
    """For a glob that means just this text."""
    return re.sub(r"([*?[])", r"[\1]", text)


def _new_name(name: str, taken: Mapping[str, object]) -> str:
    while name in taken or name == DEFAULT:
        name += "'"
    return name
