"""Model hosts: a model in a process of its own gives the answers, the batches and the metrics that it gives in this one."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from adding import Adds, Slices, loads
from penstock.errors import ModelLoadError, NotShippableError, PredictionCountError, StepError, UsageError
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a script: no host imports this file

PATIENCE = 20  # seconds until a thread or a process counts as hanging

WAYS = {"in-process": {"workers": 0}, "workers": {"workers": 2}, "threads": {"workers": 1, "threads_per_worker": 3}}


@pytest.fixture(params=["in-process", "workers"])
def pipeline(request):
    """Makes pipelines that run in ways that differ in who asks the host."""
    return lambda **more: ps.Pipeline(**{**WAYS[request.param], **more})


# Answers, and how many copies give them.


@pytest.mark.parametrize("pipeline", WAYS, indirect=True)
def test_answers_come_in_order_from_one_copy(pipeline, tmp_path):
    p = pipeline()
    rows = p | ps.Read(Slices(2000)) | "model" >> ps.RunInference(Adds(tmp_path / "loads", large_model=True))
    assert rows.collect() == list(range(1000, 3000))
    assert len(loads(tmp_path / "loads")) == 1
    assert str(os.getpid()) not in loads(tmp_path / "loads")
    assert p.result.rows_out("model") == 2000
    assert p.result.worker_deaths == 0


def test_exactly_n_copies(pipeline, tmp_path):
    class Slow(Adds):
        def run_inference(self, batch, model, inference_args=None):
            threading.Event().wait(0.01)  # so that there is work for every copy
            return [(row, os.getpid()) for row in batch]

    handler = Slow(tmp_path / "loads", model_copies=3, max_batch_size=10)
    answers = (pipeline() | ps.Read(Slices(1000)) | ps.RunInference(handler)).collect()
    assert [row for row, _ in answers] == list(range(1000))
    copies = loads(tmp_path / "loads")
    assert len(copies) == len(set(copies)) == 3
    assert {str(pid) for _, pid in answers} <= set(copies)
    assert len({pid for _, pid in answers}) >= 2


@pytest.mark.parametrize("copies", [0, -1, 1.5, True, "2"])
def test_a_number_of_copies_that_is_none_is_refused(copies):
    with pytest.raises(UsageError, match="model_copies"):
        ps.RunInference(Adds(model_copies=copies))


def test_two_steps_with_one_identifier_share_one_copy(pipeline, tmp_path):
    same = Adds(tmp_path / "loads", large_model=True)
    p = pipeline()
    rows = p | ps.Read(Slices(600)) | "once" >> ps.RunInference(same, model_identifier="m")
    rows = rows | "twice" >> ps.RunInference(same.with_postprocess_fn(str), model_identifier="m")
    assert rows.collect() == [str(row + 2000) for row in range(600)]
    assert len(loads(tmp_path / "loads")) == 1


@pytest.mark.parametrize("pipeline", WAYS, indirect=True)
def test_two_hosts_and_a_model_in_the_worker_one_behind_the_other(pipeline, tmp_path):
    rows = pipeline() | ps.Read(Slices(600))
    rows = rows | "a" >> ps.RunInference(Adds(tmp_path / "a", large_model=True, max_batch_size=64))
    rows = rows | "here" >> ps.RunInference(Adds(max_batch_size=50))
    rows = rows | "b" >> ps.RunInference(Adds(tmp_path / "b", model_copies=1, max_batch_size=30))
    assert rows.collect() == [row + 3000 for row in range(600)]
    assert (len(loads(tmp_path / "a")), len(loads(tmp_path / "b"))) == (1, 1)


def test_a_handler_may_decide_by_itself(tmp_path):
    class Large(Adds):
        def share_model_across_processes(self):
            return True

    handler = Large(tmp_path / "loads")
    assert (ps.Pipeline(workers=2) | ps.Read(Slices(300)) | ps.RunInference(handler)).collect() == list(range(1000, 1300))
    assert len(loads(tmp_path / "loads")) == 1


def test_no_rows_load_no_model(tmp_path):
    handler = Adds(tmp_path / "loads", large_model=True)
    for workers in (0, 1):
        assert (ps.Pipeline(workers=workers) | ps.Create([]) | ps.RunInference(handler)).collect() == []
    assert not loads(tmp_path / "loads")


RUN = """
import sys, penstock as ps
sys.path.insert(0, {tests!r})
from test_hosts import Adds, Slices
rows = ps.Pipeline(workers=1) | ps.Read(Slices(400)) | "same" >> ps.RunInference(
    Adds({log!r}, large_model=True), model_identifier="same")
