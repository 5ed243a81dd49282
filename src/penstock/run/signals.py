"""Ctrl-C and SIGTERM while a run goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM wait: the renames that make the output visible are done together."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for each in came:
            signal.raise_signal(each)


class _Terminated(BaseException):
    """SIGTERM arrived: unwind, clean up, and die of it."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM cleans up before it ends the process, if nobody else handles it, and says what is kept of the run."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the clean-up is not to be interrupted
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _Terminated as exc:
        with contextlib.suppress(Exception):  # nobody may be listening any more
            sys.stderr.write("; ".join(["penstock: stopped", *getattr(exc, "__notes__", ())]) + "\n")
            sys.stderr.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
