"""SQL databases: rows into a table, each part in one transaction with its mark."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import OutputError, UsageError
from penstock.io.files import checked_path
from penstock.io.folders import make_folder, sync_folder
from penstock.io.records import checked_names
from penstock.io.sink import APPLIED_TWICE, Part, Write, Writer
from penstock.io.stored_sink import StoredSink

if TYPE_CHECKING:
    import sqlalchemy as sa

    from penstock.io.sql_spool import SqlPart
    from penstock.io.sql_table import SqlTable

COLUMNS, CLAIM = "columns.json", "claim"  # beside the spooled parts: what workers need to know; which process publishes
PROCESS = os.urandom(8).hex()


class SqlSink(StoredSink[Any]):
    """A table. Copies of it, in workers, spool rows to local files; they know neither the database nor its password."""

    takes_columns = True

    def __init__(self, table: SqlTable, aside: str | None) -> None:
        import hashlib
        import tempfile

        self._table: SqlTable | None = table
        self.name = table.full_name
        self.upsert_by = table.upsert_by
        self._where = f"table {self.name} in {table.database.shown}"
        self._digest = hashlib.sha256(self._where.encode()).hexdigest()[:8]
        self._is_chosen = aside is not None
        self._root = aside or tempfile.gettempdir()
        self._earlier: str | None = None  # where the process that began the run has spooled
        self._is_new = False  # the run makes the table, whose types are those of the first part
        self._kinds: dict[str, set[str]] = {}  # of the values of each column, in all parts so far

    def keep_in(self, folder: str) -> None:
        if not self._is_chosen:
            self._root = folder

    def prepare(self, run: str) -> dict[str, Any]:
        columns = self._own_table().prepare(run, going_on=False)
        self._is_new = columns is None
        self._begin(run, columns)
        return {"aside": self._root, "is_new": self._is_new}

    def resume(self, run: str, note: Any, published: Sequence[Mapping[str, Any]]) -> None:
        self._earlier = note["aside"]
        self._is_new = note["is_new"]
        self._begin(run, self._own_table().prepare(run, going_on=True))

    def start_over(self, parts: Sequence[Mapping[str, Any]]) -> None:
        runs = sorted({run for run, _ in self._named(parts)})
        if not self.upsert_by and (rows := sum(self._own_table().marked(runs).values())):
            raise OutputError(
                f"{self._where} has {rows} rows of the run that is to be forgotten, and only you can tell which: "
                f"{self._clearing(runs)}; upsert_by=[...] needs none of this"
            )

    def open(self, part: Part) -> Writer[Any]:
        from penstock.io.sql_spool import SpoolWriter

        folder = self._folder(self._root, part.run)
        _make_private(folder)
        told = Path(folder, COLUMNS)
        columns = json.loads(told.read_text()) if told.exists() else None
        path = f"{folder}/{part.name}-{part.attempt}.arrow"
        return SpoolWriter(part, path, columns=columns, keys=self.upsert_by)

    def unify(self, tokens: Sequence[SqlPart]) -> Sequence[SqlPart]:
        """Refuse parts that differ in the types of their values, where the table has none of its own."""
        from penstock.io.sql_rows import widest

        for token in tokens if self._is_new else ():
            for name, kinds in token.kinds.items():
                together = self._kinds.setdefault(name, set())
                together.update(kinds)
                widest(name, together)
        return tokens

    def publish(self, token: SqlPart) -> None:
        self._own_table().publish(token._replace(spool=self._spool(token)))

    def details(self, token: SqlPart) -> dict[str, Any]:
        return {"table": self.name, "part": token.part, "rows": token.rows, "run": token.run}

    def missing(self, published: Sequence[Mapping[str, Any]], prepared: Sequence[SqlPart] = ()) -> list[str]:
        """A part whose mark is there needs no spool any more."""
        table, parts = self._own_table(), self._named(published)
        lost = [token for token in prepared if not os.path.exists(self._spool(token))]
        if not parts and not lost:
            return []
        marked = table.marked({run for run, _ in parts} | {token.run for token in lost}).keys()
        spools = [token.spool for token in lost if (token.run, token.part) not in marked]
        gone = sorted(parts - marked)
        if not gone:
            return spools
        why = "its mark in penstock_commits is gone: delete what is left of its rows before you start over"
        if not table.is_there():
            why = f"there is no table {self.name}"
        return [*(f"{part} ({why})" for _, part in gone), *spools]

    def clean(self, run: str, keep: Collection[SqlPart] = ()) -> None:
        kept = {os.path.basename(token.spool) for token in keep}
        for folder in self.aside(run):
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                if name not in kept:
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(f"{folder}/{name}")
            with contextlib.suppress(OSError):  # some are kept
                os.rmdir(folder)

    def finish(self, run: str, published: bool) -> None:
        """Remove the spool. The marks stay in the database: by them a part that is published late, again, is known."""
        import shutil

        for folder in self.aside(run):
            if os.path.isdir(folder):
                shutil.rmtree(folder)

    def aside(self, run: str) -> Sequence[str]:
        roots = dict.fromkeys([self._root, self._earlier or self._root])
        return [self._folder(root, run) for root in roots]

    def describe(self) -> str:
        return self._where

    def _begin(self, run: str, columns: list[str] | None) -> None:
        self._kinds = {}
        folder = self._folder(self._root, run)
        _make_private(folder)
        claim = Path(folder, CLAIM)
        if claim.exists() and claim.read_text() == PROCESS:
            told = "two steps write there; put their rows together by ps.Flatten()"
            raise OutputError(f"{self._where}: {told}. {APPLIED_TWICE}")
        claim.write_text(PROCESS)
        if columns is not None:
            Path(folder, COLUMNS).write_text(json.dumps(columns))

    def _named(self, parts: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
        """Those of these parts, by their details(), that are in this table: run and name."""
        return {(part["run"], part["part"]) for part in parts if part.get("table") == self.name}

    def _clearing(self, runs: Sequence[str]) -> str:
        quoted = ", ".join(f"'{run}'" for run in runs)
        return f"delete them, then DELETE FROM penstock_commits WHERE run IN ({quoted}) AND target = '{self.name}'"

    def _spool(self, token: SqlPart) -> str:
        """Where the spool is now: the folder may have been moved since it was written."""
        name = os.path.basename(token.spool)
        moved = [f"{folder}/{name}" for folder in self.aside(token.run)]
        return next((path for path in (token.spool, *moved) if os.path.exists(path)), token.spool)

    def _folder(self, root: str, run: str) -> str:
        return os.path.join(root, f"penstock-sql-{run}-{self._digest}")

    def _own_table(self) -> SqlTable:
        assert self._table is not None, "only the user's own copy of a SqlSink has a database"
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}


def _make_private(folder: str) -> None:
    """A folder that only this user can read: rows lie there."""
    try:
        make_folder(os.path.dirname(folder), 0o700)
        os.mkdir(folder, 0o700)
        sync_folder(os.path.dirname(folder))
    except FileExistsError:
        found = os.lstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OutputError(f"{folder}: is not private to this user; remove it, or pass aside= another folder") from None
    except OSError as exc:
        raise OutputError(
            f"{folder}: cannot be created: {exc.strerror}; pass a folder that can be written to as aside="
        ) from exc


class WriteToSql(Write[Any]):
    """Each row (a dict, NamedTuple or dataclass; Arrow tables whole) as one row of a table, exactly once.

    `url` is SQLAlchemy's, of Postgres or a SQLite file. Rows are appended; with `upsert_by=[columns]` a row replaces the
    values of the one with the same key, which must be unique in the table; where the rows of a run have a key more than
    once, which of them wins depends on timing. A table that is not there is made from the
    types of the first part's rows, unless `create=False`. `schema` is a schema of Postgres. Until they are published,
    rows are spooled to `aside`, a local folder with room for all of them; by default one in `run_dir`, or else the
    folder for temporary files.
    """

    def __init__(
        self,
        url: str | sa.URL,
        table: str,
        *,
        schema: str | None = None,
        upsert_by: Sequence[str] | None = None,
        create: bool = True,
        aside: str | os.PathLike[str] | None = None,
    ) -> None:
        from penstock.io.sql_database import Database  # needs SQLAlchemy, and says so
        from penstock.io.sql_table import MARKS, SqlTable

        database = Database(url)
        if not isinstance(table, str) or not table or table == MARKS:
            raise UsageError(f"WriteToSql(table={table!r}): expected the name of a table")
        if schema is not None and not (database.is_postgres and isinstance(schema, str) and schema):
            raise UsageError(f"WriteToSql(schema={schema!r}): expected the name of a schema of Postgres, or None")
        keys = (
            ()
            if upsert_by is None
            else checked_names(upsert_by, "WriteToSql(upsert_by", "a list of column names, such as ['id']")
        )
        folder = None if aside is None else checked_path(aside, "WriteToSql")
        if folder is not None and "://" in folder:
            raise UsageError(f"WriteToSql(aside={folder!r}): expected a local folder")
        super().__init__(SqlSink(SqlTable(database, table, schema, keys, create), folder))
        self.table = table

    def default_label(self) -> str:
        return f"WriteToSql({self.table})"