print(sum(rows.collect()))
"""


def test_two_runs_at_the_same_time_never_meet(tmp_path):
    code = RUN.format(tests=os.path.dirname(__file__), log=str(tmp_path / "loads"))
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=PATIENCE * 2)[0] for run in runs]
    assert outputs == [f"{sum(range(1000, 1400))}\n"] * 2
    assert len(set(loads(tmp_path / "loads"))) == 2


# Batches.


class Sizes(ps.ModelHandler):
    """Answers every row with the batch that it was in. One call at a time, and not too quick, as a device is."""

    def load_model(self):
        return threading.Lock()

    def run_inference(self, batch, model, inference_args=None):
        with model:
            threading.Event().wait(0.01)
        return [tuple(batch)] * len(batch)


CLIENT = """
import sys, threading
sys.path.insert(0, {tests!r})
from test_hosts import Sizes, ask_from_threads
print("ready", flush=True)
sys.stdin.readline()
ask_from_threads({folder!r}, {first}, 4)
"""


def ask_from_threads(folder, first, threads):
    """From each thread ten single rows, one after the other; prints how many answers there were and the largest batch."""
    sessions = ProcessSessions(Metrics(), Surroundings(folder=folder, workers=2, cores=2))
    session = sessions.open("step", InferenceSpec.of(Sizes(large_model=True)))
    seen = []

    def ask(row):
        lane = session.join(Caller())
        for _ in range(10):
            lane.submit(ticket := Ticket([row]))
            (batch,) = lane.wait(ticket)
            assert row in batch
            seen.append(batch)
        lane.close()

    workers = [threading.Thread(target=ask, args=[first + at]) for at in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    counted = int(sessions.drain_metrics().distribution("inference_request_batch_size").sum)
    print(len(seen), counted, *sorted({row for batch in seen for row in batch}))
    sessions.close()


def test_batches_form_from_the_rows_of_several_processes_and_threads(tmp_path):
    codes = [CLIENT.format(tests=os.path.dirname(__file__), folder=str(tmp_path / "run"), first=first) for first in (0, 100)]
    clients = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for code in codes
    ]
    assert [client.stdout.readline() for client in clients] == ["ready\n"] * 2
    outputs = [each.split() for each in talk(clients, "go\n")]
    assert [int(seen) for seen, *_ in outputs] == [40, 40]
    assert sum(int(counted) for _, counted, *_ in outputs) == 80
    everybody = [str(row) for row in (*range(4), *range(100, 104))]
    assert sorted(everybody) in [sorted(rows) for _, _, *rows in outputs]  # each other's rows, in their batches


def talk(clients, word):
    for client in clients:
        client.stdin.write(word)
        client.stdin.flush()
    return [client.communicate(timeout=PATIENCE * 2)[0] for client in clients]


def test_batches_are_never_larger_than_allowed(pipeline):
    p = pipeline()
    batches = (p | ps.Read(Slices(500)) | ps.RunInference(Sizes(large_model=True, max_batch_size=32))).collect()
    assert max(map(len, batches)) <= 32
    assert all(row in batch for row, batch in enumerate(batches))


def test_batches_by_weight(pipeline):
    handler = Sizes(large_model=True, max_batch_weight=60, element_size_fn=lambda row: row % 50)
    batches = (pipeline() | ps.Read(Slices(100)) | ps.RunInference(handler)).collect()
    assert all(sum(row % 50 for row in batch) <= 60 or len(batch) == 1 for batch in batches)
    assert all(row in batch for row, batch in enumerate(batches))
    assert max(map(len, batches)) > 1


def test_batches_by_length(pipeline):
    handler = Sizes(large_model=True, batch_length_fn=len, max_padded_cost=100)
    p = pipeline()
    texts = ["x" * (1 + row * 7 % 20) for row in range(400)]
    batches = (p | ps.Create(texts) | "model" >> ps.RunInference(handler)).collect()
    assert all(len(batch) * max(map(len, batch)) <= 100 for batch in batches)
    assert all(text in batch for text, batch in zip(texts, batches, strict=True))
    assert p.result.metrics.counter("useful_cost") == sum(map(len, texts))
    assert p.result.metrics.counter("padded_cost") < 1.5 * sum(map(len, texts))


def test_batches_of_allowed_sizes_only():
    class Whole(Sizes):
        def run_inference(self, batch, model, inference_args=None):
            return [len(batch)] * len(batch)

    handler = Whole(large_model=True, max_batch_size=8, batch_size_buckets=[4, 8])
    answers = (ps.Pipeline(workers=0) | ps.Create(range(18)) | ps.RunInference(handler)).collect()
    assert set(answers) <= {4, 8}


def test_rows_that_are_batches_already(pipeline):
    handler = Sizes(large_model=True).with_no_batching()
    batches = (pipeline() | ps.Create([[1, 2, 3], [4], [5, 6]]) | ps.RunInference(handler)).collect()
    assert batches == [(1, 2, 3)] * 3 + [(4,)] + [(5, 6)] * 2


def test_a_deadline_of_a_batch_is_kept():
    handler = Sizes(large_model=True, max_batch_size=1000, max_batch_duration_secs=0.05)
    batches = (ps.Pipeline(workers=0) | ps.Create(range(10)) | ps.RunInference(handler)).collect()
    assert [row in batch for row, batch in enumerate(batches)] == [True] * 10


class Together(ps.ModelHandler):
    """Several calls at a time, each of which waits for another."""

    def load_model(self):
        return threading.Barrier(2)

    def max_concurrent_batches(self):
        return 2

    def run_inference(self, batch, model, inference_args=None):
        model.wait(PATIENCE)
        return list(batch)


def test_calls_at_the_same_time_where_the_handler_allows_them():
    handler = Together(large_model=True, max_batch_size=4)
    assert (ps.Pipeline(workers=0) | ps.Create(range(16)) | ps.RunInference(handler)).collect() == list(range(16))


class Columns(ps.ModelHandler):
    def load_model(self):
        return 2

    def takes_columns(self):
        return True

    def model_id(self):
        return "columns-1"

    def run_inference_columns(self, table, model, inference_args=None):
        return table["x"].to_numpy() * model

    def run_inference(self, batch, model, inference_args=None):
        raise AssertionError("rows were made")


def test_tables_stay_tables(pipeline, tmp_path):
    table = pa.table({"x": np.arange(20_000), "y": [f"text {row}" for row in range(20_000)]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=3000)
    p = pipeline()
    rows = p | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
    rows | ps.RunInference(Columns(large_model=True, max_batch_size=700)) | ps.WriteToParquet(str(tmp_path / "out"))
    result = p.run()
    made = pq.read_table(tmp_path / "out")
    assert made.select(["x", "y"]).equals(table)
    assert made["inference"].to_pylist() == [2 * x for x in range(20_000)]
    assert set(made["model_id"].to_pylist()) == {"columns-1"}
    assert result.metrics.distribution("inference_request_batch_size").max <= 700
    assert result.metrics.counter("num_inferences") == 20_000


# What goes along with the rows.


def test_inference_args_reach_the_model_and_part_batches(pipeline):
    class Times(Adds):
        def run_inference(self, batch, model, inference_args=None):
            return [row * inference_args["by"] for row in batch]

    handler = Times(large_model=True)
    p = pipeline()
    rows = p | ps.Read(Slices(300))
    two = rows | "two" >> ps.RunInference(handler, {"by": 2}, model_identifier="m")
    three = two | "three" >> ps.RunInference(handler, {"by": np.int64(3)}, model_identifier="m")
    assert three.collect() == [row * 6 for row in range(300)]


def test_keys_and_functions_around_the_model(pipeline):
    inner = Adds(large_model=True).with_preprocess_fn(int).with_postprocess_fn(lambda answer: -answer)
    handler = ps.KeyedModelHandler(inner).with_postprocess_fn(lambda pair: (*pair, "seen"))
    rows = pipeline() | ps.Create([(f"key {row}", str(row)) for row in range(50)]) | ps.RunInference(handler)
    assert rows.collect() == [(f"key {row}", -row - 1000, "seen") for row in range(50)]


def test_a_key_stays_where_it_is():
    """It never leaves the process, so that it may be what no pickle holds."""
    rows = ps.Pipeline(workers=0) | ps.Create([0, 1]) | ps.Map(lambda row: (threading.Event(), row))
    rows = rows | ps.RunInference(ps.KeyedModelHandler(Adds(large_model=True)))
    assert (rows | ps.Map(lambda pair: (pair[0].is_set(), pair[1]))).collect() == [(False, 1000), (False, 1001)]


class Looks(ps.ModelHandler):
    """What its process had in the environment when it first unpickled the handler, before load_model()."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.seen = (os.environ.get("PENSTOCK_TEST_SETTING"), os.getpid())

    def load_model(self):
        return os.environ.get("PENSTOCK_TEST_SETTING"), initial_environment().get("PENSTOCK_TEST_SETTING")

    def run_inference(self, batch, model, inference_args=None):
        assert self.seen[1] == os.getpid()
        return [(self.seen[0], *model)] * len(batch)


