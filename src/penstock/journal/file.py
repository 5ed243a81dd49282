"""The file of a journal, and what SQLite keeps beside it: opened, replaced, removed."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from urllib.parse import quote

from penstock.errors import EngineError

NAME = "journal.db"


def connect(path: str, mode: str, *, log: bool = True) -> sqlite3.Connection:
    """isolation_level=None: SQLite begins no transaction by itself, JournalDatabase does. The caller closes it."""
    db = sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode={mode}", uri=True, isolation_level=None, timeout=10)
    if mode.startswith("rw"):
        os.chmod(path, 0o600)  # it holds pickles, which only their owner is to write
        db.execute(f"PRAGMA journal_mode = {'WAL' if log else 'DELETE'}")
        db.execute("PRAGMA synchronous = FULL")  # with a log too, each commit is on the disk when it returns
    return db


def reading_mode(path: str) -> str:
    """While a process is at work there is a log. Without one, nothing but the file is looked at, and nothing is made."""
    return "ro" if os.path.exists(f"{path}-wal") else "ro&immutable=1"


def is_other_database(path: str) -> bool:
    """Whether the file is whole and has tables, but not those of a journal."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode={reading_mode(path)}", uri=True)
        ) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return False
    return bool(tables) and "facts" not in tables


def remove(path: str) -> None:
    """Delete a journal, and what SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)


def settle(path: str) -> None:
    """Put the log of a journal that is to be replaced into its file: left behind, it would be taken for the new one's."""
    if os.path.exists(path):
        with contextlib.suppress(sqlite3.Error):
            db = connect(path, "rw")
            [(busy, _, _)] = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            db.close()
            if busy:
                raise EngineError(f"the journal {path} is being read by another process; try again in a moment")
        for suffix in ("-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)
