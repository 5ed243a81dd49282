"""Retry: errors that may pass are tried again, in each kind of step, on every way of running."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import StepError, UsageError
from penstock.failures import OUT_OF_MEMORY, Handling
from penstock.inference.calls import How
from penstock.inference.model import ModelCopy
from penstock.retry import Tried, Tries

AT_ONCE = ps.Retry(attempts=3, on=ConnectionError, backoff=0)


class Shaky:
    """Raises for a row as often as `times` says, counted in files: copies of it in all processes count together."""

    def __init__(self, folder, times, error=ConnectionError):
        self.folder, self.times, self.error = folder, times, error

    def __call__(self, row):
        tried = self.folder / str(row)
        with tried.open("a") as file:
            file.write("x")
        if len(tried.read_text()) <= self.times.get(row, 0):
            raise self.error(f"not now, {row}")
        return row

    def tries(self):
        return {int(path.name): len(path.read_text()) for path in self.folder.iterdir()}


class Model(ps.ModelHandler):
    """The model is a function of one row."""

    def __init__(self, function, **settings):
        super().__init__(**settings)
        self.function = function
        self.batches = []

    def load_model(self):
        return self.function

    def run_inference(self, batch, model, inference_args=None):
        self.batches.append(list(batch))
        return [model(row) for row in batch]


def half_made(function):
    def make(row):
        yield row
        yield -function(row)

    return make


STEPS = {
    "Map": (lambda function: ps.Map(function), lambda row: [row]),
    "Filter": (lambda function: ps.Filter(lambda row: function(row) >= 0), lambda row: [row]),
    "FlatMap": (lambda function: ps.FlatMap(half_made(function)), lambda row: [row, -row]),
    "ParDo": (lambda function: ps.ParDo(half_made(function)), lambda row: [row, -row]),
    "RunInference": (lambda function: ps.RunInference(Model(function).with_no_batching()), lambda row: [row]),
}


@pytest.fixture(params=STEPS)
def kind(request):
    return request.param


def test_errors_that_pass_cost_nothing(pipeline, kind, tmp_path):
    shaky = Shaky(tmp_path, {3: 2, 7: 1})
    step, made_of = STEPS[kind]
    rows = [[row] for row in range(10)] if kind == "RunInference" else range(10)
    made = (pipeline() | ps.Create(rows) | step(shaky).with_retry(AT_ONCE)).collect()
    assert made == [each for row in range(10) for each in made_of(row)]
    assert shaky.tries() == {row: {3: 3, 7: 2}.get(row, 1) for row in range(10)}


def test_errors_that_do_not_pass_end_the_run_and_say_how_often_they_were_tried(pipeline, kind, tmp_path):
    step = STEPS[kind][0](Shaky(tmp_path, {3: 3})).with_retry(AT_ONCE)
    rows = [[3]] if kind == "RunInference" else [3]
    with pytest.raises(StepError, match=r"step 'Step': ConnectionError: not now, 3 \(after 3 attempts\)\n  row: 3"):
        (pipeline() | ps.Create(rows) | "Step" >> step).collect()


def test_errors_that_do_not_pass_become_failures_with_their_number(pipeline, kind, tmp_path):
    shaky = Shaky(tmp_path, {3: 9, 7: 1})
    step, made_of = STEPS[kind]
    rows = [[row] for row in range(10)] if kind == "RunInference" else range(10)
    good, failures = pipeline() | ps.Create(rows) | step(shaky).with_exception_handling().with_retry(AT_ONCE)
    failed = failures.failed_inferences if kind == "RunInference" else failures
    both = (good, failed | ps.Map(lambda pair: pair[1])) | ps.Flatten()
    *made, failure = both.collect()
    assert made == [each for row in range(10) for each in made_of(row) if row != 3]
    assert (failure.attempts, failure.error_type) == (3, "ConnectionError")
    assert shaky.tries()[3] == 3
    assert shaky.tries()[7] == 2


def test_other_errors_are_not_tried_again(pipeline, kind, tmp_path):
    shaky = Shaky(tmp_path, {3: 1}, ValueError)
    rows = [[3]] if kind == "RunInference" else [3]
    with pytest.raises(StepError, match="not now, 3\n"):
        (pipeline() | ps.Create(rows) | STEPS[kind][0](shaky).with_retry(AT_ONCE)).collect()
    assert shaky.tries() == {3: 1}


def test_a_step_without_retry_is_tried_once(pipeline, kind, tmp_path):
    shaky = Shaky(tmp_path, {3: 1})
    rows = [[3]] if kind == "RunInference" else [3]
    with pytest.raises(StepError):
        (pipeline() | ps.Create(rows) | STEPS[kind][0](shaky)).collect()
    assert shaky.tries() == {3: 1}


def test_a_model_in_a_process_of_its_own_is_called_again_there(pipeline, tmp_path):
    class BusyError(Exception):
        """Nobody can import it: it travels by value, once with the handler and once with the rows."""

    shaky = Shaky(tmp_path, {3: 1, 7: 9}, BusyError)
    retry = ps.Retry(attempts=3, on=BusyError, backoff=0)
    step = ps.RunInference(Model(shaky, max_batch_size=4)).with_retry(retry).with_exception_handling(use_subprocess=True)
    good, failures = pipeline() | ps.Create(range(12)) | step
    both = (good, failures.failed_inferences | ps.Map(lambda pair: (pair[0], pair[1].attempts))) | ps.Flatten()
    assert both.collect() == [*(row for row in range(12) if row != 7), (7, 3)]


class OfColumns(Model):
    """Gets a column of numbers, which it changes before it asks."""

    def takes_columns(self):
        return "numpy"

    def run_inference_columns(self, columns, model, inference_args=None):
        numbers = columns["n"]
        numbers += 100
        return np.float32([[model(int(number) - 100), number] for number in numbers])


@pytest.mark.parametrize(("workers", "settings"), [(0, {}), (2, {}), (0, {"large_model": True})])
@pytest.mark.parametrize("handled", [True, False])
def test_a_model_of_columns_is_tried_again_and_writes_the_same_bytes(tmp_path, workers, settings, handled):
    table = pa.table({"id": [f"row {at}" for at in range(40)], "n": range(40), "label": pa.array(["a", None] * 20)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10)

    def run(name, times):
        (tmp_path / f"{name} tries").mkdir()
        shaky = Shaky(tmp_path / f"{name} tries", times)
        handler = OfColumns(shaky, columns="n", output_column="vector", max_batch_size=8, **settings)
        step = ps.RunInference(handler).with_retry(AT_ONCE)
        p = ps.Pipeline(workers=workers)
        rows = p | ps.ReadFromParquet(tmp_path / "in.parquet")
        good, *_ = rows | step.with_exception_handling() if handled else (rows | step,)
        good | ps.WriteToParquet(tmp_path / name)
        p.run()
        return [part.read_bytes() for part in sorted((tmp_path / name).iterdir())], shaky.tries()

    clean, _ = run("clean", {})
    again, tries = run("again", {3: 2, 17: 1})
    assert again == clean
    assert (tries[3], tries[17]) == (3, 2)
    made = pq.read_table(tmp_path / "again")
    assert made.select(["id", "n", "label"]).equals(table)
    assert made["vector"].to_pylist() == [[at, at + 100] for at in range(40)]
    if handled:
        _, tries = run("lost", {3: 9, 17: 1})
        lost = pq.read_table(tmp_path / "lost")
        assert lost.schema == made.schema
        assert lost.to_pylist() == [row for row in made.to_pylist() if row["n"] != 3]
        assert tries[17] == 2


# One model copy: the batch is tried again before its rows are told apart.


def copy_of(handler):
    copy = ModelCopy("Ask", handler)
    copy.load()
    return copy


def test_a_batch_is_tried_again_as_it_is(tmp_path):
    handler = Model(Shaky(tmp_path, {5: 2}))
    got = copy_of(handler).outcomes(list(range(8)), How(None, "Ask", Handling(), AT_ONCE))
    assert handler.batches == [list(range(8))] * 3
    assert (got.answers, got.failures, got.calls) == (list(range(8)), {}, 3)


def test_the_attempts_are_for_the_batch_and_all_that_it_leads_to(tmp_path):
    handler = Model(Shaky(tmp_path, {5: 99}))
    got = copy_of(handler).outcomes(list(range(8)), How(None, "Ask", Handling(), AT_ONCE))
    assert handler.batches == [*[list(range(8))] * 3, [0, 1, 2, 3], [4, 5], [4], [5], [6, 7]]
    assert {at: failure.attempts for at, failure in got.failures.items()} == {5: 3}
    assert got.calls == len(handler.batches)


def test_an_error_that_may_pass_in_the_search_for_another(tmp_path):
    shaky = Shaky(tmp_path, {1: 2})  # passes the first time, as the batch raises before it comes to it

    def model(row):
        if row == 0:
            raise ValueError("zero")
        return shaky(row)

    got = copy_of(Model(model)).outcomes([0, 1, 2, 3], How(None, "Ask", Handling(), AT_ONCE))
    assert got.answers == [None, 1, 2, 3]
    assert list(got.failures) == [0]


def test_memory_that_runs_out_is_no_reason_to_wait():
    def model(row):
        raise MemoryError("too large")

    handler = Model(model)
    got = copy_of(handler).outcomes([1], How(None, "Ask", Handling(), ps.Retry(on=Exception, backoff=1e6)))
    assert got.failures[0].kind == OUT_OF_MEMORY
    assert len(handler.batches) == 1


def test_a_handler_that_is_not_safe_to_call_again_is_refused():
    handler = Model(str)
    handler.retry_safe = False
    with pytest.raises(UsageError, match="Model says that a second call with the same rows does harm"):
        ps.RunInference(handler).with_retry(AT_ONCE)


# Waiting, without a clock.


def test_waits_grow_to_their_bound_and_are_shortened_by_chance():
    retry = ps.Retry(attempts=9, backoff=0.5, max_backoff=3)
    assert [retry.wait(tried, 0.0) for tried in range(1, 6)] == [0.5, 1, 2, 3, 3]
    assert retry.wait(2, 1.0) == 0.5
    assert retry.wait(10_000, 0.5) == 2.25
    assert ps.Retry(backoff=0).wait(3, 0.3) == 0


def test_tries_wait_and_end():
    waited = []
    tries = Tries(ps.Retry(attempts=3, backoff=1), waited.append, lambda: 0.0)
    assert not tries.again(ValueError()), "not of a kind that may pass"
    assert [tries.again(TimeoutError()) for _ in range(3)] == [True, True, False]
    assert waited == [1, 2]
    assert tries.made == 3
    assert not Tries(None).again(ConnectionError())


def test_a_function_is_tried_again_and_counts():
    waited, errors = [], [ConnectionError("one"), TimeoutError("two")]

    def function(row):
        if errors:
            raise errors.pop(0)
        return row

    tried = Tried(function, ps.Retry(), lambda retry: Tries(retry, waited.append, lambda: 1.0))
    assert (tried("row"), tried.made, waited) == ("row", 3, [0.25, 0.5])
    assert (tried("next"), tried.made) == ("next", 1)
    errors += [ConnectionError("one"), ValueError("another kind")]
    with pytest.raises(ValueError, match="another kind"):
        tried("row")
    assert tried.made == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attempts": 0}, r"Retry\(attempts=0\): expected a whole number of at least 1"),
        ({"attempts": 1.5}, "attempts=1.5"),
        ({"attempts": True}, "attempts=True"),
        ({"on": "ConnectionError"}, "expected a class of errors such as ConnectionError"),
        ({"on": ()}, "expected a class of errors"),
        ({"on": (ValueError, KeyboardInterrupt)}, "each must be an Exception"),
        ({"backoff": -1}, r"Retry\(backoff=-1\): expected seconds, 0 or more"),
        ({"backoff": float("nan")}, "backoff=nan"),
        ({"max_backoff": float("inf")}, "max_backoff=inf"),
        ({"max_backoff": None}, "max_backoff=None"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        ps.Retry(**settings)


def test_only_a_retry_is_taken():
    for step in (ps.Map(str), ps.RunInference(Model(str)), ps.ParDo(str).with_outputs("a")):
        with pytest.raises(UsageError, match=r"with_retry\(3\): expected a ps.Retry"):
            step.with_retry(3)
