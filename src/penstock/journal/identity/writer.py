"""Digests of values and definitions, part by part: the same in every process and every run, until something changes."""

from __future__ import annotations

import enum
import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Protocol, TypeAlias

from penstock.journal.identity.bytecode import cells_set, guards, operations, signature_of
from penstock.journal.identity.definitions import (
    PLAIN,
    SCALARS,
    content_of,
    is_named,
    is_users_class,
    name_of,
    origin_of_function,
    place_of,
    wrapped_by,
)
from penstock.journal.identity.forms import form_of
from penstock.journal.identity.modules import DIGEST_BYTES

State: TypeAlias = Callable[[Any], Any]  # what counts of an instance besides its class; None if nothing does

MOST_NESTED = 100  # containers in each other, far from the limit of Python's stack


class Context(Protocol):
    """What a digest is made for."""

    def refer(self, definition: Any) -> str:
        """What stands for a function or class of the user's, whose own digest is made elsewhere."""

    def use(self, function: FunctionType) -> None:
        """The function was written; what else it depends on has digests of its own."""

    def module(self, name: str) -> None:
        """The module of this name is used; if it is the user's, its own digest is made elsewhere."""


def is_definition(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return origin_of_function(value) != "known" and wrapped_by(value) is None
    return is_users_class(value)


class Writer:
    """Feeds one digest of a value."""

    def __init__(self, context: Context, state: State, inside: tuple[int, ...] = ()) -> None:
        self.hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._context = context
        self._state = state
        self.has_code = False
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
            self.definition(type(value))
            self.items([value.name, value.value])
        elif isinstance(value, (type, FunctionType)):
            self.definition(value)
        elif isinstance(value, (dict, MappingProxyType)):
            self._type(value, dict)
            self.items([value.default_factory] if isinstance(value, defaultdict) else [])
            self._dict(value)
        elif isinstance(value, (list, tuple, deque)):
            self._type(value, list, tuple)
            self.items([value.maxlen] if isinstance(value, deque) else [])
            self.items(value)
        elif isinstance(value, (set, frozenset)):
            self._type(value, set, frozenset)
            self._set(value)
        elif isinstance(value, MethodType):
            self.token("method", value.__func__.__name__ if hasattr(value.__func__, "__name__") else "")
            self.items([value.__self__, value.__func__])
        elif isinstance(value, (BuiltinFunctionType, MethodWrapperType)):
            self.token("builtin", name_of(value))
            self.items([] if isinstance(value.__self__, (ModuleType, type(None))) else [value.__self__])
        elif isinstance(value, ModuleType):
            self.token("module", value.__name__)
            self._context.module(value.__name__)
        elif (wrapped := wrapped_by(value)) is not None:
            self.token("wrapped", type(value).__name__)
            self.write(wrapped)
        elif (form := form_of(value)) is not None:
            self.items(form)
            if is_users_class(type(value)):
                self._instance(value)
        elif isinstance(value, SCALARS):
            self._type(value)
            scalar: Any = next(each for each in SCALARS if isinstance(value, each))
            self.items(scalar.__getnewargs__(value))
        elif is_named(value):
            self.token("named", name_of(value))
        else:
            self._instance(value)

    def _type(self, value: Any, *plain: type) -> None:
        """The type of a value that is more than its attributes; a class of the user's counts with these."""
        if is_users_class(type(value)):
            self._instance(value)
        else:
            self.token("of", type(value).__name__ if type(value) in plain else name_of(type(value)))

    def items(self, items: Iterable[Any]) -> None:
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
        writer = Writer(self._context, self._state, tuple(self._inside))
        writer.write(value)
        return writer.hash.hexdigest()

    def _set(self, value: Any) -> None:
        items = sorted(value, key=place_of)
        self.token("set", "\n".join(sorted(map(self._apart, items))))

    def definition(self, value: Any) -> None:
        if is_definition(value):
            self.token("definition", self._context.refer(value))
            return
        self.token("named", name_of(value))
        if isinstance(value, FunctionType):
            wrapped = wrapped_by(value)
            self.items([wrapped] if wrapped else map(content_of, value.__closure__ or ()))

    def _instance(self, value: Any) -> None:
        self.definition(type(value))
        state = self._state(value)
        self.token("state", type(state).__name__)
        if state is not None:
            self.write(state)

    # Definitions.

    def header(self, cls: type) -> None:
        self.token("class", cls.__name__)
        for base in (*cls.__bases__, *filter(is_users_class, [type(cls)])):
            self.definition(base)
        if issubclass(cls, enum.Enum):
            self.items((member.name, member.value) for member in cls)

    def member(self, kind: str, functions: list[FunctionType]) -> None:
        self.token("member", kind)
        for function in functions:
            if is_definition(function):
                self.body(function)
            else:
                self.write(function)

    def body(self, function: FunctionType) -> None:
        self.has_code = True
        self._code(function.__code__)
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        state = cells_set(function.__code__)
        constants = [content_of(cell) for name, cell in closure if name not in state]
        for part in (function.__defaults__, function.__kwdefaults__, *constants):
            self.write(part)
        self._context.use(function)

    def _code(self, code: CodeType) -> None:
        self.write(signature_of(code))
        self.write(guards(code))
        for operation in operations(code):
            self.token(operation.name)
            if isinstance(operation.argument, CodeType):
                self._code(operation.argument)
            else:
                self.write(operation.argument)
