"""Python's threads while one of them feeds a device.

A thread that computes gives way to another every 5 ms by default. One that launches a model gives way at each of its
hundreds of operations, and would wait so long for its next turn each time, with the device idle meanwhile.
"""

from __future__ import annotations

import sys
import threading

INTERVAL = 1e-4  # seconds


class QuickTurns:
    """Shorter turns while anybody needs them. What the user has set is left alone if it is shorter still."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0

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
