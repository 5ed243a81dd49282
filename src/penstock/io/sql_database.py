"""A database by its URL: connections, transactions, and errors that tell no secret. Needs SQLAlchemy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from penstock.errors import MissingPackageError, OutputError, UsageError
from penstock.rows import safe_str

try:
    import sqlalchemy as sa
except ImportError as exc:
    raise MissingPackageError("sqlalchemy", "sql") from exc

T = TypeVar("T")

EXPECTED = "expected 'postgresql+psycopg://user:password@host/database' or 'sqlite:///file.db'"
DRIVERS = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite"}
BUSY_SECONDS = 300  # how long SQLite waits while another process writes
CONNECT_SECONDS = 15
WAITS = (0.5, 2.0, 8.0)  # seconds before a transaction that broke off is tried again
MOST_TEXT = 1000  # characters of a database's message that are shown


class Database:
    """Where a table is, in the user's process. Each transaction has a connection of its own."""

    def __init__(self, url: str | sa.URL) -> None:
        self._url = _checked(url)
        self.is_postgres = self._url.get_backend_name() == "postgresql"
        places = {key: value for key, value in self._url.query.items() if key in ("host", "port")}
        shown = self._url.set(drivername=self._url.get_backend_name(), query=places)
        self.shown: str = shown.render_as_string(hide_password=True)
        secrets = [self._url.password, *(v for k, v in self._url.query.items() if "pass" in k)]
        self._secrets = [str(secret) for secret in secrets if secret]
        self.engine = self._make_engine()

    def _make_engine(self) -> sa.Engine:
        options: dict[str, Any] = {}
        if not self.is_postgres:
            options = {"timeout": BUSY_SECONDS}
        elif "connect_timeout" not in self._url.query:
            options = {"connect_timeout": CONNECT_SECONDS}
        try:
            engine = sa.create_engine(self._url, connect_args=options, poolclass=sa.pool.NullPool, hide_parameters=True)
        except ImportError as exc:
            raise MissingPackageError("psycopg", "sql") from exc
        if not self.is_postgres:  # Python's sqlite3 would begin late, and then fail at once where another process writes
            sa.event.listen(engine, "connect", lambda driver, _: setattr(driver, "isolation_level", None))
            sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def look(self, work: Callable[[sa.Connection], T], doing: str, *, absent: T) -> T:
        """What `work` returns, which only reads; `absent` if there is no such file of SQLite, which is not made then."""
        if not self.is_postgres and not os.path.exists(_file_of(self._url)):
            return absent
        return self.transact(work, doing, again=True, only_reads=True)

    def transact(
        self, work: Callable[[sa.Connection], T], doing: str, *, again: bool = False, only_reads: bool = False
    ) -> T:
        """What `work` returns, committed. Raises OutputError for what the database says.

        `again`: the work may be repeated, and is if the server went away or chose it as the victim of a deadlock.
        """
        engine = self.engine.execution_options(only_reads=only_reads)
        waits = iter(WAITS if again and self.is_postgres else ())
        while True:
            try:
                with engine.begin() as connection:
                    return work(connection)
            except (sa.exc.SQLAlchemyError, self._driver.Error) as exc:
                about_the_server = isinstance(getattr(exc, "orig", exc), self._driver.OperationalError)
                wait = next(waits, None) if about_the_server else None
                if wait is None:
                    raise self._told(exc, doing) from self._cause(exc)
            time.sleep(wait)

    @property
    def _driver(self) -> Any:
        return self.engine.dialect.loaded_dbapi

    def _told(self, exc: Exception, doing: str) -> OutputError:
        message = self._without_secrets(safe_str(getattr(exc, "orig", None) or exc)).strip()
        if len(message) > MOST_TEXT:
            message = f"{message[:MOST_TEXT]}..."
        folder = "" if self.is_postgres else os.path.dirname(_file_of(self._url))
        hint = f"; there is no folder {folder}: make it" if folder and not os.path.isdir(folder) else ""
        if _is_key_taken(exc):
            hint = "; upsert_by=[...] with the columns of that key updates the row that is there"
        return OutputError(f"{doing} in {self.shown}: the database says: {message}{hint}")

    def _cause(self, exc: Exception) -> Exception | None:
        text = safe_str(exc)
        return exc if self._without_secrets(text) == text else None

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def quoted(*names: str) -> str:
    """Names as one name in SQL, such as "schema"."table"; for statements that the driver gets as they are."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def _is_key_taken(exc: Exception) -> bool:
    """Whether there is a row with the same unique key."""
    error = getattr(exc, "orig", None) or exc
    codes = {getattr(error, "sqlstate", None), getattr(error, "sqlite_errorname", None)}
    return not codes.isdisjoint(("23505", "SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE"))


def _begin_sqlite(connection: sa.Connection) -> None:
    """Only who writes has to be the only one."""
    connection.exec_driver_sql("BEGIN" if connection.get_execution_options()["only_reads"] else "BEGIN IMMEDIATE")


def _file_of(url: sa.URL) -> str:
    """The file of a database of SQLite."""
    name = str(url.database)
    is_uri = name.startswith("file:") and sa.util.asbool(url.query.get("uri", False))
    return unquote(urlsplit(name).path) if is_uri else name


def _checked(url: str | sa.URL) -> sa.URL:
    """The URL with its driver; a local file by its whole path. No message repeats the URL: it may hold a password."""
    if not isinstance(url, (str, sa.URL)):
        raise UsageError(f"WriteToSql({type(url).__name__}): {EXPECTED}")
    try:
        made = sa.engine.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise UsageError(f"WriteToSql: the URL cannot be understood; {EXPECTED}") from None
    backend, _, driver = made.drivername.partition("+")
    if f"{backend}+{driver}" not in ("postgresql+", "postgresql+psycopg", "sqlite+", "sqlite+pysqlite"):
        raise UsageError(f"WriteToSql: the URL is of {made.drivername}; {EXPECTED}")
    made = made.set(drivername=DRIVERS[backend])
    if backend == "postgresql":
        if "@" in f"{made.host}{made.database}":
            raise UsageError("WriteToSql: the URL has two '@'; in a user name or password, write it as %40")
        return made
    if made.host:
        raise UsageError(
            "WriteToSql: a file of SQLite comes after three slashes, a whole path after four: sqlite:///file.db"
        )
    if made.database in (None, "", ":memory:") or made.query.get("mode") == "memory":
        raise UsageError("WriteToSql: a database in memory is gone with its connection; name a file: sqlite:///file.db")
    return made if made.database.startswith("file:") else made.set(database=os.path.abspath(made.database))