def initial_environment():
    """What this process was started with."""
    with open("/proc/self/environ", "rb") as environment:
        return dict(entry.split("=", 1) for entry in environment.read().decode().split("\0") if "=" in entry)


@pytest.mark.parametrize("settings", [{"large_model": True}, {}], ids=["host", "worker"])
def test_env_vars_are_there_before_anything_is_imported(settings):
    handler = Looks(env_vars={"PENSTOCK_TEST_SETTING": "on"}, **settings)
    answers = (ps.Pipeline(workers=1) | ps.Create([1, 2]) | ps.RunInference(handler)).collect()
    assert answers == [("on", "on", "on")] * 2
    assert "PENSTOCK_TEST_SETTING" not in os.environ


def test_env_vars_of_a_host_are_not_those_of_the_user_s_process():
    handler = Looks(env_vars={"PENSTOCK_TEST_SETTING": "on"}, large_model=True)
    answers = (ps.Pipeline(workers=0) | ps.Create([1]) | ps.RunInference(handler)).collect()
    assert answers == [("on", "on", "on")]
    assert "PENSTOCK_TEST_SETTING" not in os.environ


def test_two_models_with_different_env_vars_each_have_their_own():
    rows = ps.Pipeline(workers=1) | ps.Create([1])
    for number in range(2):
        handler = Looks(env_vars={"PENSTOCK_TEST_SETTING": f"set {number}"}, large_model=True)
        rows = rows | f"step {number}" >> ps.RunInference(handler)
    assert rows.collect() == [("set 1",) * 3]


