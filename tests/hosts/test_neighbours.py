"""Plain models of several steps on one GPU share a process there, and its memory. The device here is a name in
CUDA_VISIBLE_DEVICES, whose memory is what a pretended torch says, or what a table in the process has room for."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path

import cloudpickle
import pytest

import penstock as ps
from penstock.errors import ModelLoadError
from penstock.inference.neighbours import with_neighbours
from penstock.inference.spec import InferenceSpec
from penstock.models.place import Surroundings, choose_place

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 300
TORCH = """
class cuda:
    is_available = is_initialized = staticmethod(lambda: True)
    mem_get_info = staticmethod(lambda: (1250, 1250))  # of which models may take 1000
    device_count = memory_reserved = memory_allocated = staticmethod(lambda: 0)
"""


class Weights:
    """What is loaded."""


class OnDevice(ps.ModelHandler):
    """Adds a number. Each load leaves a line: its number, the process, and who else was loaded there."""

    wraps_answers = True
    room: int | None = None  # bytes of a device that refuses what does not fit

    def __init__(self, folder, number, size=100, **settings):
        super().__init__(**{"max_batch_size": 10, **settings})
        self.folder, self.number, self.size = str(folder), number, size

    def accelerator(self):
        return "gpu"

    def model_id(self):
        return f"m{self.number}"

    def model_bytes(self, model):
        return self.size

    def load_model(self):
        here = sys.__dict__.setdefault("models_on_device", {})  # of this process, whoever unpickles this class
        with open(Path(self.folder, "loads"), "a") as file:
            file.write(f"{self.number} {os.getpid()} {sum(here.values())}\n")
        if self.room is not None and sum(here.values()) + self.size > self.room:
            raise MemoryError("the device is full")
        model = Weights()
        here[id(model)] = self.size
        weakref.finalize(model, here.pop, id(model))
        return model

    def run_inference(self, batch, model, inference_args=None):
        here = sys.models_on_device
        assert id(model) in here
        return [(row + self.number, os.getpid(), sum(here.values())) for row in batch]


class Full(OnDevice):
    room = 1000


class Broken(OnDevice):
    def load_model(self):
        raise ValueError("no weights")


class Crashes(OnDevice):
    """A row that is below 0 kills the process."""

    def run_inference(self, batch, model, inference_args=None):
        if min(batch) < 0:
            os._exit(3)
        return super().run_inference(batch, model)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.fixture
def sized(monkeypatch, tmp_path):
    """A device of which models may take 1000 bytes."""
    Path(tmp_path, "torch").mkdir()
    Path(tmp_path, "torch", "__init__.py").write_text(TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*handlers, rows=range(ROWS), handled=False, workers=2):
    """The answers of each branch, and the pipeline's result."""
    p = ps.Pipeline(workers=workers, progress=False)
    source = p | ps.Create(list(rows))
    made = []
    for handler in handlers:
        step = f"add {handler.number}" >> ps.RunInference(handler)
        made.append((source | step.with_exception_handling())[0] if handled else source | step)
    number = lambda answer: (answer.model_id, answer.example, answer.inference)  # noqa: E731
    found = (tuple(made) | ps.Flatten() | ps.Map(number)).collect()
    return [[each for each in found if each[0] == handler.model_id()] for handler in handlers], p.result


def loads(folder):
    """(number, process, bytes of others there) of each."""
    return [tuple(map(int, line.split())) for line in Path(folder, "loads").read_text().splitlines()]


def check(branches, *numbers, rows=range(ROWS)):
    for made, number in zip(branches, numbers, strict=True):
        assert [example for _, example, _ in made] == list(rows)
        assert [value for _, _, (value, _, _) in made] == [row + number for row in rows]


def test_models_that_fit_are_loaded_once_each_in_one_process(tmp_path):
    branches, _ = run(OnDevice(tmp_path, 1), OnDevice(tmp_path, 2))
    check(branches, 1, 2)
    assert sorted(number for number, _, _ in loads(tmp_path)) == [1, 2]
    assert len({process for made in branches for _, _, (_, process, _) in made}) == 1
    assert os.getpid() not in {process for _, process, _ in loads(tmp_path)}


