"""Runs with a journal, in small: each test holds one line of the code that decides on what outlives a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import sqlite3
import stat
import subprocess
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import EngineError, OutputError, PenstockError, StepError
from penstock.io.files import list_files
from penstock.io.jsonl import JsonlSink
from penstock.journal import digests
from penstock.journal.digests import Digests
from penstock.journal.journal import Journal
from penstock.models.host_address import make_private, run_folder
from penstock.models.messages import Shutdown
from penstock.run.outcomes import SplitId, SplitResult
from penstock.transport.channel import Channel

LINES = 4000  # of some bytes each: several splits


@pytest.fixture
def folder(tmp_path):
    """A folder with two inputs: in/0.txt and in/1.txt."""
    (tmp_path / "in").mkdir()
    for part in range(2):
        write_input(tmp_path, part)
    return tmp_path


def write_input(folder, part):
    (folder / "in" / f"{part}.txt").write_text("".join(f"{part}-{n}\n" for n in range(LINES)))


def stop_at(folder, row):
    """Have the runs of a folder fail at this row; at none, if it is empty."""
    (folder / "stop").write_text(row)


def copied(folder, *, write=None, shuffled=False, **options):
    """A run that copies in/ to out/, and fails at the row that is in the file `stop`. Its code is the same each time."""
    stop = str(folder / "stop")

    def work(rows):
        with contextlib.suppress(FileNotFoundError), open(stop) as file:
            if (row := file.read()) in rows:
                raise ValueError(f"stopped\nat {row}")
        return rows

    p = ps.Pipeline(**{"run_dir": folder / "run", "workers": 0, **options})
    rows = p | ps.ReadFromText(folder / "in" / "*.txt") | "work" >> ps.MapBatches(work)
    (rows | ps.Reshuffle() | ps.Map(str) if shuffled else rows) | (write or ps.WriteToText(folder / "out"))
    return p.run()


def fails(folder, row, **options):
    """The run comes to this row, and fails there."""
    stop_at(folder, row)
    with pytest.raises(StepError, match="stopped"):
        copied(folder, **options)
    stop_at(folder, "")


def contents(folder):
    """The part files in out/, by name."""
    return {path.name: path.read_text() for path in sorted((folder / "out").glob("part-*"))}


def inputs_of(folder):
    return "".join(path.read_text() for path in sorted((folder / "in").iterdir()))


def manifest_of(folder):
    return json.loads((folder / "run" / "manifest.json").read_text())


# The journal's file.


def test_only_its_owner_can_read_the_journal(tmp_path):
    before = os.umask(0)
    try:
        journal = Journal.create(str(tmp_path), {"run": "1"}, [], [])
        journal.set_facts({"explained": 1})
        modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in os.listdir(tmp_path)}
        journal.close()
    finally:
        os.umask(before)
    assert modes.keys() > {"journal.db", "journal.db-wal"}
    assert set(modes.values()) == {0o600}


class Marks:
    """Its pickle, when it is loaded, leaves a file that shows it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def planted_log(folder, loaded):
    """A write-ahead log for the journal in `folder`: with it the run has one more split, which is such a pickle."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    journal = Journal.open(str(other))
    journal.add_splits([(SplitId(0, 10_000), Marks(loaded))], "ReadFromText(*.txt)", [])
    shutil.copy(other / "journal.db-wal", folder / "journal.db-wal")
    journal.close()
    assert (folder / "journal.db-wal").stat().st_size


def given_away(path):
    """Make a file or folder another user's, which root alone can do."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a file another user's")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("whose", ["another user's", "linked", "writable"])
def test_a_log_that_somebody_else_put_beside_the_journal_is_not_read(folder, tmp_path, whose, fresh):
    """SQLite would take it for a part of the journal, whose pickles can do anything as the user who resumes the run."""
    fails(folder, "1-3999")
    run = folder / "run"
    loaded = tmp_path / "loaded"
    planted_log(run, loaded)
    log = run / "journal.db-wal"
    if whose == "another user's":
        given_away(log)
    elif whose == "linked":
        os.rename(log, tmp_path / "log")
        log.symlink_to(tmp_path / "log")
    else:
        log.chmod(0o666)
    with pytest.raises(OutputError, match=r"journal\.db-wal: .*not opened; remove it") as caught:
        copied(folder, fresh=fresh)
    assert "another user" in str(caught.value) or whose != "another user's"
    assert not loaded.exists()
    log.unlink()
    copied(folder, fresh=fresh)


