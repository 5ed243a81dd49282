"""What dies, and what the user sees: workers, in every phase of their work; the coordinator, by every signal."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import penstock as ps
from penstock.errors import ModelLoadError, NotShippableError, StepError, WorkerDiedError


def act(how):
    if how == "raise":
        raise RuntimeError("scripted")
    if how == "exit":
        os._exit(3)
    ctypes.string_at(0)  # a real segmentation fault


class LoadTrouble(ps.ModelHandler):
    def __init__(self, how):
        self.how = how
        self.home = os.getpid()

    def load_model(self):
        act(self.how)

    def run_inference(self, batch, model, inference_args=None):
        return batch


class UnpickleTrouble(LoadTrouble):
    def load_model(self):
        return None

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.getpid() != self.home:
            act(self.how)


class PredictTrouble(LoadTrouble):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        if 77 in batch:
            act(self.how)
        return batch


class Unshippable:
    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        act(self.how)


class PickleTrouble(PredictTrouble):
    def run_inference(self, batch, model, inference_args=None):
        return [Unshippable(self.how) if row == 77 else row for row in batch]


class KilledWhileLoading(PredictTrouble):
    def load_model(self):
        os.kill(os.getpid(), signal.SIGKILL)


RAISES = [
    (LoadTrouble, ModelLoadError, "LoadTrouble.load_model\\(\\) raised RuntimeError: scripted"),
    (UnpickleTrouble, NotShippableError, "could not be loaded in a worker process .RuntimeError: scripted"),
    (PredictTrouble, StepError, "step 'model': RuntimeError: scripted\n  row: 77"),
    (PickleTrouble, NotShippableError, "step 'model': a row of type Unshippable cannot be sent"),
]


@pytest.mark.parametrize(("handler", "error", "message"), RAISES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_table_of_deaths_raise(handler, error, message, descendants):
    with pytest.raises(error, match=message):
        (ps.Pipeline(workers=2) | ps.Create(range(200)) | "model" >> ps.RunInference(handler("raise"))).collect()
    assert not descendants()


def test_an_error_about_killed_workers_says_how_to_need_less_memory():
    with pytest.raises(WorkerDiedError, match="signal SIGKILL") as caught:
        (ps.Pipeline(workers=1) | ps.Create(range(20)) | "model" >> ps.RunInference(KilledWhileLoading("kill"))).collect()
    assert "memory runs out: use fewer workers (workers=1), or large_model=True on the model's handler" in str(caught.value)


@pytest.mark.parametrize(("how", "told"), [("exit", "exit code 3"), ("segfault", "signal SIGSEGV")])
@pytest.mark.parametrize("handler", [LoadTrouble, UnpickleTrouble, PredictTrouble, PickleTrouble])
def test_the_table_of_deaths(handler, how, told, descendants):
    with pytest.raises(WorkerDiedError, match=told) as caught:
        (ps.Pipeline(workers=2) | ps.Create(range(200)) | "model" >> ps.RunInference(handler(how))).collect()
    assert "died 4 times" in str(caught.value)
    assert "model" in str(caught.value)
    assert ".with_exception_handling(use_subprocess=True)" in str(caught.value)
    assert "timeout=" in str(caught.value)
    assert "large_model=True" in str(caught.value)
    assert not descendants()


def test_an_error_that_cannot_be_pickled_still_tells_its_story():
    class StubbornError(Exception):
        def __reduce__(self):
            raise TypeError("not me")

    def fail(x):
        raise StubbornError("deep inside")

    with pytest.raises(StepError, match="StubbornError: deep inside") as caught:
        (ps.Pipeline(workers=1) | ps.Create([1]) | ps.Map(fail)).collect()
    assert "in fail" in caught.value.__notes__[0]


def test_an_error_whose_str_raises():
    class MuteError(Exception):
        def __str__(self):
            raise ValueError("no words")

    def fail(x):
        raise MuteError

    for workers in (0, 1):
        with pytest.raises(StepError, match="MuteError: .its message cannot be shown"):
            (ps.Pipeline(workers=workers) | ps.Create([1]) | ps.Map(fail)).collect()


@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
def test_system_exit_in_a_worker_s_step_is_that_step_s_error(exception):
    def leave(x):
        raise exception("enough")

    with pytest.raises(StepError, match=f"{exception.__name__}: enough"):
        (ps.Pipeline(workers=1) | ps.Create([1]) | ps.Map(leave)).collect()


def test_a_worker_that_dies_once_costs_nothing(tmp_path):
    def crash_once(x):
        mark = tmp_path / "crashed"
        if x == 2500 and not mark.exists():
            mark.touch()
            os._exit(1)
        return x

    p = ps.Pipeline(workers=2)
    assert (p | ps.Create(range(5000)) | ps.Map(crash_once)).collect() == list(range(5000))
    assert (p.result.worker_deaths, p.result.retries) == (1, 1)


def test_neighbours_of_a_deadly_row_are_not_used_up(tmp_path):
    """Four deaths among threads that share a worker: only what dies alone is charged."""

    def crash_in_company(x):
        if x % 100 == 0:
            with open(tmp_path / "deaths", "a+") as deaths:
                fcntl.flock(deaths, fcntl.LOCK_EX)  # held to the end: one mark for each death, whichever thread it is
                deaths.seek(0)
                if len(deaths.read()) < 3:
                    deaths.write("x")
                    deaths.flush()
                    os._exit(1)
        return x

    p = ps.Pipeline(workers=1, threads_per_worker=4)
    assert (p | ps.Create(range(1000)) | ps.Map(crash_in_company)).collect() == list(range(1000))
    assert p.result.worker_deaths == 3


class Slices(ps.Source):
    """Many small splits, so that a kill always finds one at work."""

    def splits(self, goal):
        return [range(start, start + 500) for start in range(0, 100_000, 500)]

    def read(self, split):
        yield list(split)


class Unhurried(ps.ModelHandler):
    def load_model(self):
        return threading.Event()

    def run_inference(self, batch, model, inference_args=None):
        model.wait(0.004)
        return [-row for row in batch]


def test_workers_killed_at_random(descendants, tmp_path):
    done, kills, rows_at_kill = threading.Event(), [], [-1500]

    def killer():
        chance = random.Random(7)
        while not done.wait(chance.uniform(0.2, 0.8)) and len(kills) < 15:
            workers = [pid for pid in descendants() if b"engines.local.worker" in command_line(pid)]
            rows = sum(stage.rows for stage in handle.progress())
            if workers and rows >= rows_at_kill[-1] + 1500:  # else the same split may die each time, on a slow machine
                rows_at_kill.append(rows)
                kills.append(victim := chance.choice(workers))
                os.kill(victim, signal.SIGKILL)

    p = ps.Pipeline(workers=2)
    rows = p | ps.Read(Slices()) | ps.RunInference(Unhurried(max_batch_size=64)) | ps.Reshuffle() | ps.Map(lambda x: -x)
    rows | ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
    handle = p.start()
    thread = threading.Thread(target=killer)
    thread.start()
    try:
        result = handle.wait()
    finally:
        done.set()
        thread.join()
    parts = sorted((tmp_path / "out").iterdir())
    assert [int(line) for part in parts for line in part.read_text().splitlines()] == list(range(100_000))
    assert len(kills) >= 3
    assert result.worker_deaths >= 1
    assert not descendants()


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


SCRIPT = """
import ctypes, os, sys, threading
import penstock as ps