def test_each_step_is_measured_by_itself(tmp_path):
    _, result = run(OnDevice(tmp_path, 1, size=100), OnDevice(tmp_path, 2, size=200, max_batch_size=1))
    batches = {key.step: value for key, value in result.metrics.distributions.items() if "request_batch_size" in key.name}
    sizes = {key.step: value for key, value in result.metrics.distributions.items() if key.name == "model_byte_size"}
    assert batches["add 2"].count == ROWS
    assert batches["add 1"].count < ROWS
    assert (sizes["add 1"].max, sizes["add 2"].max) == (100, 200)


def test_models_that_do_not_fit_together_take_turns(sized, tmp_path):
    branches, result = run(OnDevice(tmp_path, 1, size=600), OnDevice(tmp_path, 2, size=700))
    check(branches, 1, 2)
    assert max(there for made in branches for _, _, (_, _, there) in made) <= 1000
    assert {number for number, _, _ in loads(tmp_path)} == {1, 2}
    unloads = {key.step: count for key, count in result.metrics.counters.items() if key.name == "model_unloads"}
    assert sum(unloads.values()) >= 1


def test_a_model_that_finds_no_memory_waits_until_the_others_can_go(tmp_path, caplog):
    branches, _ = run(Full(tmp_path, 1, size=400), Full(tmp_path, 2, size=900))
    check(branches, 1, 2)
    second = [there for number, _, there in loads(tmp_path) if number == 2]
    assert 0 in second, "once nothing was there"
    assert max(there for made in branches for _, _, (_, _, there) in made) <= 1000


@pytest.mark.parametrize("batches", [{}, {"max_batch_duration_secs": 0.001}], ids=["", "in threads"])
def test_in_the_users_process_models_that_find_no_memory_take_turns(tmp_path, caplog, batches):
    first, second, third = (Full(tmp_path, n, size=size, **batches) for n, size in [(1, 400), (2, 900), (3, 300)])
    branches, _ = run(first, second, third, workers=0)
    check(branches, 1, 2, 3)
    assert {process for made in branches for _, _, (_, process, _) in made} == {os.getpid()}
    assert max(there for made in branches for _, _, (_, _, there) in made) <= 1000
    assert "its model takes turns with those of other steps: no memory was left for it" in caplog.text
    with pytest.raises(ModelLoadError, match="the device is full"):
        run(first, Full(tmp_path, 4, size=1100), workers=0)


def test_a_model_that_is_larger_than_its_share_of_the_device_is_loaded_all_the_same(sized, tmp_path):
    branches, _ = run(OnDevice(tmp_path, 1, size=100), OnDevice(tmp_path, 2, size=1200))
    check(branches, 1, 2)


@pytest.mark.parametrize("handled", [False, True])
def test_a_model_that_cannot_be_loaded_ends_the_run(tmp_path, handled):
    with pytest.raises(ModelLoadError, match=r"step 'add 2': the model of step 'add 2' could not be loaded.*no weights"):
        run(OnDevice(tmp_path, 1), Broken(tmp_path, 2), handled=handled)


def test_a_crash_costs_the_neighbour_a_load_and_no_row(tmp_path):
    rows = [*range(20), -1, *range(20, 40)]
    branches, result = run(OnDevice(tmp_path, 1), Crashes(tmp_path, 2, max_batch_size=1), rows=rows, handled=True)
    check(branches[:1], 1, rows=rows)
    check(branches[1:], 2, rows=range(40))
    failed = {step: counts.rows_failed for step, counts in result.counts.items() if counts.rows_failed}
    assert failed == {"add 2": 1}


