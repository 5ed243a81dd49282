"""The table that rows go to, and beside it the table of commits: a mark for each part that was copied."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from penstock.crashes import crash_point
from penstock.errors import OutputError
from penstock.io.digests import xxh128_of
from penstock.io.sql_copying import Into, copy_to_postgres, insert_into_sqlite
from penstock.io.sql_database import Database, quoted
from penstock.io.sql_rows import widest
from penstock.io.sql_spool import SqlPart, listed, refuse_unknown, spooled, spooled_kinds

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
        return self.name if self.schema is None else f"{self.schema}.{self.name}"

    def prepare(self, run: str, *, going_on: bool) -> list[str] | None:
        """Check that a run can write to the table. The names of its columns; None if it is yet to be made."""
        doing = f"table {self.full_name}"
        columns = self.database.transact(lambda connection: self._check(connection, run, going_on), doing)
        if columns is not None and self.upsert_by:
            keys = listed(self.upsert_by)
            self.database.transact(self._check_keys, f"upsert_by needs a unique key on {keys} of table {self.full_name}")
        return columns

    def publish(self, token: SqlPart) -> None:
        """The rows of a part and its mark, together, unless the mark is there."""
        self.database.transact(lambda connection: self._publish(connection, token), self._doing(token), again=True)
        crash_point()

    def rows_of(self, runs: Collection[str]) -> int:
        """How many rows these runs have put into the table, by their marks."""
        return self.database.transact(lambda connection: self._rows_of(connection, runs), f"table {MARKS}")

    def forget(self, runs: Collection[str]) -> None:
        """Take away the marks of these runs."""
        self.database.transact(lambda connection: self._forget(connection, runs), f"table {MARKS}")

    def _doing(self, token: SqlPart) -> str:
        return f"copying part {token.part} ({token.rows} rows) into table {self.full_name}"

    def _check(self, connection: sa.Connection, run: str, going_on: bool) -> list[str] | None:
        if going_on and not self._has(connection, MARKS):
            raise OutputError(
                f"{self.database.shown}: the table {MARKS} is gone, which told what this run has written; "
                "delete the run's rows and start over"
            )
        self._make_marks(connection)
        with connection.begin_nested() as trial:
            self._mark(connection, SqlPart(run, part="", rows=0, spool="", xxh128=None))
            trial.rollback()
        if not going_on and self._rows_of(connection, [run]):
            raise OutputError(f"table {self.full_name} in {self.database.shown} has rows of the run {run} already")
        columns = self._columns(connection)
        if columns is None:
            self._check_create(connection)
            return None
        refuse_unknown(self.upsert_by, columns)
        _execute(connection, f"EXPLAIN INSERT INTO {self._quoted} DEFAULT VALUES")  # may it be written to?
        return list(columns)

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
        kinds = spooled_kinds(token.spool)
        columns = self._columns(connection) or self._make_table(connection, kinds)
        refuse_unknown(kinds, columns)
        into = Into(
            table=self._quoted,
            names=list(kinds),
            columns=list(map(quoted, kinds)),
            keys=list(map(quoted, self.upsert_by)),
            arrays=frozenset(name for name, kind in columns.items() if isinstance(kind, sa.ARRAY)),
        )
        copy = copy_to_postgres if self.database.is_postgres else insert_into_sqlite
        copy(connection, into, spooled(token.spool))
        crash_point()

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

    def _rows_of(self, connection: sa.Connection, runs: Collection[str]) -> int:
        if not self._has(connection, MARKS):
            return 0
        query = sa.select(sa.func.coalesce(sa.func.sum(self._marks.c.rows), 0)).where(*self._of(runs))
        return int(connection.scalar(query) or 0)

    def _forget(self, connection: sa.Connection, runs: Collection[str]) -> None:
        if self._has(connection, MARKS):
            connection.execute(sa.delete(self._marks).where(*self._of(runs)))

    def _of(self, runs: Collection[str]) -> tuple[Any, Any]:
        return self._marks.c.run.in_(runs), self._marks.c.target == self.full_name

    def _make_marks(self, connection: sa.Connection) -> None:
        if not self._has(connection, MARKS):
            self._alone(connection)
            self._marks.create(connection, checkfirst=True)

    def _make_table(self, connection: sa.Connection, kinds: Mapping[str, set[str]]) -> dict[str, Any]:
        """The table's columns, made from the rows unless another process has been quicker."""
        self._alone(connection)
        if there := self._columns(connection):
            return there
        types = {name: SQL_TYPES[widest(name, kinds[name])] for name in kinds}
        columns = [
            sa.Column(sa.quoted_name(name, True), kind, primary_key=name in self.upsert_by, autoincrement=False)
            for name, kind in types.items()
        ]
        table = sa.Table(sa.quoted_name(self.name, True), sa.MetaData(), *columns, schema=self.schema)
        table.create(connection, checkfirst=False)
        return types

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