@pytest.mark.parametrize(
    "name", ["journal.db", "journal.db-shm", "journal.db-journal", "journal.db.new", "lock", "manifest.json"]
)
def test_no_file_of_another_user_is_opened_in_a_run_dir(folder, name):
    fails(folder, "1-3999")
    file = folder / "run" / name
    file.touch()
    given_away(file)
    with pytest.raises(OutputError, match=f"{re.escape(name)}: belongs to another user"):
        copied(folder)


def test_a_lock_that_is_a_link_is_not_written_to(folder):
    (folder / "run").mkdir()
    (folder / "precious").write_text("precious")
    (folder / "run/lock").symlink_to(folder / "precious")
    with pytest.raises(OutputError, match="lock: is not a file itself"):
        copied(folder)
    assert (folder / "precious").read_text() == "precious"


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_run_dir_that_others_can_write_to_is_refused_with_what_to_do(folder, mode):
    run = folder / "run"
    run.mkdir()
    run.chmod(mode)
    with pytest.raises(OutputError, match="other users can write to the folder") as caught:
        copied(folder)
    assert os.listdir(run) == []
    command = re.search(r"\((chmod .*?)\)", str(caught.value))
    subprocess.run(shlex.split(command.group(1)), check=True)
    copied(folder)


def test_a_run_dir_of_another_user_is_refused(folder):
    run = folder / "run"
    run.mkdir(mode=0o755)
    given_away(run)
    with pytest.raises(OutputError, match="belongs to another user.*choose a folder of your own"):
        copied(folder)
    assert os.listdir(run) == []


def test_a_run_dir_that_the_run_makes_is_private_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        copied(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "run").stat().st_mode) == 0o700


def test_a_link_in_the_place_of_unpublished_parts_is_not_followed(folder):
    """Cleaning up would delete the files of that name in the folder that it leads to."""
    fails(folder, "1-3999")
    precious = folder / "precious"
    precious.mkdir()
    (precious / "notes.txt").write_text("mine")
    aside = folder / "out" / f".penstock-{manifest_of(folder)['run']}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.symlink_to(precious)
    with pytest.raises(OutputError, match="is a link"):
        copied(folder)
    assert [path.name for path in precious.iterdir()] == ["notes.txt"]
    aside.unlink()
    copied(folder)
    assert "".join(contents(folder).values()) == inputs_of(folder)


def test_a_split_is_prepared_once(tmp_path):
    split = SplitId(0, 0)
    journal = Journal.create(str(tmp_path), {"run": "1"}, [(split, "rows")], [])
    try:
        journal.prepare([(split, SplitResult(bundles=1), [])])
        with pytest.raises(EngineError, match="was done before"):
            journal.prepare([(split, SplitResult(bundles=2), [])])
        journal.done([split])
        with pytest.raises(EngineError, match="was done before"):
            journal.prepare([(split, SplitResult(bundles=2), [])])
        assert journal.splits.total().bundles == 1
        assert journal.splits.counts() == {"done": 1}
    finally:
        journal.close()


def test_the_log_of_a_killed_run_is_not_taken_for_that_of_the_next(tmp_path):
    """SQLite takes up a log that lies beside a journal, whatever journal that is."""
    (tmp_path / "killed").mkdir()
    first = Journal.create(str(tmp_path), {"run": "1"}, [(SplitId(0, n), f"old {n}") for n in range(300)], [])
    first.set_facts({"explained": "x" * 10_000})
    for path in tmp_path.glob("journal.db*"):  # what a process that is killed now leaves
        shutil.copy(path, tmp_path / "killed")
    first.close()
    assert (tmp_path / "killed" / "journal.db-wal").stat().st_size > 0
    journal = Journal.create(str(tmp_path / "killed"), {"run": "2"}, [(SplitId(0, 0), "new")], [])
    try:
        assert (journal.fact("run"), journal.fact("explained")) == ("2", None)
        assert journal.splits.open() == [(SplitId(0, 0), "new")]
    finally:
        journal.close()


