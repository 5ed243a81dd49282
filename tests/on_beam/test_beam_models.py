"""Where models live and what batches they get, on Apache Beam: the same as on Penstock's own engine."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import apache_beam as beam
import cloudpickle
import pytest
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

import beam_programs
import penstock.beam as of_penstock
from beam_programs import Weights, from_file, written
from beam_runs import run
from penstock.beam.inference_dofn import RefreshedInferenceDoFn
from penstock.beam.versions import TimedVersions, VersionNames
from penstock.inference.refresh import Refresh
from penstock.inference.spec import InferenceSpec
from penstock.models.host_address import run_folder
from penstock.models.place import Surroundings

for each in (sys.modules[__name__], beam_programs):
    cloudpickle.register_pickle_by_value(each)

LONGEST = 60.0  # seconds that something may take


def wait_for(holds):
    until = time.monotonic() + LONGEST
    while not holds():
        assert time.monotonic() < until, "it never came to pass"
        time.sleep(0.01)


class Spread(of_penstock.ModelHandler):
    """Answers with how much the lengths of its batch differ."""

    def load_model(self):
        return Weights(0)

    def run_inference(self, batch, model, inference_args=None):
        lengths = [len(each) for each in batch]
        return [max(lengths) - min(lengths)] * len(batch)


def test_rows_of_like_length_share_a_batch(tmp_path):
    lengths = [random.Random(number).randint(1, 500) for number in range(2000)]

    def program(base, p, folder):
        texts = p | beam.Create([0]) | beam.FlatMap(lambda _: ["x" * length for length in lengths])
        return {
            "by length": texts | "L" >> base.RunInference(Spread(max_batch_size=16, batch_length_fn=len)),
            "as they come": texts | "C" >> base.RunInference(Spread(max_batch_size=16)),
        }

    found = run(program, of_penstock, str(tmp_path))
    by_length, as_they_come = (sum(found.values_of(name)) for name in ("by length", "as they come"))
    assert len(found["by length"]) == len(found["as they come"]) == 2000
    assert by_length < as_they_come / 5


class Meets(of_penstock.ModelHandler):
    """Answers with its process, when all copies are at work."""

    def __init__(self, folder, copies):
        super().__init__(model_copies=copies, max_batch_size=1)
        self.folder, self.copies = folder, copies

    def load_model(self):
        return Weights(0)

    def run_inference(self, batch, model, inference_args=None):
        Path(self.folder, f"{os.getpid()}.pid").touch()
        wait_for(lambda: len(list(Path(self.folder).glob("*.pid"))) >= self.copies)
        return [os.getpid()] * len(batch)


def test_copies_of_a_model_are_so_many_processes(tmp_path):
    def program(base, p, folder):
        rows = p | beam.Create([0]) | beam.FlatMap(lambda _: range(50))
        return {"answers": rows | base.RunInference(Meets(folder, 2))}

    found = run(program, of_penstock, str(tmp_path)).values_of()
    assert (len(found), len({*found} - {os.getpid()})) == (50, 2)


class Prepares(of_penstock.ModelHandler):
    def load_prepare(self):
        return 10

    def prepare(self, examples, tool, inference_args=None):
        return [(each * tool, os.getpid()) for each in examples]

    def load_model(self):
        return Weights(0)

    def run_inference(self, batch, model, inference_args=None):
        return [(each, prepared_in, os.getpid()) for each, prepared_in in batch]


class Threads(of_penstock.ModelHandler):
    """Answers with how many threads the libraries of its process may use."""

    def load_model(self):
        return Weights(int(os.environ["OMP_NUM_THREADS"]))

    def run_inference(self, batch, model, inference_args=None):
        return [model.much for _ in batch]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be kept to some of the cores here")
def test_frameworks_use_the_cores_that_the_worker_may_use(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def program(base, p, folder):
        return {"answers": p | beam.Create([1]) | base.RunInference(Threads(large_model=True))}

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert run(program, of_penstock, str(tmp_path)).values_of() == [1]
    finally:
        os.sched_setaffinity(0, cores)


def test_rows_of_a_model_in_a_host_are_prepared_outside(tmp_path):
    def program(base, p, folder):
        return {"answers": p | beam.Create([1, 2]) | base.RunInference(Prepares(large_model=True))}

    found = run(program, of_penstock, str(tmp_path)).values_of()
    assert [each[:2] for each in found] == [(10, os.getpid()), (20, os.getpid())]
    assert os.getpid() not in {host for _, _, host in found}


class Crashes(of_penstock.ModelHandler):
    def load_model(self):
        return Weights(0)

    def run_inference(self, batch, model, inference_args=None):
        if 3 in batch:
            os._exit(1)
        return batch


def test_a_row_that_crashes_the_model_fails_alone(tmp_path):
    def program(base, p, folder):
        main, other = p | beam.Create(range(6)) | base.RunInference(Crashes()).with_exception_handling(use_subprocess=True)
        return {"answers": main, "failed": other.failed_inferences | beam.MapTuple(lambda row, error: row)}

    found = run(program, of_penstock, str(tmp_path))
    assert found.values_of() == [0, 1, 2, 4, 5]
    assert found.values_of("failed") == [3]


class Notes(of_penstock.ModelHandler):
    """Notes that it was called."""

    def __init__(self, path, **settings):
        super().__init__(**settings)
        self.path = path

    def load_model(self):
        return Weights(0)

    def run_inference(self, batch, model, inference_args=None):
        Path(self.path).touch()
        return batch


def test_a_model_in_a_host_answers_while_its_bundle_is_read(tmp_path):
    called = tmp_path / "called"

    def read(_):
        yield from range(100)
        wait_for(called.exists)
        yield 100

    def program(base, p, folder):
        return {"answers": p | beam.Create([0]) | beam.FlatMap(read) | base.RunInference(handler)}

    handler = Notes(str(called), large_model=True, max_batch_size=16)
    assert sorted(run(program, of_penstock, str(tmp_path)).values_of()) == [*range(101)]


@pytest.mark.parametrize("large", [False, True], ids=["in the process", "in a host"])
def test_a_slow_source_does_not_keep_its_rows_from_the_model(large, tmp_path):
    """They are too few for a block, and too far apart to wait for more."""
    called = tmp_path / "called"

    def read(_):
        yield 0
        time.sleep(0.05)  # what makes it slow
        yield 1
        wait_for(called.exists)
        yield 2

    def program(base, p, folder):
        handler = Notes(str(called), large_model=large, max_batch_size=2)
        return {"answers": p | beam.Create([0]) | beam.FlatMap(read) | base.RunInference(handler)}

    assert run(program, of_penstock, str(tmp_path)).values_of() == [0, 1, 2]


class Weighs(of_penstock.ModelHandler):
    """Answers with how many of its kind are in memory; model 9 is too large for the budget."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def update_model_path(self, model_path):
        self.path = model_path

    def load_model(self):
        number = int(Path(self.path).read_text())
        here = Path(self.folder, f"here-{number}-{os.getpid()}")
        here.touch()
        model = Weights(number)
        weakref.finalize(model, here.unlink)
        return model

    def model_bytes(self, model):
        return (50 if model.much == 9 else 4) << 20

    def run_inference(self, batch, model, inference_args=None):
        return [len(list(Path(self.folder).glob("here-*"))) for _ in batch]


