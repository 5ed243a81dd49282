"""RunInference on the runners of Apache Beam, and what is left when something dies or fails."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import apache_beam as beam
import cloudpickle
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer
from apache_beam.testing import test_stream

import beam_programs
import penstock as ps
import penstock.beam as of_penstock
from beam_programs import Weights, adding, failing_rows, from_file, model_per_key, plain, written
from beam_runs import RUNNERS, counters, run
from penstock.beam import process_sessions
from penstock.models.folder_use import remove_unused
from penstock.models.host_address import run_folder

HERE = str(Path(__file__).parent)

for module in (sys.modules[__name__], beam_programs):
    cloudpickle.register_pickle_by_value(module)  # as from a script: no host imports these files, nor Beam


@pytest.fixture(autouse=True)
def nothing_left(descendants, caplog):
    """After each test: no process of its own, no session, and no file of one that the next run does not remove."""
    before = folders()
    yield
    caplog.get_records("call").clear()  # of errors, whose frames refer to functions
    gc.collect()  # a runner that drops a function whose bundle failed may not tear it down
    wait_until(lambda: not [pid for pid in descendants() if not is_zombie_of_beam(pid)])
    wait_until(lambda: process_sessions.in_use == {})

    def is_clean():
        return all(used_by_others(name) for name in folders() - before)

    if not comes_to_pass(
        is_clean, seconds=10.0
    ):  # what killed workers leave, the next run removes. Folders of other tests come and go
        wait_until(lambda: remove_unused(str(Path(run_folder("any")).parent)) or is_clean())


def folders():
    """Those of runs whose processes may come and go."""
    return {path.parent.name for path in Path(run_folder("any")).parent.glob("*/users")}


def used_by_others(name):
    """Whether another process has a run's folder open: tests of other files run at the same time."""
    users = Path(run_folder(name)) / "users"
    return not users.exists() or any(
        pid != os.getpid() and users in opened(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
    )


def opened(pid):
    """The files that a process has open."""
    try:
        return {file.readlink() for file in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:  # it is gone
        return set()


def is_zombie_of_beam(pid):
    """Its pool of workers kills them, and waits for none."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return True
    return state == "Z" and int(parent) == os.getpid() and pid in WORKERS


WORKERS: set[int] = set()  # of such pools


def wait_until(holds):
    assert comes_to_pass(holds), "it never came to pass"


def comes_to_pass(holds, seconds=30.0):  # on a loaded machine processes take long to end
    until = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return held


@pytest.fixture
def tests_importable(monkeypatch):
    """For workers that are processes: what a user's package would be."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.mark.parametrize("runner", ["threads", "portable", "bundles"])
@pytest.mark.parametrize("program", [plain, failing_rows, model_per_key])
def test_runners_of_one_process_give_the_same(runner, program, tmp_path, expected):
    found = run(program, of_penstock, str(tmp_path), runner=runner)
    assert {name: found.values_of(name) for name in found} == expected(program)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What a program gives in the process."""

    @functools.cache
    def run_once(program):
        found = run(program, of_penstock, str(tmp_path_factory.mktemp("expected")))
        return {name: found.values_of(name) for name in found}

    return run_once


class Where(ps.ModelHandler):
    """Notes in a file who has loaded it; answers with the process it is in."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def load_model(self):
        with open(f"{self.folder}/loads", "a") as file:
            file.write(f"{os.getpid()}\n")
        return Weights(os.getpid())

    def run_inference(self, batch, model, inference_args=None):
        return [(each, model.much) for each in batch]


def in_processes(base, p, folder):
    """A model in each process, one for all of them, and who asked."""
    rows = p | beam.Create(range(400)) | beam.Reshuffle()
    return {
        "each": rows | "Each" >> base.RunInference(Where(f"{folder}/each")),
        "large": rows | "Large" >> base.RunInference(Where(f"{folder}/large", large_model=True)),
        "asked": rows | "Asked" >> beam.Map(lambda _: os.getpid()) | beam.Distinct(),
    }


def check_processes(found, folder):
    asked = set(found.values_of("asked"))
    assert os.getpid() not in asked
    for name in ("each", "large"):
        assert sorted(row for row, _ in found.values_of(name)) == list(range(400))
        answered = {pid for _, pid in found.values_of(name)}
        loaded = {int(pid) for pid in Path(folder, name, "loads").read_text().split()}
        assert answered <= loaded
        if name == "large":
            assert len(loaded) == 1
            assert not loaded & asked
        else:
            assert loaded <= asked


def test_processes_share_a_large_model(tests_importable, tmp_path):
    for name in ("each", "large"):
        (tmp_path / name).mkdir()
    found = run(in_processes, of_penstock, str(tmp_path), runner="processes")
    check_processes(found, tmp_path)
    assert counters(found)["RunInference", "num_inferences"] == 800


def test_a_model_is_loaded_once_for_all_bundles(tmp_path):
    """By a runner that sets up and tears down its functions for each. Each has one element; they come one by one."""
    rows = test_stream.TestStream()
    for number in range(4):
        rows.add_elements([number]).advance_watermark_to(number)
    with beam.Pipeline(runner=BundleBasedDirectRunner(), options=PipelineOptions(["--streaming"])) as p:
        answers = p | rows.advance_watermark_to_infinity() | of_penstock.RunInference(Where(str(tmp_path)))
        answers | beam.MapTuple(lambda row, _: note(tmp_path / "answers", row))
    assert sorted((tmp_path / "answers").read_text().split()) == ["0", "1", "2", "3"]
    assert len((tmp_path / "loads").read_text().split()) == 1


def note(path, what):
    with path.open("a") as file:
        file.write(f"{what}\n")


def test_external_workers(tests_importable, tmp_path):
    for name in ("each", "large"):
        (tmp_path / name).mkdir()
    address, server = BeamFnExternalWorkerPoolServicer.start(use_process=True)
    try:
        external = ["--environment_type=EXTERNAL", f"--environment_config={address}"]
        found = run(in_processes, of_penstock, str(tmp_path), runner="portable", more=external)
    finally:
        server.stop(0).wait()
    WORKERS.update(found.values_of("asked"))
    check_processes(found, tmp_path)


class Imports(of_penstock.ModelHandler):
    """Whether the process of the model has imported Beam."""

    def load_model(self):
        return {"apache_beam" in sys.modules}

    def run_inference(self, batch, model, inference_args=None):
        return [(each, *model) for each in batch]


def test_the_process_of_a_model_does_not_import_beam(tmp_path):
    """It would take longer than all else."""

    def program(base, p, folder):
        return {"answers": p | beam.Create([1]) | base.RunInference(Imports(large_model=True))}

    assert run(program, of_penstock, str(tmp_path)).values_of() == [(1, False)]


def refreshed(base, p, folder):
    """A model that changes, in each process and in a host."""
    old, new = written(folder, "old.json", 1), written(folder, "new.json", 1000)
    metadata = p | "Versions" >> beam.Create([base.ModelMetadata(model_id=new, model_name="new")])
    rows = p | beam.Create(range(40)) | beam.Reshuffle()
    handlers = {"each": from_file(base)(old), "large": from_file(base)(old, large_model=True)}
    return {
        name: rows | name >> base.RunInference(handler, model_metadata_pcoll=metadata) for name, handler in handlers.items()
    }


@pytest.mark.parametrize("runner", ["process", "processes"])
def test_a_model_that_changes_leaves_no_file(runner, tests_importable, tmp_path):
    """Workers that the runner kills leave some: they go with the pipeline, at the latest when the next one starts."""
    found = run(refreshed, of_penstock, str(tmp_path), runner=runner)
    assert sorted(found.values_of("each")) == sorted(found.values_of("large")) == list(range(1000, 1040))


# Deaths.


class Dies(ps.ModelHandler):
    """Once, with a signal: the model's process, or the broker above it."""

    def __init__(self, folder, who, **settings):
        super().__init__(large_model=True, max_batch_size=10, **settings)
        self.folder = folder
        self.who = who

    def load_model(self):
        return Weights(1)

    def run_inference(self, batch, model, inference_args=None):
        if 50 in batch and not os.path.exists(f"{self.folder}/died"):
            Path(self.folder, "died").touch()
            os.kill(os.getpid() if self.who == "model" else os.getppid(), signal.SIGKILL)
        return [each + model.much for each in batch]


@pytest.mark.parametrize("who", ["model", "broker"])
def test_a_host_that_is_killed_costs_no_element(who, tmp_path):
    def program(base, p, folder):
        return {"answers": p | beam.Create(range(200)) | base.RunInference(Dies(folder, who))}

    found = run(program, of_penstock, str(tmp_path), runner="threads")
    assert (tmp_path / "died").exists()
    assert sorted(found.values_of()) == list(range(1, 201))


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_fails_the_pipeline_and_leaves_nothing(tests_importable, tmp_path):
    """As these runners have it: they say so, and retry nothing. Other processes share the model of the killed one."""
    started = {}
    for runner in ("processes", "external"):  # at the same time: what takes long is to import Beam
        folder = tmp_path / runner
        folder.mkdir()
        command = [sys.executable, f"{HERE}/beam_killed_worker.py", str(folder), runner]
        started[folder] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for folder, each in started.items():
        _, errors = each.communicate(timeout=240)
        assert (folder / "died").exists(), errors
        assert each.returncode == 1
        assert "Channel closed prematurely" in errors
        hosts = [int(pid) for pid in (folder / "hosts").read_text().split()]
        wait_until(lambda hosts=hosts: not any(map(is_there, hosts)))


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("large", [False, True], ids=["in the process", "in a host"])
def test_a_bundle_that_is_retried_is_answered_as_if_it_were_the_first(large, tmp_path):
    """The step behind fails once: this runner runs its bundle again."""

    def fails_once(row, folder):
        if row == 31 and not os.path.exists(f"{folder}/failed"):
            Path(folder, "failed").touch()
            raise OSError("just now")
        return row

    def program(base, p, folder):
        answers = p | beam.Create(range(100)) | base.RunInference(Plus(large_model=large))
        return {"answers": answers | beam.Map(fails_once, folder)}

    found = run(program, of_penstock, str(tmp_path), runner="bundles")
    assert (tmp_path / "failed").exists()
    assert sorted(found.values_of()) == list(range(1, 101))


class Plus(ps.ModelHandler):
    def load_model(self):
        return Weights(1)

    def run_inference(self, batch, model, inference_args=None):
        return [model.plus(each) for each in batch]


class FailsOnce(ps.ModelHandler):
    """In run_inference(), and says so in a file."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def load_model(self):
        return Weights(1)

    def run_inference(self, batch, model, inference_args=None):
        if not os.path.exists(f"{self.folder}/failed"):
            Path(self.folder, "failed").touch()
            raise OSError("just now")
        return [each + model.much for each in batch]


def test_users_of_a_pipeline_meet_in_the_same_sessions_and_the_last_one_closes_them():
    users = [Plus() for _ in range(3)]  # kept: what nothing refers to counts as gone
    opened = [process_sessions.opened(run, user) for run, user in zip(("one", "one", "other"), users, strict=True)]
    (first, _), (second, _), (other, _) = opened
    assert first.held is second.held
    assert first.held is not other.held
    for each in (other, first):
        each.release()
    assert set(process_sessions.in_use) == {"one"}
    second.release()
    assert not process_sessions.in_use


def test_a_model_that_fails_once_fails_a_bundle_that_is_retried(tmp_path):
    def program(base, p, folder):
        return {"answers": p | beam.Create(range(100)) | base.RunInference(FailsOnce(folder))}

    found = run(program, of_penstock, str(tmp_path), runner="bundles")
    assert (tmp_path / "failed").exists()
    assert sorted(found.values_of()) == list(range(1, 101))


@pytest.mark.parametrize(
    ("runner", "large"),
    [("process", False), ("threads", False), ("threads", True), ("portable", False), ("bundles", False), ("bundles", True)],
)
def test_a_pipeline_that_fails_leaves_nothing_behind(runner, large, tmp_path):
    """Behind the model, with elements that are on their way to it; then another pipeline runs in the same process."""

    def fails(row):
        if row > 1500:
            raise OSError("as always")
        return row

    def program(base, p, folder, after=fails):
        rows = p | beam.Create([0]) | beam.FlatMap(lambda _: range(3000))
        return {"answers": rows | base.RunInference(Plus(large_model=large, max_batch_size=64)) | beam.Map(after)}

    with pytest.raises(Exception, match="as always"):
        run(program, of_penstock, str(tmp_path), runner=runner)
    found = run(lambda *given: program(*given, after=str), of_penstock, str(tmp_path), runner=runner)
    assert len(found["answers"]) == 3000


def test_a_model_that_cannot_be_loaded_fails_the_pipeline(tmp_path):
    class Missing(of_penstock.ModelHandler):
        def load_model(self):
            raise FileNotFoundError("no such model")

        def run_inference(self, batch, model, inference_args=None):
            return batch

    def program(base, p, folder):
        return {"answers": p | beam.Create(range(3)) | base.RunInference(Missing())}

    with pytest.raises(Exception, match="no such model"):
        run(program, of_penstock, str(tmp_path))


def test_a_model_that_takes_too_long_is_killed(tmp_path):
    class Stuck(ps.ModelHandler):
        def load_model(self):
            return Weights(1)

        def run_inference(self, batch, model, inference_args=None):
            if 7 in batch:
                threading.Event().wait(600)
            return [each + model.much for each in batch]

    def program(base, p, folder):
        step = base.RunInference(Stuck(max_batch_size=4)).with_exception_handling(timeout=1)
        main, other = p | beam.Create(range(12)) | step
        return {"answers": main, "failed": other.failed_inferences | beam.Map(lambda failed: failed[0])}

    found = run(program, of_penstock, str(tmp_path))
    assert found.values_of("failed") == [7]
    assert len(found["answers"]) == 11


def test_one_pipeline_runs_twice(tmp_path):
    p = beam.Pipeline(runner=RUNNERS["process"][0]())
    (
        p
        | beam.Create(range(10))
        | of_penstock.RunInference(adding(of_penstock)(1))
        | beam.Map(lambda row: Path(tmp_path, f"{row} {time.monotonic_ns()}").touch())
    )
    for _ in range(2):
        p.run().wait_until_finish()
    assert len(list(tmp_path.iterdir())) == 20
