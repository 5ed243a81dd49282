"""Short jobs: which runs go to threads of the user's process, and that nobody sees a difference but in speed."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from threadpoolctl import ThreadpoolController, threadpool_info

import penstock as ps
from penstock.errors import PenstockError
from penstock.handlers.pytorch import PytorchModelHandlerTensor
from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream
from penstock.io.parquet import ParquetSource
from penstock.io.parquet_writing import ParquetSink
from penstock.models.native_threads import NativeThreads
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

THREADS, PROCESS, WORKERS = "in threads of this process", "in this process", "in worker processes"
ROWS = 6000
T = TypeVar("T")
RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(200, 2))
Y = (X[:, 0] > 0).astype(int)


class PidModel:
    """A model of the user's own class, whose answers are the process that gave them."""

    calls = threading.Lock()

    def predict(self, rows: Any) -> Any:
        assert self.calls.acquire(blocking=False), "called by two threads at once"
        try:
            warnings.simplefilter("ignore")  # and it does not tidy up
            return np.full(len(rows), os.getpid())
        finally:
            self.calls.release()


class Refusing(PidModel):
    def predict(self, rows: Any) -> Any:
        raise ValueError("refused")


class OwnHandler(SklearnModelHandlerNumpy):
    """A class of the user's, derived from one of Penstock's."""


class OwnSource(ParquetSource):
    pass


