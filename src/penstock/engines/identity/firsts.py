"""What this process found when it first asked: code may change its own dicts, objects and classes while it runs.

So a pipeline that runs again in the same process is compared as it was before its code ran. What is made anew, as when a
cell of a notebook runs again, is another object, and looked at anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")
_Known: TypeAlias = dict[Hashable, tuple[Callable[[], Any], Any]]  # by name, each with what it was found of

_in_definitions: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
_in_modules: dict[str, _Known] = {}


def first_found(owner: Any, name: Hashable, thing: Any, find: Callable[[], T]) -> T:
    """What find() gave when it was first asked for this thing, of that name in a function, a class or a module's name."""
    known = _in_modules.setdefault(owner, {}) if isinstance(owner, str) else _in_definitions.setdefault(owner, {})
    if name not in known or known[name][0]() is not thing or thing is None:
        known[name] = _reference(thing), find()
    found: T = known[name][1]
    return found


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return ref(thing)
    except TypeError:  # it is a dict, a list or the like, and is kept
        return lambda: thing
