"""What else went on in this process while something was measured."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Mark(NamedTuple):
    """A moment."""

    running: int
    begun: int


class Activity:
    """Things of one kind that threads of this process do: how many run, and how many were ever begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both numbers
        self._running = 0
        self._begun = 0

    def begin(self) -> Mark:
        """One more runs; the moment before it."""
        with self._lock:
            mark = Mark(self._running, self._begun)
            self._running += 1
            self._begun += 1
        return mark

    def end(self) -> None:
        """One that was begun is over."""
        with self._lock:
            self._running -= 1

    def mark(self) -> Mark:
        with self._lock:
            return Mark(self._running, self._begun)

    def was_quiet(self, since: Mark, own: int = 0) -> bool:
        """Whether none but `own` ran at any time since then."""
        with self._lock:
            return since.running == 0 and self._begun == since.begun + own


LOADS = Activity()  # of models
BATCHES = Activity()  # that models were called with
