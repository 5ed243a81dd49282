"""What goes wrong with a journal, for people: the disk, the file, the code that is to read it."""

from __future__ import annotations

import contextlib
import pickle
import sqlite3
from collections.abc import Iterator

from penstock.errors import EngineError, RunChangedError

KEPT = "what was done is kept in"  # begins the note on an error that says so
CLEAR = (  # --fresh must know what it may replace
    "remove what the run has written (its parts or rows, and folders named .penstock-* in its output) and this run_dir, and "
    "run the same command again"
)


@contextlib.contextmanager
def journal_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.OperationalError, OSError) as exc:
        if getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:  # a table is missing: an empty file, or another
            raise _damaged(path, exc) from exc
        raise EngineError(
            f"the journal {path} cannot be read or written: {exc}; fix that (space, permissions, a disk that works) and "
            "run the same command again: nothing that was done is lost"
        ) from exc
    except sqlite3.DatabaseError as exc:
        raise _damaged(path, exc) from exc


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    try:
        with journal_errors(path):
            yield
    except (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as exc:
        raise _damaged(path, exc) from exc


@contextlib.contextmanager
def unpickling(path: str, what: str) -> Iterator[None]:
    """What users' sources and sinks have made is read with their code."""
    with reading(path):
        try:
            yield
        except (AttributeError, ImportError) as exc:
            raise RunChangedError(
                f"the journal {path} has {what} whose code no longer exists: {type(exc).__name__}: {exc}; restore it "
                "under the same name, and accept the change of code once more (--accept-change code), or start over with "
                "fresh=True (--fresh)"
            ) from exc


def _damaged(path: str, exc: Exception) -> EngineError:
    return EngineError(f"the journal {path} is damaged: {type(exc).__name__}: {exc}; restore it from a copy; or {CLEAR}")
