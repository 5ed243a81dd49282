"""What ends the requests that wait in a process."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Ending:
    """Of the requests that were begun before something ended them all: each raises it where it waits, and is not sent any
    more. Those that are under way are answered."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._told = threading.Event()  # wakes threads
        self._awake = asyncio.Event()  # wakes coroutines; where there are any, tell() is called on the loop's thread

    def tell(self, error: BaseException) -> None:
        """The first one counts."""
        self._error = self._error or error
        self._told.set()
        self._awake.set()

    @property
    def is_told(self) -> bool:
        return self._told.is_set()

    def check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # else each request that raises it makes its traceback longer

    async def sleep(self, seconds: float) -> None:
        self.check()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._awake.wait()
        self.check()

    def sleep_thread(self, seconds: float) -> None:
        """The same on a thread that may block."""
        self._told.wait(seconds)
        self.check()
