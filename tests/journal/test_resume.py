"""Runs with a journal: they go on where they were, notice what has changed, and say how they stand."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy
import pytest
import xxhash

import penstock as ps
from kills.in_every_process import durable_steps
from penstock.errors import EngineError, OutputError, PenstockError, RunChangedError, StepError, TransientError, UsageError
from penstock.io import folders
from penstock.io.files import list_files
from penstock.io.jsonl import JsonlSink, JsonlWriter
from penstock.io.source import FileSource
from penstock.journal.digests import Digests
from penstock.journal.journal import Journal
from penstock.journal.run_dir import RunDir

LINES = 4000  # of some bytes each: several splits


@pytest.fixture
def folder(tmp_path):
    """A folder with inputs: in/0.txt and in/1.txt."""
    (tmp_path / "in").mkdir()
    for part in range(2):
        write_input(tmp_path, part)
    return tmp_path


def write_input(folder, part, lines=LINES):
    (folder / "in" / f"{part}.txt").write_text("".join(f"{part}-{n}\n" for n in range(lines)))


def copied(folder, *, stop_at=None, workers=0, function=None, **options):
    """A run that copies in/ to out/ and notes each row that it works on in `seen`; it fails at a row if it is told to."""
    seen = str(folder / "seen")

    def work(row):
        if row == stop_at:
            raise ValueError("stopped")
        return row

    def note(rows):
        with open(seen, "a") as file:
            file.write("".join(f"{row}\n" for row in rows))
        return rows

    p = ps.Pipeline(run_dir=folder / "run", workers=workers, **options)
    rows = p | ps.ReadFromText(folder / "in" / "*.txt") | ps.MapBatches(note) | "work" >> ps.Map(work)
    (rows | "more" >> ps.Map(function) if function else rows) | ps.WriteToText(folder / "out")
    return p.run()


def replacing(folder, stop_at, *, workers=0, **options):
    """A run that copies in/ over what is in out/."""
    p = ps.Pipeline(run_dir=folder / "run", workers=workers, **options)
    rows = p | ps.ReadFromText(folder / "in" / "*.txt")
    rows | ps.Map(lambda row: f"{1 // (row != stop_at)}{row}"[1:]) | ps.WriteToText(folder / "out", overwrite=True)
    return p.run()


def begun(folder, **options):
    """A run that has done some of its splits and failed."""
    with pytest.raises(StepError, match="stopped"):
        copied(folder, stop_at="1-1000", accept_changes=(), **options)


def goes_on(folder, **options):
    return copied(folder, accept_changes=("code",), **options)


def lines_of(folder):
    return [line for path in sorted((folder / "out").glob("part-*")) for line in path.read_text().splitlines()]


def inputs_of(folder):
    return [line for path in sorted((folder / "in").glob("*.txt")) for line in path.read_text().splitlines()]


def seen_by(folder):
    lines = (folder / "seen").read_text().splitlines()
    (folder / "seen").unlink()
    return lines


def manifest_of(folder):
    return json.loads((folder / "run" / "manifest.json").read_text())


def all_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Going on.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_where_it_was(folder, workers):
    begun(folder, workers=workers)
    done = set(lines_of(folder))
    assert 0 < len(done) < 2 * LINES, "some splits are visible already"
    seen_by(folder)
    result = goes_on(folder, workers=workers)
    assert lines_of(folder) == inputs_of(folder)
    assert done.isdisjoint(seen_by(folder)), "what was done is not done again"
    assert 0 < result.splits_before < result.splits
    assert result.rows_before == len(done)
    assert result.counts["work"].rows_in == 2 * LINES, "counts are those of all processes"
    assert [name for name in os.listdir(folder / "out") if name.startswith(".")] == []


def test_a_finished_run_does_nothing(folder):
    first = copied(folder)
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").iterdir()}
    seen_by(folder)
    again = copied(folder)
    assert again.was_finished
    assert not first.was_finished
    assert again.counts == first.counts
    assert again.metrics == first.metrics
    assert not (folder / "seen").exists()
    assert {path: path.stat().st_mtime_ns for path in (folder / "out").iterdir()} == before


def test_other_numbers_of_workers_threads_and_rows_in_a_batch_are_fine(folder):
    begun(folder, workers=2)
    goes_on(folder, workers=1, threads_per_worker=2)
    assert lines_of(folder) == inputs_of(folder)
    copied(folder, workers=0, accept_changes=("code",))


def test_part_names_do_not_depend_on_interruptions(folder, tmp_path_factory):
    begun(folder, workers=2)
    goes_on(folder, workers=0)
    clean = tmp_path_factory.mktemp("clean")
    (clean / "in").symlink_to(folder / "in")
    copied(clean, workers=2)
    assert all_files(clean / "out") == all_files(folder / "out")


def test_metrics_are_those_of_a_clean_run(folder):
    def run(stop_at, **options):
        def failing(row):
            if row == stop_at:
                raise ValueError("stopped")
            return row

        p = ps.Pipeline(run_dir=folder / "run", workers=2, **options)
        rows = p | ps.ReadFromText(folder / "in" / "*.txt") | ps.RunInference(Lengths(max_batch_size=10))
        rows | ps.Map(lambda result: result.example) | ps.Map(failing) | ps.WriteToText(folder / "out")
        return p.run()

    with pytest.raises(StepError):
        run("1-1000")
    assert run(None, accept_changes=("code",)).metrics.counter("num_inferences") == 2 * LINES


class Lengths(ps.ModelHandler):
    def load_model(self):
        return len

    def run_inference(self, batch, model, inference_args=None):
        return [ps.PredictionResult(row, model(row)) for row in batch]


def test_ctrl_c_leaves_a_run_that_can_go_on(folder):
    script = folder / "job.py"
    script.write_text(
        "import sys, time, penstock as ps\n"
        "def slow(row):\n"
        "    if row.startswith('1-'): time.sleep(0.01)\n"
        "    return row\n"
        "p = ps.Pipeline()\n"
        "p | ps.ReadFromText('in/*.txt') | ps.Map(slow) | ps.WriteToText('out')\n"
    )
    command = [sys.executable, "-m", "penstock.cli", "run", "--run-dir", "run", "--workers", "2", "job.py"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any((folder / "out").glob("part-*")), process)
    told = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "status", "run"], cwd=folder, capture_output=True, text=True
    )
    assert f"running, in process {process.pid}" in told.stdout
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    advice = "run the same command again, and it resumes from there"
    assert re.search(rf"penstock: stopped; what was done is kept in {folder}/run \(\d+ of 14 splits\): {advice}\n$", told), (
        told
    )
    assert manifest_of(folder)["state"] == "stopped"
    assert not [name for name in os.listdir(folder / "out") if name.startswith(".")]
    script.write_text(script.read_text().replace("time.sleep(0.01)", "pass"))
    command[4:4] = ["--accept-change", "code"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"penstock: {2 * LINES:,} rows \([\d,]+ of them before\), [\d.]+ s -> ", done.stderr)
    assert lines_of(folder) == inputs_of(folder)


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_a_lambda_that_moved_in_its_file_is_the_same_step(folder):
    """Labels of lambdas name their line; what was counted under the old one is counted on."""
    script = folder / "job.py"
    text = (
        "import penstock as ps, os\n"
        "p = ps.Pipeline(run_dir='run', workers=0)\n"
        "rows = p | ps.ReadFromText('in/*.txt')\n"
        "rows = rows | ps.Map(lambda row: row if os.path.exists('on') else 1 // (row != '1-1000'))\n"
        "rows | ps.Map(str) | ps.WriteToText('out')\n"
        "p.run()\n"
    )
    script.write_text(text)
    failed = subprocess.run([sys.executable, "job.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert "ZeroDivisionError" in failed.stderr
    assert "run the same command again, and it resumes from there" in failed.stderr
    (folder / "on").touch()
    script.write_text("# a comment\n" + text)
    done = subprocess.run([sys.executable, "job.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(lines_of(folder)) == 2 * LINES


def test_collect_cannot_be_resumed(tmp_path):
    with pytest.raises(UsageError, match="cannot be resumed"):
        (ps.Pipeline(run_dir=tmp_path) | ps.Create([1])).collect()


@pytest.mark.parametrize(
    "options",
    [{"fresh": True}, {"accept_changes": ("inputs",)}, {"run_dir": "x", "accept_changes": "inputs"}, {"run_dir": ""}],
)
def test_options_that_make_no_sense(options):
    with pytest.raises(UsageError):
        ps.Pipeline(**options)


# Starting over, and earlier outputs.


def test_fresh_starts_over_and_keeps_the_old_output_until_it_is_done(folder):
    copied(folder)
    old = lines_of(folder)
    seen_by(folder)
    with pytest.raises(StepError):
        copied(folder, fresh=True, function=lambda row: f"new {1 // (row != '1-1000')} {row}")
    assert lines_of(folder) == old, "until the new run is done, readers see the old one"
    copied(folder, function=lambda row: f"new {row}", accept_changes=("code",))
    assert sorted({line.split()[0] for line in lines_of(folder)}) == ["new"]
    assert len(lines_of(folder)) == 2 * LINES


def test_a_run_that_overwrites_replaces_the_output_when_it_is_done(folder):
    (folder / "out").mkdir()
    for number in range(40):
        (folder / "out" / f"part-{number:05d}.txt").write_text("old\n")

    with pytest.raises(StepError):
        replacing(folder, "1-3999", workers=2)
    assert set(lines_of(folder)) == {"old"}
    assert len(list((folder / "out").glob("part-*"))) == 40
    replacing(folder, None, workers=2, accept_changes=("code",))
    assert lines_of(folder) == inputs_of(folder)
    assert replacing(folder, None).was_finished


REPLACING = """
import importlib.metadata, os, sys, traceback
import fsspec.implementations.local
import penstock as ps, penstock.journal.journaled, penstock.io.lines
import durable_steps