def hang(x):
    open(os.path.join({marks!r}, str(os.getpid())), "w").close()
    if {gil}:
        ctypes.PyDLL(None).sleep(600)
    threading.Event().wait(600)

with ps.Pipeline(workers={workers}) as p:
    p | ps.Create(range(5000)) | ps.Map(str) | ps.WriteToText({out!r})
    p | ps.Create(range(5000)) | ps.Map(hang)
"""


@pytest.fixture
def hanging(tmp_path):
    """A run whose workers hang: its process, the pids of its workers, and the folders to look at."""
    running = []

    def start(workers, gil=False, out="out"):
        marks, temporary, out = tmp_path / "marks", tmp_path / "tmp", tmp_path / out
        marks.mkdir()
        temporary.mkdir()
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(marks=str(marks), out=str(out), workers=workers, gil=gil))
        environment = os.environ | {"TMPDIR": str(temporary)}
        process = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True)
        running.append(process)
        wait_until(lambda: len(list(marks.iterdir())) >= max(1, workers), 30)
        return process, {int(path.name) for path in marks.iterdir()} - {process.pid}, (out, temporary)

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_until(condition, seconds):
    """Look again and again until it is so; the tests' own clock, for things that other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        threading.Event().wait(0.02)


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def nothing_is_left(folders):
    out, temporary = folders
    return not any(out.glob("**/*")) and not any(out.glob(".penstock*")) and not any(temporary.iterdir())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_nothing_behind(hanging, number, workers):
    process, pids, folders = hanging(workers)
    process.send_signal(number)
    process.wait(10)
    wait_until(lambda: all(map(is_gone, pids)), 5)
    wait_until(lambda: nothing_is_left(folders), 5)
    assert not [name for name in os.listdir("/dev/shm") if "penstock" in name]  # others have semaphores there
    errors = process.stderr.read()
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    else:
        assert process.returncode == -number


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_held_down_leaves_nothing_behind(hanging, workers):
    process, pids, folders = hanging(workers)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        threading.Event().wait(0.0005)
    wait_until(lambda: all(map(is_gone, pids)), 5)
    wait_until(lambda: nothing_is_left(folders), 5)


def test_a_killed_run_removes_no_folder_but_its_own(hanging, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").touch()
    process, pids, folders = hanging(2, out="out::v2")
    process.kill()
    wait_until(lambda: all(map(is_gone, pids)), 5)
    wait_until(lambda: nothing_is_left(folders), 5)
    assert os.listdir(tmp_path / "out") == ["theirs"]


def test_workers_that_hold_the_gil_end_with_a_killed_coordinator(hanging):
    process, pids, folders = hanging(2, gil=True)
    process.kill()
    wait_until(lambda: all(map(is_gone, pids)), 5)
    wait_until(lambda: nothing_is_left(folders), 5)
    assert pids


def test_a_worker_s_own_children_end_with_it(tmp_path, descendants):
    def leave_a_child(x):
        subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait(600)"])
        return x

    assert (ps.Pipeline(workers=1) | ps.Create([1]) | ps.Map(leave_a_child)).collect() == [1]
    wait_until(lambda: not descendants(), 5)


def test_a_worker_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(WorkerDiedError, match="cannot be started: exit code 1"):
        (ps.Pipeline(workers=1) | ps.Create([1])).collect()
