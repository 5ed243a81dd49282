"""What the tests of SQL sinks share: a fresh database of either kind, and parts written to it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa

import penstock as ps
from kills.in_every_process import durable_steps
from penstock.io.sql_spool import SqlPart
from postgres_server import PASSWORD, postgres_server

PUBLISH = """
import json, os, sys
import durable_steps
import penstock as ps
from penstock.io.sql_spool import SqlPart

durable_steps.wrap_sql_commits()

sink = ps.WriteToSql(os.environ["DATABASE_URL"], "answers", **json.loads(sys.argv[2])).sink
token = SqlPart(*json.loads(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
sink.publish(token)
"""

numbers = itertools.count()


@dataclass(frozen=True)
class TestDatabase:
    __test__ = False

    url: str

    @property
    def is_postgres(self) -> bool:
        return self.url.startswith("postgresql")

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """Execute one statement; the rows that it gives."""
        engine = sa.create_engine(self.url, poolclass=sa.pool.NullPool)
        with engine.begin() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def rows(self, columns: str = "*", table: str = "answers") -> list[tuple[Any, ...]]:
        """What a reader sees now; nothing if there is no such table."""
        return self.run(f"SELECT {columns} FROM {table}") if self.has(table) else []

    def has(self, table: str) -> bool:
        return bool(sa.inspect(sa.create_engine(self.url, poolclass=sa.pool.NullPool)).has_table(table))

    def types(self, table: str = "answers") -> dict[str, str]:
        engine = sa.create_engine(self.url, poolclass=sa.pool.NullPool)
        return {column["name"]: str(column["type"]) for column in sa.inspect(engine).get_columns(table)}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as host:
        yield host


def url_of(host: str, database: str, user: str = "postgres", password: str = PASSWORD) -> str:
    return f"postgresql+psycopg://{user}:{quote(password, safe='')}@/{database}?host={host}"


@pytest.fixture
def postgres(server: str) -> TestDatabase:
    name = f"test{next(numbers)}"
    engine = sa.create_engine(url_of(server, "postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return TestDatabase(url_of(server, name))


@pytest.fixture
def sqlite(tmp_path: Path) -> TestDatabase:
    return TestDatabase(f"sqlite:///{tmp_path}/my answers.db")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def write_part(sink: ps.Sink[Any], name: str, *blocks: Any, run: str = "run", journaled: bool = False) -> SqlPart:
    writer = sink.open(ps.Part(run=run, name=name, attempt=1, journaled=journaled))
    for block in blocks:
        writer.write(block)
    token = writer.close()
    assert isinstance(token, SqlPart)
    return token


def write_all(write: ps.Write[Any], *blocks: Any, run: str = "run") -> None:
    """A whole run with one part for each block."""
    write.sink.prepare(run)
    try:
        for i, block in enumerate(blocks):
            write.sink.publish(write_part(write.sink, f"{i:05}", block, run=run))
    finally:
        write.sink.finish(run, True)


def publisher(database: TestDatabase, token: SqlPart, crash_at: str = "", **options: Any) -> subprocess.Popen[str]:
    """Another process that will publish a part when it is told to go on."""
    environment = {**durable_steps.environment(crash_at), "DATABASE_URL": database.url}
    command = [sys.executable, "-c", PUBLISH, json.dumps(token), json.dumps(options)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)


def publish(*publishers: subprocess.Popen[str]) -> list[int]:
    """Have all of them publish at the same time; their exit codes."""
    for process in publishers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in publishers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    codes = [process.wait(60) for process in publishers]
    for process in publishers:
        process.communicate()
    return codes