# What is measured.


@pytest.mark.parametrize("pipeline", WAYS, indirect=True)
def test_metrics_arrive_complete(pipeline, tmp_path):
    p = pipeline()
    handler = Adds(model_copies=2, max_batch_size=16)
    (p | ps.Read(Slices(3000)) | "model" >> ps.RunInference(handler) | ps.Map(str)).collect()
    metrics = p.result.metrics
    assert metrics.counter("num_inferences", step="model") == 3000
    sizes = metrics.distribution("inference_request_batch_size", step="model")
    assert (sizes.sum, sizes.max <= 16) == (3000, True)
    assert metrics.distribution("inference_batch_latency_micro_secs", step="model").count == sizes.count
    assert 1 <= metrics.distribution("load_model_latency_milli_secs", step="model").count <= 2
    assert 1 <= metrics.distribution("model_byte_size", step="model").count <= 2
    assert metrics.distribution("inference_request_batch_byte_size", step="model").count >= 1
    assert metrics.counter("failed_batches_counter") == 0


def test_the_names_of_metrics_are_those_of_a_model_in_the_process():
    names = []
    for settings in ({}, {"large_model": True}):
        p = ps.Pipeline(workers=0)
        (p | ps.Create(range(300)) | "model" >> ps.RunInference(Adds(**settings), metrics_namespace="mine")).collect()
        metrics = p.result.metrics
        names.append({*(key for key, count in metrics.counters.items() if count), *metrics.distributions})
    assert names[0] == names[1]


