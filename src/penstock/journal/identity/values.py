"""Digests of values and of code: the same in every process and every run, until something changes.

What a value leads to has digests of its own, so that people can be told what has changed: "fn" is a function, "fn: helper" a
function of the user's that it calls, "fn: LIMIT" a constant that either of them names. References among them are names, so
code that calls itself, or many functions that share one, cost nothing.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Set
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from penstock.journal.identity.bytecode import Import, uses_of
from penstock.journal.identity.definitions import (
    Ignored,
    Place,
    constants_of,
    functions_in,
    members_of,
    set_by,
    state_of,
    used_by,
    wrapped_by,
)
from penstock.journal.identity.modules import DIGEST_BYTES, contents_of, file_of, imported
from penstock.journal.identity.writer import Writer, is_definition

VALUE, FUNCTION, CLASS, MODULE = "value", "function", "class", "module"  # what a digest is of
OF_ONE_PYTHON = FUNCTION, MODULE  # digests that another version of Python makes in another way
Find: TypeAlias = Callable[[Any, Ignored], Any]  # what counts of an object

MOST_OBJECTS = 20_000  # in one value, for their attributes to count: ways through a net of objects are endless


def fingerprint(value: Any) -> str:
    """A short digest of a value: equal values of one type have equal ones, in every process."""
    found = digests("", value)
    return hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=DIGEST_BYTES).hexdigest()


def digests(name: str, value: Any, ignored: Ignored = lambda cls, attribute: False) -> dict[str, str]:
    """The digest of a value, under its name, and those of what it leads to, as "name: what"; each as "kind:digest".

    Nothing of `ignored` attributes, of classes and of their instances, is looked at.
    """
    is_set: set[Place] = set()
    while True:  # until all that is set is known: most code sets nothing
        found = _Digests(name, ignored, is_set)
        made = found.of(value)
        if found.found_set <= is_set:
            return made
        is_set = is_set | found.found_set


class _Digests:
    """All digests that one value leads to, without what is `set` by code that it leads to."""

    def __init__(self, root: str, ignored: Ignored, is_set: Set[Place]) -> None:
        self.root = root
        self.made: dict[str, str] = {}
        self.found_set: set[Place] = set()
        self._ignored = ignored
        self._is_set = is_set
        self._keys: dict[int, str] = {}  # of definitions, by id
        self._kept: list[Any] = []  # so that no id is used twice
        self._waiting: deque[Callable[[], None]] = deque()
        self._constants: set[Place] = set()
        self._modules: set[str] = set()
        self._taken: set[str] = {root}

    def of(self, value: Any) -> dict[str, str]:
        if is_definition(value):
            self._define(value, self.root)
        else:
            self._write(self.root, VALUE, lambda writer: writer.write(value))
        while self._waiting:
            self._waiting.popleft()()
        return self.made

    def refer(self, definition: Any) -> str:
        """The key of a function or class, whose own digest is made later."""
        if id(definition) not in self._keys:
            self._define(definition, self._free_key(definition.__name__.strip("<>")))
        return self._keys[id(definition)]

    def module(self, name: str) -> None:
        """What is in a module of the user's, and in those that it imports, loaded or not."""
        if name not in self._modules:
            self._modules.add(name)
            if file := file_of(name):
                key, (digest, imports) = self._free_key(name), contents_of(file)
                self.made[key] = f"{MODULE}:{digest}"
                self._import(imports, name if file.endswith("__init__.py") else name.rpartition(".")[0])

    def _import(self, imports: Iterable[Import], package: str) -> None:
        for name in sorted({name for each in imports for name in imported(each, package)}):
            self._waiting.append(functools.partial(self.module, name))

    def use(self, function: FunctionType) -> None:
        """Everything else that a function depends on."""
        taken, is_set, imports = uses_of(function.__code__)
        self.found_set |= set(set_by(function, is_set))
        self._import(imports, str(function.__globals__.get("__package__") or ""))
        for found in used_by(function, taken):
            definition = wrapped_by(found.value) or found.value
            place = id(found.space), found.name
            if is_definition(definition):
                self.refer(definition)
            elif isinstance(definition, ModuleType):
                self.module(definition.__name__)
            elif place not in self._constants and place not in self._is_set:
                self._kept.append(found.space)
                self._constants.add(place)
                self._write_constant(self._free_key(found.shown), found.value)

    def _define(self, definition: Any, key: str) -> None:
        self._keys[id(definition)] = key
        self._kept.append(definition)
        if isinstance(definition, FunctionType):
            self._waiting.append(lambda: self._write(key, FUNCTION, lambda writer: writer.body(definition)))
        else:
            self._waiting.append(lambda: self._define_class(definition, key))

    def _define_class(self, cls: type, key: str) -> None:
        self._write(key, CLASS, lambda writer: writer.header(cls))
        for name, member in members_of(cls, self._ignored):
            if (id(cls), name) in self._is_set:
                continue
            if functions := functions_in(member):
                self._write(
                    f"{key}.{name}",
                    FUNCTION,
                    functools.partial(Writer.member, kind=type(member).__name__, functions=functions),
                )
            else:
                self._write_constant(f"{key}.{name}", member)

    def _write_constant(self, key: str, value: Any) -> None:
        self._waiting.append(lambda: self._write(key, VALUE, lambda writer: writer.write(value), constants_of))

    def _write(self, key: str, kind: str, write: Callable[[Writer], None], find: Find = state_of) -> None:
        objects = itertools.count()

        def state(value: Any) -> Any:
            found = find(value, self._ignored) if next(objects) < MOST_OBJECTS else None
            if not isinstance(found, dict):
                return found
            return {name: each for name, each in found.items() if (id(value), name) not in self._is_set}

        write(writer := Writer(self, state))
        if next(objects) > MOST_OBJECTS:
            write(writer := Writer(self, lambda value: None))
        self.made[key] = f"{FUNCTION if writer.has_code else kind}:{writer.hash.hexdigest()}"

    def _free_key(self, name: str) -> str:
        key = first = f"{self.root}: {name}"
        number = 1
        while key in self._taken:
            number += 1
            key = f"{first}#{number}"
        self._taken.add(key)
        return key