@pytest.mark.parametrize("large", [False, True], ids=["in the process", "in a host"])
def test_models_of_keys_are_within_their_budget(large, tmp_path):
    """Two at a time have room. One that has none costs its own elements, and says so."""
    for number in (*range(6), 9):
        written(tmp_path, f"{number}.json", number)

    def program(base, p, folder):
        handler = Weighs(folder, large_model=large)
        keyed = base.KeyedModelHandler.from_pattern(f"{folder}/{{key}}.json", handler, memory_budget="10MB")
        rows = [(str(key), number) for number in range(5) for key in (*range(6), 9)]
        main, other = p | beam.Create(rows) | base.RunInference(keyed).with_exception_handling()
        return {"answers": main, "failed": other.failed_inferences | beam.MapTuple(lambda row, error: (row, error[1]))}

    found = run(program, of_penstock, str(tmp_path))
    assert sorted(key for key, _ in found.values_of()) == sorted([str(key) for key in range(6)] * 5)
    assert {here for _, here in found.values_of()} <= {1, 2}
    assert [row for row, _ in found.values_of("failed")] == [("9", number) for number in range(5)]
    assert all("takes 52.4 MB, and the budget is 10 MB" in why for _, why in found.values_of("failed"))


@pytest.mark.parametrize("large", [False, True], ids=["in the process", "in a host"])
def test_a_model_changes_while_a_pipeline_runs(large, tmp_path):
    """Bundle by bundle, as a worker of Beam's calls the step. A version that cannot be loaded leaves the one before it."""
    paths = {name: written(tmp_path, f"{name}.json", much) for name, much in [("old", 0), ("first", 100), ("second", 200)]}
    (tmp_path / "bad.json").write_text("no number")
    step = changing_step(paths["old"], f"test-{os.getpid()}-{large}", large_model=large)
    try:
        wait_for(lambda: answers(step, paths["first"], 1) == [101])
        assert answers(step, paths["second"], 2) in ([101], [201])
        wait_for(lambda: answers(step, paths["second"], 2) == [201])
        assert answers(step, str(tmp_path / "bad.json"), 3) == [201]
        wait_for(lambda: answers(step, paths["first"], 4) == [101])
    finally:
        step.teardown()