def test_the_size_of_a_model_is_that_of_its_process():
    class Fat(Adds):
        def load_model(self):
            return np.ones(8 << 20)  # 64 MB

        def run_inference(self, batch, model, inference_args=None):
            return batch

    p = ps.Pipeline(workers=0)
    (p | ps.Create(range(10)) | ps.RunInference(Fat(large_model=True))).collect()
    assert p.result.metrics.distribution("model_byte_size").max == pytest.approx(64 << 20, rel=0.3)


# Errors.


class Handle:
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("it is open")


def test_rows_that_cannot_be_pickled_are_named(pipeline):
    rows = pipeline() | ps.Create([1, 2]) | ps.Map(lambda _: Handle()) | "model" >> ps.RunInference(Adds(large_model=True))
    with pytest.raises(NotShippableError, match="step 'model': a row of type Handle cannot be sent .*it is open"):
        rows.collect()


def test_answers_that_cannot_be_pickled_are_named(pipeline):
    class Opens(Adds):
        def run_inference(self, batch, model, inference_args=None):
            return [Handle() for _ in batch]

    rows = pipeline() | ps.Create([1, 2]) | "model" >> ps.RunInference(Opens(large_model=True)) | ps.Map(str)
    with pytest.raises(NotShippableError, match="step 'model': an answer of type Handle cannot be sent .*it is open"):
        rows.collect()


class Sulks:
    """Unpickles only in the process that it was made in."""

    def __init__(self):
        self.home = os.getpid()

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.home != os.getpid():
            raise RuntimeError("not here")

    def __add__(self, other):
        return self


def test_rows_that_cannot_be_unpickled_are_an_error(pipeline):
    rows = pipeline() | ps.Create([1, 2]) | ps.Map(lambda _: Sulks()) | "model" >> ps.RunInference(Adds(large_model=True))
    with pytest.raises(NotShippableError, match="(?s)step 'model'.*RuntimeError: not here"):
        rows.collect()


@pytest.mark.timeout(15, method="signal")
def test_answers_that_cannot_be_unpickled_are_an_error():
    class Makes(Adds):
        def run_inference(self, batch, model, inference_args=None):
            return [Sulks() for _ in batch]

    rows = ps.Pipeline(workers=0) | ps.Create([1, 2]) | "model" >> ps.RunInference(Makes(large_model=True)) | ps.Map(str)
    with pytest.raises(NotShippableError, match="(?s)step 'model'.*RuntimeError: not here"):
        rows.collect()


def test_inference_args_that_cannot_be_pickled_are_an_error():
    rows = ps.Pipeline(workers=0) | ps.Create([1]) | "model" >> ps.RunInference(Adds(large_model=True), {"x": Handle()})
    with pytest.raises((StepError, NotShippableError), match="(?s)step 'model'.*it is open"):
        rows.collect()


