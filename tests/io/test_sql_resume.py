"""Runs with a journal that write to SQL databases: what of theirs is gone is noticed, and nothing is there twice."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import EngineError, OutputError, StepError
from penstock.observe.result import RunResult
from sql_databases import TestDatabase, database, postgres, server, sqlite, write_all, write_part

__all__ = ["database", "postgres", "server", "sqlite"]  # fixtures

LINES = 4000  # several splits
GONE = r"\d+ part\(s\) that this run has written are gone or changed, such as"


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where sinks without a run_dir spool
    Path("in.txt").write_text("".join(f"{i}\n" for i in range(LINES)))


def run(database: TestDatabase, *, stop_at: int | None = None, fresh: bool = False, **options: Any) -> RunResult:
    """Copy the lines to the table, in the folder `run`; fail at a line if told to."""

    def work(line: str) -> dict[str, int]:
        if int(line) == stop_at:
            raise ValueError("stopped")
        return {"id": int(line)}

    p = ps.Pipeline(run_dir="run", workers=0, fresh=fresh, accept_changes=() if fresh else ("code",))
    p | ps.ReadFromText("in.txt") | ps.Map(work) | ps.WriteToSql(database.url, "answers", **options)
    return p.run()


def begun(database: TestDatabase, **options: Any) -> None:
    with pytest.raises(StepError, match="stopped"):
        run(database, stop_at=3000, **options)
    assert 0 < len(ids(database)) < 3000


def ids(database: TestDatabase) -> list[int]:
    return sorted(row[0] for row in database.rows("id"))


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def damage_the_journal() -> None:
    Path("run/journal.db").write_bytes(os.urandom(10_000))


# What is gone.


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("options", [{}, {"upsert_by": ["id"]}])
def test_a_table_that_is_gone_is_not_taken_for_written(database: TestDatabase, is_finished: bool, options: Any) -> None:
    begun(database, **options)
    if is_finished:
        run(database, **options)
    database.run("DROP TABLE answers")
    for _ in range(2):
        with pytest.raises(OutputError, match=rf"{GONE} 00000 \(there is no table answers\).*--fresh"):
            run(database, **options)
    run(database, fresh=True, **options)
    assert ids(database) == list(range(LINES))
    assert run(database, **options).was_finished


def test_marks_that_are_gone_tell_of_rows_that_may_be(database: TestDatabase) -> None:
    run(database)
    database.run("DELETE FROM penstock_commits WHERE part = '00001'")
    with pytest.raises(OutputError, match=r" 1 part\(s\) .*, such as 00001 \(its mark .* is gone: delete what"):
        run(database)
    database.run("DROP TABLE penstock_commits")
    with pytest.raises(OutputError, match=rf"{GONE} 00000 \(its mark in penstock_commits is gone"):
        run(database)


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("is_uri", [False, True])
def test_a_database_that_is_gone_is_not_made_by_looking(sqlite: TestDatabase, is_finished: bool, is_uri: bool) -> None:
    path = Path(sqlite.url.removeprefix("sqlite:///"))
    named = TestDatabase(f"sqlite:///file:{path}?uri=true") if is_uri else sqlite
    begun(named)
    if is_finished:
        run(named)
    path.unlink()
    with pytest.raises(OutputError, match=GONE):
        run(named)
    assert not path.exists()
    run(named, fresh=True)
    assert ids(sqlite) == list(range(LINES))


def test_looking_at_a_finished_run_writes_nothing(sqlite: TestDatabase) -> None:
    run(sqlite)
    with sqlite3.connect(sqlite.url.removeprefix("sqlite:///")) as other:
        other.execute("BEGIN IMMEDIATE")  # another process is writing
        assert run(sqlite).was_finished


def test_a_table_that_goes_while_a_run_writes_is_not_made_again(database: TestDatabase) -> None:
    sink = ps.WriteToSql(database.url, "answers").sink
    note = sink.prepare("run")
    first, second = write_part(sink, "00000", [{"id": 1}]), write_part(sink, "00001", [{"id": 2}])
    sink.publish(first)
    database.run("DROP TABLE answers")
    with pytest.raises(OutputError, match=r"the table answers is gone, to which this run has written 1 rows"):
        sink.publish(second)
    assert not database.has("answers")
    with pytest.raises(OutputError, match="the table answers is gone"):  # the journal need not know of that part
        ps.WriteToSql(database.url, "answers").sink.resume("run", note, [])


def test_a_table_that_another_run_has_made_again_is_not_the_one_that_was_written(database: TestDatabase) -> None:
    run(database)
    database.run("DROP TABLE answers")
    write_all(ps.WriteToSql(database.url, "answers"), [{"id": 1}], run="another")
    with pytest.raises(OutputError, match=GONE):
        run(database)
    assert database.rows("run", "penstock_commits") == [("another",)]


def test_a_fresh_start_that_another_sink_refuses_leaves_the_marks(sqlite: TestDatabase) -> None:
    def both(**options: Any) -> RunResult:
        p = ps.Pipeline(run_dir="run", workers=0, **options)
        rows = p | ps.ReadFromText("in.txt")
        rows | ps.Map(lambda line: {"id": int(line)}) | ps.WriteToSql(sqlite.url, "answers", upsert_by=["id"])
        rows | ps.WriteToText("out")
        return p.run()

    both()
    stranger = Path("out/part-99999.txt")
    stranger.write_text("mine")
    with pytest.raises(OutputError, match="there already"):
        both(fresh=True)
    assert both().was_finished


def test_verify_does_not_vouch_for_what_it_cannot_see(sqlite: TestDatabase) -> None:
    run(sqlite)
    told = penstock("verify", "run")
    assert told.returncode == 0
    assert "as the manifest says" not in told.stderr, "there are no files"
    assert f"table answers in {sqlite.url}: " in told.stderr
    assert "were not checked" in told.stderr


# A fresh start where the journal cannot be read.


def test_a_fresh_start_without_a_readable_journal_is_refused(database: TestDatabase) -> None:
    run(database)
    damage_the_journal()
    for fresh in False, True:
        with pytest.raises(EngineError, match=r"is damaged.*remove what the run has written .* and this run_dir, and run"):
            run(database, fresh=fresh)
    assert ids(database) == list(range(LINES))
    database.run("DELETE FROM answers")
    Path("run").rename("damaged")
    run(database)
    assert ids(database) == list(range(LINES))


def test_a_fresh_start_from_a_journal_of_which_only_some_can_be_read(sqlite: TestDatabase) -> None:
    run(sqlite)
    with sqlite3.connect("run/journal.db") as journal:
        [(page,)] = journal.execute("SELECT rootpage FROM sqlite_master WHERE name = 'parts'")
        [(size,)] = journal.execute("PRAGMA page_size")
    journal.close()
    with open("run/journal.db", "r+b") as file:
        file.seek((page - 1) * size)
        file.write(os.urandom(size))
    with pytest.raises(EngineError, match="is damaged"):
        run(sqlite, fresh=True)
    assert ids(sqlite) == list(range(LINES))