class OwnSink(ParquetSink):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files, and models of two features."""
    made = tmp_path_factory.mktemp("short")
    (made / "rows").mkdir()
    for number in range(3):
        values = {name: RANDOM.normal(size=ROWS // 3) for name in ("a", "b")}
        table = pa.table({"id": range(number * ROWS // 3, (number + 1) * ROWS // 3), **values})
        pq.write_table(table, made / "rows" / f"{number}.parquet", row_group_size=700)
    models = {"model": LogisticRegression().fit(X, Y), "pid": PidModel(), "refusing": Refusing()}
    for name, model in models.items():
        (made / name).write_bytes(pickle.dumps(model))
    (made / "large").write_bytes(pickle.dumps(models["model"]) + bytes(10_000_001))
    torch.jit.script(torch.nn.Linear(2, 1)).save(str(made / "script"))
    return made


@pytest.fixture
def read(folder: Path) -> Any:
    return ps.ReadFromParquet(folder / "rows")


def handler(folder: Path, name: str = "model", kind: Any = SklearnModelHandlerNumpy, **settings: Any) -> Any:
    settings = {"columns": ["a", "b"], "max_batch_size": 128, **settings}
    return kind(str(folder / name), ModelFileType.PICKLE, trusted=True, **settings)


def where(pipeline: ps.Pipeline) -> str:
    """Where it would run, by its own word."""
    return pipeline.explain().splitlines()[0].removeprefix("runs ").partition(" (")[0]


# Which runs are short jobs.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, THREADS),
        ({"threads_per_worker": 2}, THREADS),
        ({"workers": 0}, PROCESS),
        ({"workers": 1}, WORKERS),
        ({"run_dir": "run"}, WORKERS),
        ({"deterministic": True}, WORKERS),
        ({"element_timeout": 60.0}, WORKERS),
    ],
)
def test_options_of_the_run(folder, read, tmp_path, options, expected):
    if "run_dir" in options:
        options = {"run_dir": tmp_path / "run"}
    p = ps.Pipeline(**options)
    p | read | ps.RunInference(handler(folder)) | ps.WriteToParquet(tmp_path / "out")
    assert where(p) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, THREADS),
        ({"output_column": "answer"}, THREADS),
        ({"name": "pid"}, THREADS),
        ({"name": "large"}, WORKERS),
        ({"name": "missing"}, WORKERS),
        ({"kind": OwnHandler}, WORKERS),
        ({"inference_fn": lambda model, data, args: model.predict(data)}, WORKERS),
        ({"element_size_fn": lambda row: 1, "max_batch_weight": 10}, WORKERS),
        ({"env_vars": {"A": "1"}}, WORKERS),
        ({"large_model": True}, WORKERS),
        ({"model_copies": 1}, WORKERS),
    ],
)
def test_settings_of_the_handler(folder, read, settings, expected):
    p = ps.Pipeline()
    p | read | ps.RunInference(handler(folder, **settings))
    assert where(p) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"torch_script_model_path": "script", "trusted": True}, THREADS),
        ({"torch_script_model_path": "script", "device": "GPU", "trusted": True}, WORKERS),
        ({"state_dict_path": "script", "model_class": torch.nn.Linear}, WORKERS),
    ],
)
def test_models_of_torch(folder, read, settings, expected):
    paths = {name: str(folder / path) for name, path in settings.items() if name.endswith("_path")}
    p = ps.Pipeline()
    p | read | ps.RunInference(PytorchModelHandlerTensor(columns=["a", "b"], **{**settings, **paths}))
    assert where(p) == expected


STEPS = {
    "copy": (lambda rows, model, out: rows | ps.WriteToParquet(out), THREADS),
    "no sink": (lambda rows, model, out: rows | model, THREADS),
    "reshuffled": (lambda rows, model, out: rows | ps.Reshuffle() | model | ps.WriteToParquet(out), THREADS),
    "flattened": (lambda rows, model, out: (rows, rows | ps.Reshuffle()) | ps.Flatten() | model, THREADS),
    "database": (lambda rows, model, out: rows | model | ps.WriteToSql(f"sqlite:///{out}", "answers"), THREADS),
    "handled": (lambda rows, model, out: rows | model.with_exception_handling(), THREADS),
    "retried": (lambda rows, model, out: rows | model.with_retry(ps.Retry(on=OSError)), THREADS),
    "timed": (lambda rows, model, out: rows | model.with_exception_handling(timeout=60), WORKERS),
    "isolated": (lambda rows, model, out: rows | model.with_exception_handling(use_subprocess=True), WORKERS),
    "hinted": (lambda rows, model, out: rows | model.with_resource_hints(min_ram="1GB"), WORKERS),
    "Map": (lambda rows, model, out: rows | ps.Map(dict) | model, WORKERS),
    "MapBatches": (lambda rows, model, out: rows | ps.MapBatches(lambda t: t, format="arrow") | model, WORKERS),
    "rows out": (lambda rows, model, out: rows | model | ps.WriteToJsonl(out), WORKERS),
    "own sink": (lambda rows, model, out: rows | ps.Write(OwnSink(str(out), False, None, "none")), WORKERS),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(folder, read, tmp_path, name):
    build, expected = STEPS[name]
    p = ps.Pipeline()
    build(p | read, ps.RunInference(handler(folder)), tmp_path / "out")
    assert where(p) == expected


@pytest.mark.parametrize("wrap", ["with_preprocess_fn", "with_postprocess_fn"])
def test_functions_around_the_model(folder, read, wrap):
    p = ps.Pipeline()
    p | read | ps.RunInference(getattr(handler(folder), wrap)(lambda row: row))
    assert where(p) == WORKERS


def test_sources(folder, tmp_path):
    p = ps.Pipeline()
    p | ps.Read(OwnSource(str(folder / "rows"), None)) | ps.RunInference(handler(folder))
    assert where(p) == WORKERS
    p = ps.Pipeline()
    p | ps.Create([{"a": 1.0, "b": 2.0}] * 2000) | ps.RunInference(handler(folder))
    assert where(p) == WORKERS
    few = tmp_path / "few.parquet"
    pq.write_table(pa.table({"a": [1.0], "b": [2.0]}), few)
    p = ps.Pipeline()
    p | ps.ReadFromParquet(few) | ps.RunInference(handler(folder))
    assert where(p) == PROCESS


@pytest.mark.parametrize(("columns", "expected"), [(["a"], THREADS), (["a", "b"], WORKERS)])
def test_the_size_is_that_in_memory_of_the_columns_that_are_read(tmp_path, columns, expected):
    """The file has but a few kilobytes: its values repeat."""
    path = tmp_path / "repeated.parquet"
    column = pa.chunked_array([pa.repeat(pa.scalar(0, pa.int64()), 1_000_000)] * 17)  # 136 MB
    pq.write_table(pa.table({"a": column, "b": column}), path, row_group_size=10**7)
    assert path.stat().st_size < 10**6
    p = ps.Pipeline()
    p | ps.ReadFromParquet(path, columns=columns) | ps.WriteToParquet(tmp_path / "out")
    assert where(p) == expected


def test_explain_says_why_and_what_it_means(folder, read, tmp_path):
    p = ps.Pipeline(threads_per_worker=3)
    p | read | ps.RunInference(handler(folder)) | ps.WriteToParquet(tmp_path / "out")
    lines = p.explain().splitlines()
    size = r"0\.\d+ MB at the sources, and every step takes columns: at most 256 MB need no worker processes"
    assert re.fullmatch(rf"runs in threads of this process \({size}\)", lines[0])
    assert "a crash of native code ends this process" in lines[1]
    assert "workers=" in lines[1]
    assert lines[2] == f"pool 0: this process, {max(3, len(os.sched_getaffinity(0)))} threads"
    assert "one model copy in this process" in "\n".join(lines)


# What they give.


def written(folder: Path) -> list[pa.Table]:
    """The parts of an output, in order."""
    return [pq.read_table(path) for path in sorted(folder.iterdir())]


def test_the_rows_of_worker_processes_in_their_order(folder, read, tmp_path):
    for way, options in {"threads": {"threads_per_worker": 2}, "workers": {"workers": 2}}.items():
        p = ps.Pipeline(**options)
        p | read | ps.RunInference(handler(folder)) | ps.WriteToParquet(tmp_path / way)
        assert p.run().rows_out("RunInference(SklearnModelHandlerNumpy)") == ROWS
    ours, theirs = (pa.concat_tables(written(tmp_path / way)) for way in ("threads", "workers"))
    assert ours["id"].to_pylist() == list(range(ROWS))
    assert ours.equals(theirs)


def test_answers_of_a_script_of_torch(folder, read):
    model = PytorchModelHandlerTensor(torch_script_model_path=str(folder / "script"), trusted=True, columns=["a", "b"])
    answers = (ps.Pipeline(threads_per_worker=3) | read | ps.RunInference(model)).collect()
    assert [answer.example["id"] for answer in answers] == list(range(ROWS))
    rows = torch.tensor([[answer.example["a"], answer.example["b"]] for answer in answers], dtype=torch.float32)
    expected = torch.jit.load(str(folder / "script"))(rows).detach().numpy()
    np.testing.assert_allclose(np.array([answer.inference for answer in answers]), expected, rtol=1e-5, atol=1e-6)


def test_it_is_this_process_and_a_model_of_the_user_s_class_is_called_by_one_thread_at_a_time(folder, read):
    """PidModel raises if it is not."""
    p = ps.Pipeline(threads_per_worker=4)
    answers = (p | read | ps.RunInference(handler(folder, "pid"))).collect()
    assert {answer.inference for answer in answers} == {os.getpid()}
    assert [answer.example["id"] for answer in answers] == list(range(ROWS))


# What it leaves as it was.


def in_thread(function: Callable[[], T]) -> T:
    """In one that ends: of those that there are, threadpoolctl lets the first that set a number set another."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def native_threads() -> tuple[Any, ...]:
    return torch.get_num_threads(), sorted((each["filepath"], each["num_threads"]) for each in threadpool_info())


