"""Digests of values and of code: the same in every process and every run, until something changes.

What a value leads to has digests of its own, so that people can be told what has changed: "fn" is a function, "fn: helper" a
function of the user's that it calls, "fn: LIMIT" a constant that either of them names. References among them are names, so
code that calls itself, or many functions that share one, cost nothing.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from penstock.engines.identity.bytecode import operations, signature_of
from penstock.engines.identity.definitions import (
    PLAIN,
    Ignored,
    changed_by,
    content_of,
    functions_in,
    is_data,
    is_named,
    is_users_class,
    members_of,
    name_of,
    origin_of,
    origin_of_function,
    place_of,
    state_of,
    used_by,
    wrapped_by,
)
from penstock.engines.identity.forms import form_of

VALUE, FUNCTION, CLASS = "value", "function", "class"  # what a digest is of; those of functions hold for one Python alone
DIGEST_BYTES = 8
MOST_NESTED = 100  # containers in each other, far from the limit of Python's stack


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
        if _is_definition(value):
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

    def use(self, function: FunctionType) -> None:
        """Everything else that a function depends on."""
        space = id(function.__globals__)
        self._kept.append(function.__globals__)
        self._changed |= {(space, name) for name in changed_by(function)}
        for name, value in used_by(function):
            definition = wrapped_by(value) or value
            if _is_definition(definition):
                self.refer(definition)
            elif (space, name) not in self._constants:
                self._constants[space, name] = key = self._free_key(name)
                self._later(key, VALUE, value)

    def _define(self, definition: Any, key: str) -> None:
        self._keys[id(definition)] = key
        self._kept.append(definition)
        if isinstance(definition, FunctionType):
            self._waiting.append(lambda: self._write(key, FUNCTION, lambda writer: writer.body(definition)))
        else:
            self._waiting.append(lambda: self._define_class(definition, key))

    def _define_class(self, cls: type, key: str) -> None:
        self._write(key, CLASS, lambda writer: writer.header(cls))
        for name, member in members_of(cls, self.ignored):
            if functions := functions_in(member):
                self._write(f"{key}.{name}", FUNCTION, functools.partial(_write_member, member, functions))
            else:
                self._write(f"{key}.{name}", VALUE, functools.partial(_write_value, member))

    def _later(self, key: str, kind: str, value: Any) -> None:
        self._waiting.append(lambda: self._write(key, kind, lambda writer: writer.write(value)))

    def _write(self, key: str, kind: str, write: Callable[[_Writer], None]) -> None:
        writer = _Writer(self)
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


def _is_definition(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return origin_of_function(value) != "known" and wrapped_by(value) is None
    return is_users_class(value)


def _write_value(value: Any, writer: _Writer) -> None:
    writer.write(value)


def _write_member(member: Any, functions: list[FunctionType], writer: _Writer) -> None:
    writer.token("member", type(member).__name__)
    for function in functions:
        if _is_definition(function):
            writer.body(function)
        else:
            writer.write(function)


class _Writer:
    """Feeds one digest."""

    def __init__(self, all_of_them: _Digests, inside: tuple[int, ...] = ()) -> None:
        self.hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.has_code = False
        self._all = all_of_them
        self._inside = list(inside)  # the ids of the containers around

    def token(self, kind: str, data: str | bytes | memoryview = b"") -> None:
        data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        self.hash.update(f"{kind}:{data.nbytes if isinstance(data, memoryview) else len(data)}:".encode())
        self.hash.update(data)

    def write(self, value: Any) -> None:
        if type(value) in PLAIN:
            self._plain(value)
        elif id(value) in self._inside:
            self.token("around", str(len(self._inside) - self._inside.index(id(value))))
        elif len(self._inside) > MOST_NESTED:
            self.token("deep", type(value).__name__)
        else:
            self._inside.append(id(value))
            try:
                self._compound(value)
            except Exception:  # whatever a foreign object does when it is looked at, a run must not fail for it
                self.token("unreadable", type(value).__name__)
            self._inside.pop()

    def _plain(self, value: Any) -> None:
        if type(value) is str or type(value) is bytes:
            self.token(type(value).__name__, value)
        else:
            self.token(type(value).__name__, hex(value) if type(value) is int else repr(value))

    def _compound(self, value: Any) -> None:
        if isinstance(value, memoryview):
            self.token("bytes", value)
        elif isinstance(value, enum.Enum):
            self.token("enum", type(value).__name__)
            self._items([value.name, value.value])
        elif isinstance(value, (type, FunctionType)):
            self._definition(value)
        elif isinstance(value, (dict, MappingProxyType)):
            self._type(value, dict)
            self._dict(value)
        elif isinstance(value, (list, tuple, deque)):
            self._type(value, list, tuple)
            self._items(value)
        elif isinstance(value, (set, frozenset)):
            self._set(value)
        elif isinstance(value, MethodType):
            self.token("method", value.__func__.__name__ if hasattr(value.__func__, "__name__") else "")
            self._items([value.__self__, value.__func__])
        elif isinstance(value, BuiltinFunctionType):
            self.token("builtin", name_of(value))
            self._items([] if isinstance(value.__self__, (ModuleType, type(None))) else [value.__self__])
        elif (wrapped := wrapped_by(value)) is not None:
            self.token("wrapped", type(value).__name__)
            self.write(wrapped)
        elif (form := form_of(value)) is not None:
            self._items(form)
        elif is_named(value):
            self.token("named", name_of(value))
        else:
            self._instance(value)

    def _type(self, value: Any, *plain: type) -> None:
        """The type of a container; subclasses of the user's are known by what they do."""
        if is_users_class(type(value)):
            self._definition(type(value))
        else:
            self.token("of", type(value).__name__ if type(value) in plain else name_of(type(value)))

    def _items(self, items: Iterable[Any]) -> None:
        items = list(items)
        if len(items) > 8 and set(map(type, items)) <= PLAIN:
            try:
                self.token("plain", ascii(items))
                return
            except ValueError:  # a number of thousands of digits
                pass
        self.token("items", str(len(items)))
        for item in items:
            self.write(item)

    def _dict(self, value: Any) -> None:
        by_key = sorted(((self._apart(key), key) for key in value), key=lambda pair: pair[0])
        self.token("pairs", str(len(by_key)))
        for digest, key in by_key:
            self.token("key", digest)
            self.write(value[key])

    def _apart(self, value: Any) -> str:
        writer = _Writer(self._all, tuple(self._inside))
        writer.write(value)
        return writer.hash.hexdigest()

    def _set(self, value: Any) -> None:
        items = sorted(value, key=place_of)
        self.token("set", "\n".join(sorted(map(self._apart, items))))

    def _definition(self, value: Any) -> None:
        if _is_definition(value):
            self.token("definition", self._all.refer(value))
            return
        self.token("named", name_of(value))
        if isinstance(value, FunctionType):
            wrapped = wrapped_by(value)
            self._items([wrapped] if wrapped else map(content_of, value.__closure__ or ()))

    def _instance(self, value: Any) -> None:
        cls = type(value)
        self._definition(cls)
        if origin_of(cls.__module__) == "known" and not is_data(cls):
            return
        state = state_of(value, self._all.ignored)
        self.token("state", type(state).__name__)
        if state is not None:
            self.write(state)

    # Definitions themselves.

    def body(self, function: FunctionType) -> None:
        self.has_code = True
        self._code(function.__code__)
        self.write(function.__defaults__)
        self.write(function.__kwdefaults__)
        self._items(map(content_of, function.__closure__ or ()))
        self._all.use(function)

    def header(self, cls: type) -> None:
        self.token("class", cls.__name__)
        for base in cls.__bases__:
            self._definition(base)
        if issubclass(cls, enum.Enum):
            self._items((member.name, member.value) for member in cls)

    def _code(self, code: CodeType) -> None:
        self.write(signature_of(code))
        for operation in operations(code):
            self.token(operation.name)
            if isinstance(operation.argument, CodeType):
                self._code(operation.argument)
            else:
                self.write(operation.argument)
