"""The folder of a run that can be resumed: its lock, its journal, its manifest."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import stat
import time

from penstock.errors import OutputError
from penstock.io.folders import make_folder
from penstock.journal.file import NAME, is_other_database, remove
from penstock.journal.journal import Journal
from penstock.models.kept_sizes import FILE as SIZES
from penstock.options import ASIDE
from penstock.remote.answers import FOLDER as ANSWERS

LOCK = "lock"
MANIFEST = "manifest.json"
FOLDERS = (ASIDE, ANSWERS)
TRIES = 6

_held: set[int] = set()  # descriptors of locks: a child that is forked must not hold them


def _let_go() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


class RunDir:
    """The folder, held by this process alone inside a `with` block. The lock is the system's: it goes with the process.

    Its journal holds pickles, which can do anything as the user who loads them. So nothing in it is opened before it is
    known that nobody else can put files there, and then that all files are the user's own.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> RunDir:
        lock = os.path.join(self.path, LOCK)
        try:
            make_folder(self.path, 0o700)
            _check_folder(self.path)
            _check_files(self.path)
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise OutputError(
                f"run_dir={self.path!r}: {exc.strerror}; choose a folder that can be made and written to"
            ) from exc
        try:
            self._take()
        except BlockingIOError as exc:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self._release()
            raise OutputError(
                f"run_dir={self.path!r}: process {holder or 'unknown'}, or one that it has forked, is working on this run; "
                "wait for it, or stop it first"
            ) from exc
        self._check_ours()  # with the lock: a process that is at work changes these files
        _held.add(self._lock)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # there is none, or parts are kept in it
            os.rmdir(os.path.join(self.path, ASIDE))
        self._release()  # last: from here on another process may begin

    def journal(self) -> Journal | None:
        """The journal of the run that was begun here, if there is one."""
        path = os.path.join(self.path, NAME)
        remove(f"{path}.new")  # of a process that was killed while it made one
        return Journal.open(self.path) if os.path.exists(path) else None

    def forget(self, journal: Journal) -> None:
        """Remove the journal of a run that was never begun, and its manifest, which would be of no run."""
        journal.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, MANIFEST))
        remove(journal.path)

    def _check_ours(self) -> None:
        """Whether the files there that have our names are ours: a lock is emptied, and the others are replaced."""
        assert self._lock is not None
        strangers = [] if re.fullmatch(rb"(\d+\n)?", os.pread(self._lock, 32, 0)) else [LOCK]
        if not os.path.exists(os.path.join(self.path, NAME)):
            strangers += [] if _begins(os.path.join(self.path, MANIFEST), rb'\{\n "format"') else [MANIFEST]
        elif is_other_database(os.path.join(self.path, NAME)):
            strangers.append(NAME)
        strangers += [] if _begins(os.path.join(self.path, SIZES), rb"(\{\n |\{\}\Z|\Z)") else [SIZES]
        if strangers:
            self._release()
            raise OutputError(
                f"run_dir={self.path!r}: {strangers[0]} does not belong to a run; choose a new folder for the run"
            )

    def _take(self) -> None:
        """`penstock status` holds the lock for a moment, to see whether it is free: so it is tried a few times."""
        assert self._lock is not None
        for attempt in range(TRIES):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt == TRIES - 1:
                    raise
                time.sleep(0.05)

    def _release(self) -> None:
        if self._lock is not None:
            _held.discard(self._lock)
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None


def _check_folder(path: str) -> None:
    """Raise unless only this user, and root, can make and rename files there. (An ACL shows in the bits of the group.)"""
    found = os.stat(path)
    if found.st_uid not in (os.geteuid(), 0):
        raise OutputError(
            f"run_dir={path!r}: the folder belongs to another user (uid {found.st_uid}), who could put code into the "
            "journal that runs as you; choose a folder of your own"
        )
    if found.st_mode & 0o022:
        raise OutputError(
            f"run_dir={path!r}: other users can write to the folder (mode {stat.S_IMODE(found.st_mode):o}), and could put "
            f"code into the journal that runs as you; remove that permission (chmod go-w {shlex.quote(path)}), or "
            "choose a folder that does not exist yet"
        )


def _check_files(path: str) -> None:
    """Raise unless all that a run keeps there is this user's own: somebody may have written there earlier."""
    for name in filter(_is_kept, os.listdir(path)):
        try:
            found = os.lstat(os.path.join(path, name))
        except FileNotFoundError:  # removed by a process that is at work here
            continue
        is_kind = stat.S_ISDIR if name in FOLDERS else stat.S_ISREG
        if found.st_uid != os.geteuid():
            wrong = f"belongs to another user (uid {found.st_uid})"
        elif not is_kind(found.st_mode):
            wrong = f"is not a {'folder' if name in FOLDERS else 'file'} itself, but a link or something else"
        elif found.st_mode & 0o022 and not name.startswith(
            (MANIFEST, SIZES)
        ):  # which have no pickles, and the mode of other files
            wrong = f"can be written by other users (mode {stat.S_IMODE(found.st_mode):o})"
        else:
            continue
        raise OutputError(
            f"{os.path.join(path, name)}: {wrong}, so it may hold code that runs as you, and is not opened; remove it if "
            "you do not know it, or choose another run_dir"
        )


def is_of_run_dir(path: str, folder: str) -> bool:
    """Whether a file is one that a run keeps in its folder; the folder may hold other things as well."""
    inside = path.removeprefix(f"{folder}/")
    name = inside.partition("/")[0]
    return inside != path and _is_kept(name)


def _is_kept(name: str) -> bool:
    return name in (LOCK, *FOLDERS) or name.startswith((NAME, MANIFEST, SIZES))


def _begins(path: str, ours: bytes) -> bool:
    """Whether a file may be replaced: it begins as ours do, or there is none."""
    try:
        with open(path, "rb") as file:
            return re.match(ours, file.read(16)) is not None
    except FileNotFoundError:
        return True


def is_held(path: str) -> bool:
    """Whether a process is at work on the run in this folder."""
    try:
        lock = os.open(os.path.join(path, LOCK), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe has no writer
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
