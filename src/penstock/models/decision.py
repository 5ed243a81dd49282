"""What one process of a run decides about a model for all that share the machine: a word in a file of the run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.models.host_address import make_private, name_of

BEGUN = "?"  # instead of a decision: one for each process that has begun, and has come to none


def decided(folder: str, key: str, decide: Callable[[int, Sequence[str]], str]) -> str:
    """What decide(deaths, others) returned in the process that came first: the others wait for it. One process decides at a
    time, whatever model it is about. deaths: of processes that were deciding this; others: what was decided about the other
    models. If it raises, or its process dies, the next one decides: the lock is the system's."""
    make_private(folder)
    path = Path(folder, f"{name_of(key)}.decision")
    if text := _read(path).strip(BEGUN):  # without the lock, which may be held for another model
        return text
    lock = os.open(os.path.join(folder, "decisions.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun = _read(path)
        if text := begun.strip(BEGUN):
            return text
        _write(path, begun + BEGUN)  # it stays there if this process dies
        text = begun
        try:
            text = decide(len(begun), [_read(each) for each in Path(folder).glob("*.decision") if each != path])
        finally:
            _write(path, text)
        return text
    finally:
        # Unlocked, not just closed: a process that decide() has forked has the file, too, and may live on.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    return ""


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")  # one process writes at a time
    new.write_text(text, encoding="utf-8")
    new.replace(path)  # whole or not at all: whoever reads may have no lock
