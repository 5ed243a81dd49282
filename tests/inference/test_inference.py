"""RunInference in a pipeline, on every way of running."""

from __future__ import annotations

import os
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.linear_model import LinearRegression

import penstock as ps
from penstock.errors import ModelLoadError, PredictionCountError, StepError, UsageError
from penstock.inference import slow
from penstock.inference.calls import How
from penstock.inference.model import ModelCopy

ROWS = 3000


class Adds(ps.ModelHandler):
    """A model that is a dict (Beam refuses those) and adds what it is told."""

    def load_model(self):
        return {"add": 1000}

    def run_inference(self, batch, model, inference_args=None):
        more = (inference_args or {}).get("more", 0)
        return [ps.PredictionResult(row, row + model["add"] + more, "adds-1") for row in batch]


class NeverInitialised(ps.ModelHandler):
    def __init__(self):
        pass

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return (row * 2 for row in batch)


def test_predictions_in_order(pipeline):
    made = (pipeline() | ps.Create(range(ROWS)) | ps.RunInference(Adds())).collect()
    assert made == [ps.PredictionResult(row, row + 1000, "adds-1") for row in range(ROWS)]


def test_a_handler_that_never_calls_super(pipeline):
    assert (pipeline() | ps.Create(range(100)) | ps.RunInference(NeverInitialised())).collect() == list(range(0, 200, 2))


def test_inference_args_reach_the_model(pipeline):
    made = pipeline() | ps.Create([1]) | ps.RunInference(Adds(), inference_args={"more": 5})
    assert made.collect()[0].inference == 1006


def test_wrong_inference_args_are_refused_before_anything_runs():
    class Strict(Adds):
        def validate_inference_args(self, inference_args):
            if inference_args:
                raise ValueError("takes no arguments")

    with pytest.raises(ValueError, match="takes no arguments"):
        ps.RunInference(Strict(), inference_args={"more": 1})


def test_keys_are_carried_along(pipeline):
    rows = [(f"key{i}", i) for i in range(500)]
    made = (pipeline() | ps.Create(rows) | ps.RunInference(ps.KeyedModelHandler(Adds()))).collect()
    assert [(key, result.inference) for key, result in made] == [(f"key{i}", i + 1000) for i in range(500)]


def test_a_row_without_a_key_is_named(pipeline):
    with pytest.raises(StepError, match=r"expects \(key, example\) rows, but got int: 3"):
        (pipeline() | ps.Create([("a", 1), 3]) | ps.RunInference(ps.KeyedModelHandler(Adds()))).collect()


def test_maybe_keyed(pipeline):
    made = (pipeline() | ps.Create([("a", 1), 2]) | ps.RunInference(ps.MaybeKeyedModelHandler(Adds()))).collect()
    assert made == [("a", ps.PredictionResult(1, 1001, "adds-1")), ps.PredictionResult(2, 1002, "adds-1")]


def test_the_last_preprocess_function_runs_first_and_postprocess_in_order(pipeline):
    handler = (
        Adds()
        .with_preprocess_fn(lambda x: x * 10)
        .with_preprocess_fn(lambda text: int(text))
        .with_postprocess_fn(lambda result: result.inference)
        .with_postprocess_fn(lambda x: f"<{x}>")
    )
    assert (pipeline() | ps.Create(["1", "2"]) | ps.RunInference(handler)).collect() == ["<1010>", "<1020>"]


def test_functions_inside_and_outside_of_keys(pipeline):
    inner = Adds().with_preprocess_fn(int).with_postprocess_fn(lambda result: result.inference)
    handler = ps.KeyedModelHandler(inner).with_preprocess_fn(lambda pair: (pair[0].upper(), pair[1]))
    handler = handler.with_postprocess_fn(lambda pair: dict([pair]))
    assert (pipeline() | ps.Create([("a", "1")]) | ps.RunInference(handler)).collect() == [{"A": 1001}]


def test_handlers_with_functions_leave_the_first_one_alone():
    plain = Adds()
    plain.with_preprocess_fn(int)
    assert plain.get_preprocess_fns() == ()
    assert ps.RunInference(plain).spec.path.before == ()


