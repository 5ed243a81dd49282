"""The threads that native libraries (BLAS, OpenMP, torch) start by themselves, while several of ours call models at once.

Each of ours with a pool of as many as there are cores is slower than each with its share. Worker processes are told by
variables, before the libraries load; the user's process is told while a short job runs, and gets back what it had.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any


class NativeThreads:
    """A limit for each thread that calls models. The libraries are limited once they are there: after a model is loaded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards all but _own
        self._found: Any = None  # what threadpoolctl has found, new for every look
        self._restore = contextlib.ExitStack()  # the last look is undone first
        self._closed = False
        self._own = threading.local()  # of each thread: what it has limited for itself

    def look(self) -> None:
        """Limit the libraries that are loaded now. To be called after each load of a model."""
        with self._lock:
            if self._closed:
                return
            self._limit_torch()
            self._found = _libraries()
            if self._found is not None:
                self._restore.enter_context(self._found.select(user_api="blas").limit(limits=self._limit))

    def limit_this_thread(self) -> None:
        """What each thread has for itself, such as OpenMP's number, which ends with it. Called before a model is."""
        found = self._found
        if found is not None and getattr(self._own, "found", None) is not found:
            self._own.found = found
            found.select(user_api="openmp").limit(limits=self._limit)

    def close(self) -> None:
        """All as it was before, but for threads that were limited, which end with the run."""
        with self._lock:
            self._closed = True
            self._restore.close()

    def _limit_torch(self) -> None:
        torch = sys.modules.get("torch")
        if hasattr(torch, "set_num_threads") and torch is not None:
            self._restore.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self._limit)


def _libraries() -> Any:
    """The native libraries that this process has loaded, if threadpoolctl, which scikit-learn brings, can tell."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()
