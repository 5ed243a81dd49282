"""What WriteToSql refuses before a run begins, and that no message, and nothing that travels, has a secret in it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import penstock as ps
from penstock.errors import MissingPackageError, UsageError
from postgres_server import PASSWORD
from sql_databases import TestDatabase, postgres, server, sqlite, url_of, write_all, write_part

__all__ = ["postgres", "server", "sqlite"]  # fixtures

SECRETS = [PASSWORD, "s3cret", "w0rd"]


def numbered(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "text": f"row {i}"} for i in ids]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rows are spooled by default."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def told(url: str, table: str = "answers", **options: Any) -> str:
    """The whole traceback of what is raised when a run begins."""
    with pytest.raises(UsageError) as raised:
        ps.WriteToSql(url, table, **options).sink.prepare("run")
    text = "".join(traceback.format_exception(raised.value))
    assert not [secret for secret in SECRETS if secret in text]
    return text


def test_no_error_tells_the_password(server: str, postgres: TestDatabase) -> None:
    wrong_password = url_of(server, "postgres", password=f"{PASSWORD}!")
    assert 'password authentication failed for user "postgres"' in told(wrong_password)
    assert 'database "nowhere" does not exist' in told(url_of(server, "nowhere"))
    assert "No such file or directory" in told(url_of("/nowhere", "postgres"))
    assert "the database says: " in told("postgresql://me:s3cret@127.0.0.1:1/db")
    assert "the URL has two '@'; in a user name or password, write it as %40" in told("postgresql://me:s3cret@w0rd@host/db")
    for url in ("s3cret", "postgresql://me:s3cret@host:port/db", "postgresql//me:s3cret@host/db"):
        assert "the URL cannot be understood" in told(url)
    assert "the URL is of mysql+pymysql; expected" in told("mysql+pymysql://me:s3cret@host/db")
    assert "has no table answers; make it, or pass create=True" in told(postgres.url, create=False)
    in_query = f"postgresql:///{postgres.url.split('/')[3].split('?')[0]}?host={server}&user=postgres&password=s3cret"
    assert "password authentication failed" in told(in_query)


def test_nothing_that_travels_or_is_shown_has_the_password(postgres: TestDatabase) -> None:
    write = ps.WriteToSql(postgres.url, "answers")
    sink = write.sink
    sink.prepare("run")
    token = write_part(sink, "00000", numbered(1))
    shown = [repr(write), repr(sink), sink.describe(), write.default_label(), str(token), str(sink.details(token))]
    travels = [cloudpickle.dumps(sink), pickle.dumps(token)]
    assert not [secret for secret in SECRETS if secret in "".join(shown) or secret.encode() in b"".join(travels)]
    assert write.default_label() == "WriteToSql(answers)"
    assert ps.WriteToSql("postgresql+psycopg://me:s3cret@host:1/db?sslpassword=s3cret", "answers").sink.describe() == (
        "table answers in postgresql://me:***@host:1/db"
    )


def test_wrong_calls(tmp_path: Path) -> None:
    for url in ("sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"):
        with pytest.raises(UsageError, match="a database in memory is gone with its connection"):
            ps.WriteToSql(url, "answers")
    with pytest.raises(UsageError, match="a file of SQLite comes after three slashes"):
        ps.WriteToSql("sqlite://x.db", "answers")
    wrong: list[tuple[Any, ...]] = [
        ({"url": 3, "table": "answers"}, "expected 'postgresql"),
        ({"table": ""}, "expected the name of a table"),
        ({"table": "penstock_commits"}, "expected the name of a table"),
        ({"table": "answers", "schema": "main"}, "expected the name of a schema of Postgres"),
        ({"table": "answers", "upsert_by": "id"}, "expected a list of column names"),
        ({"table": "answers", "upsert_by": []}, "expected a list of column names"),
        ({"table": "answers", "upsert_by": ["id", "id"]}, "different ones"),
        ({"table": "answers", "aside": "s3://bucket"}, "expected a local folder"),
    ]
    for options, message in wrong:
        with pytest.raises(UsageError, match=message):
            ps.WriteToSql(**{"url": f"sqlite:///{tmp_path}/x.db", **options})
    assert f"unable to open database file; there is no folder {tmp_path}/nowhere" in told(
        f"sqlite:///{tmp_path}/nowhere/x.db"
    )
    write_all(ps.WriteToSql(f"sqlite:///{tmp_path}/x.db", "answers"), numbered(1), run="earlier")
    assert "upsert_by=['idd']): table answers has no column 'idd'; it has 'id', 'text'" in told(
        f"sqlite:///{tmp_path}/x.db", upsert_by=["idd"]
    )
    (tmp_path / "text.db").write_text("this is no database" * 100)
    assert "file is not a database" in told(f"sqlite:///{tmp_path}/text.db")


def test_a_database_that_may_only_be_read(sqlite: TestDatabase) -> None:
    write_all(ps.WriteToSql(sqlite.url, "answers"), numbered(1), run="earlier")
    path = sqlite.url.removeprefix("sqlite:///")
    assert "attempt to write a readonly database" in told(f"sqlite:///file:{path}?mode=ro&uri=true")


def test_a_user_who_may_not(server: str, postgres: TestDatabase) -> None:
    postgres.run("CREATE TABLE theirs (id int)")
    postgres.run(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
    name = postgres.url.split("/")[3].split("?")[0]
    guest = url_of(server, name, user="guest")
    assert "permission denied for schema public" in told(guest)
    write_all(ps.WriteToSql(postgres.url, "answers"), numbered(1))
    postgres.run("GRANT SELECT ON penstock_commits TO guest")
    assert "permission denied for table penstock_commits" in told(guest)
    postgres.run("GRANT INSERT ON penstock_commits TO guest")
    assert "has no table new, and the user may not make one" in told(guest, "new")
    assert "permission denied for table theirs" in told(guest, "theirs")
    assert 'schema "nowhere" does not exist' in told(postgres.url, schema="nowhere")


@pytest.mark.parametrize(("package", "named"), [("sqlalchemy", "sqlalchemy"), ("psycopg", "psycopg")])
def test_a_package_that_is_missing(package: str, named: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import penstock as ps; from penstock.errors import MissingPackageError\n"
        "try: ps.WriteToSql('postgresql://me:pass@host/db', 'answers')\n"
        "except MissingPackageError as exc: print(exc)"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed == f"{named} is not installed; run: pip install 'penstock[sql]'\n"
    assert issubclass(MissingPackageError, ImportError)
