"""Answers that were paid for, kept in run_dir as they come, so that a resumed run does not ask for them again.

    <run_dir>/.penstock-answers/<run>/<step>.<process>.db      what one process was answered: digest of the request -> body

Each process writes a file of its own, and holds a lock on it while it lives. Those of processes that are gone are read. So
rows that are alike are each asked for as long as nobody dies, as in a run without run_dir.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import sqlite3
import threading
from pathlib import Path

from penstock.errors import EngineError

FOLDER = ".penstock-answers"  # the user may have an output of any plain name in run_dir
OURS = re.compile(r"[0-9a-f]{16}\.(spent|\d+-[0-9a-f]{8}\.db(-wal|-shm|-journal|\.lock)?)")
LOOK_EVERY = 256  # answers that are looked for, between two looks for files of processes that have died since


def digest_of(*parts: bytes) -> bytes:
    """Of a request: of all that its answer depends on, and nothing secret."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.digest()


def forget_answers(run_dir: str) -> None:
    """Of all runs that were in this folder. Files with other names than ours stay, and the folders that they are in."""
    folder = Path(run_dir, FOLDER)
    for run in folder.glob("*/"):
        for file in run.iterdir():
            if OURS.fullmatch(file.name):
                file.unlink(missing_ok=True)
    for each in [*folder.glob("*/"), folder]:
        with contextlib.suppress(OSError):  # there is none, or somebody has put something there
            each.rmdir()


class KeptAnswers:
    """Of one step in one process. Used by any thread. run_dir: empty where nothing is kept; so it is on a machine that does
    not have that folder. run: the id of the run; one that starts over has another."""

    def __init__(self, run_dir: str, run: str, step: str) -> None:
        self.stem = digest_of(step.encode()).hex()[:16]  # of its files
        self.folder: Path | None = None
        if run_dir and os.path.isdir(run_dir):
            self.folder = Path(run_dir) / FOLDER / run
            for each in (self.folder.parent, self.folder):
                each.mkdir(mode=0o700, exist_ok=True)
        # Guards what follows; SQLite's connections are used by one thread at a time (check_same_thread=False).
        self._lock = threading.Lock()
        self._own: sqlite3.Connection | None = None  # made with the first answer
        self._alive: int | None = None  # the lock that says that this process is
        self._name = ""
        self._others: dict[str, sqlite3.Connection] = {}
        self._looked = 0

    @property
    def keeps(self) -> bool:
        return self.folder is not None

    def find(self, digest: bytes) -> bytes | None:
        """The answer to a request that a process was given which is gone."""
        if self.folder is None:
            return None
        with self._lock:
            if self._looked % LOOK_EVERY == 0:
                self._look(self.folder)
            self._looked += 1
            for connection in self._others.values():
                row = connection.execute("SELECT body FROM answers WHERE digest = ?", [digest]).fetchone()
                if row is not None:
                    return bytes(row[0])
        return None

    def keep(self, digest: bytes, body: bytes) -> None:
        """Written before anybody is given the answer: a process that is killed later has left it."""
        if self.folder is None:
            return
        try:
            with self._lock:
                if self._own is None:
                    self._own = self._open_own(self.folder)
                self._own.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", [digest, body])
        except (OSError, sqlite3.Error) as exc:  # the disk is full
            raise EngineError(
                f"an answer cannot be kept in {self.folder} ({type(exc).__name__}: {exc}), so that a resumed run would pay "
                "for it again; make room there, and run the same command again: the run is resumed"
            ) from exc

    def close(self) -> None:
        with self._lock:
            for connection in [*self._others.values(), *([self._own] if self._own else [])]:
                connection.close()
            self._others, self._own = {}, None
            # Last: from now on others read the file.
            if self._alive is not None:
                os.close(self._alive)
                self._alive = None

    def _open_own(self, folder: Path) -> sqlite3.Connection:
        self._name = f"{self.stem}.{os.getpid()}-{os.urandom(4).hex()}.db"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        # Before the file itself: one without a lock is of a process that is gone.
        self._alive = os.open(folder / f"{self._name}.lock", flags, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        connection = _connect(folder / self._name)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")  # the death of a process loses nothing; that of the machine may
        connection.execute("CREATE TABLE IF NOT EXISTS answers (digest BLOB PRIMARY KEY, body BLOB) WITHOUT ROWID")
        return connection

    def _look(self, folder: Path) -> None:
        """For files of processes that are gone."""
        for path in sorted(folder.glob(f"{self.stem}.*.db")):
            if path.name != self._name and path.name not in self._others and not _is_alive(path):
                with contextlib.suppress(sqlite3.Error):  # of one that died before it had a table
                    connection = _connect(path)
                    connection.execute("SELECT 1 FROM answers LIMIT 1")
                    self._others[path.name] = connection


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)


def _is_alive(path: Path) -> bool:
    """Whether the process that writes this file is."""
    try:
        file = os.open(f"{path}.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(file)
