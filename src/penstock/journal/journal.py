"""The journal of a run: which splits there are, what became of each, and all that a later process must know to go on.

    split:  open -> prepared -> done
                    ^           ^-- its parts are published
                    '-- its rows are counted, and its parts lie aside, whole and synced; their final names are known

One SQLite file in `run_dir`, in WAL mode: what a transaction has written outlives a crash and a power cut, whole or not at
all. It is made under another name and renamed when it holds every split, so a journal that is there is complete. The only
process that writes it holds the lock of the folder (run_dir.py); `penstock status` may read it at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.crashes import crash_point
from penstock.errors import EngineError
from penstock.io.files import InputFile
from penstock.io.folders import sync_folder
from penstock.journal.errors import journal_errors, reading, unpickling
from penstock.journal.file import NAME, connect, reading_mode, remove, settle
from penstock.journal.values import name_of, not_picklable, storable
from penstock.run.outcomes import PreparedPart, SplitId, SplitResult
from penstock.transport.packing import dump_rows, load_pickle

FACTS = {  # by name, each a JSON value
    "format": "of the journal",
    "created": "when the run was begun",
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
}

FORMAT = 2
TRIES = 6  # at the log's removal, which has to wait for `penstock status`

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

    def __init__(self, connection: sqlite3.Connection, path: str, *, read_only: bool = False) -> None:
        self._db = connection
        self._read_only = read_only
        self.path = path
        self.folder = os.path.dirname(path)

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
            journal = cls(connect(new, "rwc", log=False), path)  # a log could be left behind by the rename
            try:
                journal._fill(facts, splits, files)
            except BaseException:
                journal.close()
                remove(new)
                raise
            journal.close()
            crash_point()
            settle(path)
            os.replace(new, path)
            crash_point()
            sync_folder(folder)
            crash_point()
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str, *, read_only: bool = False) -> Journal:
        path = os.path.join(folder, NAME)
        with reading(path):
            journal = cls(connect(path, reading_mode(path) if read_only else "rw"), path, read_only=read_only)
            try:
                found = journal.fact("format")
            except BaseException:
                journal._db.close()
                raise
        if found != FORMAT:
            journal._db.close()
            raise EngineError(
                f"{path}: was written by another version (format {found}, expected {FORMAT}); run it with that, or "
                "start over with fresh=True or --fresh"
            )
        return journal

    def close(self) -> None:
        """The writer leaves one file: a log that stays, because somebody reads it just now, would never be removed."""
        for _ in range(0 if self._read_only else TRIES):
            try:
                self._db.execute("PRAGMA journal_mode = DELETE")
                break
            except sqlite3.OperationalError:
                time.sleep(0.05)
            except sqlite3.Error:
                break
        self._db.close()

    # What there is.

    @property
    def was_begun(self) -> bool:
        """Whether anything but the journal was made: the sinks have been prepared."""
        return self.fact("sinks") is not None

    def fact(self, name: str) -> Any:
        assert name in FACTS, name
        found = self._query("SELECT value FROM facts WHERE name = ?", (name,))
        return json.loads(found[0][0]) if found else None

    def open_splits(self) -> list[tuple[SplitId, Any]]:
        """The splits that are still to be done."""
        found = self._query("SELECT source, number, split FROM splits WHERE state = 'open' ORDER BY source, number")
        with unpickling(self.path, "splits"):
            return [(SplitId(source, number), load_pickle(split)) for source, number, split in found]

    def splits_of(self, source: int) -> list[tuple[SplitId, bool, Any]]:
        """All splits of a source, and whether they are still to be done."""
        found = self._query("SELECT number, state, split FROM splits WHERE source = ? ORDER BY number", (source,))
        with unpickling(self.path, "splits"):
            return [(SplitId(source, number), state == "open", load_pickle(split)) for number, state, split in found]

    def split_counts(self) -> dict[str, int]:
        """How many splits there are in each state."""
        return dict(self._query("SELECT state, count(*) FROM splits GROUP BY state"))

    def next_number(self, source: int) -> int:
        [(greatest,)] = self._query("SELECT max(number) FROM splits WHERE source = ?", (source,))
        return 0 if greatest is None else int(greatest) + 1

    def total(self) -> SplitResult:
        """What came of all splits that are prepared or done."""
        total = SplitResult()
        for (told,) in self._query("SELECT result FROM splits WHERE state != 'open'"):
            total.add(SplitResult.from_json(json.loads(told)))
        return total

    def prepared(self) -> list[tuple[SplitId, list[PreparedPart]]]:
        """The splits that are prepared and not done, with their parts."""
        return self._with_parts("state = 'prepared'")

    def with_parts(self) -> list[tuple[SplitId, list[PreparedPart]]]:
        """The splits that are prepared or done, with their parts."""
        return self._with_parts("state != 'open'")

    def parts(self) -> list[dict[str, Any]]:
        """The sinks' details of all parts, of splits that are prepared or done."""
        return [json.loads(details) for (details,) in self._query("SELECT details FROM parts")]

    def published(self) -> dict[int, list[dict[str, Any]]]:
        """The sinks' details of all parts of splits that are done, by sink, in the order of splits."""
        found: dict[int, list[dict[str, Any]]] = {}
        for sink, details in self._query(
            "SELECT p.sink, p.details FROM splits s JOIN parts p USING (source, number)"
            " WHERE s.state = 'done' ORDER BY p.source, p.number, p.position"
        ):
            found.setdefault(sink, []).append(json.loads(details))
        return found

    def files(self, role: str) -> dict[str, dict[str, tuple[InputFile, str | None]]]:
        """The files of that role ("input", "model") by owner and path, each with its digest if that is known."""
        found: dict[str, dict[str, tuple[InputFile, str | None]]] = {}
        rows = self._query("SELECT owner, path, bytes, stamp, sha256 FROM files WHERE role = ?", (role,))
        for owner, path, size, stamp, digest in rows:
            name = name_of(path)
            found.setdefault(name_of(owner), {})[name] = InputFile(name, size, stamp, None), digest
        return found

    def sessions(self) -> list[dict[str, Any]]:
        names = ("number", "process", "started", "seconds", "outcome", "error")
        rows = self._query(f"SELECT {', '.join(names)} FROM sessions ORDER BY number")
        return [dict(zip(names, row, strict=True)) for row in rows]

    # What changes. Each is one transaction, synced to the disk when it returns.

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        with self._transaction():
            for name, value in facts.items():
                self._set(name, value)

    def begin_session(self) -> int:
        """The number of this process among those that have worked on the run, from 1."""
        with self._transaction():
            self._db.execute("UPDATE sessions SET outcome = 'died' WHERE outcome IS NULL")
            values = (os.getpid(), time.time())
            number = self._db.execute("INSERT INTO sessions (process, started) VALUES (?, ?)", values).lastrowid
        assert number is not None
        return number

    def finish(self, session: int, seconds: float) -> None:
        """The run is over: this process had the last of it."""
        with self._transaction():
            self._set("finished", time.time())
            self._end_session(session, seconds, "finished", None)

    def end_session(self, number: int, seconds: float, outcome: str, error: str | None = None) -> None:
        with self._transaction():
            self._end_session(number, seconds, outcome, error)

    def add_splits(self, splits: Iterable[tuple[SplitId, Any]], owner: str, files: Sequence[InputFile]) -> None:
        """More work: splits of files that were not there when the run was begun."""
        with self._transaction():
            self._add_splits(splits)
            self._put_files(("input", owner, file, None) for file in files)
            self._set("rows", None)
            self._db.execute("DELETE FROM facts WHERE name = 'finished'")

    def put_files(self, files: Iterable[tuple[str, str, InputFile, str | None]]) -> None:
        """Files, each with its role, owner and digest, in the place of what is known of them."""
        with self._transaction():
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
        with self._transaction():
            for name, value in facts.items():
                self._set(name, value)
            self._db.execute("DELETE FROM files")
            self._put_files(files)
            self._db.executemany("DELETE FROM splits WHERE source = ? AND number = ? AND state = 'open'", removed)
            self._add_splits(added)

    def reopen(self, splits: Iterable[SplitId]) -> None:
        """These splits were prepared, and their parts are lost: they run again."""
        with self._transaction():
            for split in splits:
                self._db.execute("DELETE FROM parts WHERE source = ? AND number = ?", split)
                self._db.execute("UPDATE splits SET state = 'open', result = NULL WHERE source = ? AND number = ?", split)

    def prepare(self, splits: Iterable[tuple[SplitId, SplitResult, Sequence[PreparedPart]]]) -> None:
        """These splits are done but for the publishing of their parts. From now on they are never run again."""
        with self._transaction():
            for split, result, parts in splits:
                told = json.dumps(result.to_json(), separators=(",", ":"))
                update = (
                    "UPDATE splits SET state = 'prepared', result = ? WHERE source = ? AND number = ? AND state = 'open'"
                )
                if self._db.execute(update, (told, *split)).rowcount != 1:
                    raise EngineError(f"{self.path}: split {split} was done before; this is a defect of Penstock")
                self._put_parts(split, parts)

    def prepare_again(self, splits: Iterable[tuple[SplitId, Sequence[PreparedPart]]]) -> None:
        """These splits are prepared or done, and their parts are others now, not published yet."""
        with self._transaction():
            for split, parts in splits:
                self._db.execute("UPDATE splits SET state = 'prepared' WHERE source = ? AND number = ?", split)
                self._put_parts(split, parts)

    def done(self, splits: Iterable[SplitId]) -> None:
        """The parts of these splits are published."""
        with self._transaction():
            self._db.executemany("UPDATE splits SET state = 'done' WHERE source = ? AND number = ?", splits)

    def _end_session(self, number: int, seconds: float, outcome: str, error: str | None) -> None:
        values = (seconds, outcome, error, number)
        self._db.execute("UPDATE sessions SET seconds = ?, outcome = ?, error = ? WHERE number = ?", values)

    def _set(self, name: str, value: Any) -> None:
        assert name in FACTS, name
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def _fill(
        self,
        facts: Mapping[str, Any],
        splits: Iterable[tuple[SplitId, Any]],
        files: Iterable[tuple[str, str, InputFile]],
    ) -> None:
        self._db.executescript(_TABLES)
        crash_point()
        with self._transaction():
            for name, value in {"format": FORMAT, "created": time.time(), **facts}.items():
                self._set(name, value)
            self._add_splits(splits)
            self._put_files((role, owner, file, None) for role, owner, file in files)

    def _add_splits(self, splits: Iterable[tuple[SplitId, Any]]) -> None:
        rows = ((*split, self._pickled(payload, "split", split.source)) for split, payload in splits)
        self._db.executemany("INSERT INTO splits (source, number, split) VALUES (?, ?, ?)", rows)

    def _put_parts(self, split: SplitId, parts: Sequence[PreparedPart]) -> None:
        rows = [
            (*split, at, part.sink, self._pickled(part.token, "part", part.sink), json.dumps(part.details))
            for at, part in enumerate(parts)
        ]
        self._db.executemany("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _pickled(self, value: Any, kind: str, maker: int) -> bytes:
        """A split of a source, or the token of a sink's part, for later processes."""
        try:
            return dump_rows(value)
        except Exception as exc:
            order = self.fact("order") or {}
            makers = order.get("sources" if kind == "split" else "sinks", ())
            raise not_picklable(value, kind, makers[maker] if maker < len(makers) else f"number {maker}", exc) from exc

    def _put_files(self, files: Iterable[tuple[str, str, InputFile, str | None]]) -> None:
        rows = [
            (role, storable(owner), storable(file.path), file.size, file.modified, digest)
            for role, owner, file, digest in files
        ]
        self._db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _with_parts(self, condition: str) -> list[tuple[SplitId, list[PreparedPart]]]:
        found: dict[SplitId, list[PreparedPart]] = {}
        with unpickling(self.path, "parts"):
            for source, number, sink, token, details in self._query(
                "SELECT s.source, s.number, p.sink, p.token, p.details FROM splits s"
                f" LEFT JOIN parts p USING (source, number) WHERE {condition} ORDER BY s.source, s.number, p.position"
            ):
                parts = found.setdefault(SplitId(source, number), [])
                if token is not None:
                    parts.append(PreparedPart(sink, load_pickle(token), json.loads(details)))
        return list(found.items())

    def _query(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with journal_errors(self.path):
            return self._db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with journal_errors(self.path):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                crash_point()
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            crash_point()
