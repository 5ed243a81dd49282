"""Ctrl-C and SIGTERM during a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

PATIENCE = 10.0  # seconds for a clean-up, in which nobody interrupts it


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
        for each in came:  # after all handlers are back: the first may raise
            signal.raise_signal(each)


class _Terminated(KeyboardInterrupt):
    """SIGTERM arrived: unwind, clean up, and die of it. Like Ctrl-C it is nobody's error, and passes through every step."""


def _is_of_ray(handler: object) -> bool:
    """Whether Ray has set it for a driver: it ends the process at SIGTERM without a word, and is called in the end."""
    return (getattr(handler, "__module__", None) or "").startswith("ray.")


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM, if nobody else handles them, unwind the run once; then SIGTERM ends the process and says
    what is kept of the run.

    More of them change nothing while the run is cleaned up: an interrupt at any of its steps would leave processes and
    folders behind. After PATIENCE the next one counts again, for a clean-up that hangs, or code that swallowed the first.
    """
    kinds = {signal.SIGINT: (signal.default_int_handler, KeyboardInterrupt), signal.SIGTERM: (signal.SIG_DFL, _Terminated)}
    now = {number: signal.getsignal(number) for number in kinds}
    ours = {number: before for number, before in now.items() if before == kinds[number][0] or _is_of_ray(before)}
    if threading.current_thread() is not threading.main_thread() or not ours:
        yield
        return
    deaf_until, is_ended = 0.0, False  # only the main thread, in which signals are handled, has to do with them

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal deaf_until, is_ended
        is_ended = is_ended or number == signal.SIGTERM
        if time.monotonic() >= deaf_until:
            deaf_until = time.monotonic() + PATIENCE
            raise kinds[signal.Signals(number)][1]

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    except _Terminated as exc:
        with contextlib.suppress(Exception):  # nobody may be listening any more
            sys.stderr.write("; ".join(["penstock: stopped", *getattr(exc, "__notes__", ())]) + "\n")
            sys.stderr.flush()
        raise
    finally:
        for number in reversed(ours):  # Ctrl-C last: it may strike at once
            signal.signal(number, ours[number])
            if number == signal.SIGTERM and is_ended:
                os.kill(os.getpid(), signal.SIGTERM)
