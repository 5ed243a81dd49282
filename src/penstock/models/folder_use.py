"""Who uses the folder of a run whose processes come and go, as those of Beam do: whoever leaves last removes it.

Each process holds a lock on the file `users` in it, which the system takes back from one that is killed. What such
processes leave behind is removed when a run starts.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from penstock.errors import EngineError
from penstock.models.host_address import Address, make_private

USERS = "users"


class FolderUse:
    """This process's, until it leaves. The folder is made."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file: int | None = None
        while self._file is None:  # it may be removed just now
            with contextlib.suppress(FileNotFoundError):
                make_private(folder)
                self._file = _locked(folder, fcntl.LOCK_SH, os.O_CREAT)
        remove_unused(str(Path(folder).parent))
        atexit.register(self.leave)

    def leave(self) -> None:
        """Remove the folder, if nobody else uses it."""
        file, self._file = self._file, None
        if file is not None:
            atexit.unregister(self.leave)
            os.close(file)  # before the look: this process's own lock would be found there
            remove_if_unused(self.folder)


def remove_unused(parent: str) -> None:
    """The folders of runs whose processes are all gone. parent: a private folder."""
    with contextlib.suppress(OSError):
        for each in os.scandir(parent):
            if each.is_dir(follow_symlinks=False):
                remove_if_unused(each.path)


def remove_if_unused(folder: str) -> None:
    """Unless a process uses it, or a host in it lives. Folders that were never used in this way are left alone."""
    try:
        file = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while anybody has it shared
    except OSError:
        return
    try:
        if file is not None and not _has_host(folder):
            # The file with the lock goes last: who opens it until then waits for it, and sees that it is gone (_locked).
            for each in os.scandir(folder):
                if each.name != USERS:
                    os.unlink(each.path)
            shutil.rmtree(folder)
    except OSError:  # somebody else is at it
        return
    finally:
        if file is not None:
            os.close(file)


def _locked(folder: str, how: int, flags: int = 0) -> int | None:
    """The lock, held until the file is closed; None: the file was removed meanwhile."""
    path = os.path.join(folder, USERS)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(file, how)
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
    except FileNotFoundError:
        pass
    except OSError:
        os.close(file)
        raise
    os.close(file)
    return None


def _has_host(folder: str) -> bool:
    for path in Path(folder).glob("*.sock"):
        with contextlib.suppress(EngineError, OSError):
            if (sock := Address(folder, path.stem).connect()) is not None:
                sock.close()
                return True
    return False
