"""Places where a test has a process of a run killed: just before and just after each durable step that it takes.

Durable steps are syncs, renames and removals of files, and what SQLite databases commit. The functions for them are wrapped
in every process of the run: Penstock itself knows nothing of this.

PENSTOCK_CRASH_AT=<role>:<n>:<file>     the first process of that role to come to its n-th place makes the file, and dies
PENSTOCK_CRASH_COUNTS=<folder>          each process adds a byte to <folder>/<role>-<pid> at each place that it comes to

The coordinator is the process that was started with these; workers are told by their command; no other has places.
"""

from __future__ import annotations

import os
import shutil  # noqa: F401  looks at the functions that it finds in os when it is imported
import signal
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Callable
from typing import Any

FILE_STEPS = ("replace", "rename", "link", "unlink", "remove", "rmdir")
STATEMENTS = ("COMMIT", "PRAGMA JOURNAL_MODE")  # a change of the mode moves the log into the file, or removes it
STARTED = "PENSTOCK_CRASH_STARTED"  # in what the coordinator starts

_role = ""
_left = 0
_mark = ""
_counts = ""


def environment(crash_at: str = "", counts: str = "") -> dict[str, str]:
    """The variables of a process that has places, and of those that it starts."""
    path = os.pathsep.join(filter(None, (os.path.dirname(__file__), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PENSTOCK_CRASH_AT": crash_at, "PENSTOCK_CRASH_COUNTS": counts}


def start() -> None:
    """Wrap the steps of this process, if it has a role. Called once, before it imports anything else."""
    global _counts
    role = "coordinator"
    if STARTED in os.environ:
        role = "worker" if any("local.worker:" in argument for argument in sys.orig_argv) else ""
    os.environ[STARTED] = "1"
    _counts = os.environ.get("PENSTOCK_CRASH_COUNTS", "")
    aim(os.environ.get("PENSTOCK_CRASH_AT", ""), role)
    if role:
        tempfile.gettempdir()  # tries which folder it can write to, once
        os.fsync = _synced
        for name in FILE_STEPS:
            setattr(os, name, between_places(getattr(os, name)))
        sqlite3.connect = _connect


def aim(crash_at: str, role: str = "coordinator") -> None:
    """What this process is, and where it dies; "" if it does not."""
    global _role, _left, _mark
    _role = role
    wanted, _, rest = crash_at.partition(":")
    number, _, _mark = rest.partition(":")
    _left = int(number) if wanted == role and number else 0


def between_places(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, with a place before and one after it."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        place()
        result = step(*arguments, **options)
        place()
        return result

    return wrapped


def _synced(file: int) -> None:
    """Before a folder is synced, a name in it was changed: there is a place after that."""
    if not stat.S_ISDIR(os.fstat(file).st_mode):
        place()
    _fsync(file)
    place()


def wrap_sql_commits() -> None:
    """The commits of SQLAlchemy, to any database: what imports it calls this."""
    from sqlalchemy.engine.default import DefaultDialect

    DefaultDialect.do_commit = between_places(DefaultDialect.do_commit)


def place() -> None:
    """Die here, if a test wants it."""
    global _left
    if _counts:
        with open(os.path.join(_counts, f"{_role}-{os.getpid()}"), "ab") as file:
            file.write(b".")
    if _left > 0:
        _left -= 1
        if _left == 0 and _is_first(_mark):
            os.kill(os.getpid(), signal.SIGKILL)


def _is_first(mark: str) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class _Connection(sqlite3.Connection):
    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        is_step = sql.upper().startswith(STATEMENTS)
        return (between_places(super().execute) if is_step else super().execute)(sql, *values)

    def executescript(self, script: str) -> sqlite3.Cursor:
        return between_places(super().executescript)(script)


def _connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
    return _connect_plainly(*arguments, **{"factory": _Connection, **options})


_connect_plainly = sqlite3.connect
_fsync = os.fsync
