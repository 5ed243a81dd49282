"""Processes that a step's own code forks: one that comes back into Penstock's code ends there, and runs no further rows.

A child that os.fork() makes in a step has all that its parent has, the sockets too. What the parent's rows become is the
parent's to tell.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

_forks = 0  # that lie between this process and the one that imported this module
_here = threading.local()  # .rows: those that this thread's function is still to be called with


def _in_child() -> None:
    """In the child, on the only thread that it has, before os.fork() returns there."""
    global _forks
    _forks += 1
    for _ in getattr(_here, "rows", ()):  # map() is in C: it ends where there are no more rows
        pass


os.register_at_fork(after_in_child=_in_child)


def this_process() -> int:
    """To be asked before the user's code is called, for end_if_forked() after it."""
    return _forks


def end_if_forked(began: int, step: str) -> None:
    """End this process, if it is another than that which began."""
    if _forks != began:
        what = f"penstock: step {step!r}: a process that its code forked (os.fork()) returned from it, and is ended\n"
        os.write(2, what.encode(errors="replace"))  # not by sys.stderr, whose lock another thread may have held at the fork
        os._exit(1)  # nothing is flushed or closed: it is all the parent's


class RowsToMap:
    """While a function is called with these rows: a process that it forks finds none left. (No @contextmanager: that sets
    attributes of errors, whose class may be frozen.)"""

    __slots__ = ("_before", "_rows")

    def __init__(self, rows: Iterator[Any]) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        self._before = getattr(_here, "rows", ())
        _here.rows = self._rows

    def __exit__(self, *_: object) -> None:
        _here.rows = self._before