class FailsToLoad(ps.ModelHandler):
    def load_model(self):
        return self.deep_inside()

    def deep_inside(self):
        raise OSError("weights not found")

    def run_inference(self, batch, model, inference_args=None):
        return batch


def test_a_load_that_fails_tells_the_whole_story(pipeline):
    message = "step 'model': FailsToLoad.load_model.. raised OSError: weights not found"
    with pytest.raises(ModelLoadError, match=message) as caught:
        (pipeline() | ps.Read(Slices(500)) | "model" >> ps.RunInference(FailsToLoad(large_model=True))).collect()
    assert "in deep_inside" in "\n".join(caught.value.__notes__)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_handler_that_leaves_while_it_loads():
    class Leaves(Adds):
        def load_model(self):
            sys.exit("no licence")

    with pytest.raises(ModelLoadError, match="SystemExit: no licence"):
        (ps.Pipeline(workers=0) | ps.Create([1]) | ps.RunInference(Leaves(large_model=True))).collect()


class FailsOn(Adds):
    def __init__(self, bad, **settings):
        super().__init__(**settings)
        self.bad = bad

    def run_inference(self, batch, model, inference_args=None):
        if self.bad in batch:
            raise ValueError("scripted")
        return super().run_inference(batch, model, inference_args)


def test_a_row_that_fails_is_named(pipeline):
    with pytest.raises(StepError, match="step 'model': ValueError: scripted\n  row: 77") as caught:
        (pipeline() | ps.Read(Slices(300)) | "model" >> ps.RunInference(FailsOn(77, large_model=True))).collect()
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in run_inference" in "\n".join(caught.value.__notes__)


def test_an_error_names_the_step_that_its_row_came_from():
    handler = FailsOn(1050, large_model=True)
    rows = ps.Pipeline(workers=0) | ps.Create(range(100)) | "first" >> ps.RunInference(handler, model_identifier="m")
    with pytest.raises(StepError, match="step 'second': ValueError: scripted\n  row: 1050"):
        (rows | "second" >> ps.RunInference(handler, model_identifier="m")).collect()


@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt])
def test_a_handler_that_leaves_has_failed(exception):
    class Leaves(Adds):
        def run_inference(self, batch, model, inference_args=None):
            raise exception("enough")

    with pytest.raises(StepError, match=f"{exception.__name__}.*enough"):
        (ps.Pipeline(workers=0) | ps.Create([1]) | "model" >> ps.RunInference(Leaves(large_model=True))).collect()


def test_a_wrong_number_of_answers():
    class Forgets(Adds):
        def run_inference(self, batch, model, inference_args=None):
            return batch[1:]

    with pytest.raises(PredictionCountError, match="step 'model'.* 4 predictions for 5 examples"):
        (ps.Pipeline(workers=0) | ps.Create(range(5)) | "model" >> ps.RunInference(Forgets(large_model=True))).collect()


def test_out_of_memory_means_smaller_batches(pipeline, tmp_path):
    class Small(Adds):
        def run_inference(self, batch, model, inference_args=None):
            with open(self.log, "a") as log:
                log.write(f"{len(batch)}\n")
            if len(batch) > 20:
                raise MemoryError
            return super().run_inference(batch, model, inference_args)

        def load_model(self):
            return 1000

    p = pipeline()
    handler = Small(tmp_path / "calls", large_model=True, max_batch_size=64)
    assert (p | ps.Read(Slices(1000)) | ps.RunInference(handler)).collect() == list(range(1000, 2000))
    assert p.result.metrics.counter("out_of_memory_counter") >= 1
    calls = [int(size) for size in (tmp_path / "calls").read_text().split()]
    assert sum(size > 20 for size in calls) < 20  # it was learned


# Arrays.


class Changes(ps.ModelHandler):
    """Doubles arrays in place, and answers with the very same ones."""

    def load_model(self):
        return 2

    def run_inference(self, batch, model, inference_args=None):
        for array in batch:
            array *= model
        return batch


def change(array):
    array += 1
    return array


