"""The database of a journal: facts by name, queries, and transactions that are synced to the disk when they return."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.journal.errors import journal_errors

TRIES = 6  # at the log's removal, which has to wait for `penstock status`

FACTS = {  # by name, each a JSON value
    "format": "of the journal",
    "created": "when the run was started",
    "run": "its id",
    "rows": "in all sources together, if that is known",
    "few": "the stages whose output is cut finely",
    "goals": "how finely each source is cut: for files that come later",
    "identity": "of the pipeline, its code, arguments and handlers",
    "order": "of sources and sinks, which the other tables know by their positions",
    "fixed": "options that decide on answers",
    "sinks": "what each sink's prepare() returned; none is there until the sinks have been prepared",
    "hold": "whether parts are published at the end alone",
    "asides": "folders that hold unpublished parts",
    "earlier": "the parts of runs that were here before, which this one may replace",
    "earlier_runs": "their ids",
    "earlier_asides": "their folders of unpublished parts",
    "finished": "when the run was done",
    "accepted": "the changes that the user has accepted",
    "changed_while_read": "changes that were found when all splits were done",
    "environment": "the process that works on it, or did last: versions, packages, seeds",
    "explained": "the plan, in words",
    "sink_names": "where the rows go, in words",
    "refreshes": "what became of new versions of models that change during the run",
}


class JournalDatabase:
    """An open one. Used by one thread. It owns the connection, and close() ends it."""

    def __init__(self, connection: sqlite3.Connection, path: str, *, read_only: bool = False) -> None:
        self._connection = connection
        self._read_only = read_only
        self.path = path

    def close(self) -> None:
        """The writer leaves one file: a log that stays, because somebody reads it just now, would never be removed."""
        for _ in range(0 if self._read_only else TRIES):
            try:
                self._connection.execute("PRAGMA journal_mode = DELETE")
                break
            except sqlite3.OperationalError:
                time.sleep(0.05)
            except sqlite3.Error:
                break
        self._connection.close()

    def fact(self, name: str) -> Any:
        assert name in FACTS, name
        found = self.query("SELECT value FROM facts WHERE name = ?", (name,))
        return json.loads(found[0][0]) if found else None

    def set(self, name: str, value: Any) -> None:
        assert name in FACTS, name
        self.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Inside a transaction."""
        return self._connection.execute(sql, values)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Inside a transaction."""
        self._connection.executemany(sql, rows)

    def make_tables(self, script: str) -> None:
        self._connection.executescript(script)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with journal_errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that the block writes, or nothing. When it returns, that is on the disk (synchronous = FULL)."""
        with journal_errors(self.path):
            try:
                self._connection.execute("BEGIN IMMEDIATE")  # takes the write lock at once: it is not missed halfway
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
