"""Loading a model while another one answers, so that batches keep the cores."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.inference.handler import ModelHandler

T = TypeVar("T")

NICENESS = 8  # of a core that a batch wants too, such a thread has about a seventh; an idle one is all its own


def load_beside(load: Callable[[], T], handler: ModelHandler[Any, Any, Any]) -> T:
    """What load() returns, or raises. Where every core is busy, it takes longer, and batches hardly do (Linux). Not so for
    classes of the user's own: threads and processes that load_model() leaves behind would have the low priority too."""
    if sys.platform != "linux" or not type(handler).load_model.__module__.startswith("penstock."):
        return load()
    made: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        own = threading.get_native_id()
        with contextlib.suppress(OSError):  # where that is forbidden
            os.setpriority(os.PRIO_PROCESS, own, max(NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        try:
            made.append(load())
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run, name="penstock-load", daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return made[0]
