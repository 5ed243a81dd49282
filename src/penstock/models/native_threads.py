"""The threads that native libraries (BLAS, OpenMP, torch) start by themselves, while several of ours call models at once.

Each of ours with a pool of as many as there are cores is slower than each with its share. Worker processes are told by
variables, before the libraries load; the user's process is told while a short job runs, and gets back what it had.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple


class _Libraries(NamedTuple):
    """Those that a look has found; None: it is not there."""

    pools: Any  # threadpoolctl's view of BLAS and OpenMP
    torch: Any


class NativeThreads:
    """A limit for each thread that calls models. Libraries are limited once they are there: after a model is loaded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards all but _own
        self._found: _Libraries | None = None  # another one after every look
        self._restore = contextlib.ExitStack()  # the last look is undone first
        self._keeper: ThreadPoolExecutor | None = None  # one thread: who limits a pool that all threads share must undo it
        self._closed = False
        self._own = threading.local()  # of each thread: what it has limited for itself

    def look(self) -> None:
        """Limit what the libraries that are loaded now have for the whole process. To be called after each load."""
        with self._lock:
            if not self._closed:
                self._keeper = self._keeper or ThreadPoolExecutor(1, "penstock-native-threads")
                self._found = self._keeper.submit(self._limit_shared).result()

    def limit_this_thread(self) -> None:
        """Limit what each thread has for itself, which ends with it. Called before a model is."""
        found = self._found  # read once, without the lock: before each batch, and look() sets it whole
        if found is not None and getattr(self._own, "found", None) is not found:
            self._own.found = found
            if found.pools is not None:
                found.pools.select(user_api="openmp").limit(limits=self._limit)
            if found.torch is not None:
                found.torch.set_num_threads(self._limit)

    def close(self) -> None:
        """Everything is as before, but for threads that were limited."""
        with self._lock:
            self._closed = True  # a model that is loaded later limits nothing
            if self._keeper is not None:
                self._keeper.submit(self._restore.close).result()
                self._keeper.shutdown()
                self._keeper = None

    def _limit_shared(self) -> _Libraries:
        found = _Libraries(_loaded_pools(), _loaded_torch())
        if found.pools is not None:
            self._restore.enter_context(found.pools.select(user_api="blas").limit(limits=self._limit))
        if found.torch is not None:
            self._restore.callback(found.torch.set_num_threads, found.torch.get_num_threads())
            found.torch.set_num_threads(self._limit)
        return found


def _loaded_pools() -> Any:
    """If threadpoolctl, which scikit-learn brings, is there to find them."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()


def _loaded_torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "set_num_threads") else None
