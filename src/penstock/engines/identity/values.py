"""Digests of values and of code: the same in every process and every run, until something changes.

What a value leads to has digests of its own, so that people can be told what has changed: "fn" is a function, "fn: helper" a
function of the user's that it calls, "fn: LIMIT" a constant that either of them names. References among them are names, so
code that calls itself, or many functions that share one, cost nothing.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from penstock.engines.identity.bytecode import cells_set, operations, signature_of
from penstock.engines.identity.definitions import (
    Global,
    Ignored,
    changed_by,
    constants_of,
    content_of,
    functions_in,
    is_data,
    members_of,
    origin_of,
    state_of,
    used_by,
    wrapped_by,
)
from penstock.engines.identity.firsts import first_found
from penstock.engines.identity.writer import DIGEST_BYTES, Writer, is_definition

VALUE, FUNCTION, CLASS = "value", "function", "class"  # what a digest is of; those of functions hold for one Python alone
MOST_OBJECTS = 20_000  # in one global, for their attributes to count


def fingerprint(value: Any) -> str:
    """A short digest of a value: equal values of one type have equal ones, in every process."""
    found = digests("", value)
    return hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=DIGEST_BYTES).hexdigest()


def digests(name: str, value: Any, ignored: Ignored = lambda cls, attribute: False) -> dict[str, str]:
    """The digest of a value, under its name, and those of what it leads to, as "name: what"; each as "kind:digest".

    Nothing of `ignored` attributes, of classes and of their instances, is looked at.
    """
    return _Digests(name, ignored).of(value)


class _Digests:
    """All digests that one value leads to."""

    def __init__(self, root: str, ignored: Ignored) -> None:
        self.root = root
        self.ignored = ignored
        self.made: dict[str, str] = {}
        self._keys: dict[int, str] = {}  # of definitions, by id
        self._kept: list[Any] = []  # so that no id is used twice
        self._waiting: deque[Callable[[], None]] = deque()
        self._constants: dict[tuple[int, str], str] = {}  # keys of globals, by their module's dict and name
        self._changed: set[tuple[int, str]] = set()
        self._taken: set[str] = {root}

    def of(self, value: Any) -> dict[str, str]:
        if is_definition(value):
            self._define(value, self.root)
        else:
            self._write(self.root, VALUE, lambda writer: writer.write(value))
        while self._waiting:
            self._waiting.popleft()()
        state = {key for place, key in self._constants.items() if place in self._changed}
        return {key: digest for key, digest in self.made.items() if key not in state}

    def refer(self, definition: Any) -> str:
        """The key of a function or class, whose own digest is made later."""
        if id(definition) not in self._keys:
            self._define(definition, self._free_key(definition.__name__.strip("<>")))
        return self._keys[id(definition)]

    def state(self, value: Any) -> Any:
        cls = type(value)
        return None if origin_of(cls.__module__) == "known" and not is_data(cls) else state_of(value, self.ignored)

    def use(self, function: FunctionType) -> None:
        """Everything else that a function depends on."""
        self._changed |= {(id(each.space), each.name) for each in changed_by(function)}
        for found in used_by(function):
            definition = wrapped_by(found.value) or found.value
            if is_definition(definition):
                self.refer(definition)
            elif (id(found.space), found.name) not in self._constants:
                self._kept.append(found.space)
                self._constants[id(found.space), found.name] = key = self._free_key(found.shown)
                self._waiting.append(functools.partial(self._write_global, key, found))

    def part(self, function: FunctionType, number: int, value: Any) -> str:
        """The digest of what a function was made with. Code may have changed it since."""
        return self._take(first_found(function, (number, self.ignored), value, lambda: _found(value, self.state)))

    def _write_global(self, key: str, found: Global) -> None:
        module, name = str(found.space.get("__name__")), (found.name, self.ignored)
        finding = first_found(module, name, found.value, lambda: _constants(found.value, self.ignored))
        self.made[key] = f"{VALUE}:{self._take(finding)}"

    def _take(self, finding: _Finding) -> str:
        for definition in finding.definitions:
            self.refer(definition)
        return finding.digest

    def _define(self, definition: Any, key: str) -> None:
        self._keys[id(definition)] = key
        self._kept.append(definition)
        if isinstance(definition, FunctionType):
            self._waiting.append(lambda: self._write(key, FUNCTION, lambda writer: writer.body(definition)))
        else:
            self._waiting.append(lambda: self._define_class(definition, key))

    def _define_class(self, cls: type, key: str) -> None:
        self._write(key, CLASS, lambda writer: writer.header(cls))
        members = list(members_of(cls, self.ignored))
        for name, member in members:
            if functions := functions_in(member):
                self._write(f"{key}.{name}", FUNCTION, functools.partial(_write_member, member, functions))
        data = {name: member for name, member in members if not functions_in(member)}
        found = first_found(cls, self.ignored, cls, lambda: {name: _constants(data[name], self.ignored) for name in data})
        for name, finding in found.items():
            self.made[f"{key}.{name}"] = f"{VALUE}:{self._take(finding)}"

    def _write(self, key: str, kind: str, write: Callable[[_CodeWriter], None]) -> None:
        writer = _CodeWriter(self)
        write(writer)
        self.made[key] = f"{FUNCTION if writer.has_code else kind}:{writer.hash.hexdigest()}"

    def _free_key(self, name: str) -> str:
        key = first = f"{self.root}: {name}"
        number = 1
        while key in self._taken:
            number += 1
            key = f"{first}#{number}"
        self._taken.add(key)
        return key


class _Finding(NamedTuple):
    """The digest of a value, and the definitions that the value leads to."""

    digest: str
    definitions: list[Any]


def _constants(value: Any, ignored: Ignored) -> _Finding:
    """What counts of a global: of objects their classes, and their constants unless they are too many."""
    objects = itertools.count()
    found = _found(value, lambda each: constants_of(each, ignored) if next(objects) < MOST_OBJECTS else None)
    return found if next(objects) <= MOST_OBJECTS else _found(value, lambda each: None)


def _found(value: Any, state: Callable[[Any], Any]) -> _Finding:
    apart = _Apart(state)
    writer = Writer(apart)
    writer.write(value)
    return _Finding(writer.hash.hexdigest(), apart.definitions)


class _Apart:
    """For the digest of a value apart from all others: definitions in it have names that depend on the value alone."""

    def __init__(self, state: Callable[[Any], Any]) -> None:
        self.state = state
        self.definitions: list[Any] = []

    def refer(self, definition: Any) -> str:
        alike = [each for each in self.definitions if each.__name__ == definition.__name__]
        if not any(each is definition for each in alike):
            alike.append(definition)
            self.definitions.append(definition)
        return f"{definition.__name__}#{[each is definition for each in alike].index(True)}"


def _write_member(member: Any, functions: list[FunctionType], writer: _CodeWriter) -> None:
    writer.token("member", type(member).__name__)
    for function in functions:
        if is_definition(function):
            writer.body(function)
        else:
            writer.write(function)


class _CodeWriter(Writer):
    """Feeds the digest of a definition, and follows what it leads to."""

    def __init__(self, all_of_them: _Digests) -> None:
        super().__init__(all_of_them)
        self.has_code = False
        self._all = all_of_them

    def body(self, function: FunctionType) -> None:
        self.has_code = True
        self._code(function.__code__)
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        state = cells_set(function.__code__)
        constants = [content_of(cell) for name, cell in closure if name not in state]
        for number, part in enumerate([function.__defaults__, function.__kwdefaults__, *constants]):
            if isinstance(part, (deque, dict, list, set, tuple)):
                self.token("part", self._all.part(function, number, part))
            else:
                self.write(part)
        self._all.use(function)

    def header(self, cls: type) -> None:
        self.token("class", cls.__name__)
        for base in cls.__bases__:
            self.definition(base)
        if issubclass(cls, enum.Enum):
            self.items((member.name, member.value) for member in cls)

    def _code(self, code: CodeType) -> None:
        self.write(signature_of(code))
        for operation in operations(code):
            self.token(operation.name)
            if isinstance(operation.argument, CodeType):
                self._code(operation.argument)
            else:
                self.write(operation.argument)
