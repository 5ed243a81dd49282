"""Rows into SQL databases: exactly once, whatever dies, and into one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock as ps
from kills.in_every_process import durable_steps
from penstock.errors import OutputError
from penstock.testing import check_sink
from postgres_server import PASSWORD
from sql_databases import (
    TestDatabase,
    database,
    postgres,
    publish,
    publisher,
    server,
    sqlite,
    write_all,
    write_part,
)

__all__ = ["database", "postgres", "server", "sqlite"]  # fixtures


def numbered(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "text": f"row {i}"} for i in ids]


def ids(database: TestDatabase) -> list[int]:
    return [row[0] for row in database.rows("id")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rows are spooled by default."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.parametrize("upsert_by", [None, ["id"]])
def test_it_keeps_the_contract_of_a_sink(database: TestDatabase, temporary: Path, upsert_by: Any) -> None:
    def make() -> ps.Sink[Any]:
        return ps.WriteToSql(database.url, "answers", upsert_by=upsert_by).sink

    def read_back() -> list[dict[str, Any]]:
        return [{"id": i, "text": text} for i, text in sorted(database.rows("id, text"))]

    check_sink(make(), lambda n: numbered(*range(10 * n, 10 * n + 5)), read_back, again=make)
    assert os.listdir(temporary) == []
    assert len(database.rows(table="penstock_commits")) == 3, "marks stay"


class Answer(NamedTuple):
    id: int
    text: str


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_writes_every_row_once(database: TestDatabase, temporary: Path, workers: int) -> None:
    with ps.Pipeline(workers=workers) as p:
        p | ps.Create(range(5000)) | ps.Map(lambda i: Answer(i, f"row {i}")) | ps.WriteToSql(database.url, "answers")
    assert sorted(database.rows("id, text")) == [(i, f"row {i}") for i in range(5000)]
    assert [int(rows) for (rows,) in database.rows("sum(rows)", "penstock_commits")] == [5000]
    assert os.listdir(temporary) == []


def test_tables_are_written_whole(database: TestDatabase) -> None:
    with ps.Pipeline(workers=0) as p:
        halves = ps.MapBatches(lambda t: pa.table({"id": t["id"], "half": pc.divide(t["id"], 2.0)}), format="arrow")
        p | ps.Create([{"id": i} for i in range(100)]) | halves | ps.WriteToSql(database.url, "answers")
    assert database.rows("id, half") == [(i, i / 2) for i in range(100)]


@pytest.mark.parametrize(("place", "rows_after_the_kill"), [(1, 0), (2, 3)])
def test_a_process_that_is_killed_while_it_publishes(
    database: TestDatabase, tmp_path: Path, place: int, rows_after_the_kill: int
) -> None:
    sink = ps.WriteToSql(database.url, "answers").sink
    sink.prepare("run")
    token = write_part(sink, "00000", numbered(1, 2), numbered(3), journaled=True)
    assert publish(publisher(database, token, f"coordinator:{place}:{tmp_path}/mark")) == [-9]
    assert len(database.rows()) == rows_after_the_kill
    assert publish(publisher(database, token)) == [0]
    assert ids(database) == [1, 2, 3]
    sink.publish(token)
    assert ids(database) == [1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"upsert_by": ["id"]}])
def test_processes_that_publish_one_part_at_the_same_time(database: TestDatabase, options: Any) -> None:
    sink = ps.WriteToSql(database.url, "answers", **options).sink
    sink.prepare("run")
    token = write_part(sink, "00000", numbered(*range(5000)))
    assert publish(publisher(database, token, **options), publisher(database, token, **options)) == [0, 0]
    assert sorted(ids(database)) == list(range(5000))


def test_processes_that_publish_different_parts_make_one_table(database: TestDatabase) -> None:
    sink = ps.WriteToSql(database.url, "answers").sink
    sink.prepare("run")
    tokens = [write_part(sink, f"{n:05}", numbered(*range(100 * n, 100 * n + 100))) for n in range(2)]
    assert publish(*(publisher(database, token) for token in tokens)) == [0, 0]
    assert sorted(ids(database)) == list(range(200))


def test_the_mark_wins_over_a_later_attempt(database: TestDatabase) -> None:
    sink = ps.WriteToSql(database.url, "answers").sink
    sink.prepare("run")
    sink.publish(write_part(sink, "00000", numbered(1, 2)))
    sink.publish(write_part(sink, "00000", numbered(1, 2, 3)))
    assert ids(database) == [1, 2]
    assert database.rows("rows", "penstock_commits") == [(2,)]


def test_a_part_is_published_again_after_its_spool_is_gone(database: TestDatabase) -> None:
    sink = ps.WriteToSql(database.url, "answers").sink
    sink.prepare("run")
    first, second = write_part(sink, "00000", numbered(1)), write_part(sink, "00001", numbered(2))
    sink.publish(first)
    assert sink.missing([], [first, second]) == []
    sink.finish("run", True)
    assert sink.missing([], [first, second]) == [second.spool], "the mark of the first is there"
    sink.publish(first)
    assert ids(database) == [1]
    with pytest.raises(OutputError, match="00001-1.arrow: the finished part is gone"):
        sink.publish(second)
    assert ids(database) == [1]


def test_a_lost_connection_is_made_again(postgres: TestDatabase) -> None:
    import psycopg

    sink = ps.WriteToSql(postgres.url, "answers").sink
    write_all(ps.WriteToSql(postgres.url, "answers"), numbered(0), run="earlier")
    sink.prepare("run")
    token = write_part(sink, "00000", numbered(1, 2))
    blocked = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with psycopg.connect(postgres.url.replace("+psycopg", "")) as blocker:
        blocker.execute("LOCK TABLE answers")
        publishing = threading.Thread(target=sink.publish, args=[token])
        publishing.start()
        while not postgres.run(blocked):
            time.sleep(0.01)
    publishing.join(60)
    assert ids(postgres) == [0, 1, 2]


def test_rows_are_updated_by_their_key(database: TestDatabase) -> None:
    database.run("CREATE TABLE answers (a bigint, b text, note text, score double precision, UNIQUE (a, b))")
    database.run("INSERT INTO answers VALUES (1, 'x', 'kept', 0.5), (9, 'z', 'kept', 9)")
    write = ps.WriteToSql(database.url, "answers", upsert_by=["b", "a"])
    rows = [{"a": 1, "b": "x", "score": 1.5}, {"a": 1, "b": "y", "score": 2.5}, {"a": 1, "b": "y", "score": 3.5}]
    for run in ("one", "two"):
        write_all(write, rows, run=run)
    assert sorted(database.rows()) == [(1, "x", "kept", 1.5), (1, "y", None, 3.5), (9, "z", "kept", 9.0)]


def test_rows_of_nothing_but_a_key(database: TestDatabase) -> None:
    write = ps.WriteToSql(database.url, "answers", upsert_by=["id"])
    write_all(write, [{"id": 1}, {"id": 2}, {"id": 1}])
    assert sorted(ids(database)) == [1, 2]
    with pytest.raises(OutputError, match="rows without 'id', which upsert_by names"):
        write_all(ps.WriteToSql(database.url, "others", upsert_by=["id"]), [{"text": "x"}])
    with pytest.raises(OutputError, match="'id' is None in a row"):
        write_all(write, [{"id": 1}, {"id": None}], run="third")


def test_upsert_needs_a_unique_key(database: TestDatabase) -> None:
    database.run("CREATE TABLE answers (id bigint, text text)")
    with pytest.raises(OutputError, match="upsert_by needs a unique key on 'id' of table answers.*the database says"):
        ps.WriteToSql(database.url, "answers", upsert_by=["id"]).sink.prepare("run")
    with pytest.raises(OutputError, match="table answers has no column 'key'; it has 'id', 'text'"):
        ps.WriteToSql(database.url, "answers", upsert_by=["key"]).sink.prepare("run")


def test_a_run_that_is_forgotten(database: TestDatabase) -> None:
    write = ps.WriteToSql(database.url, "answers")
    sink = write.sink
    sink.prepare("run")
    token = write_part(sink, "00000", numbered(1, 2))
    assert sink.details(token) == {"table": "answers", "part": "00000", "rows": 2, "run": "run"}
    sink.publish(token)
    with pytest.raises(OutputError, match="has rows of the run run already"):
        ps.WriteToSql(database.url, "answers").sink.prepare("run")
    parts = [sink.details(token), {"path": "of another sink"}]
    clear = "DELETE FROM penstock_commits WHERE run IN ('run') AND target = 'answers'"
    with pytest.raises(OutputError, match="has 2 rows of the run that is to be forgotten") as raised:
        sink.start_over(parts)
    assert clear in str(raised.value)
    ps.WriteToSql(database.url, "others").sink.start_over(parts)
    database.run("DELETE FROM answers")
    database.run(clear)
    sink.start_over(parts)


def test_a_run_that_is_forgotten_and_updates_by_key(database: TestDatabase) -> None:
    sink = ps.WriteToSql(database.url, "answers", upsert_by=["id"]).sink
    sink.start_over([])
    sink.prepare("run")
    token = write_part(sink, "00000", numbered(1, 2))
    sink.publish(token)
    sink.finish("run", False)
    sink.start_over([sink.details(token)])
    sink.prepare("another")
    sink.publish(write_part(sink, "00000", [{"id": 1, "text": "new"}], run="another"))
    assert sorted(database.rows()) == [(1, "new"), (2, "row 2")]


def test_a_run_that_goes_on_in_another_process(sqlite: TestDatabase, tmp_path: Path) -> None:
    first = ps.WriteToSql(sqlite.url, "answers", aside=tmp_path / "one").sink
    note = first.prepare("run")
    kept, thrown = write_part(first, "00000", numbered(1), journaled=True), write_part(first, "00001", numbered(2))
    second = ps.WriteToSql(sqlite.url, "answers", aside=tmp_path / "two").sink
    second.resume("run", note, [])
    second.clean("run", [kept])
    assert (os.path.exists(kept.spool), os.path.exists(thrown.spool)) == (True, False)
    second.publish(kept)
    second.publish(write_part(second, "00001", numbered(2)))
    assert ids(sqlite) == [1, 2]
    second.finish("run", True)
    assert [os.listdir(tmp_path / name) for name in ("one", "two")] == [[], []]
    sqlite.run("DROP TABLE penstock_commits")
    with pytest.raises(OutputError, match="the table penstock_commits is gone"):
        second.resume("run", note, [])


def test_a_spool_that_has_changed(sqlite: TestDatabase) -> None:
    sink = ps.WriteToSql(sqlite.url, "answers").sink
    sink.prepare("run")
    token = write_part(sink, "00000", numbered(1), journaled=True)
    with open(token.spool, "ab") as file:
        file.write(b"x")
    with pytest.raises(OutputError, match="the finished part has changed"):
        sink.publish(token)
    assert not sqlite.has("answers")


def test_rows_lie_in_a_private_folder(sqlite: TestDatabase, temporary: Path) -> None:
    sink = ps.WriteToSql(sqlite.url, "answers").sink
    sink.prepare("run")
    (folder,) = sink.aside("run")
    assert os.path.dirname(folder) == str(temporary)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    sink.finish("run", False)
    os.mkdir(folder)
    os.chmod(folder, 0o755)
    with pytest.raises(OutputError, match="is not private to this user"):
        sink.prepare("run")


def test_two_steps_cannot_write_to_one_table(sqlite: TestDatabase) -> None:
    ps.WriteToSql(sqlite.url, "answers").sink.prepare("run")
    ps.WriteToSql(sqlite.url, "others").sink.prepare("run")
    with pytest.raises(OutputError, match=r"two steps write there; put their rows together by ps\.Flatten"):
        ps.WriteToSql(sqlite.url, "answers").sink.prepare("run")


def test_memory_does_not_grow_with_the_part(database: TestDatabase) -> None:
    sink = ps.WriteToSql(database.url, "answers").sink
    sink.prepare("run")
    token = write_part(sink, "00000", *([{"id": i, "text": "x" * 1000} for i in range(1000)] for _ in range(40)))
    assert os.path.getsize(token.spool) > 40_000_000
    script = (
        "import os, sys, json, pyarrow as pa, penstock as ps; from penstock.io.sql_spool import SqlPart\n"
        "sink = ps.WriteToSql(os.environ['DATABASE_URL'], 'answers').sink\n"
        "sink.publish(SqlPart(*json.loads(sys.argv[1]))); print(pa.default_memory_pool().max_memory())"
    )
    environment = {**os.environ, "DATABASE_URL": database.url}
    command = [sys.executable, "-c", script, json.dumps(token)]
    most = int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert most < 12_000_000
    assert database.rows("count(*)") == [(40_000,)]


JOURNALED = """
import os, sys
import durable_steps
import penstock as ps