@pytest.mark.parametrize("shape", [(3,), (512, 1024)], ids=["small", "large"])
def test_arrays_may_be_changed_in_place(pipeline, shape):
    def make(row):
        return np.full(shape, row, dtype=np.float32)

    rows = pipeline() | ps.Create(range(24)) | ps.Map(make) | ps.RunInference(Changes(large_model=True, max_batch_size=4))
    arrays = (rows | ps.Map(change)).collect()
    for row, array in enumerate(arrays):
        assert array.shape == shape
        assert array.dtype == np.float32
        assert (array == row * 2 + 1).all()
        array[:] = 0  # still ours, with the host gone


def test_tensors_may_be_changed_in_place():
    import torch

    def make(row):
        return torch.full((512, 1024), row, dtype=torch.float32)

    rows = ps.Pipeline(workers=1) | ps.Create(range(24)) | ps.Map(make) | ps.RunInference(Changes(large_model=True))
    tensors = (rows | ps.Map(change)).collect()
    for row, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((512, 1024), row * 2 + 1, dtype=torch.float32))
        tensor.zero_()


def test_what_the_model_changes_the_caller_does_not_see():
    """The rows of a step that has two readers: the other one has them as they were."""
    p = ps.Pipeline(workers=0)
    rows = p | ps.Create(range(8)) | ps.Map(lambda row: np.full(50_000, row, dtype=np.float64))
    model = rows | ps.RunInference(Changes(large_model=True)) | ps.Map(lambda array: ("model", float(array.sum())))
    plain = rows | ps.Map(lambda array: ("plain", float(array.sum())))
    collected = ((model, plain) | ps.Flatten()).collect()
    assert collected == [("model", row * 1e5) for row in range(8)] + [("plain", row * 5e4) for row in range(8)]


@pytest.mark.parametrize("settings", [{}, {"large_model": True}], ids=["here", "host"])
def test_an_answer_holds_the_example_that_the_caller_has(settings):
    class Tells(Changes):
        def run_inference(self, batch, model, inference_args=None):
            return [ps.PredictionResult(array, float(array.sum())) for array in super().run_inference(batch, model)]

    rows = ps.Pipeline(workers=0) | ps.Create(range(4)) | ps.Map(lambda row: np.full(3, row, dtype=np.float32))
    answers = (rows | ps.RunInference(Tells(**settings))).collect()
    assert [(answer.example.tolist(), answer.inference) for answer in answers] == [
        ([float(row)] * 3, row * 6.0) for row in range(4)
    ]


ARRAYS = [
    np.arange(10)[::2],
    np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    np.array(3.5),
    np.zeros((0, 7), dtype=np.int8),
    np.array([b"bytes", b"more"]),
    np.array([{"a": 1}, None], dtype=object),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.ma.masked_array(np.arange(4), mask=[0, 1, 0, 0]),
    np.float32(2.5),
]


class Same(ps.ModelHandler):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return batch


@pytest.mark.parametrize("pipeline", WAYS, indirect=True)
def test_arrays_of_every_kind_come_back_as_they_were(pipeline):
    answers = (pipeline() | ps.Create(ARRAYS) | ps.RunInference(Same(large_model=True))).collect()
    for sent, got in zip(ARRAYS, answers, strict=True):
        assert (type(sent), sent.dtype, sent.shape) == (type(got), got.dtype, got.shape)
        np.testing.assert_array_equal(sent, got)


def test_tensors_of_every_kind_come_back_as_they_were():
    import torch

    tensors = [
        torch.arange(100_000).reshape(100, 1000).T,
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(2.0),
        torch.zeros(0, 4),
        torch.ones(4, requires_grad=True),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ]
    answers = (ps.Pipeline(workers=0) | ps.Create(tensors) | ps.RunInference(Same(large_model=True))).collect()
    for sent, got in zip(tensors, answers, strict=True):
        assert (type(sent), sent.dtype, sent.requires_grad) == (type(got), got.dtype, got.requires_grad)
        assert torch.equal(sent.to_dense(), got.to_dense())


