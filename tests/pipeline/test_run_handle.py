"""A run that was started: waited for, stopped and looked at, from this thread and from others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock as ps
from penstock.errors import StoppedError, UsageError

ROWS = 4000


class Gate:
    """Holds a step at one row, in whatever process it is, until the test lets it go."""

    def __init__(self, folder):
        self.reached, self.opened = str(folder / "reached"), str(folder / "opened")
        os.mkfifo(self.reached)
        os.mkfifo(self.opened)
        self.key = os.open(self.opened, os.O_RDWR)  # never waits for the other side

    def wait_until_reached(self):
        with open(self.reached) as file:
            file.read()

    def open(self):
        os.write(self.key, b"x" * 100)

    def close(self):
        os.close(self.key)


@pytest.fixture
def gate(tmp_path):
    made = Gate(tmp_path)
    yield made
    made.close()


def hold(number, reached, opened):
    """At one row: say so, and wait."""
    if number == ROWS // 2 and os.path.exists(reached):
        with open(reached, "w"):
            pass
        with open(opened, "rb", buffering=0) as file:
            file.read(1)
    return number


def held_pipeline(pipeline, gate, tmp_path, **options):
    p = pipeline(**options)
    rows = p | ps.Create(range(ROWS)) | "Hold" >> ps.Map(hold, gate.reached, gate.opened)
    rows | ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
    return p


def written(tmp_path):
    files = sorted(tmp_path.glob("out/part-*"))
    return [int(line) for file in files for line in file.read_text().splitlines()]


def test_stop_ends_a_run_that_another_thread_waits_for(pipeline, gate, tmp_path):
    run = held_pipeline(pipeline, gate, tmp_path).start()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(run.wait)
        gate.wait_until_reached()
        (stage,) = run.progress()
        assert (stage.known, stage.failures) == (ROWS, 0)
        assert stage.rows < ROWS
        run.stop()
        gate.open()  # what runs in this process ends its split; worker processes are ended
        with pytest.raises(StoppedError, match="the run was stopped"):
            waiting.result()
    assert written(tmp_path) == []


def test_a_run_that_was_stopped_is_resumed(pipeline, gate, tmp_path):
    run = held_pipeline(pipeline, gate, tmp_path, run_dir=tmp_path / "run").start()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(run.wait)
        gate.wait_until_reached()
        run.stop()
        gate.open()
        with pytest.raises(StoppedError) as stopped:
            waiting.result()
    assert "run the same command again" in "".join(stopped.value.__notes__)
    os.unlink(gate.reached)
    result = held_pipeline(pipeline, gate, tmp_path, run_dir=tmp_path / "run").run()
    assert written(tmp_path) == list(range(ROWS))
    assert result.rows_out("Hold") == ROWS


def test_progress_before_and_after_the_work(pipeline):
    p = pipeline()
    good, _ = p | ps.Create(range(100)) | ps.Map(lambda n: 1 // (n % 10)).with_exception_handling()
    good | ps.Reshuffle() | ps.Map(str)
    run = p.start()
    assert list(run.progress()) == []
    run.wait()
    first, second = run.progress()
    assert (first.rows, first.known, first.failures) == (100, 100, 10)
    assert (second.rows, second.known, second.failures) == (90, None, 0)


def test_stop_does_nothing_to_a_run_that_is_done(pipeline):
    p = pipeline()
    p | ps.Create(range(10)) | "Negate" >> ps.Map(lambda n: -n)
    run = p.start()
    result = run.wait()
    run.stop()
    assert result.rows_out("Negate") == 10
    with pytest.raises(UsageError, match=r"wait\(\) was called before"):
        run.wait()


def test_what_cannot_be_sent_is_found_by_start(pipeline):
    p = pipeline()
    generator = (n for n in range(3))
    p | ps.Create([1]) | ps.Map(lambda n: next(generator))
    with pytest.raises(UsageError, match="cannot be copied to a worker"):
        p.start()


class SlowToLoad(ps.ModelHandler):
    """Loads when the test lets it."""

    def __init__(self, gate):
        super().__init__()
        self.reached, self.opened = gate.reached, gate.opened

    def load_model(self):
        return hold(ROWS // 2, self.reached, self.opened)

    def run_inference(self, batch, model, inference_args=None):
        return batch


def test_loading_the_model_is_shown_while_it_loads(pipeline, gate, tmp_path):
    p = pipeline()
    p | ps.Create(range(ROWS)) | "Model" >> ps.RunInference(SlowToLoad(gate))
    run = p.start()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(run.wait)
        gate.wait_until_reached()
        (stage,) = run.progress()
        os.unlink(gate.reached)  # no other copy waits
        gate.open()
        waiting.result()
    assert (stage.rows, stage.state) == (0, "loading the model")
    (stage,) = run.progress()
    assert (stage.rows, stage.state) == (ROWS, "")


SCRIPT = """
import penstock as ps

with ps.Pipeline({options}) as p:
    p | ps.Create([1, 2, 3]) | ps.Map(str) | ps.WriteToText("out")
print(ps.Pipeline().options.workers, (ps.Pipeline() | ps.Create([4])).collect())
"""


@pytest.mark.parametrize(("options", "is_told"), [("", True), ("progress=True", True), ("progress=False", False)])
def test_a_script_ends_with_a_summary_unless_it_is_switched_off(tmp_path, options, is_told):
    (tmp_path / "job.py").write_text(SCRIPT.format(options=options))
    done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "None [4]\n"
    lines = done.stderr.splitlines()
    if is_told:
        assert len(lines) == 1, "collect() says nothing: its rows are there"
        assert re.fullmatch(r"penstock: 3 rows in 0\.\d s -> .*/out", lines[0])
    else:
        assert lines == []


def test_a_run_whose_stderr_is_closed_is_a_run_like_any_other(tmp_path):
    (tmp_path / "job.py").write_text("import sys\nsys.stderr.close()\n" + SCRIPT.format(options="workers=2"))
    done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "None [4]\n"
