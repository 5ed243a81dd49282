"""What one process of a run decides about a model for all that share the machine: a word in a file of the run's folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from penstock.models.host_address import make_private, name_of


def decided(folder: str, key: str, decide: Callable[[], str]) -> str:
    """What decide() returned in the process that came first; the others wait for it. If it raises, or its process dies, the
    next one decides: the lock is the system's."""
    make_private(folder)
    file = os.open(os.path.join(folder, f"{name_of(key)}.decision"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = os.pread(file, 4096, 0).decode()
        if not text:
            text = decide()
            os.pwrite(file, text.encode(), 0)
        return text
    finally:
        os.close(file)  # gives the lock back
