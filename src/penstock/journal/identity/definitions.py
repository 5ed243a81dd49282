"""Functions and classes of the user's: which ones they are, what they are made of, and what else they lead to."""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple, TypeAlias

from penstock.journal.identity.bytecode import Name
from penstock.journal.identity.forms import form_of
from penstock.journal.identity.modules import Origin, origin_of

Ignored: TypeAlias = Callable[[type, str], bool]  # whether an attribute of a class, or of its instances, does not matter
Place: TypeAlias = tuple[int, str]  # the id of a module's dict, a class or an object, and a name in it

PLAIN = {bool, bytes, complex, float, int, str, type(None), type(Ellipsis), type(NotImplemented)}
SCALARS = str, bytes, int, float, complex
_BASES_WITHOUT_STATE = {"abc", "builtins", "typing"}  # modules
_NAMESPACES = {"argparse.Namespace", "argparse._AttributeHolder", "types.SimpleNamespace"}
_KNOWN = (
    *(BuiltinFunctionType, FunctionType, MethodWrapperType, MappingProxyType, type),
    *(deque, dict, enum.Enum, frozenset, list, set, tuple),
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")


class Global(NamedTuple):
    """A global that a function names."""

    space: dict[str, Any]  # of the module that it stands in
    name: str
    shown: str  # the name with those of modules before it, as the function has it
    value: Any


def name_of(thing: Any) -> str:
    """A function's or class's full name. A wrapper may have taken its __module__ from the function that it wraps."""
    module = thing.__globals__.get("__name__") if isinstance(thing, FunctionType) else getattr(thing, "__module__", None)
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def origin_of_function(function: FunctionType) -> Origin:
    """Where its code stands: its __module__ may be that of the function that it wraps."""
    return origin_of(function.__globals__.get("__name__"))


def is_users_class(thing: Any) -> bool:
    return isinstance(thing, type) and origin_of(thing.__module__) == "user"


def wrapped_by(thing: Any) -> FunctionType | None:
    """The function inside a wrapper that is not the user's own, such as functools.lru_cache."""
    origin = origin_of_function(thing) if isinstance(thing, FunctionType) else origin_of(type(thing).__module__)
    if origin == "user":
        return None
    wrapped = inspect.getattr_static(thing, "__wrapped__", None)
    return wrapped if isinstance(wrapped, FunctionType) else None


def used_by(function: FunctionType, taken: Iterable[Name]) -> Iterator[Global]:
    """The globals that a function takes, where they are constants or definitions that it depends on."""
    for names in taken:
        found = _resolved(function.__globals__, names)
        if found is None:
            continue
        value = found.value
        if isinstance(value, FunctionType):
            origin = origin_of_function(value)
            beside = value.__globals__ is function.__globals__
            if origin == "user" or (beside and origin == "library") or wrapped_by(value):
                yield found
        elif isinstance(value, type):
            if is_users_class(value):
                yield found
        elif wrapped_by(value) or is_compared(value):
            yield found


def _resolved(space: dict[str, Any], names: Name) -> Global | None:
    """What a dotted name stands for, if it is a global, also of another module of the user's, or such a module."""
    if names[0].startswith("__"):
        return None
    for at, name in enumerate(names, 1):
        if name not in space:
            return None
        value = space[name]
        if not isinstance(value, ModuleType) or at == len(names):
            return Global(space, name, ".".join(names[:at]), value)
        if origin_of(value.__name__) != "user":
            return None
        space = vars(value)
    return None


def set_by(function: FunctionType, names: Iterable[Name]) -> Iterator[Place]:
    """Where the globals and attributes of these names are: state, and no constants."""
    for *owners, name in names:
        owner: Any = function.__globals__
        for each in owners:
            owner = owner.get(each) if isinstance(owner, dict) else inspect.getattr_static(owner, each, None)
            owner = vars(owner) if isinstance(owner, ModuleType) else owner
        yield id(owner), name


def is_compared(value: Any) -> bool:
    """Whether a global is more than something that lives, such as a lock, a client, or a model of a library's."""
    if type(value) in PLAIN or isinstance(value, (*_KNOWN, *SCALARS)):
        return True
    if isinstance(value, ModuleType):
        return origin_of(value.__name__) == "user"
    if isinstance(value, MethodType):
        return isinstance(value.__func__, FunctionType) and origin_of_function(value.__func__) == "user"
    return is_users_class(type(value)) or is_dataclass(value) or is_namespace(type(value)) or form_of(value) is not None


def members_of(cls: type, ignored: Ignored) -> Iterator[tuple[str, Any]]:
    """What the body of a class defines that can matter: functions, also under decorators, constants and classes.

    Names like __this__ are Python's, or a framework's that notes things down there, except for methods.
    """
    is_enum = issubclass(cls, enum.Enum)
    for name, value in sorted(vars(cls).items()):
        if ignored(cls, name) or name == "_abc_impl":
            continue
        if functions_in(value):
            if not (is_enum and name in ("__new__", "_generate_next_value_")):
                yield name, value
        elif not is_enum and not (name.startswith("__") and name.endswith("__")) and is_compared(value):
            yield name, value


def functions_in(member: Any) -> list[FunctionType]:
    """The functions of a method, property or the like; empty for anything else."""
    if isinstance(member, property):
        inner = [member.fget, member.fset, member.fdel]
    elif isinstance(member, (staticmethod, classmethod)):
        inner = [member.__func__]
    elif isinstance(member, functools.cached_property):
        inner = [member.func]
    else:
        inner = [member, wrapped_by(member)]
    return [each for each in inner if isinstance(each, FunctionType)]


def state_of(value: Any, ignored: Ignored) -> Any:
    """What makes an instance what it is: what it says itself for pickling, else its attributes; None if it has none."""
    cls = type(value)
    if origin_of(cls.__module__) == "known" and not (is_namespace(cls) or cls.__module__.startswith("penstock")):
        return None
    if getattr(cls, "__getstate__", None) is not object.__getstate__:
        try:
            state = value.__getstate__()
        except Exception:  # not to be pickled: known by its type
            return None
        return _that_counts(cls, state, ignored) if isinstance(state, dict) else state
    return _that_counts(cls, _attributes(value), ignored)


def constants_of(value: Any, ignored: Ignored) -> dict[str, Any]:
    """The constants among the attributes of an object that a global holds. No code of its class runs for it.

    What is None may be made when it is needed; and who knows what a base class of other people's keeps there.
    """
    if not is_dataclass(value) and not all(map(_keeps_what_it_is_given, type(value).__mro__)):
        return {}
    state = _that_counts(type(value), _attributes(value), ignored)
    return {
        name: each
        for name, each in state.items()
        if each is not None and is_compared(each) and not (type(each) is int and each == id(value))
        if not (type(each) is str and _ADDRESS.search(each))
    }


def _keeps_what_it_is_given(cls: type) -> bool:
    return is_users_class(cls) or is_namespace(cls) or cls.__module__ in _BASES_WITHOUT_STATE


def _attributes(value: Any) -> dict[str, Any]:
    state = object.__getstate__(value)  # None, a dict, or such a one and another of slots
    parts = state if isinstance(state, tuple) else (state,)
    found = {name: each for part in parts if part for name, each in part.items()}
    names = [field.name for field in fields(value) if field.compare] if is_dataclass(value) else [*found]
    return {name: found[name] for name in names if name in found}


def _that_counts(cls: type, state: dict[Any, Any], ignored: Ignored) -> dict[Any, Any]:
    """Without what is ignored, and what cached_property left there, which is made anew from the rest."""
    return {
        name: each
        for name, each in state.items()
        if not isinstance(inspect.getattr_static(cls, str(name), None), functools.cached_property)
        if not ignored(cls, str(name))
    }


def is_named(value: Any) -> bool:
    """Whether it is a function that was not written in Python: a method of a built-in type, or one that Cython made."""
    cls = type(value)
    return origin_of(cls.__module__) != "user" and callable(value) and isinstance(getattr(value, "__qualname__", None), str)


def place_of(item: Any) -> tuple[str, int]:
    """Where a function stands: sets give them in no order, and those of one name are told apart by number."""
    return (name_of(item), item.__code__.co_firstlineno) if isinstance(item, FunctionType) else ("", 0)


def content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return NotImplemented


def is_namespace(cls: type) -> bool:
    """Whether instances of a class of Python's are nothing but their attributes."""
    return name_of(cls) in _NAMESPACES
