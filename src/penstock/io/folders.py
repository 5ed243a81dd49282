"""Folders that are there, and names in them that are found, after a power cut."""

from __future__ import annotations

import errno
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