# Parts.


class NotingSink(JsonlSink):
    """Notes the file aside of each part that it begins; fails at the third, if `broken` is beside its folder."""

    def open(self, part):
        noted = Path(f"{self.path}.noted")
        with noted.open("a") as file:
            file.write(f"{self.places(part).aside}\n")
        if noted.with_name("broken").exists() and len(noted.read_text().splitlines()) == 3:
            raise ValueError("broken")
        return super().open(part)


def test_no_two_processes_write_a_part_under_one_name(folder):
    """A worker of a process that was killed may still be writing when the next one does the same split."""

    def noted():
        copied(folder, write=ps.Write(NotingSink(str(folder / "out"), False)))

    (folder / "broken").touch()
    with pytest.raises(PenstockError, match="broken"):
        noted()
    (folder / "broken").unlink()
    noted()
    names = (folder / "out.noted").read_text().splitlines()
    parts = [re.sub(r"-\d+\.jsonl$", "", name) for name in names]
    assert parts[2] in parts[3:], "the second process has begun the part that the first could not end"
    assert len(set(names)) == len(names)


def test_part_names_are_those_of_the_number_of_workers_that_the_run_began_with(folder):
    """Where splits are few for the workers, what a stage makes for the next is cut finely, and there are more parts."""
    other = folder / "other"
    other.mkdir()
    (other / "in").symlink_to(folder / "in")
    copied(other, shuffled=True, threads_per_worker=8)
    copied(folder, shuffled=True, run_dir=folder / "clean")
    clean = contents(folder)
    assert contents(other).keys() != clean.keys(), "else this tests nothing"
    shutil.rmtree(folder / "out")
    fails(folder, "1-1000", shuffled=True)
    assert copied(folder, shuffled=True, threads_per_worker=8).splits_before > 0
    assert contents(folder) == clean


# An earlier output that is replaced.


def replaced(folder):
    return ps.WriteToText(folder / "out", overwrite=True)


def make_old_output(folder):
    (folder / "out").mkdir()
    for number in range(20):
        (folder / "out" / f"part-{number:05d}.txt").write_text(f"old {number}\n")
    return contents(folder)


def test_an_old_output_is_whole_until_the_run_is_done_however_often_it_fails(folder):
    old = make_old_output(folder)
    fails(folder, "0-3000", write=replaced(folder))
    assert manifest_of(folder)["splits"]["prepared"] > 0
    assert contents(folder) == old
    fails(folder, "1-3000", write=replaced(folder))
    assert manifest_of(folder)["splits"]["prepared"] > 0
    assert contents(folder) == old
    copied(folder, write=replaced(folder))
    assert "".join(contents(folder).values()) == inputs_of(folder)


def test_after_an_output_was_replaced_new_files_are_published_split_by_split(folder):
    make_old_output(folder)
    copied(folder, write=replaced(folder))
    before = contents(folder)
    write_input(folder, 2)
    fails(folder, "2-3000", write=replaced(folder))
    after = contents(folder)
    assert before.items() < after.items(), "some splits of the new file are there already, and all that was"
    copied(folder, write=replaced(folder))
    assert "".join(contents(folder).values()) == inputs_of(folder)


# What is told.


def test_the_manifest_shows_no_rows_of_an_error(folder):
    fails(folder, "1-1000")
    [session] = manifest_of(folder)["sessions"]
    assert session["error"] == "StepError: step 'work': ValueError"
    assert "1-1000" not in (folder / "run" / "manifest.json").read_text()