@pytest.mark.parametrize(("kind", "attach"), [("preprocess", "with_preprocess_fn"), ("postprocess", "with_postprocess_fn")])
def test_an_error_in_a_function_names_it_and_the_row(pipeline, kind, attach):
    def picky(row):
        raise ValueError("not this one")

    handler = getattr(Adds(), attach)(picky)
    with pytest.raises(StepError, match=rf"step 'm \({kind} function picky\)': ValueError: not this one\n  row: "):
        (pipeline() | ps.Create([5]) | "m" >> ps.RunInference(handler)).collect()


def test_no_batching_takes_lists_and_gives_single_answers(pipeline):
    class Sizes(Adds):
        def run_inference(self, batch, model, inference_args=None):
            return [(row, len(batch)) for row in batch]

    made = (pipeline() | ps.Create([[1, 2, 3], [4], [5, 6]]) | ps.RunInference(Sizes().with_no_batching())).collect()
    assert made == [(1, 3), (2, 3), (3, 3), (4, 1), (5, 2), (6, 2)]


def test_batches_never_exceed_their_limits(pipeline):
    class Sizes(ps.ModelHandler):
        def load_model(self):
            return None

        def run_inference(self, batch, model, inference_args=None):
            return [(row, len(batch), sum(batch)) for row in batch]

    handler = Sizes(max_batch_size=13, max_batch_weight=100, element_size_fn=lambda x: x)
    made = (pipeline() | ps.Create([i % 60 + 1 for i in range(2000)]) | ps.RunInference(handler)).collect()
    assert [row for row, _, _ in made] == [i % 60 + 1 for i in range(2000)]
    assert all(size <= 13 and weight <= 100 for _, size, weight in made)


def test_one_model_copy_in_each_process(pipeline):
    class Counts(ps.ModelHandler):
        def load_model(self):
            return {"id": object(), "pid": os.getpid(), "loaded_by": threading.get_ident()}

        def run_inference(self, batch, model, inference_args=None):
            return [(model["pid"], id(model["id"])) for _ in batch]

    made = (pipeline() | ps.Create(range(ROWS)) | ps.RunInference(Counts())).collect()
    copies = set(made)
    assert len(copies) == len({pid for pid, _ in copies})


def test_steps_share_a_model_by_its_identifier():
    class Tells(ps.ModelHandler):
        def load_model(self):
            return object()

        def run_inference(self, batch, model, inference_args=None):
            return [id(model) for _ in batch]

    p = ps.Pipeline(workers=0)
    rows = p | ps.Create([1])
    first = rows | ps.RunInference(Tells(), model_identifier="shared")
    second = rows | ps.RunInference(Tells(), model_identifier="shared")
    other = rows | ps.RunInference(Tells())
    ids = ((first, second, other) | ps.Flatten()).collect()
    assert ids[0] == ids[1] != ids[2]


def test_metrics_by_the_names_that_beam_users_know(pipeline):
    p = pipeline()
    _ = p | ps.Create(range(ROWS)) | "model" >> ps.RunInference(Adds(max_batch_size=50))
    metrics = p.run().metrics
    assert metrics.counter("num_inferences") == ROWS
    assert metrics.counter("failed_batches_counter") == 0
    sizes = metrics.distribution("inference_request_batch_size", step="model")
    assert (sizes.sum, sizes.max) == (ROWS, 50)
    assert metrics.distribution("inference_batch_latency_micro_secs").count == sizes.count
    assert metrics.distribution("inference_request_batch_byte_size").min > 0
    assert metrics.distribution("load_model_latency_milli_secs").count >= 1
    assert metrics.distribution("model_byte_size").count >= 1
    assert {key.namespace for key in metrics.distributions} == {"RunInference"}


def test_metrics_namespace():
    p = ps.Pipeline()
    _ = p | ps.Create([1]) | ps.RunInference(Adds(), metrics_namespace="mine")
    assert {key.namespace for key in p.run().metrics.counters} == {"mine"}


def test_the_guilty_row_of_a_batch_is_found(pipeline):
    class Fragile(Adds):
        def run_inference(self, batch, model, inference_args=None):
            if 1717 in batch:
                raise ValueError("a bad one is among them")
            return batch

    made = pipeline() | ps.Create(range(ROWS)) | "fragile" >> ps.RunInference(Fragile(max_batch_size=64))
    with pytest.raises(StepError, match=r"step 'fragile': ValueError: a bad one is among them\n  row: 1717(\n|$)"):
        made.collect()


