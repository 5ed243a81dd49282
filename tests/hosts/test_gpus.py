"""Several GPUs: a model on each, in a process that sees its own alone, and rows for whichever is free. The devices here are
names in CUDA_VISIBLE_DEVICES; processes and hosts are real."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest

import penstock as ps
from penstock.models.memory import visible_gpus

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PATIENCE = 20  # seconds until a device counts as left without rows
ROWS = 1000


class OnDevice(ps.ModelHandler):
    """Answers are (row, device). What happens on a device leaves a line in a file."""

    def __init__(self, folder, **settings):
        super().__init__(**{"max_batch_size": 10, **settings})
        self.folder = str(folder)

    def accelerator(self):
        return "gpu"

    def load_model(self):
        device = os.environ["CUDA_VISIBLE_DEVICES"]
        self.note("loads", device, os.getpid())
        return device

    def run_inference(self, batch, model, inference_args=None):
        before = self.noted("calls")
        self.note("calls", model, len(batch))
        self.call(model, before)
        return [(row, model) for row in batch]

    def call(self, device, before):
        """`before`: the calls that began before this one."""

    def note(self, what, device, number):
        with open(Path(self.folder, what), "a") as file:
            file.write(f"{device} {number}\n")

    def noted(self, what):
        """(device, process) of each load, (device, rows) of each call."""
        file = Path(self.folder, what)
        return [(device, int(n)) for device, n in map(str.split, file.read_text().splitlines())] if file.exists() else []

    def wait_until(self, holds):
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, "a device got no rows"
            time.sleep(0.002)


class AllAtOnce(OnDevice):
    """No call ends before every device was called, and all copies are loaded."""

    devices = 2
    copies = 1

    def call(self, device, before):
        self.wait_until(lambda: len(self.noted("loads")) >= self.copies and self._called() == self.devices)

    def _called(self):
        return len({name for name, _ in self.noted("calls")})


class OneSlow(OnDevice):
    """A call on device 1 ends after two that began later on the other, while there are rows for these."""

    def call(self, device, before):
        if device == "1":
            self.wait_until(lambda: self._quick(self.noted("calls")) >= self._quick(before) + 2 or self._is_over())
        else:
            self.wait_until(lambda: any(name == "1" for name, _ in self.noted("calls")))

    def _quick(self, calls):
        return sum(name == "0" for name, _ in calls)

    def _is_over(self):
        return sum(rows for _, rows in self.noted("calls")) >= ROWS - 50


class OneDies(OnDevice):
    """Device 1 is lost in its first call; the other goes on when that is loaded again."""

    def call(self, device, before):
        if device == "1" and not any(name == "1" for name, _ in before):
            os.kill(os.getpid(), signal.SIGKILL)
        self.wait_until(lambda: sum(name == "1" for name, _ in self.noted("loads")) == 2)


class Whole(ps.Source):
    """Rows as one split, a few at a time."""

    def __init__(self, rows):
        self.rows = rows

    def splits(self, goal):
        return [0]

    def read(self, split):
        for start in range(0, self.rows, 10):
            yield list(range(start, min(start + 10, self.rows)))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


def answers(handler, **options):
    """The devices that answered, how many rows each: rows come out in order, none is lost."""
    p = ps.Pipeline(workers=1, progress=False, **options)
    made = (p | ps.Read(Whole(ROWS)) | ps.RunInference(handler)).collect()
    assert [row for row, _ in made] == list(range(ROWS))
    return Counter(device for _, device in made)


def test_a_process_for_each_device_which_sees_it_alone(two_gpus, tmp_path):
    handler = AllAtOnce(tmp_path)
    assert set(answers(handler)) == {"0", "1"}
    loads = handler.noted("loads")
    assert sorted(device for device, _ in loads) == ["0", "1"]
    assert len({process for _, process in loads}) == 2
    assert os.getpid() not in dict(loads).values()


def test_names_are_passed_on_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a3f, 7")
    assert set(answers(AllAtOnce(tmp_path))) == {"GPU-5a3f", "7"}


def test_a_handler_may_use_some_devices_only(two_gpus, tmp_path):
    handler = OnDevice(tmp_path, env_vars={"CUDA_VISIBLE_DEVICES": "1"})
    assert set(answers(handler)) == {"1"}
    assert len(handler.noted("loads")) == 1


def test_copies_are_dealt_out_to_the_devices(two_gpus, tmp_path):
    handler = AllAtOnce(tmp_path, model_copies=4)
    handler.copies = 4
    answers(handler)
    assert sorted(device for device, _ in handler.noted("loads")) == ["0", "0", "1", "1"]


def test_one_worker_keeps_many_devices_busy(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    handler = AllAtOnce(tmp_path)
    handler.devices = 6
    assert len(answers(handler)) == 6


def test_a_fast_device_gets_more_rows_and_a_slow_one_is_not_idle(two_gpus, tmp_path):
    handler = OneSlow(tmp_path, max_batch_size=None, batch_size_buckets=[10])  # all rows may be in flight
    rows = answers(handler)
    assert rows["0"] > rows["1"] > 0


def test_rows_of_a_device_that_is_lost_are_answered(two_gpus, tmp_path):
    handler = OneDies(tmp_path)
    answers(handler)
    assert sorted(device for device, _ in handler.noted("loads")) == ["0", "1", "1"]
    assert len({process for _, process in handler.noted("loads")}) == 3


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [("0,1", ("0", "1")), (" 3 , 2 ", ("3", "2")), ("", ()), ("-1", ()), ("0,0", ("0", "0")), ("1,-1,0", ("1",))],
)
def test_the_devices_that_cuda_shows(monkeypatch, chosen, seen):
    """Names after one that is none are not seen, as CUDA has it. One that is listed twice counts twice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == seen


class SecondIsLoading(OnDevice):
    """No call ends before the model of the next step is loaded."""

    def call(self, device, before):
        self.wait_until(lambda: Path(self.folder, "second", "loads").exists())


def test_models_in_a_row_load_at_the_same_time(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "second").mkdir()
    p = ps.Pipeline(workers=2)
    first = p | ps.Create(range(50)) | "first" >> ps.RunInference(SecondIsLoading(tmp_path))
    made = first | "second" >> ps.RunInference(OnDevice(tmp_path / "second"))
    assert [row for ((row, _), _) in made.collect()] == list(range(50))


def overlap(row):
    """The row, and how many calls of this were at work in the process. Each thread has a copy of it, and all share sys."""
    sys.at_work = seen = getattr(sys, "at_work", 0) + 1
    time.sleep(0)
    sys.at_work -= 1
    return row, seen


def test_threads_in_front_of_a_device_do_not_run_the_users_functions_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    p = ps.Pipeline(workers=2)
    rows = p | ps.Create(range(20_000)) | ps.Map(overlap)
    made = (rows | ps.RunInference(OnDevice(tmp_path, max_batch_size=1000))).collect()
    assert [row for ((row, _), _) in made] == list(range(20_000))
    assert {seen for ((_, seen), _) in made} == {1}