def changing_step(path, run, **settings):
    """As each thread of a worker of Beam's has one."""
    spec = InferenceSpec.of(from_file(of_penstock)(path, **settings), refresh=Refresh.of())
    step = RefreshedInferenceDoFn(spec, "step", run)
    step.setup()
    return step


def answers(step, path, since):
    """Of a bundle of one element, whose side input is this version."""
    version = [TimedVersions(since, of_penstock.ModelMetadata(path, path))]
    step.start_bundle()
    made = list(step.process(1, version, WindowedValue(1, 0, (GlobalWindow(),))))
    return [each.value for each in (*made, *step.finish_bundle())]


def test_a_bundle_that_is_behind_does_not_bring_an_older_model_back(tmp_path):
    """Threads read the side input at their own times: one has it as it was before, when another has had the newer one."""
    paths, run = [written(tmp_path, f"{much}.json", much) for much in (0, 100, 200)], f"test-{os.getpid()}-behind"
    ahead, behind = (changing_step(paths[0], run) for _ in range(2))
    names = VersionNames(InferenceSpec.of(from_file(of_penstock)(paths[0])), "step", Surroundings(folder=run_folder(run)))
    try:
        wait_for(lambda: answers(ahead, paths[2], 2) == [201])
        assert answers(behind, paths[1], 1) == [201]
        names.look()
        assert names.newest("") == paths[2], "by whoever has the model on this machine"
    finally:
        ahead.teardown()
        behind.teardown()


def test_versions_that_are_refused_do_not_use_up_what_there_is_to_fall_back_on(tmp_path):
    """However many there are."""
    step = changing_step(written(tmp_path, "old.json", 0), f"test-{os.getpid()}-refused")
    try:
        for since in range(1, 6):
            bad = tmp_path / f"bad-{since}.json"
            bad.write_text("no number")
            assert answers(step, str(bad), since) == [1]
        new = written(tmp_path, "new.json", 100)
        wait_for(lambda: answers(step, new, 6) == [101])
    finally:
        step.teardown()


# New versions that a pattern names.


@contextmanager
def being_written(path):
    """A file that grows, until the end."""
    over = threading.Event()

    def write():
        with path.open("w") as file:
            while not over.wait(0.02):
                file.write("1")
                file.flush()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        wait_for(path.exists)
        yield
    finally:
        over.set()
        thread.join()


def test_a_file_that_is_being_written_is_no_version_yet(tmp_path):
    os.replace(written(tmp_path, "new", 100), tmp_path / "model-1.json")

    def program(base, p, folder):
        pattern, until = f"{folder}/model-*.json", time.time() + 3
        old = from_file(base)(written(folder, "old.json", 1))
        step = base.RunInference(old, watch_model_pattern=pattern, interval=1, stop_timestamp=until)
        versions = p | base.WatchFilePattern(pattern, interval=1, stop_timestamp=until)
        versions | beam.Map(lambda version: Path(folder, f"seen {version.model_name}").touch())
        return {"answers": p | beam.Create([1]) | step}

    with being_written(tmp_path / "model-2.json"):
        assert run(program, of_penstock, str(tmp_path)).values_of() == [101]
    assert [path.name for path in tmp_path.glob("seen *")] == ["seen model-1.json"]


def test_a_pattern_with_keys_gives_the_versions_of_each_key(tmp_path):
    for key in "ab":
        written(tmp_path, f"{key}.json", 1)
        os.replace(written(tmp_path, "new", 100), tmp_path / f"new-{key}.json")

    def program(base, p, folder):
        handler = base.KeyedModelHandler.from_pattern(f"{folder}/{{key}}.json", from_file(base)(""))
        pattern, until = f"{folder}/new-{{key}}.json", time.time() + 1
        step = base.RunInference(handler, watch_model_pattern=pattern, interval=86_400, stop_timestamp=until)
        return {"answers": p | beam.Create([("a", 1), ("b", 2)]) | step}

    assert run(program, of_penstock, str(tmp_path)).values_of() == [("a", 101), ("b", 102)]


def test_of_several_versions_that_come_at_once_the_last_is_used(tmp_path):
    """Beam's RunInference fails: its side input has room for one."""

    def program(base, p, folder):
        paths = [written(folder, f"{much}.json", much) for much in (0, 100, 200)]
        versions = p | "One" >> beam.Create([0]) | beam.FlatMap(lambda _: [base.ModelMetadata(path, "") for path in paths])
        return {
            "answers": p | beam.Create([1]) | base.RunInference(from_file(base)(paths[0]), model_metadata_pcoll=versions)
        }

    assert run(program, of_penstock, str(tmp_path)).values_of() == [201]
