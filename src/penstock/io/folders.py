"""Folders and names that are there after a power cut, and files that somebody has locked."""

from __future__ import annotations

import errno
import fcntl
import os


def make_folder(path: str, mode: int = 0o777) -> None:
    """Make a folder, and those above it that are missing. The mode is of the folder itself, if it is made."""
    missing = missing_folders(path)
    os.makedirs(path, mode, exist_ok=True)
    for folder in missing:
        sync_folder(os.path.dirname(folder))


def missing_folders(path: str) -> list[str]:
    """Those on the way to a folder that are not there, the folder itself first."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def is_locked(path: str) -> bool:
    """Whether a process holds the lock of a file. One that is not there, nobody does."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe has no writer
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def sync_folder(path: str) -> None:
    """Keep the names of files that were made or renamed there."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(folder)
