"""Loading a model while another one answers, so that batches keep the cores."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import ModelLoadError
from penstock.inference.handler import ModelHandler

T = TypeVar("T")

NICENESS = 8  # of a core that a batch wants too, such a thread has about a seventh; an idle one is all its own


def load_beside(load: Callable[[], T], handler: ModelHandler[Any, Any, Any]) -> T:
    """What load() returns, or raises. Where every core is busy, it takes longer, and batches hardly do (Linux). Not so for
    classes of the user's own: threads and processes that load_model() leaves behind would have the low priority too."""
    if sys.platform != "linux" or not type(handler).load_model.__module__.startswith("penstock."):
        return load()

    def run() -> T:
        own = threading.get_native_id()
        with contextlib.suppress(OSError):  # where that is forbidden
            os.setpriority(os.PRIO_PROCESS, own, max(NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        return load()

    return load_within(None, run)


def load_within(seconds: float | None, load: Callable[[], T]) -> T:
    """What load() returns, or raises, in a thread of its own. ModelLoadError if that takes longer: the thread goes on, and
    nobody gets what it loads."""
    made: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(load())
        except BaseException as exc:
            raised.append(exc)

    # A daemon: one that is given up on below must not keep the process. The lists are read after it has ended.
    thread = threading.Thread(target=run, name="penstock-load", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise ModelLoadError(f"it took longer than the {seconds:g} s that loading may take (load_timeout)")
    if raised:
        raise raised[0]
    return made[0]
