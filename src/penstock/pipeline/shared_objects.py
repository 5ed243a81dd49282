"""Objects that the steps of one process share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()  # guards the next; nobody's code is called under it
_locks: dict[str, threading.Lock] = {}  # by key: guards its object, and is held while that is made
_objects: dict[str, tuple[Any, Any]] = {}  # by key: the tag, and the object


class Shared:
    """Something large that a function or DoFn needs, made once in each process, as in Beam:

        shared = ps.Shared()
        rows | ps.Map(lambda row: lookup(shared.acquire(load_table), row))

    Copies of one Shared, which every thread that runs a step has, give the same object. For models there is
    `ps.RunInference`, which also batches.
    """

    def __init__(self) -> None:
        self._key = os.urandom(16).hex()

    def acquire(self, constructor_fn: Callable[[], T], tag: Any = None) -> T:
        """The object, made by constructor_fn() if this process has none, or has one of another tag, which is let go.
        Called from any thread: the others wait while one makes it. What constructor_fn raises is raised here."""
        with _lock:
            own = _locks.setdefault(self._key, threading.Lock())
        with own:
            if self._key not in _objects or _objects[self._key][0] != tag:
                _objects.pop(self._key, None)  # before the next is made: there may be no room for two
                _objects[self._key] = tag, constructor_fn()
            found: T = _objects[self._key][1]
            return found