durable_steps.wrap_sql_commits()
with ps.Pipeline(run_dir="run", workers=0) as p:
    rows = p | ps.ReadFromText("in.txt") | ps.Map(lambda line: {"id": int(line)})
    rows | ps.WriteToSql(os.environ["DATABASE_URL"], "answers", aside="aside")
"""


def test_a_run_that_is_killed_again_and_again_goes_on(database: TestDatabase, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{i}\n" for i in range(2000)))
    (tmp_path / "job.py").write_text(JOURNALED)
    deaths = 0
    for place in range(20, 200, 14):  # another one in each process, and further than all the work of the last
        steps = durable_steps.environment(f"coordinator:{place}:{tmp_path}/mark{place}")
        environment = {**steps, "DATABASE_URL": database.url}
        done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, env=environment, capture_output=True, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr.decode()
        deaths += 1
    assert deaths > 2
    assert sorted(ids(database)) == list(range(2000))
    assert database.rows("count(*), sum(rows)", "penstock_commits")[0][1] == 2000
    assert os.listdir(tmp_path / "aside") == []
    stored = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert PASSWORD.encode() not in stored
    verified = subprocess.run([sys.executable, "-m", "penstock.cli", "verify", "run"], cwd=tmp_path, check=False)
    assert verified.returncode == 0
