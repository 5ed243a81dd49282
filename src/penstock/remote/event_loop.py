"""The event loop of a process: one thread, in which all of its requests are under way."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()  # guards the two below
_loop: asyncio.AbstractEventLoop | None = None
_process = 0  # that it was started in: a fork has no such thread


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop; it is started when it is first asked for, and ends with the process."""
    global _loop, _process
    with _lock:
        if _loop is None or _process != os.getpid():
            _loop, _process = asyncio.new_event_loop(), os.getpid()
            # A daemon that nobody ends: sessions come and go, and use it again.
            threading.Thread(target=_loop.run_forever, name="penstock-requests", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine comes to, on the loop's thread. To be called from any other."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return future.result()
    except BaseException:  # its own error, or Ctrl-C on this thread: then the request must not go on without anybody
        future.cancel()
        raise