@pytest.mark.parametrize("options", [{}, {"fresh": True}])
@pytest.mark.parametrize("name", ["lock", "manifest.json", "journal.db", "batch_sizes.json"])
def test_files_of_others_in_the_folder_of_a_run_are_left_alone(folder, name, options):
    theirs = folder / "run" / name
    theirs.parent.mkdir()
    if name == "journal.db":
        with contextlib.closing(sqlite3.connect(theirs)) as db:
            db.execute("CREATE TABLE diary (day TEXT)")
    else:
        theirs.write_text('{"name": "somebody\'s"}')
    before = theirs.read_bytes()
    with pytest.raises(OutputError, match=f"{name} does not belong to a run"):
        copied(folder, **options)
    assert theirs.read_bytes() == before
    assert not (folder / "out").exists()


def test_after_new_files_no_number_of_rows_is_told_as_all(tmp_path):
    """How many there are was counted when the run began."""

    def write(part, rows):
        pq.write_table(pa.table({"n": list(range(rows))}), tmp_path / f"{part}.parquet")

    def run():
        p = ps.Pipeline(run_dir=tmp_path / "run", workers=0)
        p | ps.ReadFromParquet(tmp_path / "*.parquet") | ps.WriteToJsonl(tmp_path / "out")
        started = p.start()
        started.wait()
        return [(stage.rows, stage.known) for stage in started.progress()]

    write(0, 2000)
    assert run() == [(2000, 2000)]
    write(1, 3000)
    assert run() == [(5000, None)]


# Digests.


def test_all_digests_are_in_the_manifest_however_long_they_take(folder, monkeypatch):
    waited_for = threading.Event()
    digest_of = digests.sha256_of

    def slow(path):
        assert waited_for.wait(60)
        return digest_of(path)

    def waiting(method):
        """From now on somebody waits for the digests, so they may be made."""

        def waits(*arguments):
            waited_for.set()
            return method(*arguments)

        return waits

    monkeypatch.setattr(digests, "sha256_of", slow)
    for name in ("finish", "__exit__"):
        monkeypatch.setattr(Digests, name, waiting(getattr(Digests, name)))
    copied(folder)
    expected = [digest_of(str(path)) for path in sorted((folder / "in").iterdir())]
    assert [each["sha256"] for each in manifest_of(folder)["inputs"]] == expected


@pytest.mark.parametrize(
    ("wanted", "room", "made"),
    [(None, 0, True), (None, -1, False), (True, -1, True), (False, 0, False)],
)
def test_inputs_are_digested_up_to_a_size_or_as_the_user_wants(folder, monkeypatch, wanted, room, made):
    """The limit is for all inputs together."""
    every = sum(path.stat().st_size for path in (folder / "in").iterdir())
    assert digests.MOST_BYTES == 1 << 30
    monkeypatch.setattr(digests, "MOST_BYTES", every + room)
    copied(folder, input_digests=wanted)
    assert [each["sha256"] is not None for each in manifest_of(folder)["inputs"]] == [made, made]


def test_models_are_always_digested(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("some bytes")
    [file] = list_files(str(tmp_path / "file"))
    monkeypatch.setattr(digests, "MOST_BYTES", 0)
    journal = Journal.create(str(tmp_path), {"run": "1"}, [], [("model", "step", file), ("input", "step", file)])
    try:
        with Digests(journal, ps.RunOptions(input_digests=False)) as made:
            made.finish()
        found = {role: journal.files(role)["step"][file.path][1] is not None for role in ("model", "input")}
        assert found == {"model": True, "input": False}
    finally:
        journal.close()


# Model hosts.


def test_hosts_of_a_process_that_was_killed_are_ended(folder):
    fails(folder, "1-1000")
    run = manifest_of(folder)["run"]
    journal = Journal.open(str(folder / "run"))
    killed = journal.begin_session()  # which comes to no end
    journal.close()
    hosts = run_folder(f"{run}-{killed}")
    make_private(hosts)
    told = []
    with socket.socket(socket.AF_UNIX) as host:
        host.bind(os.path.join(hosts, "model.sock"))
        host.listen()
        host.settimeout(60)

        def serve():
            with host.accept()[0] as line:
                message, _ = Channel(line, plain=True).receive()
                told.append(message)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        try:
            copied(folder)
            assert not os.path.exists(hosts)
        finally:
            shutil.rmtree(hosts, ignore_errors=True)
        serving.join(60)
    assert [type(each) for each in told] == [Shutdown]
