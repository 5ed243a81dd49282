"""The journal of a run: which splits there are, what became of each, and all that it takes to resume the run.

    split:  open -> prepared -> done
                    ^           ^-- its parts are published
                    '-- its rows are counted, and its parts lie aside, whole and synced; their final names are known

One SQLite file in `run_dir`, in WAL mode: what a transaction has written outlives a crash and a power cut, whole or not at
all. It is made under another name and renamed when it holds every split, so a journal that is there is complete. The only
process that writes it holds the lock of the folder (run_dir.py); `penstock status` may read it at any time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import EngineError
from penstock.io.files import InputFile
from penstock.io.folders import sync_folder
from penstock.journal.database import JournalDatabase
from penstock.journal.errors import CLEAR, journal_errors, reading
from penstock.journal.file import NAME, connect, reading_mode, remove, settle
from penstock.journal.split_table import SplitTable
from penstock.journal.values import name_of, storable
from penstock.run.outcomes import PreparedPart, SplitId, SplitResult

FORMAT = 2

_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, process INTEGER NOT NULL, started REAL NOT NULL, seconds REAL, outcome TEXT, error TEXT);
CREATE TABLE files (
    role TEXT NOT NULL, owner TEXT NOT NULL, path TEXT NOT NULL, bytes INTEGER NOT NULL, stamp TEXT NOT NULL, sha256 TEXT,
    PRIMARY KEY (role, owner, path)) WITHOUT ROWID;
CREATE TABLE splits (
    source INTEGER NOT NULL, number INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'open', split BLOB NOT NULL, result TEXT,
    PRIMARY KEY (source, number)) WITHOUT ROWID;
CREATE INDEX splits_by_state ON splits (state);
CREATE TABLE parts (
    source INTEGER NOT NULL, number INTEGER NOT NULL, position INTEGER NOT NULL,
    sink INTEGER NOT NULL, token BLOB NOT NULL, details TEXT NOT NULL,
    PRIMARY KEY (source, number, position)) WITHOUT ROWID;
"""


