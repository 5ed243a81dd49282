"""How many bytes a loaded model takes: what is counted in it, its files, and by how much the process grew."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier

import penstock as ps
from penstock.errors import ModelLoadError, UsageError
from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy
from penstock.inference.calls import How
from penstock.inference.model import ModelCopy
from penstock.models import sizing
from penstock.models.activity import BATCHES
from penstock.models.loading import LoadedModel, load
from penstock.models.memory import file_bytes
from penstock.models.sizing import Reached, counted_bytes

MB = 1_000_000


def array(size: int) -> Any:
    return np.ones(size // 8)


def mapped(size: int) -> mmap.mmap:
    """Memory that no object of Python tells of."""
    memory = mmap.mmap(-1, size)
    memory.write(b"x" * size)
    return memory


class Loads(ps.ModelHandler[Any, Any, Any]):
    """Loads what a function makes."""

    def __init__(self, make: Any, files: Any = (), declared: Any = None) -> None:
        self.make, self.files, self.declared = make, files, declared

    def load_model(self) -> Any:
        return self.make()

    def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
        return list(batch)

    def model_files(self) -> Any:
        return self.files

    def model_bytes(self, model: Any) -> Any:
        return self.declared(model) if callable(self.declared) else self.declared


def loaded(handler: Any) -> LoadedModel:
    made = ModelCopy("step", handler).load()
    assert made is not None
    return made


# What can be counted.


@pytest.mark.parametrize(
    "model",
    [
        {"weights": array(10 * MB)},
        [array(4 * MB), (array(6 * MB),)],
        array(10 * MB).reshape(1000, -1)[:1],  # of a view, all that it keeps alive
        np.frombuffer(bytes(10 * MB), np.int8)[:8],
        np.array([array(5 * MB), None, array(5 * MB)], dtype=object),
        bytearray(10 * MB),
        ["x" * (5 * MB), b"x" * (5 * MB)],
        pa.table({"a": array(5 * MB), "b": array(5 * MB)}),
        pa.array(["x" * (10 * MB)]).dictionary_encode(),
        {"closure": (lambda weights: lambda rows: rows @ weights)(array(10 * MB))},
        np.ma.masked_array(np.zeros(10 * MB // 2, np.int8), np.zeros(10 * MB // 2, bool)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_ten_megabytes_of_every_kind(model: Any) -> None:
    assert counted_bytes(model).ram == pytest.approx(10 * MB, rel=0.05)


def test_memory_that_is_shared_counts_once() -> None:
    weights = array(10 * MB)
    views = [
        weights,
        weights[10:],
        weights.reshape(-1, 2).T,
        torch.from_numpy(weights),
        torch.from_numpy(weights).view(-1, 4),
    ]
    assert counted_bytes(views).ram == pytest.approx(10 * MB, rel=0.01)
    tensor = torch.zeros(10 * MB // 4)
    assert counted_bytes([tensor[:5], tensor.view(2, -1), tensor]).ram == pytest.approx(10 * MB, rel=0.01)
    column = pa.chunked_array([pa.array(weights)])
    assert counted_bytes([column, column.chunk(0), pa.table({"a": column})]).ram == pytest.approx(10 * MB, rel=0.01)


@pytest.mark.parametrize("scripted", [False, True])
def test_a_torch_module(scripted: bool) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(10)), torch.nn.BatchNorm1d(500))
    module.append(module[0])  # tied weights
    size = sum(each.nbytes for each in [*module.parameters(), *module.buffers()])
    model = torch.jit.script(module) if scripted else module
    count = counted_bytes({"model": model})
    assert (count.ram, count.devices) == (pytest.approx(size, rel=0.02), {})


def test_tensors_that_are_nowhere_or_sparse_do_no_harm() -> None:
    model = [torch.zeros(10 * MB, device="meta"), torch.eye(100).to_sparse(), array(MB)]
    count = counted_bytes(model)
    assert (count.ram, count.devices) == (pytest.approx(MB, rel=0.01), {})


def test_an_exported_program_is_its_weights() -> None:
    """The shapes in its graph hold no memory, though they say that they do."""
    program = torch.export.export(torch.nn.Linear(1000, 1000), (torch.zeros(20_000, 1000),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count = counted_bytes(program.module())
    assert (count.ram, count.devices) == (pytest.approx(4 * MB, rel=0.25), {})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_on_a_device_is_not_in_memory() -> None:
    module = torch.nn.Linear(2000, 2000)
    count = counted_bytes(module.to("cuda"))
    assert count.devices == {"cuda:0": pytest.approx(16 * MB, rel=0.01)}
    assert count.ram < MB
    made = loaded(Loads(lambda: torch.nn.Linear(2000, 2000).to("cuda"), declared=None))
    assert (made.bytes, dict(made.devices)) == (made.devices["cuda:0"], {"cuda:0": pytest.approx(16 * MB, rel=0.05)})


def test_objects_that_raise_when_they_are_looked_at() -> None:
    class Shy:
        def __init__(self) -> None:
            self.weights = array(MB)

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __sizeof__(self) -> int:
            raise RuntimeError

        def __len__(self) -> int:
            raise RuntimeError

        __eq__ = __hash__ = __len__  # type: ignore[assignment]

    class ShyDict(dict[str, Any]):
        __len__ = __iter__ = __sizeof__ = Shy.__len__  # type: ignore[assignment]

    count = counted_bytes([Shy(), ShyDict(weights=array(MB)), array(MB)])
    assert count.ram == pytest.approx(3 * MB, rel=0.01)


def test_objects_in_circles() -> None:
    weights = array(MB)
    model: dict[str, Any] = {"weights": weights}
    model["self"] = [model, (model, weights)]
    assert counted_bytes(model).ram == pytest.approx(MB, rel=0.01)


def test_the_program_is_no_part_of_a_model() -> None:
    class Model:
        huge = array(50 * MB)

        def __init__(self) -> None:
            self.modules = [np, sys, sys.modules[__name__]]
            self.functions = [counted_bytes, np.dot, len, Model]
            self.frame = sys._getframe()

    assert counted_bytes(Model()).ram < MB


def test_a_long_vocabulary_does_not_hide_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "MOST_OBJECTS", 5_000)
    model = [{number: float(number) for number in range(100_000)}, [[[[[array(MB)]]]]]]
    count = counted_bytes(model)
    assert count.ram > MB + sys.getsizeof(model[0])
    assert len(Reached(model).objects) == 5_000


def test_what_was_there_before_does_not_count() -> None:
    class Handler:
        def __init__(self) -> None:
            self.base = array(50 * MB)

        def load(self) -> Any:
            self.added = array(MB)
            return self

    handler = Handler()
    before = Reached(handler)
    assert counted_bytes(handler.load(), before).ram == pytest.approx(MB, rel=0.01)
    assert counted_bytes([handler.base, array(MB)], before).ram == pytest.approx(MB, rel=0.01)


def test_nothing_is_kept() -> None:
    class Model:
        alive = 0

        def __init__(self) -> None:
            Model.alive += 1

        def __del__(self) -> None:
            Model.alive -= 1

    model = [Model()]
    counted_bytes(model, Reached(model))
    del model
    gc.collect()
    assert Model.alive == 0


# What a load comes to.


def test_models_that_load_at_once_are_measured_apart() -> None:
    gc.collect()  # what other tests have left would be freed meanwhile
    both = threading.Barrier(2)

    def make() -> Any:
        both.wait()
        model = {"weights": array(50 * MB)}
        both.wait()  # the process has grown by both
        return model

    made: list[LoadedModel] = []
    threads = [threading.Thread(target=lambda: made.append(loaded(Loads(make)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.bytes for each in made] == [pytest.approx(50 * MB, rel=0.2)] * 2
    assert min(each.grown for each in made) > 80 * MB


def test_memory_that_python_does_not_see_is_what_the_process_grew_by() -> None:
    made = loaded(Loads(lambda: mapped(50 * MB)))
    assert counted_bytes(made.model).ram < MB
    assert made.bytes == made.grown == pytest.approx(50 * MB, rel=0.2)


def test_the_growth_does_not_count_where_it_may_be_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"x" * 3000)
    files = [str(path)]

    def while_a_batch_runs() -> Any:
        BATCHES.begin()
        BATCHES.end()
        return mapped(50 * MB)

    def with_an_import() -> Any:
        monkeypatch.setitem(sys.modules, "a_framework", sys)
        return mapped(50 * MB)

    gc.collect()  # what other tests have left would be freed meanwhile
    assert loaded(Loads(while_a_batch_runs, files)).bytes == 3000
    assert loaded(Loads(while_a_batch_runs)).bytes > 40 * MB  # there is nothing else to go by
    assert loaded(Loads(with_an_import)).bytes < MB
    assert loaded(Loads(lambda: mapped(50 * MB), files)).bytes > 40 * MB


def test_a_batch_that_a_model_runs_counts_as_one() -> None:
    before = BATCHES.mark()
    copy = ModelCopy("step", Loads(object), one_of_many=True)
    copy.load()
    assert BATCHES.was_quiet(before)
    copy.outcomes([1, 2], How(None, "step"))
    assert not BATCHES.was_quiet(before)
    assert BATCHES.was_quiet(BATCHES.mark())


def test_the_files_of_a_forest(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(2000, 8))
    forest = RandomForestClassifier(100, n_jobs=1).fit(features, random.integers(0, 2, 2000))
    path = tmp_path / "forest.pickle"
    path.write_bytes(pickle.dumps(forest))
    made = loaded(SklearnModelHandlerNumpy(str(path), ModelFileType.PICKLE, trusted=True))
    assert made.bytes >= os.path.getsize(path) > 5 * counted_bytes(made.model).ram


def test_a_handler_may_say_how_large_its_model_is() -> None:
    made = loaded(Loads(lambda: array(10 * MB), declared=lambda model: np.int64(model.nbytes // 2)))
    assert (made.bytes, type(made.bytes)) == (5 * MB, int)
    assert made.ram == pytest.approx(10 * MB, rel=0.5)
    assert loaded(Loads(lambda: array(10 * MB), declared=0)).bytes == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, "8GB", True])
def test_a_size_that_is_none(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"model_bytes\(\) returned .*expected a whole number of bytes"):
        loaded(Loads(object, declared=wrong))


def test_a_size_that_cannot_be_said() -> None:
    with pytest.raises(ModelLoadError, match=r"step 'step': Loads.model_bytes\(\) raised ZeroDivisionError"):
        loaded(Loads(object, declared=lambda model: 1 // 0))


def test_a_load_that_fails_does_not_disturb_the_next() -> None:
    with pytest.raises(ZeroDivisionError):
        load(lambda: 1 // 0, {})
    assert load(lambda: mapped(50 * MB), {}).bytes > 40 * MB


def test_a_model_that_was_counted_is_freed_with_its_last_user():
    class Model:
        pass

    model = Model()
    model.itself = [Model()]
    seen = weakref.ref(model.itself[0])
    assert counted_bytes(model).ram > 0
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


def test_an_empty_name_of_a_file_is_not_the_working_directory():
    assert file_bytes(lambda: [""]) is None