def test_too_few_predictions(pipeline):
    class Forgets(Adds):
        def run_inference(self, batch, model, inference_args=None):
            return batch[:-1]

    with pytest.raises(PredictionCountError, match="step 'f': run_inference.. returned 3 predictions for 4 examples"):
        (pipeline() | ps.Create([[1, 2, 3, 4]]) | "f" >> ps.RunInference(Forgets().with_no_batching())).collect()


def test_a_handler_that_returns_none(pipeline):
    class Forgets(Adds):
        def run_inference(self, batch, model, inference_args=None):
            [row + model["add"] for row in batch]

    with pytest.raises(
        PredictionCountError, match=r"run_inference\(\) returned None; it must return one prediction per row"
    ):
        (pipeline() | ps.Create([1]) | ps.RunInference(Forgets())).collect()


class Gives(Adds):
    """Its answers to a batch are what the function makes of it."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def run_inference(self, batch, model, inference_args=None):
        return self.answer(batch)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda batch: {"label": batch, "score": batch}, "dict"),
        (lambda batch: "ab", "str"),
        (lambda batch: b"ab", "bytes"),
        (lambda batch: pd.DataFrame({"label": batch, "score": batch}), "DataFrame"),
        (lambda batch: pa.table({"label": batch, "score": batch}), "Table"),
        (lambda batch: ps.PredictionResult(batch, batch, None), "PredictionResult"),
        (lambda batch: set(batch), "set"),
    ],
)
def test_answers_that_are_not_one_for_each_row_of_the_batch(pipeline, answer, kind):
    """Each has as many keys, letters, columns or items as the batch has rows."""
    rows = pipeline() | ps.Create([1, 2, 3] if kind == "PredictionResult" else [1, 2])
    with pytest.raises(
        PredictionCountError, match=rf"step 'ask': run_inference\(\) returned a {kind}; .*one prediction per row"
    ):
        (rows | "ask" >> ps.RunInference(Gives(answer))).collect()


@pytest.mark.parametrize("answer", [np.array, tuple, iter, lambda batch: np.array([[row, row] for row in batch])])
def test_answers_as_anything_with_one_item_for_each_row(answer):
    made = (ps.Pipeline() | ps.Create([1, 2]) | ps.RunInference(Gives(answer))).collect()
    assert [np.max(row) for row in made] == [1, 2]


@pytest.mark.parametrize("batch", ["text", {"a": 1}, 5])
def test_a_row_that_is_to_be_a_batch_and_is_none(batch):
    with pytest.raises(StepError, match="expects rows that are lists of examples, got"):
        (ps.Pipeline() | ps.Create([batch]) | ps.RunInference(Adds().with_no_batching())).collect()


@pytest.mark.parametrize("watched", [False, True])
def test_a_call_that_does_not_end_is_told_of_once(watched, monkeypatch, caplog):
    monkeypatch.setattr(slow, "SLOW", 0.01)
    told = threading.Event()
    monkeypatch.setattr(slow.logger, "filter", lambda record: told.set() or True)

    class Slow(Adds):
        def run_inference(self, batch, model, inference_args=None):
            told.wait(60 if watched else 0.2)
            return super().run_inference(batch, model, inference_args)

    watch = slow.SlowCalls("Score") if watched else None
    copy = ModelCopy("Score", Slow(), slow=watch)
    copy.load()
    for _ in range(2):
        copy.outcomes([1], How(None, "Score"))
    if watch is not None:
        watch.close()
    for thread in [thread for thread in threading.enumerate() if thread.name == "penstock-slow-calls"]:
        thread.join(60)  # it ends when it has told, or when nothing is left to watch
        assert not thread.is_alive()
    messages = [record.getMessage() for record in caplog.records]
    if not watched:  # its process is killed when it is too late; or it is the user's own
        assert not messages
    else:
        assert len(messages) == 1
        assert messages[0].startswith("step 'Score': a call of the model has run for")
        assert "timeout=" in messages[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_models_in_workers_are_watched(workers):
    class Watched(Adds):
        def run_inference(self, batch, model, inference_args=None):
            return [any(thread.name == "penstock-slow-calls" for thread in threading.enumerate())] * len(batch)

    assert (ps.Pipeline(workers=workers) | ps.Create([1]) | ps.RunInference(Watched())).collect() == [workers > 0]


def test_a_load_that_fails(pipeline):
    class Broken(Adds):
        def load_model(self):
            raise OSError("the disk is on fire")

    with pytest.raises(ModelLoadError, match="step 'b': Broken.load_model.. raised OSError: the disk is on fire"):
        (pipeline() | ps.Create([1]) | "b" >> ps.RunInference(Broken())).collect()


def test_two_models_in_one_stage_with_threads(pipeline):
    """Bundles that wait at one model must not keep batches at the other from leaving."""
    made = (
        pipeline()
        | ps.Create(range(2000))
        | ps.RunInference(NeverInitialised().with_postprocess_fn(lambda x: x + 1))
        | ps.RunInference(Adds(max_batch_size=700).with_postprocess_fn(lambda r: r.inference))
    )
    assert made.collect() == [row * 2 + 1 + 1000 for row in range(2000)]


def test_a_duration_across_callers(pipeline):
    made = pipeline() | ps.Create(range(500)) | ps.RunInference(Adds(max_batch_size=64, max_batch_duration_secs=0.01))
    assert [result.inference for result in made.collect()] == list(range(1000, 1500))


def test_env_vars_are_there_when_the_model_loads(pipeline):
    class Looks(ps.ModelHandler):
        def load_model(self):
            return os.environ.get("PENSTOCK_TEST_SETTING")

        def run_inference(self, batch, model, inference_args=None):
            return [model for _ in batch]

    handler = Looks(env_vars={"PENSTOCK_TEST_SETTING": "on"})
    try:
        assert (pipeline() | ps.Create([1]) | ps.RunInference(handler)).collect() == ["on"]
    finally:
        os.environ.pop("PENSTOCK_TEST_SETTING", None)


class Columns(ps.ModelHandler):
    """Takes tables whole, and refuses rows: so a run that succeeds has made no row objects."""

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


def test_columns_are_taken_whole_from_file_to_file(pipeline, tmp_path):
    pq.write_table(
        pa.table({"x": np.arange(20_000), "y": np.arange(20_000) * 0.5}), tmp_path / "in.parquet", row_group_size=3000
    )
    p = pipeline()
    rows = p | ps.ReadFromParquet(str(tmp_path / "in.parquet")) | ps.RunInference(Columns(max_batch_size=700))
    rows | ps.WriteToParquet(str(tmp_path / "out"))
    result = p.run()
    table = pq.read_table(tmp_path / "out")
    assert table.column_names == ["x", "y", "inference", "model_id"]
    assert table["inference"].to_pylist() == [2 * x for x in range(20_000)]
    assert set(table["model_id"].to_pylist()) == {"columns-1"}
    assert result.metrics.distribution("inference_request_batch_size").max == 700


def test_the_row_view_of_columns_is_a_prediction_result(pipeline, tmp_path):
    pq.write_table(pa.table({"x": [1, 2, 3], "id": ["a", "b", "c"]}), tmp_path / "in.parquet")
    rows = pipeline() | ps.ReadFromParquet(str(tmp_path / "in.parquet")) | ps.RunInference(Columns())
    made = (rows | ps.Reshuffle() | ps.Map(lambda result: result)).collect()
    assert made[1] == ps.PredictionResult({"x": 2, "id": "b"}, 4, "columns-1")
    with pipeline() as p:
        (
            p
            | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
            | ps.RunInference(Columns())
            | ps.WriteToParquet(str(tmp_path / "out"))
        )
    read = (pipeline() | ps.ReadFromParquet(str(tmp_path / "out"))).collect()
    assert read[0] == {"x": 1, "id": "a", "inference": 2, "model_id": "columns-1"}


def test_columns_become_rows_for_handlers_that_want_rows(pipeline, tmp_path):
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "in.parquet")
    rows = pipeline() | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
    handler = Adds().with_preprocess_fn(lambda row: row["x"]).with_postprocess_fn(lambda result: result.inference)
    assert (rows | ps.RunInference(handler)).collect() == [1001, 1002, 1003]


class TakesTwo(Adds):
    def run_inference(self, batch, model):
        return batch


@pytest.mark.parametrize("name", ["gpu", "GPU", "tpu", "cuda:1", "type:nvidia-tesla-t4;count:1"])
def test_accelerators_that_are_known(name):
    assert ps.Map(str).with_resource_hints(accelerator=name).hints.accelerator == name


def test_settings_that_go_together():
    step = ps.RunInference(Adds(large_model=True, model_copies=2, env_vars={"A": "1"}))
    assert step.spec.wishes().shared
    assert step.spec.wishes().copies == 2


def test_a_handler_whose_limits_are_its_own_is_asked_when_it_is_used():
    class Own(Adds):
        def batch_elements_kwargs(self):
            return {**super().batch_elements_kwargs(), "element_size_fn": len}

    assert ps.RunInference(Own(max_batch_weight=9)).spec.limits.max_weight == 9


def test_the_rows_of_a_step_that_is_not_there():
    pipeline = ps.Pipeline(workers=0)
    pipeline | "A" >> ps.Create([1]) | "B" >> ps.Map(str)
    result = pipeline.run()
    assert result.rows_out("B") == 1
    with pytest.raises(UsageError, match="there is no step 'X'; the steps are 'A', 'B'"):
        result.rows_out("X")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.RunInference(Adds), "call it: Adds"),
        (lambda: ps.RunInference(len), "expected a ModelHandler"),
        (
            lambda: ps.RunInference(LinearRegression()),
            r"SklearnModelHandlerNumpy\('model.skops'\) of penstock",
        ),
        (lambda: ps.RunInference("model.pt"), "give the path to the handler for its kind of model"),
        (lambda: ps.KeyedModelHandler(ps.ModelHandler(max_batchsize=3)), "did you mean max_batch_size?"),
        (
            lambda: ps.ModelHandler(zzz="red"),
            r"zzz=\.\.\.\): there is no such argument; its arguments are min_",
        ),
        (lambda: ps.ModelHandler(timeout=3), r"no such argument; it is one of RunInference.*_handling\(timeout=\.\.\.\)"),
        (lambda: ps.KeyedModelHandler(ps.KeyedModelHandler(Adds())), "has keys already"),
        (lambda: ps.RunInference(Adds(max_batch_size=0)), "max_batch_size=0"),
        (lambda: ps.RunInference(Adds(min_batch_size=9, max_batch_size=3)), "min_batch_size=9 is over"),
        (lambda: ps.RunInference(Adds(max_batch_weight=9)), "needs element_size_fn"),
        (lambda: Adds().with_preprocess_fn(3), "expected a function"),
        (lambda: Adds(max_batch_size="8"), "max_batch_size='8': expected a whole number"),
        (lambda: Adds(max_batch_duration_secs="1"), "max_batch_duration_secs='1': expected seconds"),
        (lambda: Adds(batch_length_fn=3), "batch_length_fn=3: expected a function of one row"),
        (lambda: Adds(batch_size_buckets=8), "batch_size_buckets=8: expected a list of whole numbers"),
        (lambda: Adds(length_buckets="8"), "length_buckets='8': expected a list of whole numbers"),
        (lambda: Adds(large_model="no"), "large_model='no': expected True or False"),
        (lambda: Adds(model_copies=0), "model_copies=0: expected a whole number of at least 1"),
        (lambda: Adds(model_copies=True), "model_copies=True: expected a whole number of at least 1"),
        (lambda: Adds(env_vars={"A": 1}), 'env_vars={\'A\': 1}: expected text for both: {"A": "1"}'),
        (lambda: Adds(env_vars=["A=1"]), r"env_vars=\['A=1'\]: expected a dict of text"),
        (
            lambda: ps.RunInference(TakesTwo()),
            r"TakesTwo.run_inference\(batch, model\) cannot be called with .*inference_args",
        ),
        (lambda: ps.RunInference(Adds()).with_resource_hints(accelerator="tpuu"), "accelerator='tpuu': expected \"gpu\""),
        (lambda: ps.Pipeline(progress="yes"), "progress='yes': expected True, False, or None"),
    ],
)
def test_wrong_settings_are_refused_when_made(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_one_identifier_for_two_models_is_refused():
    p = ps.Pipeline()
    rows = p | ps.Create([1])
    same = Adds(max_batch_size=3)
    a = rows | "a" >> ps.RunInference(same, model_identifier="m")
    b = a | "b" >> ps.RunInference(same.with_preprocess_fn(lambda r: r.inference), model_identifier="m")
    assert b.collect()[0].inference == 2001
    b | "c" >> ps.RunInference(Adds(max_batch_size=4), model_identifier="m")
    with pytest.raises(UsageError, match="steps 'a' and 'c' have the model_identifier 'm', but their handlers differ"):
        p.run()