class Journal:
    """An open journal. Used by one thread."""

    def __init__(self, database: JournalDatabase) -> None:
        self._db = database
        self.path = database.path
        self.folder = os.path.dirname(database.path)
        self.splits = SplitTable(database)

    @classmethod
    def create(
        cls,
        folder: str,
        facts: Mapping[str, Any],
        splits: Iterable[tuple[SplitId, Any]],
        files: Iterable[tuple[str, str, InputFile]],
    ) -> Journal:
        """A new journal with these splits, all of them open, and files, each with its role and owner. It takes the place
        of one that is there."""
        path = os.path.join(folder, NAME)
        new = f"{path}.new"
        remove(new)
        with journal_errors(path):
            journal = cls(JournalDatabase(connect(new, "rwc", log=False), path))  # a log could be left behind by the rename
            try:
                journal._fill(facts, splits, files)
            except BaseException:
                journal.close()
                remove(new)
                raise
            journal.close()
            settle(path)  # before the rename: the log beside the old file would be read as the new one's
            os.replace(new, path)
            sync_folder(folder)  # else a power cut could undo the rename, when parts are published already
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str, *, read_only: bool = False) -> Journal:
        path = os.path.join(folder, NAME)
        with reading(path):
            database = connect(path, reading_mode(path) if read_only else "rw")
            journal = cls(JournalDatabase(database, path, read_only=read_only))
            try:
                found = journal.fact("format")
            except BaseException:
                journal.close()
                raise
        if found != FORMAT:
            journal.close()
            raise EngineError(
                f"{path}: was written by another version (format {found}, expected {FORMAT}); run it with that; or {CLEAR}"
            )
        return journal

    def close(self) -> None:
        self._db.close()

    # What there is.

    @property
    def database(self) -> JournalDatabase:
        """Where it is kept."""
        return self._db

    @property
    def was_begun(self) -> bool:
        """Whether anything but the journal was made: the sinks have been prepared."""
        return self.fact("sinks") is not None

    def fact(self, name: str) -> Any:
        return self._db.fact(name)

    def files(self, role: str) -> dict[str, dict[str, tuple[InputFile, str | None]]]:
        """The files of that role ("input", "model") by owner and path, each with its digest if that is known."""
        found: dict[str, dict[str, tuple[InputFile, str | None]]] = {}
        rows = self._db.query("SELECT owner, path, bytes, stamp, sha256 FROM files WHERE role = ?", (role,))
        for owner, path, size, stamp, digest in rows:
            name = name_of(path)
            found.setdefault(name_of(owner), {})[name] = InputFile(name, size, stamp, None), digest
        return found

    def sessions(self) -> list[dict[str, Any]]:
        names = ("number", "process", "started", "seconds", "outcome", "error")
        rows = self._db.query(f"SELECT {', '.join(names)} FROM sessions ORDER BY number")
        return [dict(zip(names, row, strict=True)) for row in rows]

    # What changes. Each is one transaction, synced to the disk when it returns.

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        with self._db.transaction():
            for name, value in facts.items():
                self._db.set(name, value)

    def begin_session(self) -> int:
        """The number of this process among those that have worked on the run, from 1."""
        with self._db.transaction():
            # This process holds the lock of the folder, so that no other one is at work.
            self._db.execute("UPDATE sessions SET outcome = 'died' WHERE outcome IS NULL")
            values = (os.getpid(), time.time())
            number = self._db.execute("INSERT INTO sessions (process, started) VALUES (?, ?)", values).lastrowid
        assert number is not None
        return number

    def finish(self, session: int, seconds: float) -> None:
        """The run is over: this process had the last of it."""
        with self._db.transaction():
            self._db.set("finished", time.time())
            self._end_session(session, seconds, "finished", None)

    def end_session(self, number: int, seconds: float, outcome: str, error: str | None = None) -> None:
        with self._db.transaction():
            self._end_session(number, seconds, outcome, error)

    def add_splits(self, splits: Iterable[tuple[SplitId, Any]], owner: str, files: Sequence[InputFile]) -> None:
        """More work: splits of files that were not there when the run was begun."""
        with self._db.transaction():
            self.splits.add(splits)
            self._put_files(("input", owner, file, None) for file in files)
            self._db.set("rows", None)
            self._db.execute("DELETE FROM facts WHERE name = 'finished'")

    def put_files(self, files: Iterable[tuple[str, str, InputFile, str | None]]) -> None:
        """Files, each with its role, owner and digest, instead of what is known of them."""
        with self._db.transaction():
            self._put_files(files)

    def accept(
        self,
        facts: Mapping[str, Any],
        files: Iterable[tuple[str, str, InputFile, str | None]],
        removed: Iterable[SplitId],
        added: Iterable[tuple[SplitId, Any]],
    ) -> None:
        """Something is not as it was: these facts count now, these files are all there are, and open splits are removed and
        added."""
        with self._db.transaction():
            for name, value in facts.items():
                self._db.set(name, value)
            self._db.execute("DELETE FROM files")
            self._put_files(files)
            self._db.executemany("DELETE FROM splits WHERE source = ? AND number = ? AND state = 'open'", removed)
            self.splits.add(added)

    def prepare(self, splits: Iterable[tuple[SplitId, SplitResult, Sequence[PreparedPart]]]) -> None:
        """These splits are done but for the publishing of their parts. From now on they are never run again."""
        with self._db.transaction():
            for split, result, parts in splits:
                told = json.dumps(result.to_json(), separators=(",", ":"))
                update = (
                    "UPDATE splits SET state = 'prepared', result = ? WHERE source = ? AND number = ? AND state = 'open'"
                )
                if self._db.execute(update, (told, *split)).rowcount != 1:
                    raise EngineError(f"{self.path}: split {split} was done before; this is a bug in Penstock")
                self.splits.put_parts(split, parts)

    def prepare_again(self, splits: Iterable[tuple[SplitId, Sequence[PreparedPart]]]) -> None:
        """These splits are prepared or done, and their parts are others now, not published yet."""
        with self._db.transaction():
            for split, parts in splits:
                self._db.execute("UPDATE splits SET state = 'prepared' WHERE source = ? AND number = ?", split)
                self.splits.put_parts(split, parts)

    def done(self, splits: Iterable[SplitId]) -> None:
        """The parts of these splits are published."""
        with self._db.transaction():
            self._db.executemany("UPDATE splits SET state = 'done' WHERE source = ? AND number = ?", splits)

    def _end_session(self, number: int, seconds: float, outcome: str, error: str | None) -> None:
        values = (seconds, outcome, error, number)
        self._db.execute("UPDATE sessions SET seconds = ?, outcome = ?, error = ? WHERE number = ?", values)

    def _fill(
        self,
        facts: Mapping[str, Any],
        splits: Iterable[tuple[SplitId, Any]],
        files: Iterable[tuple[str, str, InputFile]],
    ) -> None:
        self._db.make_tables(_TABLES)
        with self._db.transaction():
            for name, value in {"format": FORMAT, "created": time.time(), **facts}.items():
                self._db.set(name, value)
            self.splits.add(splits)
            self._put_files((role, owner, file, None) for role, owner, file in files)

    def _put_files(self, files: Iterable[tuple[str, str, InputFile, str | None]]) -> None:
        rows = [
            (role, storable(owner), storable(file.path), file.size, file.modified, digest)
            for role, owner, file, digest in files
        ]
        self._db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)