@pytest.fixture
def three_threads() -> Iterator[None]:
    """For all libraries, whatever the machine has."""
    before = {each["filepath"]: each["num_threads"] for each in threadpool_info()}
    before_torch = torch.get_num_threads()
    in_thread(lambda: ThreadpoolController().limit(limits=3))
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before_torch)
    in_thread(lambda: ThreadpoolController().limit(limits=before))


@pytest.mark.parametrize("name", ["model", "pid", "refusing"])
def test_native_threads_and_warnings_are_as_they_were(folder, read, three_threads, name):
    before, filters = native_threads(), list(warnings.filters)
    p = ps.Pipeline(threads_per_worker=2)
    answers = p | read | ps.RunInference(handler(folder, name))
    assert where(p) == THREADS
    if name == "refusing":
        with pytest.raises(PenstockError, match="refused"):
            answers.collect()
    else:
        answers.collect()
    assert (native_threads(), warnings.filters) == (before, filters)


def numbers_of(api: str) -> set[int]:
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == api}


def test_native_threads_are_limited_for_those_that_call_models(three_threads):
    def call() -> tuple[Any, ...]:
        limits.limit_this_thread()
        return numbers_of("blas"), numbers_of("openmp"), torch.get_num_threads()

    before = native_threads()
    limits = NativeThreads(1)
    with ThreadPoolExecutor(1) as caller:  # it lives on when the limits end, as that of a run which was stopped may
        caller.submit(limits.look).result()
        caller.submit(limits.look).result()  # another model was loaded
        assert caller.submit(call).result() == ({1}, {1}, 1)
        limits.close()
        assert native_threads() == before
        caller.submit(limits.look).result()  # by one that is late
        assert native_threads() == before


class Meeting(ps.ModelHandler[Any, Any, Any]):
    """A thread-safe model: two threads meet in it. It answers with the threads that BLAS may use."""

    def __init__(self, safe: bool = True) -> None:
        super().__init__(max_batch_size=1)
        self.safe = safe
        self.met = threading.Barrier(2)
        self.have_met = False

    def load_model(self) -> None:
        return None

    def is_thread_safe(self, model: None) -> bool:
        return self.safe

    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        if self.safe and not self.have_met:
            self.met.wait(30)
            self.have_met = True
        return [max(numbers_of("blas")) for _ in batch]