def test_answers_that_are_kept_are_not_written_over(tmp_path):
    """Shared memory is used again, but not what somebody still refers to: here every answer of a long run."""

    class Makes(Adds):
        def run_inference(self, batch, model, inference_args=None):
            return [np.full(20_000, row, dtype=np.int32) for row in batch]

    answers = (ps.Pipeline(workers=0) | ps.Create(range(500)) | ps.RunInference(Makes(model_copies=2))).collect()
    assert all((answer == row).all() for row, answer in enumerate(answers))


def test_rows_that_a_model_keeps_are_not_written_over():
    class Keeps(Adds):
        def load_model(self):
            return []

        def run_inference(self, batch, model, inference_args=None):
            model.extend((int(array[0]), array) for array in batch)
            return [all(bool((kept == value).all()) for value, kept in model) for _ in batch]

    rows = ps.Pipeline(workers=0) | ps.Create(range(200)) | ps.Map(lambda row: np.full(20_000, row, dtype=np.int32))
    assert all((rows | ps.RunInference(Keeps(large_model=True, max_batch_size=8))).collect())


def test_a_row_of_many_megabytes():
    rows = ps.Pipeline(workers=1) | ps.Create([1, 2]) | ps.Map(lambda row: np.full(12 << 20, row, dtype=np.float32))
    sums = rows | ps.RunInference(Changes(large_model=True)) | ps.Map(lambda array: float(array.mean()))
    assert sums.collect() == [2.0, 4.0]


def test_many_single_rows_in_shared_memory_make_one_batch(tmp_path):
    """More of them than descriptors fit beside one message."""
    sessions = ProcessSessions(Metrics(), Surroundings(folder=str(tmp_path / "run"), cores=2))
    try:
        lane = sessions.open("step", InferenceSpec.of(Changes(large_model=True, max_batch_size=300))).join(Caller())
        tickets = [Ticket([np.full(10_000, row, dtype=np.float32)]) for row in range(300)]
        for ticket in tickets:
            lane.submit(ticket)
        answers = [answer for ticket in tickets for answer in lane.wait(ticket)]
        assert all((answer == row * 2).all() for row, answer in enumerate(answers))
        lane.close()
    finally:
        sessions.close()


def test_a_run_leaves_no_descriptor_open():
    def run():
        rows = ps.Pipeline(workers=0) | ps.Create(range(64)) | ps.Map(lambda row: np.full(100_000, row, dtype=np.float32))
        return (rows | ps.RunInference(Changes(large_model=True, max_batch_size=4)) | ps.Map(len)).collect()

    def descriptors():
        gc.collect()
        return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd))

    run()
    before = [re.sub(r"\d+", "n", name) for name in descriptors()]
    run()
    assert [re.sub(r"\d+", "n", name) for name in descriptors()] == before


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# Where a model is, and why.


def test_explain_says_where_and_why():
    def told(**options):
        handler = options.pop("handler")
        p = ps.Pipeline(**options)
        p | ps.Create(range(10)) | ps.RunInference(handler)
        return p.explain()

    assert "one model copy for all processes, in a host (large_model)" in told(handler=Adds(large_model=True), workers=4)
    assert "3 model copies for all processes, in a host (model_copies=3)" in told(handler=Adds(model_copies=3), workers=4)
    assert "one model copy in each worker process" in told(handler=Adds(), workers=4)
    assert "the first copy is measured: one host for all" in told(handler=Adds(), workers=4)
    assert "measured" not in told(handler=Adds(), workers=1)
    assert "one model copy in this process" in told(handler=Adds(), workers=0)
    timed = told(handler=Adds(), workers=4, element_timeout=2.5)
    assert "4 model copies for all processes, in a host (timeout of 2.5 s: only a process can be killed)" in timed
    shared = told(handler=Adds(large_model=True), workers=4, element_timeout=2.5)
    assert "one model copy for all processes, in a host (large_model)" in shared
