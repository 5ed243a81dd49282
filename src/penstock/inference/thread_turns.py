"""Python's threads while one of them feeds a device, in the model's process and in those that prepare rows.

A thread that computes gives way to another every 5 ms by default. One that launches a model gives way at each of its
hundreds of operations, and would wait so long for its next turn each time, with the device idle meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

INTERVAL = 1e-4  # seconds


class QuickTurns:
    """Shorter turns while anybody needs them. What the user has set is left alone if it is shorter still."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both, and the setting of the process
        self._users = 0
        self._before = 0.0  # what the first user found, for the last one to set again

    def begin(self) -> None:
        with self._lock:
            if not self._users:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, INTERVAL))
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._before)


QUICK_TURNS = QuickTurns()  # of this process


class Turn:
    """Held by a thread while it runs a split, so that only one does at a time, and given up while it waits for a host: so
    rows of one split are prepared while those of another are answered. Where it is not `wanted`, it does nothing."""

    def __init__(self, wanted: bool = False) -> None:
        self._lock = threading.Lock() if wanted else None  # not reentrant: a thread enters once for a split

    def __enter__(self) -> None:
        if self._lock is not None:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """By the thread that holds it, which has it again when this ends; the answers may be there earlier."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