importlib.metadata.distributions = lambda: ()  # to read what is known of all packages takes longer than the run

def run(folder, crash_at):
    os.chdir(folder)
    durable_steps.aim(crash_at)
    p = ps.Pipeline(run_dir="run", workers=0)
    p | ps.ReadFromText("in/*.txt") | ps.WriteToText("out", overwrite=True)
    p.run()

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(*line.rstrip().split("|"))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is such a thing: a kill, unlike a power cut, loses nothing that a disk must keep."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def test_a_kill_at_each_step_of_a_run_that_replaces_an_output(memory):
    """In particular between the renames at the end, and before what is left of the old output is removed. The processes are
    forked from one that has imported all: importing, and waiting for the disk, took nearly all of the time."""
    command = [sys.executable, "-c", REPLACING]
    environment = durable_steps.environment()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:

        def run(folder, crash_at=""):
            server.stdin.write(f"{folder}|{crash_at}\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        for step in range(1, 100):
            folder = memory / str(step)
            (folder / "in").mkdir(parents=True)
            for part in range(2):
                write_input(folder, part, lines=600)
            (folder / "out").mkdir()
            for number in (0, 1, 50):
                (folder / "out" / f"part-{number:05d}.txt").write_text("old\n")
            code = run(folder, f"coordinator:{step}:mark")
            assert code == (-signal.SIGKILL if (folder / "mark").exists() else 0)
            if code:
                assert run(folder) == 0
            assert lines_of(folder) == inputs_of(folder)
            assert not [name for name in os.listdir(folder / "out") if name.startswith(".")]
            assert manifest_of(folder)["state"] == "finished"
            if not code:
                break
    assert step > 20, "there are more steps than that"
    assert penstock(folder, "verify", "run").returncode == 0


def test_output_of_somebody_else_is_not_touched(folder):
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.txt").write_text("old\n")
    with pytest.raises(OutputError, match="there already"):
        copied(folder)
    (folder / "out" / "part-00000.txt").unlink()
    copied(folder)  # nothing was begun: it is not refused
    assert lines_of(folder) == inputs_of(folder)


# What has changed.


def test_an_input_that_was_replaced_is_refused(folder):
    begun(folder)
    write_input(folder, 1, LINES + 1)
    with pytest.raises(RunChangedError, match=r"(?s)1\.txt had a size of .*\(--accept-change inputs\)"):
        copied(folder, accept_changes=("code",))


def test_an_input_with_other_bytes_and_the_same_size_is_refused(folder):
    begun(folder)
    path = folder / "in" / "0.txt"
    path.write_text(path.read_text().replace("0-1\n", "0-x\n"))
    with pytest.raises(RunChangedError, match=r"0\.txt was written again"):
        goes_on(folder)


def test_an_input_that_was_only_touched_is_the_same(folder):
    copied(folder)
    os.utime(folder / "in" / "0.txt", (1, 1))
    assert copied(folder).was_finished


def test_an_input_that_is_gone_is_refused(folder):
    begun(folder)
    (folder / "in" / "0.txt").rename(folder / "elsewhere")
    with pytest.raises(RunChangedError, match=r"0\.txt is gone"):
        goes_on(folder)


def test_new_files_are_more_work(folder):
    begun(folder)
    before = set(os.listdir(folder / "out"))
    write_input(folder, "00")  # sorted before the others: its rows come later all the same
    goes_on(folder)
    assert lines_of(folder) == [line for part in ("0", "1", "00") for line in inputs_of_part(folder, part)]
    write_input(folder, 2)
    seen_by(folder)
    result = copied(folder, accept_changes=("code",))
    assert seen_by(folder) == inputs_of_part(folder, 2), "a finished run goes on with the new file alone"
    assert result.counts["work"].rows_in == 4 * LINES
    assert before < set(os.listdir(folder / "out"))


def inputs_of_part(folder, part):
    return (folder / "in" / f"{part}.txt").read_text().splitlines()


def test_rows_in_memory_count_as_inputs(tmp_path):
    def run(rows, **options):
        p = ps.Pipeline(run_dir=tmp_path / "run", **options)
        p | ps.Create(rows) | ps.Map(str) | ps.WriteToText(tmp_path / "out")
        return p.run()

    run([1, 2])
    assert run([1, 2]).was_finished
    with pytest.raises(RunChangedError, match="inputs: step 'Create'"):
        run([1, 3])
    assert run([1, 3], accept_changes=("inputs",)).was_finished


SCRIPT = """
import sys
import penstock as ps
import steps

p = ps.Pipeline(run_dir="run", workers=1)
rows = p | ps.Create(["a ", "b"]) | ps.Map(steps.work) | ps.RunInference(steps.Handler())
rows | ps.Map(repr) | ps.WriteToText("out")
try:
    print(p.run().was_finished, p.run().was_finished)
except ps.UsageError as error:
    print(error)
"""
STEPS = """
import penstock as ps

class Tok:
    def __init__(self):
        self.calls = 0
    def clean(self, x):
        self.calls += 1
        return x.strip()

class Model:
    def score(self, row):
        return len(row)

TOK, MODEL, SEEN = Tok(), Model(), {}

def note(seen, x):
    seen[x] = True

def work(x):
    note(SEEN, x)
    return TOK.clean(x)

class Handler(ps.ModelHandler):
    def load_model(self):
        return MODEL
    def run_inference(self, batch, model, inference_args=None):
        return [model.score(row) for row in batch]
"""


def test_a_module_that_was_changed_is_named_and_state_is_no_change(tmp_path):
    def run(**changed):
        (tmp_path / "script.py").write_text(SCRIPT)
        (tmp_path / "steps.py").write_text(STEPS.replace(*changed.get("steps", ("", ""))))
        command = [sys.executable, "-B", "script.py"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True, timeout=60).stdout

    assert run() == "False True\n"
    assert run() == "True True\n"
    assert "  code: steps.py was changed\nrestore" in run(steps=("strip()", "upper()"))
    assert "  code: steps.py was changed\nrestore" in run(steps=("self.calls = 0", "self.calls = 1"))


def test_a_journal_of_an_older_version_is_refused_with_what_to_do(folder):
    copied(folder)
    with contextlib.closing(sqlite3.connect(folder / "run" / "journal.db")) as journal, journal:
        journal.execute("UPDATE facts SET value = '1' WHERE name = 'format'")
    for options in {}, {"fresh": True}:
        with pytest.raises(EngineError, match=r"another version \(format 1, expected 2\).*remove what the run has written"):
            copied(folder, **options)
    shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "run")
    assert not copied(folder).was_finished


