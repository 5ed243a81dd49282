"""The table that rows go to, and beside it the table of commits: a mark for each part that was copied."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from penstock.errors import OutputError
from penstock.io.digests import xxh128_of
from penstock.io.records import listed
from penstock.io.sql_copying import Into, copy_to_postgres, insert_into_sqlite
from penstock.io.sql_database import Database, quoted
from penstock.io.sql_rows import widest
from penstock.io.sql_spool import SqlPart, refuse_unknown, spooled

MARKS = "penstock_commits"
LOCK = int.from_bytes(hashlib.sha256(MARKS.encode()).digest()[:8], signed=True)  # one at a time makes tables

SQL_TYPES: dict[str, Any] = {
    "null": sa.Text(),
    "bool": sa.Boolean(),
    "int": sa.BigInteger(),
    "float": sa.Double(),
    "text": sa.Text(),
    "bytes": sa.LargeBinary(),
    "date": sa.Date(),
    "time": sa.Time(),
    "datetime": sa.DateTime(),
    "datetime with zone": sa.DateTime(timezone=True),
    "decimal": sa.Numeric(),
    "uuid": sa.Text().with_variant(postgresql.UUID(), "postgresql"),
    "json": sa.JSON().with_variant(postgresql.JSONB(), "postgresql"),
}
NUMBERS = (sa.Boolean, sa.Integer, sa.Numeric, sa.Float)


@dataclass(frozen=True)
class SqlTable:
    """One table of a database. Every method is one transaction, and raises OutputError for what the database says."""

    database: Database
    name: str
    schema: str | None
    upsert_by: tuple[str, ...]
    create: bool

    @property
    def full_name(self) -> str:
        """With its schema, if one was given; for people, not quoted."""
        return self.name if self.schema is None else f"{self.schema}.{self.name}"

    def prepare(self, run: str, *, going_on: bool) -> list[str] | None:
        """Check that a run can write to the table. The names of its columns; None if it is yet to be made."""
        doing = f"table {self.full_name}"
        if going_on and (gone := self.database.look(lambda connection: self._gone(connection, run), doing, absent=MARKS)):
            raise OutputError(
                f"{self.database.shown}: the table {gone} is gone, and with it what this run has written, or its marks; "
                "restore it, or delete the run's rows and start over"
            )
        columns = self.database.transact(lambda connection: self._check(connection, run, going_on), doing)
        if columns is not None and self.upsert_by:
            keys = listed(self.upsert_by)
            self.database.transact(self._check_keys, f"upsert_by needs a unique key on {keys} of table {self.full_name}")
        return columns

    def publish(self, token: SqlPart) -> None:
        """The rows of a part and its mark, together, unless the mark is there."""
        self.database.transact(lambda connection: self._publish(connection, token), self._doing(token), again=True)

    def is_there(self) -> bool:
        """Whether the table exists. False also where the database does not."""
        return self.database.look(lambda connection: self._has(connection, self.name), self._looking, absent=False)

    def marked(self, runs: Collection[str]) -> dict[tuple[str, str], int]:
        """The parts of these runs that the table has by their marks: their rows, by run and part."""
        return self.database.look(lambda connection: self._marked(connection, runs), self._looking, absent={})

    @property
    def _looking(self) -> str:
        return f"looking at table {self.full_name}"

    def _doing(self, token: SqlPart) -> str:
        return f"copying part {token.part} ({token.rows} rows) into table {self.full_name}"

    def _check(self, connection: sa.Connection, run: str, going_on: bool) -> list[str] | None:
        self._make_marks(connection)
        with connection.begin_nested() as trial:
            self._mark(connection, SqlPart(run, part="", rows=0, spool="", xxh128=None))
            trial.rollback()
        if not going_on and self._rows_of(connection, run):
            raise OutputError(f"table {self.full_name} in {self.database.shown} has rows of the run {run} already")
        columns = self._columns(connection)
        if columns is None:
            self._check_create(connection)
            return None
        if unknown := [name for name in self.upsert_by if name not in columns]:
            raise OutputError(
                f"WriteToSql(upsert_by={list(self.upsert_by)}): table {self.full_name} has no column {listed(unknown)}; "
                f"it has {listed(columns)}"
            )
        _execute(connection, f"EXPLAIN INSERT INTO {self._quoted} DEFAULT VALUES")  # may it be written to?
        return list(columns)

    def _gone(self, connection: sa.Connection, run: str) -> str:
        """The table that a resumed run needs and that is not there any more, if there is such a one."""
        if not self._has(connection, MARKS):
            return MARKS
        is_lost = not self._has(connection, self.name) and self._rows_of(connection, run)
        return self.full_name if is_lost else ""

    def _check_create(self, connection: sa.Connection) -> None:
        if not self.create:
            raise OutputError(f"{self.database.shown} has no table {self.full_name}; make it, or pass create=True")
        if self.database.is_postgres:
            schema = sa.func.current_schema() if self.schema is None else sa.literal(self.schema)
            if not connection.scalar(sa.select(sa.func.has_schema_privilege(schema, "CREATE"))):
                raise OutputError(f"{self.database.shown} has no table {self.full_name}, and the user may not make one")

    def _check_keys(self, connection: sa.Connection) -> None:
        keys = ", ".join(map(quoted, self.upsert_by))
        nulls = ", ".join("NULL" for _ in self.upsert_by)
        _execute(connection, f"EXPLAIN INSERT INTO {self._quoted} ({keys}) VALUES ({nulls}) ON CONFLICT ({keys}) DO NOTHING")

    def _publish(self, connection: sa.Connection, token: SqlPart) -> None:
        if not self._mark(connection, token):
            return  # it was published before
        if not os.path.exists(token.spool):
            raise OutputError(f"{token.spool}: the finished part is gone; leave the folder alone and run again")
        if token.xxh128 is not None and xxh128_of(token.spool) != token.xxh128:
            raise OutputError(f"{token.spool}: the finished part has changed; remove it and run again")
        columns = self._columns(connection) or self._make_table(connection, token)
        refuse_unknown(token.kinds, columns)
        into = Into(
            table=self._quoted,
            names=list(token.kinds),
            columns=list(map(quoted, token.kinds)),
            keys=list(map(quoted, self.upsert_by)),
            texts=frozenset(name for name, kind in columns.items() if isinstance(kind, sa.String)),
            arrays=frozenset(name for name, kind in columns.items() if isinstance(kind, sa.ARRAY)),
            numbers=frozenset(name for name, kind in columns.items() if isinstance(kind, NUMBERS)),
        )
        copy = copy_to_postgres if self.database.is_postgres else insert_into_sqlite
        copy(connection, into, spooled(token.spool))

    def _mark(self, connection: sa.Connection, token: SqlPart) -> bool:
        """Leave the part's mark; False if it is there. Waits for whoever is copying the same part."""
        key = {"run": token.run, "target": self.full_name, "part": token.part}
        values = {**key, "rows": token.rows, "xxh128": token.xxh128}
        if self.database.is_postgres:
            insert = postgresql.insert(self._marks).values(values).on_conflict_do_nothing()
            return connection.scalar(insert.returning(self._marks.c.part)) is not None
        if connection.execute(sa.select(self._marks).filter_by(**key)).first() is not None:
            return False
        connection.execute(sa.insert(self._marks).values(values))  # in SQLite this transaction is the only one
        return True

    def _marked(self, connection: sa.Connection, runs: Collection[str]) -> dict[tuple[str, str], int]:
        if not (self._has(connection, MARKS) and self._has(connection, self.name)):
            return {}
        marks = self._marks.c
        query = sa.select(marks.run, marks.part, marks.rows).where(marks.target == self.full_name, marks.run.in_(runs))
        return {(run, part): rows for run, part, rows in connection.execute(query)}

    def _rows_of(self, connection: sa.Connection, run: str) -> int:
        """How many rows a run has put into the table, by its marks; the table need not be there any more."""
        marks = self._marks.c
        query = sa.select(sa.func.sum(marks.rows)).where(marks.run == run, marks.target == self.full_name)
        return int(connection.scalar(query) or 0)

    def _make_marks(self, connection: sa.Connection) -> None:
        if not self._has(connection, MARKS):
            self._alone(connection)
            self._marks.create(connection, checkfirst=True)

    def _make_table(self, connection: sa.Connection, token: SqlPart) -> dict[str, Any]:
        """The table's columns, made for the rows of a part, which is marked, unless another process has been quicker."""
        self._alone(connection)
        if there := self._columns(connection):
            return there
        self._refuse_or_forget_old_marks(connection, token)
        types = {name: SQL_TYPES[widest(name, set(kinds))] for name, kinds in token.kinds.items()}
        columns = [
            sa.Column(sa.quoted_name(name, True), kind, primary_key=name in self.upsert_by, autoincrement=False)
            for name, kind in types.items()
        ]
        table = sa.Table(sa.quoted_name(self.name, True), sa.MetaData(), *columns, schema=self.schema)
        table.create(connection, checkfirst=False)
        return types

    def _refuse_or_forget_old_marks(self, connection: sa.Connection, token: SqlPart) -> None:
        """Marks that are there when a table is made are of one that is gone. Other runs notice that when theirs are, too."""
        if lost := self._rows_of(connection, token.run) - token.rows:
            raise OutputError(
                f"{self.database.shown}: the table {self.full_name} is gone, to which this run has written {lost} rows; "
                "restore it, or start over"
            )
        others = self._marks.c.target == self.full_name, self._marks.c.run != token.run
        if connection.execute(sa.select(self._marks).where(*others).limit(1)).first() is not None:
            connection.execute(sa.delete(self._marks).where(*others))

    def _alone(self, connection: sa.Connection) -> None:
        """Until the transaction ends. In SQLite every transaction is alone."""
        if self.database.is_postgres:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))

    def _columns(self, connection: sa.Connection) -> dict[str, Any] | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sa.exc.SAWarning)  # types of extensions, such as vectors
            try:
                columns = sa.inspect(connection).get_columns(self.name, schema=self.schema)
            except sa.exc.NoSuchTableError:
                return None
        return {column["name"]: column["type"] for column in columns}

    def _has(self, connection: sa.Connection, name: str) -> bool:
        return bool(sa.inspect(connection).has_table(name, schema=self.schema))

    @property
    def _quoted(self) -> str:
        return quoted(*filter(None, (self.schema, self.name)))

    @cached_property
    def _marks(self) -> sa.Table:
        return sa.Table(
            MARKS,
            sa.MetaData(),
            sa.Column("run", sa.Text, primary_key=True),
            sa.Column("target", sa.Text, primary_key=True),
            sa.Column("part", sa.Text, primary_key=True),
            sa.Column("rows", sa.BigInteger, nullable=False),
            sa.Column("xxh128", sa.Text),
            sa.Column("committed_at", sa.DateTime(timezone=True), server_default=sa.func.current_timestamp()),
            schema=self.schema,
        )


def _execute(connection: sa.Connection, statement: str) -> None:
    """By the driver itself, which takes a % in a name as it is."""
    connection.connection.cursor().execute(statement)