def test_one_after_the_other_works_as_side_by_side(tmp_path):
    p = ps.Pipeline(workers=2, progress=False)
    first = p | ps.Create(list(range(ROWS))) | "one" >> ps.RunInference(OnDevice(tmp_path, 1))
    made = first | ps.Map(lambda answer: answer.inference[0]) | "two" >> ps.RunInference(OnDevice(tmp_path, 2))
    assert [answer.inference[0] for answer in made.collect()] == [row + 3 for row in range(ROWS)]
    assert len({process for _, process, _ in loads(tmp_path)}) == 1


class Named(OnDevice):
    """Adds the number that its file is named by."""

    def update_model_path(self, model_path):
        self.number = int(Path(model_path).stem)

    def model_id(self):
        return f"{self.number}.json"


class UntilAnswered(ps.Source):
    """Numbers, until a model has answered."""

    def __init__(self, folder, name):
        self.mark = Path(folder, f"{name}.answered")

    def splits(self, goal):
        return [0]

    def read(self, split):
        at = 0
        while not self.mark.exists() and at < 400_000:
            yield list(range(at, at + 10))
            at += 10


def test_one_of_them_may_change_while_the_run_goes_on(tmp_path):
    for number in (1, 5):
        Path(tmp_path, f"{number}.json").write_text("")

    def seen(answer):
        Path(tmp_path, f"{answer.model_id}.answered").touch()
        return Path(answer.model_id).name, answer.inference[0] - answer.example

    p = ps.Pipeline(workers=2, progress=False)
    versions = p | "versions" >> ps.Create([ps.ModelMetadata(str(tmp_path / "5.json"))])
    rows = p | ps.Read(UntilAnswered(tmp_path, "5.json"))
    first = rows | "one" >> ps.RunInference(Named(tmp_path, 1), model_metadata_pcoll=versions)
    second = rows | "two" >> ps.RunInference(OnDevice(tmp_path, 2))
    made = set(((first, second) | ps.Flatten() | ps.Map(seen)).collect())
    assert {("5.json", 5), ("m2", 2)} <= made <= {("1.json", 1), ("5.json", 5), ("m2", 2)}
    assert len({process for _, process, _ in loads(tmp_path)}) == 1


def test_explain_says_that_they_share(tmp_path):
    p = ps.Pipeline(workers=2)
    rows = p | ps.Create(range(10_000))
    for number in (1, 2):
        rows | f"add {number}" >> ps.RunInference(OnDevice(tmp_path, number)) | ps.WriteToText(str(tmp_path / str(number)))
    said = [line for line in p.explain().splitlines() if "add " in line]
    assert all("with the other models on that GPU" in line for line in said if "model" in line)


def specs(**handlers):
    return with_neighbours({name: InferenceSpec.of(handler) for name, handler in handlers.items()})


class OnCpu(OnDevice):
    def accelerator(self):
        return None


class Ahead(OnDevice):
    def prepares_ahead(self):
        return True


@pytest.mark.parametrize(
    "other",
    [
        OnCpu("", 2),
        OnDevice("", 2, large_model=True),
        OnDevice("", 2, model_copies=2),
        OnDevice("", 2, env_vars={"A": "1"}),
        Ahead("", 2),
        ps.KeyedModelHandler([ps.KeyModelMapping(["a"], OnDevice("", 2))]),
    ],
)
def test_who_has_a_process_of_its_own_for_another_reason_keeps_it(other):
    assert set(specs(a=OnDevice("", 1), other=other, b=OnDevice("", 3))) == {"a", "b"}
    assert not specs(a=OnDevice("", 1), other=other)


@pytest.mark.parametrize(
    ("around", "shared"),
    [
        ({"gpus": ("0",), "workers": 2}, True),
        ({"gpus": ("0",), "workers": 1}, True),
        ({"gpus": ("0", "1"), "workers": 2}, False),
        ({"gpus": (), "workers": 2}, False),
        ({"gpus": ("0",), "in_process": True}, False),
        ({"gpus": ("0",), "workers": 2, "element_timeout": 1.0}, False),
    ],
)
def test_where_they_share_a_place(around, shared):
    spec = specs(a=OnDevice("", 1), b=OnDevice("", 2))["a"]
    assert choose_place(spec.wishes(), Surroundings(**around)).shared == shared