def test_another_pipeline_is_refused(folder):
    copied(folder)
    with pytest.raises(RunChangedError, match=r"(?s)pipeline: .*start over with fresh=True \(--fresh\)$"):
        copied(folder, function=str)


def test_another_model_is_refused(folder):
    model = folder / "model.bin"

    class Handler(Lengths):
        def model_files(self):
            return [str(model)]

    def run(**options):
        p = ps.Pipeline(run_dir=folder / "run", **options)
        p | ps.Create(["a", "bb"]) | ps.RunInference(Handler()) | ps.Map(repr) | ps.WriteToText(folder / "out")
        return p.run()

    model.write_bytes(b"1234")
    run()
    os.utime(model, (1, 1))
    assert run().was_finished, "its digest is the same"
    assert manifest_of(folder)["models"][0]["sha256"] is not None
    model.write_bytes(b"4321")
    with pytest.raises(RunChangedError, match=r"models: step .*model\.bin was written again"):
        run()
    assert run(accept_changes=("models",)).was_finished


# Two processes, damaged journals, disks that are full.


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(folder):
    script = folder / "job.py"
    script.write_text(
        "import time, penstock as ps\n"
        "p = ps.Pipeline(run_dir='run', workers=0)\n"
        "p | ps.Create(range(3)) | ps.Map(lambda n: print(n, flush=True) or time.sleep(600)) | ps.WriteToText('out')\n"
        "p.run()\n"
    )
    first = subprocess.Popen([sys.executable, "job.py"], cwd=folder, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"0\n"
    second = subprocess.run([sys.executable, "job.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert f"process {first.pid}, or one that it has forked, is working on this run" in second.stderr
    first.kill()
    first.wait()
    third = subprocess.Popen([sys.executable, "job.py"], cwd=folder, stdout=subprocess.PIPE)
    assert third.stdout.readline() == b"0\n"
    third.kill()
    third.wait()
    first.stdout.close()
    third.stdout.close()


def test_a_damaged_journal_is_not_taken_for_none(folder):
    begun(folder)
    journal = folder / "run" / "journal.db"
    data = bytearray(journal.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    journal.write_bytes(data)
    before = lines_of(folder)
    for options in {}, {"fresh": True}:  # nothing is known any more of who wrote what is there
        with pytest.raises(EngineError, match=r"is damaged.*remove what the run has written .* and this run_dir, and run"):
            copied(folder, **options)
    assert lines_of(folder) == before
    shutil.rmtree(folder / "run")
    with pytest.raises(OutputError, match="there already"):
        copied(folder)
    shutil.rmtree(folder / "out")
    copied(folder)
    assert lines_of(folder) == inputs_of(folder)


def test_a_journal_that_was_half_made_is_made_anew(folder):
    (folder / "run").mkdir()
    (folder / "run" / "journal.db.new").write_bytes(os.urandom(5000))
    copied(folder)
    assert lines_of(folder) == inputs_of(folder)
    assert not (folder / "run" / "journal.db.new").exists()


def test_a_torn_end_of_the_journal_costs_one_commit(folder):
    """A process is killed with its journal's log in place; then the end of that log is torn off."""
    script = folder / "job.py"
    script.write_text(
        "import penstock as ps\n"
        "p = ps.Pipeline(run_dir='run', workers=0)\n"
        "p | ps.ReadFromText('in/*.txt') | ps.WriteToText('out')\n"
        "p.run()\n"
    )
    environment = durable_steps.environment(f"coordinator:90:{folder}/mark")
    assert subprocess.run([sys.executable, "job.py"], cwd=folder, env=environment, timeout=60).returncode == -signal.SIGKILL
    log = folder / "run" / "journal.db-wal"
    log.write_bytes(log.read_bytes()[:-1000] + b"torn")
    shutil.copytree(folder / "run", folder / "copy")  # whoever opens it mends it
    journal = Journal.open(str(folder / "copy"))
    done = journal.splits.counts().get("done", 0)
    journal.close()
    assert done > 0, "some splits were done before, and the torn log still says so"
    assert subprocess.run([sys.executable, "job.py"], cwd=folder, timeout=60).returncode == 0
    assert lines_of(folder) == inputs_of(folder)


def test_a_clock_that_jumps_changes_nothing(folder):
    begun(folder)
    with sqlite3.connect(folder / "run" / "journal.db") as db:
        db.execute("UPDATE sessions SET started = started + 1e9")
        db.execute("UPDATE facts SET value = '99999999999' WHERE name = 'created'")
    goes_on(folder)
    assert lines_of(folder) == inputs_of(folder)
    assert manifest_of(folder)["seconds"] > 0


class FailingWriter(JsonlWriter):
    def add(self, block):
        if os.path.exists(os.path.join(os.path.dirname(self.places.final), "..", "broken")):
            raise OSError(errno.EIO, "Input/output error")
        super().add(block)


class FailingSink(JsonlSink):
    def open(self, part):
        return FailingWriter(self.places(part))


def test_input_output_errors_end_a_run_that_can_go_on(folder):
    def run():
        p = ps.Pipeline(run_dir=folder / "run", workers=0)
        p | ps.ReadFromText(folder / "in" / "*.txt") | ps.Write(FailingSink(str(folder / "out"), False))
        return p.run()

    (folder / "broken").touch()
    with pytest.raises(TransientError, match="Input/output error"):
        run()
    (folder / "broken").unlink()
    run()
    assert [json.loads(line) for line in lines_of(folder)] == inputs_of(folder)


SMALL_DISK = """
mount -t tmpfs -o size=$SIZE tmpfs disk
mkdir disk/out disk/run
dd if=/dev/zero of=disk/filling bs=1k count=$FILL 2> /dev/null
python job.py 2> first
echo $? > codes
rm disk/filling
mount -o remount,ro disk
python job.py 2> second
echo $? >> codes
mount -o remount,rw disk
python job.py 2> third
echo $? >> codes
cp -r disk/out disk/run .
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a file system of its own for one process is Linux's")
@pytest.mark.parametrize(("output", "run_dir"), [("disk/out", "run0"), ("out0", "disk/run")])
def test_a_full_and_a_read_only_disk(folder, output, run_dir):
    """A real file system of 2 MB: first it is full, then it may not be written to, then all is well."""
    (folder / "disk").mkdir()
    (folder / "job.py").write_text(
        "import penstock as ps\n"
        f"p = ps.Pipeline(run_dir={run_dir!r}, workers=2)\n"
        f"p | ps.ReadFromText('in/*.txt') | ps.WriteToText({output!r})\n"
        "p.run()\n"
    )
    (folder / "disk.sh").write_text(SMALL_DISK)
    environment = os.environ | {
        "SIZE": "2m",
        "FILL": "2030",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "disk.sh"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    codes = (folder / "codes").read_text().split()
    first, second, third = ((folder / name).read_text() for name in ("first", "second", "third"))
    assert codes == ["1", "1", "0"], (done.stderr, first, second, third)
    assert "No space left on device" in first or "database or disk is full" in first or "disk I/O error" in first
    assert "Read-only file system" in second or "readonly database" in second
    where = folder / ("out" if output.startswith("disk") else "out0")
    assert [line for path in sorted(where.glob("part-*")) for line in path.read_text().splitlines()] == inputs_of(folder)


# The manifest, status and verify.


def penstock(folder, *arguments):
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_manifest_tells_what_went_in_and_what_came_out(folder):
    copied(folder, workers=2)
    manifest = manifest_of(folder)
    assert manifest["state"] == "finished"
    assert [os.path.basename(each["path"]) for each in manifest["inputs"]] == ["0.txt", "1.txt"]
    assert all(len(each["sha256"]) == 64 for each in manifest["inputs"])
    [output] = manifest["outputs"]
    assert sum(part["bytes"] for part in output["parts"]) == sum(p.stat().st_size for p in (folder / "out").iterdir())
    assert [part["xxh128"] for part in output["parts"]] == [
        xxhash.xxh3_128_hexdigest(Path(part["path"]).read_bytes()) for part in output["parts"]
    ]
    assert manifest["counts"]["work"] == {"rows_in": 2 * LINES, "rows_out": 2 * LINES, "rows_failed": 0}
    assert manifest["packages"]["pyarrow"]
    assert manifest["penstock"] == ps.__version__
    assert any("work" in line for line in manifest["pipeline"])


def test_failures_are_told_by_kind(folder):
    p = ps.Pipeline(run_dir=folder / "run")
    good, bad = p | ps.Create(range(10)) | "halve" >> ps.Map(lambda n: 6 // (n % 3)).with_exception_handling()
    good | "good" >> ps.Map(str) | "write good" >> ps.WriteToText(folder / "out")
    bad | "bad" >> ps.Map(lambda failed: {"n": failed[0]}) | ps.WriteToJsonl(folder / "dead")
    p.run()
    assert manifest_of(folder)["failures"] == {"halve": {"raised": 4}}
    assert "halve: 4 raised" in penstock(folder, "status", "run").stdout


def test_status_and_verify(folder):
    assert penstock(folder, "status", "nowhere").returncode == 2
    assert penstock(folder, "verify", "nowhere").returncode == 2
    begun(folder)
    told = penstock(folder, "status", "run").stdout
    assert "failed; run the same command again (without --fresh) to resume" in told
    assert "stopped" in told, "the error is shown"
    assert penstock(folder, "verify", "run").returncode == 2, "it is not finished"
    goes_on(folder)
    assert "finished" in penstock(folder, "status", "run").stdout
    assert penstock(folder, "verify", "run").returncode == 0
    parts = sorted((folder / "out").iterdir())
    parts[0].write_text(parts[0].read_text().replace("0-1\n", "0-x\n"))
    parts[1].unlink()
    parts[2].write_text("short")
    (folder / "out" / "part-99999.txt").write_text("stranger")
    wrong = penstock(folder, "verify", "run")
    assert wrong.returncode == 1
    for part in (f"{parts[0]}: its bytes have changed", f"{parts[1]}: is gone", f"{parts[2]}: has 5 bytes", "part-99999"):
        assert part in wrong.stderr


def test_a_sink_that_writes_at_least_once_says_so(tmp_path):
    class Log(JsonlSink):
        delivery = "at least once"

    p = ps.Pipeline(run_dir=tmp_path / "run")
    p | ps.Create([1]) | ps.Write(Log(str(tmp_path / "out"), False))
    assert "at least once, if the run is resumed" in p.explain()
    assert "can be resumed: output becomes visible split by split" in p.explain()


def test_a_handler_that_names_no_files_is_told_of(tmp_path):
    class Length(ps.ModelHandler):
        files = ()

        def model_files(self):
            return self.files

        def load_model(self):
            return len

        def run_inference(self, batch, model, inference_args=None):
            return [model(row) for row in batch]

    class FromFile(Length):
        files = ("weights",)

    p = ps.Pipeline(run_dir=tmp_path / "run")
    rows = p | ps.Create(["a"])
    for label, handler in {"with": FromFile(), "without": Length()}.items():
        rows | label >> ps.RunInference(handler) | f"{label} out" >> ps.WriteToParquet(tmp_path / label)
    told = [line for line in p.explain().splitlines() if "a model that has changed is not noticed" in line]
    assert [line.split("'")[1] for line in told] == ["without"]


# Rarer ways to go wrong.


def two_branches(folder, order, stop_at=None, **options):
    """Two sources, each into a folder of its own, in one order or the other."""

    def work(row):
        if row == stop_at:
            raise ValueError("stopped")
        return row

    p = ps.Pipeline(run_dir=folder / "run", workers=0, accept_changes=("code",), **options)
    for part in order:
        rows = p | f"read {part}" >> ps.ReadFromText(folder / "in" / f"{part}.txt")
        rows | f"work {part}" >> ps.Map(work) | f"write {part}" >> ps.WriteToText(folder / f"out{part}")
    return p.run()


def test_sources_and_sinks_in_another_order_are_refused(folder):
    with pytest.raises(StepError):
        two_branches(folder, "01", stop_at="1-1000")
    with pytest.raises(RunChangedError, match="the sources are written in another order"):
        two_branches(folder, "10")
    two_branches(folder, "01")
    for part in "01":
        written = [line for path in sorted((folder / f"out{part}").iterdir()) for line in path.read_text().splitlines()]
        assert written == inputs_of_part(folder, part)


def test_a_fresh_start_that_is_refused_leaves_the_run_as_it_was(folder):
    begun(folder)
    stranger = folder / "out" / "part-99999.txt"
    stranger.write_text("mine")
    with pytest.raises(OutputError, match="there already"):
        copied(folder, fresh=True)
    assert stranger.read_text() == "mine"
    stranger.unlink()
    assert goes_on(folder).splits_before > 0, "what was done is known"
    assert lines_of(folder) == inputs_of(folder)


def test_a_fresh_start_does_not_replace_the_files_of_others(folder):
    copied(folder)
    for path in (folder / "out").iterdir():
        path.unlink()
    (folder / "out" / "part-00000.txt").write_text("of another run")
    with pytest.raises(OutputError, match="there already"):
        copied(folder, fresh=True)
    assert (folder / "out" / "part-00000.txt").read_text() == "of another run"


def test_a_fresh_start_that_writes_elsewhere_leaves_nothing_aside(folder):
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.txt").write_text("old\n")

    def run(out, stop_at=None, **options):
        p = ps.Pipeline(run_dir=folder / "run", **options)
        rows = p | ps.ReadFromText(folder / "in" / "*.txt") | ps.Map(lambda row: f"{1 // (row != stop_at)}")
        rows | ps.WriteToText(folder / out, overwrite=True)
        return p.run()

    with pytest.raises(StepError):
        run("out", stop_at="1-3999")
    assert {path.name for path in (folder / "out").iterdir()} > {"part-00000.txt"}, "finished parts wait aside"
    run("elsewhere", fresh=True)
    assert [path.name for path in (folder / "out").iterdir()] == ["part-00000.txt"]


def test_passwords_in_errors_do_not_reach_the_manifest(folder):
    def ask(row):
        raise ConnectionError("no answer from postgres://me:secret@host/db")

    with pytest.raises(StepError, match="secret"):
        copied(folder, function=ask)
    assert manifest_of(folder)["sessions"][0]["error"] is not None
    for path in (folder / "run").iterdir():
        assert b"secret" not in path.read_bytes(), path


def test_new_folders_outlast_a_power_cut(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(folders, "sync_folder", synced.append)
    folders.make_folder(str(tmp_path / "a" / "b"))
    folders.make_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert sorted(synced) == [str(tmp_path), str(tmp_path / "a")], "each name is kept by the folder that holds it"


@pytest.mark.parametrize("run_dir", ["run", "."])
@pytest.mark.parametrize("source", ["{0}", "file://{0}", "{0}/link", "{0}/**/*.txt"])
def test_a_run_does_not_read_its_own_files(tmp_path, source, run_dir):
    (tmp_path / "a.txt").write_text("1\n2\n")
    (tmp_path / "link").symlink_to(".")

    def run(**options):
        p = ps.Pipeline(run_dir=tmp_path / run_dir, workers=0, **options)
        p | "read" >> ps.ReadFromText(source.format(tmp_path)) | ps.WriteToText(tmp_path / "out")
        return p.run()

    for options, is_done in ({}, False), ({}, True), ({"fresh": True}, False), ({}, True):
        result = run(**options)
        assert (result.was_finished, result.rows_out("read")) == (is_done, 2)
        assert (tmp_path / "out" / "part-00000.txt").read_text() == "1\n2\n"
    (tmp_path / "b.txt").write_text("3\n")
    assert run().rows_out("read") == 3, "but it reads what others put there"


@pytest.mark.parametrize("step", [2, 5, 8, 12, 16, 20, 24, 28, 32, 36, 40])
def test_a_run_that_was_killed_does_not_read_its_own_files(tmp_path, step):
    (tmp_path / "a.txt").write_text("1\n2\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import penstock as ps\n"
        "p = ps.Pipeline(run_dir='run', workers=0)\n"
        "p | ps.ReadFromText('[!s]*') | ps.WriteToText('out')\n"
        "p.run()\n"
    )
    environment = durable_steps.environment(f"coordinator:{step}:{tmp_path / 'script.mark'}")
    killed = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, timeout=60)
    assert killed.returncode in (0, -signal.SIGKILL)
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True, timeout=60)
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["1\n2\n"]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_formats_with_a_schema_do_not_look_at_the_files_of_the_run(tmp_path, kind):
    read, write = {"parquet": (ps.ReadFromParquet, ps.WriteToParquet), "csv": (ps.ReadFromCsv, ps.WriteToCsv)}[kind]
    tmp_path = tmp_path / "in"
    p = ps.Pipeline()
    p | ps.Create([{"a": "1"}]) | write(tmp_path)
    p.run()

    def run():
        p = ps.Pipeline(run_dir=tmp_path / "run", workers=0)
        p | "read" >> read(tmp_path) | ps.Map(lambda row: {"other": row["a"]}) | write(tmp_path / "out")
        return p.run()

    assert run().rows_out("read") == 1
    shutil.copy(next(tmp_path.glob("part-*")), tmp_path / f"later.{kind}")
    assert run().rows_out("read") == 2
    assert run().was_finished


def test_a_file_that_comes_while_a_run_begins_is_read_once(folder, monkeypatch):
    count = FileSource.among

    def and_then_one_comes(source, files):
        write_input(folder, 2)
        return count(source, files)

    monkeypatch.setattr(FileSource, "among", and_then_one_comes)
    copied(folder)
    assert lines_of(folder) == inputs_of(folder)[: 2 * LINES]
    monkeypatch.undo()
    copied(folder)
    assert sorted(lines_of(folder)) == sorted(inputs_of(folder)), "it is new for the next process"


def test_files_that_change_while_they_are_read_are_noticed(folder):
    def change(row):
        if row == "1-10":
            write_input(folder, 0, lines=LINES + 1)
        return row

    with pytest.raises(RunChangedError, match=r"(?s)changed while .*in/0.txt had a size of .*start over") as raised:
        copied(folder, function=change)
    assert not getattr(raised.value, "__notes__", None), "there is nothing to go on with"
    assert manifest_of(folder)["state"] == "failed"


def test_models_that_change_while_they_are_used_are_noticed(folder):
    class Adds(ps.ModelHandler):
        def __init__(self, path, writes=()):
            super().__init__(max_batch_size=100)
            self.path, self.writes = path, writes

        def model_files(self):
            return [self.path]

        def load_model(self):
            for name in self.writes:
                with open(f"{self.path}/{name}", "a") as file:
                    file.write("more")
            return len

        def run_inference(self, batch, model, inference_args=None):
            return [str(model(row)) for row in batch]

    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("1")

    def run(**options):
        p = ps.Pipeline(run_dir=folder / "run", workers=0, **options)
        rows = p | ps.ReadFromText(folder / "in" / "0.txt")
        rows | ps.RunInference(Adds(str(folder / "model"), writes=["weights"])) | ps.WriteToText(folder / "out")
        return p.run()

    with pytest.raises(RunChangedError, match=r"(?s)changed while .*model/weights had a size of 1 "):
        run()
    assert not run(accept_changes=("models",)).was_finished, "what is accepted is taken for what it was"
    p = ps.Pipeline(run_dir=folder / "other", workers=0)
    rows = p | ps.ReadFromText(folder / "in" / "0.txt")
    rows | ps.RunInference(Adds(str(folder / "model"), writes=["cache"])) | ps.WriteToText(folder / "other out")
    p.run()


def test_an_input_that_comes_back_is_not_new(folder):
    begun(folder)
    (folder / "in" / "0.txt").rename(folder / "aside.txt")
    with pytest.raises(RunChangedError, match="0.txt is gone"):
        goes_on(folder)
    (folder / "aside.txt").rename(folder / "in" / "0.txt")
    goes_on(folder)
    (folder / "in" / "0.txt").rename(folder / "aside.txt")
    write_input(folder, 2)
    copied(folder, accept_changes=("inputs", "code"))
    kinds = [each["kind"] for each in manifest_of(folder)["accepted_changes"]]
    assert kinds == ["code", "inputs"], "the first is from goes_on()"
    (folder / "aside.txt").rename(folder / "in" / "0.txt")
    assert copied(folder).was_finished
    assert sorted(lines_of(folder)) == sorted(inputs_of(folder))


def test_a_change_that_is_accepted_for_a_finished_run_is_no_change_of_it(folder):
    copied(folder)
    assert copied(folder, deterministic=True, accept_changes=("code",)).was_finished
    assert copied(folder).was_finished, "it is still the run that it was"


def test_digests_of_files_that_did_not_change_are_kept(folder):
    begun(folder)
    goes_on(folder)
    write_input(folder, 2)
    copied(folder, deterministic=True, accept_changes=("code",))
    os.utime(folder / "in" / "0.txt", (1, 1))
    assert copied(folder, deterministic=True).was_finished


def test_a_part_that_another_run_has_replaced_is_not_taken_for_done(folder):
    begun(folder)
    part = min((folder / "out").glob("part-*"))
    part.write_text("of another run\n")
    with pytest.raises(OutputError, match="gone or changed"):
        goes_on(folder)


def test_fresh_starts_know_all_that_the_run_has_ever_written(folder):
    for answer in "a", "bbbb", "a", "c":
        copied(folder, fresh=True, function=lambda row, answer=answer: answer)
        assert set(lines_of(folder)) == {answer}


def test_files_of_others_under_an_old_name_are_left_alone(folder):
    (folder / "out").mkdir()
    for name in "part-00000.txt", "part-00077.txt":
        (folder / "out" / name).write_text("old\n")

    def run():
        p = ps.Pipeline(run_dir=folder / "run", workers=0)
        p | ps.ReadFromText(folder / "in" / "*.txt") | ps.WriteToText(folder / "out", overwrite=True)
        return p.run()

    run()
    assert not (folder / "out" / "part-00077.txt").exists()
    (folder / "out" / "part-00077.txt").write_text("of another program\n")
    write_input(folder, 2)
    run()
    assert (folder / "out" / "part-00077.txt").read_text() == "of another program\n"


@pytest.mark.parametrize("is_finished", [False, True])
def test_output_that_is_gone_is_not_taken_for_done(folder, is_finished):
    begun(folder)
    if is_finished:
        goes_on(folder)
    next((folder / "out").iterdir()).unlink()
    with pytest.raises(OutputError, match=r"1 part\(s\) that this run has written are gone.*--fresh"):
        goes_on(folder)


def test_a_part_that_is_gone_before_it_was_published_is_an_error(folder):
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.txt").write_text("old\n")

    with pytest.raises(StepError):
        replacing(folder, "1-1000")
    [aside] = [path for path in (folder / "out").iterdir() if path.is_dir()]
    parts = [path for path in aside.iterdir() if not path.name.startswith(".")]
    assert len(parts) > 1, "splits that are prepared wait for the others"
    content = parts[0].read_bytes()
    parts[0].unlink()
    gone = rf"1 part\(s\) that this run has written are gone or changed, such as {parts[0]}; restore them, or .*--fresh"
    for _ in range(2):
        with pytest.raises(OutputError, match=gone):
            replacing(folder, None, accept_changes=("code",))
    assert lines_of(folder) == ["old"]
    parts[0].write_bytes(content)
    replacing(folder, None, accept_changes=("code",))
    assert lines_of(folder) == inputs_of(folder)


def test_a_fresh_start_replaces_a_part_whose_split_has_lost_another(tmp_path, monkeypatch):
    class Away(JsonlSink):
        def publish(self, token):
            if not (tmp_path / "back").exists():
                raise ConnectionError("the store is away")
            super().publish(token)

    def run(answer, **options):
        p = ps.Pipeline(run_dir=tmp_path / "run", **options)
        rows = p | ps.Create([1]) | ps.Map(lambda row: {"answer": os.environ["ANSWER"]})
        rows | ps.WriteToJsonl(tmp_path / "first")
        rows | ps.Write(Away(str(tmp_path / "second"), False))
        monkeypatch.setenv("ANSWER", answer)  # as if the model's answers differed a little each time
        return p.run()

    with pytest.raises(PenstockError, match="away"):
        run("a")
    assert (tmp_path / "first" / "part-00000.jsonl").exists()
    for part in (tmp_path / "second").glob(".penstock-*/*.jsonl"):
        part.unlink()
    (tmp_path / "back").touch()
    with pytest.raises(OutputError, match=r"second: 1 part\(s\) that this run has written are gone"):
        run("bb")
    run("bb", fresh=True)
    for folder in "first", "second":
        assert (tmp_path / folder / "part-00000.jsonl").read_text() == '{"answer":"bb"}\n'


def test_a_source_that_names_inputs_need_not_have_only(tmp_path):
    class Numbers(ps.Source):
        def inputs(self):
            return [ps.InputFile("numbers", 3, "today", None)]

        def splits(self, goal):
            return [0, 1, 2]

        def read(self, split):
            yield [str(split)]

    p = ps.Pipeline(run_dir=tmp_path / "run")
    p | ps.Read(Numbers()) | ps.WriteToText(tmp_path / "out")
    assert p.run().splits == 3


def test_names_and_errors_that_are_no_text(tmp_path):
    name = os.fsdecode(b"\xff.txt")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text("a\nb\n")

    def run(**options):
        p = ps.Pipeline(run_dir=tmp_path / "run", **options)
        rows = p | ps.ReadFromText(tmp_path / "in") | ps.Map(lambda row: row if os.path.exists(tmp_path / "on") else fail())
        rows | ps.WriteToText(tmp_path / "out")
        return p.run()

    def fail():
        raise ValueError("\udcff")

    with pytest.raises(StepError):
        run()
    (tmp_path / "on").touch()
    run()
    assert run().was_finished


def test_too_many_failures_are_told_with_what_helps(folder):
    p = ps.Pipeline(run_dir=folder / "run", workers=0)
    failing = ps.Map(lambda n: 1 // 0).with_exception_handling(threshold=0.5)
    good, bad = p | ps.Create(range(10)) | failing
    good | "a" >> ps.Map(str) | "b" >> ps.WriteToText(folder / "out")
    bad | "c" >> ps.Map(repr) | "d" >> ps.WriteToText(folder / "dead")
    with pytest.raises(EngineError) as caught:
        p.run()
    assert "set a higher threshold to resume" in caught.value.__notes__[-1]


def test_one_folder_holds_one_pipeline(folder):
    (folder / "job.py").write_text(
        "import penstock as ps\n"
        "for n in range(2):\n"
        "    with ps.Pipeline() as p:\n"
        "        p | ps.Create([n]) | ps.Map(str) | ps.WriteToText(f'out{n}')\n"
    )
    done = penstock(folder, "run", "--run-dir", "run", "job.py")
    assert done.returncode == 2
    assert "the script runs several pipelines" in done.stderr
    assert "the previous one has finished, and is kept there" in done.stderr
    assert (folder / "out0" / "part-00000.txt").read_text() == "0\n"


def test_sigterm_leaves_word(folder):
    (folder / "job.py").write_text(
        "import time, penstock as ps\n"
        "p = ps.Pipeline(run_dir='run', workers=0)\n"
        "p | ps.Create(range(3)) | ps.Map(lambda n: print(n, flush=True) or time.sleep(600)) | ps.WriteToText('out')\n"
        "p.run()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "job.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "0\n"
    process.terminate()
    _, told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert told.startswith(
        f"penstock: stopped; what was done is kept in {folder / 'run'} (0 of 1 splits): run the same command again"
    ), told
    assert manifest_of(folder)["state"] == "stopped"


def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    held = RunDir(str(tmp_path))
    with held:
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        with RunDir(str(tmp_path)) as again:
            assert again.journal() is None
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child is there all the while"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_that_was_replaced_before_it_was_digested_has_no_digest(tmp_path):
    """Else its new bytes would pass for those that the run was begun with."""
    for name in ("same", "replaced"):
        (tmp_path / name).write_text("old")
    files = [("input", "read", file) for name in ("same", "replaced") for file in list_files(str(tmp_path / name))]
    journal = Journal.create(str(tmp_path), {"run": "1"}, [], files)
    (tmp_path / "replaced").write_text("new")
    os.utime(tmp_path / "replaced", (1, 1))
    with Digests(journal, ps.RunOptions()) as digests:
        digests.finish()
    found = {os.path.basename(path): digest for path, (_, digest) in journal.files("input")["read"].items()}
    assert found == {"same": hashlib.sha256(b"old").hexdigest(), "replaced": None}
    journal.close()


def test_status_leaves_nothing_behind(folder):
    copied(folder)
    before = sorted(os.listdir(folder / "run"))
    assert penstock(folder, "status", "run").returncode == 0
    assert sorted(os.listdir(folder / "run")) == before


def test_a_folder_that_cannot_be_synced_ends_the_run(folder, monkeypatch):
    sync = os.fsync

    def failing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder / "out")):
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", failing)
    with pytest.raises(OutputError, match="cannot be written: Input/output error"):
        copied(folder)
    monkeypatch.undo()
    copied(folder)
    assert lines_of(folder) == inputs_of(folder)


def test_run_dir_is_a_local_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ps.RunOptions(run_dir="~/x").run_dir == str(tmp_path / "x")
    with pytest.raises(UsageError, match="on a local disk"):
        ps.Pipeline(run_dir="s3://bucket/run")


# What a second review found.


def test_whether_a_run_was_finished_does_not_depend_on_its_splits(folder):
    def empty():
        p = ps.Pipeline(run_dir=folder / "empty")
        p | ps.Create([]) | ps.WriteToText(folder / "nothing")
        return p.run().was_finished

    assert [empty(), empty()] == [False, True]
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.jsonl").write_text("old\n")

    class Away(JsonlSink):
        def publish(self, token):
            if os.path.exists(f"{self.path}/../broken"):
                raise ConnectionError("the database is away")
            super().publish(token)

    def run():
        p = ps.Pipeline(run_dir=folder / "run", workers=0)
        p | ps.ReadFromText(folder / "in" / "*.txt") | ps.Write(Away(str(folder / "out"), True))
        return p.run()

    (folder / "broken").touch()
    with pytest.raises(EngineError, match=r"could not be published: ConnectionError: the database is away; fix that"):
        run()
    told = penstock(folder, "status", "run").stdout
    assert "0 of 8 done (0.0%); 8 more are written and wait to be published" in told
    assert "of splits that are done or wait" in told
    (folder / "broken").unlink()
    result = run()
    assert result.splits_before == result.splits == 8
    assert not result.was_finished, "its output became visible just now"
    assert run().was_finished
    assert "8 of 8 done (100.0%)\n" in penstock(folder, "status", "run").stdout


def test_a_file_whose_name_is_no_text_can_be_the_whole_input(tmp_path):
    source = tmp_path / os.fsdecode(b"\xff.txt")
    source.write_text("a\nb\n")

    def run():
        p = ps.Pipeline(run_dir=tmp_path / "run")
        p | ps.ReadFromText(source) | ps.WriteToText(tmp_path / os.fsdecode(b"out\xff"))
        return p.run()

    run()
    assert run().was_finished
    [read] = manifest_of(tmp_path)["inputs"]
    assert (read["path"], read["step"]) == (str(source), f"ReadFromText({source.name})")
    told = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "status", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    assert r"out\udcff: 1 part(s), 4 bytes" in told.stdout


class Plain(ps.Source):
    """Splits as they are given to it."""

    def __init__(self, splits):
        self.all = splits

    def splits(self, goal):
        return self.all()

    def read(self, split):
        yield [str(split)]


def test_sources_and_sinks_that_give_what_a_journal_cannot_keep(tmp_path):
    class Details(JsonlSink):
        def details(self, token):
            return {**super().details(token), "rows": numpy.int64(3)}

    class Notes(JsonlSink):
        def prepare(self, run):
            return set(super().prepare(run))

    def run(splits, sink):
        p = ps.Pipeline(run_dir=tmp_path / "run", workers=0)
        p | "read it" >> ps.Read(Plain(splits)) | ps.Write(sink(str(tmp_path / "out"), False))
        return p.run()

    with pytest.raises(UsageError, match=r"(?s)Plain read it: a split of type lock cannot be pickled .*plain data"):
        run(lambda: [threading.Lock()], JsonlSink)
    assert os.listdir(tmp_path / "run") == ["lock"]
    with pytest.raises(UsageError, match=r"out: Notes\.prepare\(\) returned set\(\): .*expected what JSON has: str, int"):
        run(lambda: [1, 2], Notes)
    assert os.listdir(tmp_path / "run") == ["lock"]
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(UsageError, match=r"out: Details\.details\(\) returned .*int64 .*expected what JSON has"):
        run(lambda: [1, 2], Details)
    assert not list((tmp_path / "out").iterdir())


def test_splits_whose_class_is_gone(tmp_path, monkeypatch):
    (tmp_path / "pieces.py").write_text("class Piece(str): pass\nclass Bit(str): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import pieces

    def run(kind, **options):
        p = ps.Pipeline(run_dir=tmp_path / "run", workers=0, **options)
        rows = p | ps.Read(Plain(lambda: [kind("a"), kind("b")]))
        rows | ps.Map(lambda row: row if os.path.exists(tmp_path / "on") else 1 // 0) | ps.WriteToText(tmp_path / "out")
        return p.run()

    with pytest.raises(StepError):
        run(pieces.Piece)
    (tmp_path / "on").touch()
    piece = pieces.Piece
    monkeypatch.delattr(pieces, "Piece")
    with pytest.raises(RunChangedError, match=r"has splits whose code no longer exists: .*'Piece'.*\(--fresh\)"):
        run(pieces.Bit, accept_changes=("code",))
    assert "failed; run the same command again" in penstock(tmp_path, "status", "run").stdout, "none has died"
    monkeypatch.setattr(pieces, "Piece", piece, raising=False)
    run(pieces.Piece, accept_changes=("code",))
    assert lines_of(tmp_path) == ["a", "b"]


def test_an_empty_journal_is_a_damaged_one(folder):
    begun(folder)
    (folder / "run" / "journal.db").write_bytes(b"")
    with pytest.raises(EngineError, match=r"is damaged: .*no such table.*remove what"):
        goes_on(folder)
    told = penstock(folder, "status", "run")
    assert told.returncode == 1
    assert re.fullmatch(r"penstock: the journal .* is damaged: .*run the same command again\n", told.stderr)


def test_a_manifest_that_lacks_something(folder):
    copied(folder)
    path = folder / "run" / "manifest.json"
    whole = path.read_text()
    for name, wrong in (("state", None), ("outputs", None), ("outputs", [{"sink": "out"}])):
        manifest = {**json.loads(whole), name: wrong}
        path.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))
        told = penstock(folder, "verify", "run")
        assert (told.returncode, name in told.stderr) == (2, True)
        assert "run the same command again to rewrite it" in told.stderr
        assert "Traceback" not in told.stderr
        assert copied(folder).was_finished
        assert json.loads(path.read_text()) == json.loads(whole)


def test_a_run_that_is_refused_at_its_start_leaves_no_manifest(folder):
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.txt").write_text("old\n")
    with pytest.raises(OutputError, match="there already"):
        copied(folder)
    assert os.listdir(folder / "run") == ["lock"]
    assert "expected the run_dir of a run" in penstock(folder, "verify", "run").stderr


def test_a_reader_at_the_end_of_a_run_leaves_no_log(folder, monkeypatch):
    """Which SQLite itself removes only if nobody else has the journal open, and `penstock status` may not."""
    journal = Journal.create(str(folder), {"run": "1"}, [], [])
    journal.set_facts({"finished": 1})
    reader = Journal.open(str(folder), read_only=True)
    monkeypatch.setattr("time.sleep", lambda _: reader.close())
    journal.close()
    assert [name for name in os.listdir(folder) if name.startswith("journal")] == ["journal.db"]