@pytest.mark.parametrize(("safe", "expected"), [(True, 1), (False, 3)])
def test_threads_call_a_safe_model_at_once_with_their_share_of_the_cores(three_threads, safe, expected):
    """One that is not safe is called in turn, and may use all cores."""
    sessions = ProcessSessions(Metrics(), Surroundings(cores=2, threads=2, in_process=True))
    spec = InferenceSpec.of(Meeting(safe))

    def call() -> list[Any]:
        stream = open_stream(spec, "step", sessions, Caller())
        made = [*stream.push([1, 2, 3]), *stream.finish()]
        stream.close()
        return [row for each in made for row in each.block]

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call) for _ in range(2)]
        got = [row for each in calls for row in each.result()]
    sessions.close()
    assert numbers_of("blas") == {3}
    assert got == [expected] * 6


def of_two(rows: Any) -> Any:
    return rows * 2


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LogisticRegression(), True),
        (HistGradientBoostingClassifier(max_iter=3), True),
        (make_pipeline(StandardScaler(), FunctionTransformer(np.abs), LogisticRegression()), True),
        (make_pipeline(FunctionTransformer(of_two), LogisticRegression()), False),
        (make_pipeline(ColumnTransformer([("all", StandardScaler(), [0, 1])]), LogisticRegression()), False),
        (RandomForestClassifier(3), False),
        (KNeighborsClassifier(), False),
        (PidModel(), False),
    ],
)
def test_which_models_of_scikit_learn_are_thread_safe(folder, model, expected):
    fitted = model.fit(X, Y) if hasattr(model, "fit") else model
    assert handler(folder).is_thread_safe(fitted) is expected
    assert not handler(folder, kind=OwnHandler).is_thread_safe(fitted)


# Signals, memory.

HANGING = """
import os, threading

class Hanging:
    def predict(self, rows):
        open(os.environ["MARK"], "w").close()
        threading.Event().wait(600)
"""

SCRIPT = """
import pickle, sys
sys.path.insert(0, {here!r})
import hanging
import penstock as ps
from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy

with open({model!r}, "wb") as file:
    pickle.dump(hanging.Hanging(), file)
handler = SklearnModelHandlerNumpy({model!r}, ModelFileType.PICKLE, trusted=True, columns=["a", "b"])
with ps.Pipeline(threads_per_worker=2) as p:
    p | ps.ReadFromParquet({rows!r}) | ps.WriteToParquet({copy!r})
    p | "again" >> ps.ReadFromParquet({rows!r}) | ps.RunInference(handler) | ps.WriteToParquet({out!r})
"""


def until(condition: Any) -> None:
    """Look again and again until it is so, for things that other processes do."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_it_and_leave_nothing_behind(folder, tmp_path, number):
    (tmp_path / "hanging.py").write_text(HANGING)
    made, temporary = tmp_path / "made", tmp_path / "tmp"
    made.mkdir()
    temporary.mkdir()
    names = {"here": tmp_path, "model": tmp_path / "model", "rows": folder / "rows"}
    paths = {name: str(path) for name, path in {**names, "copy": made / "copy", "out": made / "out"}.items()}
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(SCRIPT.format(**paths))
    environment = os.environ | {"TMPDIR": str(temporary), "MARK": str(mark)}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(mark.exists)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    until(lambda: not [path for path in (*made.rglob("*"), *temporary.iterdir()) if path.is_file()])
    assert "KeyboardInterrupt" in errors if number == signal.SIGINT else process.returncode == -number


PEAK = """
import sys
import penstock as ps
p = ps.Pipeline(threads_per_worker=2)
p | ps.ReadFromParquet(sys.argv[1]) | ps.WriteToParquet(sys.argv[2], compression="snappy")
assert "in threads of this process" in p.explain()
p.run()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_input(tmp_path):
    peaks = []
    for megabytes in (60, 240):
        path = tmp_path / f"{megabytes}.parquet"
        rows = megabytes * 10**6 // 64
        table = pa.table({name: pa.repeat(pa.scalar(0.5), rows) for name in "abcdefgh"})
        pq.write_table(table, path, row_group_size=rows // 12)
        command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / f"out-{megabytes}")]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] < peaks[0] + 80_000, "kilobytes"
