"""Exception handling of RunInference: a row that fails costs that row, on every way of running."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import random
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.batching.isolation import Blame, blamed, isolate
from penstock.errors import AccountingError, OutputError, PenstockError, StepError, TransientError, UsageError
from penstock.failures import OUT_OF_MEMORY, RAISED, WRONG_COUNT, Failure, Handling
from penstock.inference.calls import How
from penstock.inference.model import ModelCopy
from penstock.observe.result import StepCount
from penstock.run.accounting import check_counts


class Model(ps.ModelHandler):
    """Answers ("answer", row) and raises what `trouble(batch)` returns, if that is an error."""

    def __init__(self, trouble=lambda batch: None, **settings):
        super().__init__(**settings)
        self.trouble = trouble
        self.batches = []

    def load_model(self):
        return "model"

    def model_id(self):
        return "model-1"

    def run_inference(self, batch, model, inference_args=None):
        self.batches.append(list(batch))
        error = self.trouble(batch)
        if error is not None:
            raise error
        return [("answer", row) for row in batch]


def poison(*bad, error=ValueError):
    """Trouble with batches that hold one of these rows."""
    return lambda batch: error(f"cannot take {[row for row in batch if row in bad]}") if set(bad) & set(batch) else None


def answers(rows):
    return [("answer", row) for row in rows]


def run(pipeline, rows, handler, **handling):
    """The answers, the failures by the output that they came from, and the pipeline: all of one run."""
    p = pipeline()
    good, failures = p | ps.Create(rows) | "Ask" >> ps.RunInference(handler).with_exception_handling(**handling)
    outputs = {"good": good, "inferences": failures.failed_inferences}
    outputs |= {f"pre{at}": each for at, each in enumerate(failures.failed_preprocessing)}
    outputs |= {f"post{at}": each for at, each in enumerate(failures.failed_postprocessing)}
    tagged = [pcoll | f"as {name}" >> ps.Map(lambda row, name: (name, row), name) for name, pcoll in outputs.items()]
    made = {name: [] for name in outputs}
    for name, row in (tagged | ps.Flatten()).collect():
        made[name].append(row)
    return made.pop("good"), made, p


def failed_rows(failed):
    return [row for row, _ in failed]


def kinds(failed):
    return {(failure.step, failure.kind, failure.group) for _, failure in failed}


# In a pipeline, on every way of running.


def test_the_rows_that_fail_alone_are_told_from_the_others(pipeline):
    bad = {7, 8, 20, 63, 99, 500}
    good, failed, p = run(pipeline, range(600), Model(poison(*bad), max_batch_size=64))
    assert good == answers(row for row in range(600) if row not in bad)
    assert failed_rows(failed["inferences"]) == sorted(bad)
    for row, failure in failed["inferences"]:
        assert (failure.step, failure.kind, failure.error_type, failure.group) == ("Ask", RAISED, "ValueError", 1)
        assert failure.message == f"cannot take [{row}]", "the error of the row alone"
        assert (failure.model_id, failure.attempts) == ("model-1", 1)
        assert "run_inference" in failure.traceback
        assert failure.traceback.endswith(f"ValueError: cannot take [{row}]")
        assert failure.traceback.count("Traceback") == 1, "the row's own error alone"
        assert str(Path(ps.__file__).parent) not in failure.traceback  # no frames of the library's own
    count = p.result.counts["Ask"]
    assert (count.rows_in, count.rows_out, count.rows_failed) == (600, 594, 6)
    assert p.result.metrics.counter("num_inferences") == 594
    assert p.result.metrics.counter("failed_batches_counter") > 0


def test_all_rows_are_poison(pipeline):
    good, failed, _ = run(pipeline, range(50), Model(poison(*range(50)), max_batch_size=16))
    assert good == []
    assert failed_rows(failed["inferences"]) == list(range(50))
    assert kinds(failed["inferences"]) == {("Ask", RAISED, 1)}


def test_no_row_is(pipeline):
    good, failed, p = run(pipeline, range(500), Model())
    assert good == answers(range(500))
    assert failed == {"inferences": []}
    assert p.result.metrics.counter("failed_batches_counter") == 0


def test_failures_before_in_and_after_the_model(pipeline):
    def parse(text):
        return int(text)

    def positive(number):
        assert number >= 0, f"{number} is negative"
        return number

    def short(answer):
        if answer[1] == 4:
            raise KeyError("four")
        return answer[1]

    def invert(number):
        return 10 / number

    handler = Model(poison(3, 5)).with_preprocess_fn(positive).with_preprocess_fn(parse)
    rows = ["1", "x", "2", "-7", "3", "4", "0", "5", "y", "10"]
    good, failed, p = run(pipeline, rows, handler.with_postprocess_fn(short).with_postprocess_fn(invert))
    assert good == [10, 5, 1]
    assert failed_rows(failed["pre0"]) == ["x", "y"], "the row as it came in; the function attached last runs first"
    assert failed_rows(failed["pre1"]) == ["-7"]
    assert failed_rows(failed["inferences"]) == ["3", "5"]
    assert failed_rows(failed["post0"]) == [("answer", 4)], "the answer that the function was given"
    assert failed_rows(failed["post1"]) == [0]
    types = {name: {failure.error_type for _, failure in each} for name, each in failed.items()}
    assert types == {
        "pre0": {"ValueError"},
        "pre1": {"AssertionError"},
        "inferences": {"ValueError"},
        "post0": {"KeyError"},
        "post1": {"ZeroDivisionError"},
    }
    assert p.result.counts["Ask"].rows_failed == 7


def test_functions_that_a_timeout_does_not_cover_are_warned_of(caplog):
    ps.RunInference(Model()).with_exception_handling(timeout=5)
    ps.RunInference(Model().with_preprocess_fn(str)).with_exception_handling()
    assert caplog.messages == []
    ps.RunInference(Model().with_preprocess_fn(str)).with_exception_handling(timeout=5)
    ps.RunInference(ps.KeyedModelHandler(Model().with_postprocess_fn(str))).with_exception_handling(use_subprocess=True)
    assert "with_exception_handling(timeout=5) is for the model and prepare()" in caplog.messages[0]
    assert "ps.Map(function).with_exception_handling(use_subprocess=True)" in caplog.messages[1]


def test_keys_stay_with_their_rows(pipeline):
    def double(number):
        return 2 * {"one": 1, "two": 2, "three": 3, "five": 5}[number]

    def check(answer):
        if answer[1] == 2:
            raise ValueError("two")
        return answer[1]

    def swap(pair):
        return pair if isinstance(pair, tuple) else int(pair)

    def show(pair):
        key, value = pair
        return f"{key}={10 // (value - 10)}"

    inner = Model(poison(6)).with_preprocess_fn(double).with_postprocess_fn(check)
    handler = ps.KeyedModelHandler(inner).with_preprocess_fn(swap).with_postprocess_fn(show)
    rows = [("a", "one"), ("b", "two"), ("c", "three"), ("d", "four"), "no key", "7", ("e", "five")]
    good, failed, _ = run(pipeline, rows, handler)
    assert good == ["b=-2"]
    assert failed_rows(failed["pre0"]) == ["no key"], "functions of the keyed handler come first"
    assert failed_rows(failed["pre1"]) == [("d", "four")]
    assert failed_rows(failed["inferences"]) == [("c", "three"), "7"], "a row that is no pair, and one that fails"
    assert "expects (key, example) rows" in failed["inferences"][1][1].message
    assert failed_rows(failed["post0"]) == [("a", ("answer", 2))], "the answer of the model, with its key"
    assert failed_rows(failed["post1"]) == [("e", 10)]


def test_maybe_keyed(pipeline):
    good, failed, _ = run(pipeline, [("a", 1), 2, ("b", 3), 3], ps.MaybeKeyedModelHandler(Model(poison(3))))
    assert good == [("a", ("answer", 1)), ("answer", 2)]
    assert failed_rows(failed["inferences"]) == [("b", 3), 3]


class NotPicklableError(Exception):
    def __init__(self, one, two):
        super().__init__("lost on the way")
        self.held = lambda: (one, two)

    def __reduce__(self):
        raise TypeError("not this one")


class UnspeakableError(RuntimeError):
    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda text: NotPicklableError(1, 2), "lost on the way"),
        (UnspeakableError, "(its message cannot be shown)"),
        (SystemExit, "cannot take [5]"),
        (StopIteration, "cannot take [5]"),
        (RecursionError, "cannot take [5]"),
    ],
    ids=["not picklable", "str raises", "SystemExit", "StopIteration", "RecursionError"],
)
def test_any_error_of_a_model_becomes_a_failure(pipeline, error, message):
    good, failed, _ = run(pipeline, range(20), Model(poison(5, error=error), max_batch_size=8))
    assert good == answers(row for row in range(20) if row != 5)
    ((row, failure),) = failed["inferences"]
    assert (row, failure.message, failure.kind) == (5, message, RAISED)


def test_any_error_of_a_function_becomes_a_failure(pipeline):
    def choose(row):
        errors = {1: lambda: NotPicklableError(1, 2), 2: UnspeakableError, 3: SystemExit, 4: StopIteration, 5: ValueError}
        if row in errors:
            raise errors[row]()
        return row

    good, failed, _ = run(pipeline, range(6), Model().with_preprocess_fn(choose))
    assert good == answers([0])
    types = ["NotPicklableError", "UnspeakableError", "SystemExit", "StopIteration", "ValueError"]
    assert [(row, failure.error_type) for row, failure in failed["pre0"]] == list(enumerate(types, 1))


def test_a_generator_that_raises_halfway(pipeline):
    class Lazy(Model):
        def run_inference(self, batch, model, inference_args=None):
            for row in batch:
                if row == 11:
                    raise ValueError("eleven")
                yield ("answer", row)

    good, failed, _ = run(pipeline, range(30), Lazy(max_batch_size=16))
    assert good == answers(row for row in range(30) if row != 11)
    assert [(row, failure.message) for row, failure in failed["inferences"]] == [(11, "eleven")]


def test_a_wrong_number_of_answers(pipeline):
    class Forgets(Model):
        def run_inference(self, batch, model, inference_args=None):
            return [("answer", row) for row in batch if row % 10 != 4]

    good, failed, _ = run(pipeline, range(30), Forgets(max_batch_size=8))
    assert good == answers(row for row in range(30) if row % 10 != 4)
    assert failed_rows(failed["inferences"]) == [4, 14, 24]
    assert kinds(failed["inferences"]) == {("Ask", WRONG_COUNT, 1)}
    assert "returned 0 predictions for 1 examples" in failed["inferences"][0][1].message


def test_a_row_that_does_not_fit_into_memory(pipeline):
    def trouble(batch):
        if 9 in batch:
            return MemoryError("nine is too large")
        if len(batch) > 4:
            return MemoryError("too many")
        return ValueError("six") if 6 in batch else None

    good, failed, p = run(pipeline, range(20), Model(trouble, max_batch_size=20))
    assert good == answers(row for row in range(20) if row not in (6, 9))
    assert [(row, failure.kind) for row, failure in failed["inferences"]] == [(6, RAISED), (9, OUT_OF_MEMORY)]
    assert p.result.metrics.counter("out_of_memory_counter") > 0


def test_a_handler_that_is_not_safe_to_call_again(pipeline):
    class Once(Model):
        retry_safe = False

    rows = [[1, 2, 3], [4, 5], [6, 13]]
    good, failed, _ = run(pipeline, rows, Once(poison(2, 13)).with_no_batching())
    assert good == answers([4, 5])
    assert failed_rows(failed["inferences"]) == [[1], [2], [3], [6], [13]]
    assert [failure.group for _, failure in failed["inferences"]] == [3, 3, 3, 2, 2]


def test_rows_that_nothing_can_be_done_with_but_passing_them_on(pipeline):
    knot = [1]
    knot.append(knot)
    rows = [{"bad": []}, {"good": {1}}, knot, [["unhashable"]]]
    trouble = lambda batch: ValueError("bad") if any("bad" in row or row[0] == 1 for row in batch) else None  # noqa: E731

    def careful(batch):
        try:
            return trouble(batch)
        except KeyError:
            return trouble([row for row in batch if isinstance(row, list)])

    good, failed, _ = run(pipeline, rows, Model(careful, max_batch_size=4))
    assert good == [("answer", {"good": {1}}), ("answer", [["unhashable"]])]
    (first, _), (second, _) = failed["inferences"]
    assert first == {"bad": []}
    assert second[0] == 1
    assert second[1] is second


@pytest.mark.parametrize("settings", [{"batch_length_fn": len}, {"element_size_fn": len, "max_batch_weight": 20}])
def test_rows_that_cannot_be_measured(pipeline, settings):
    rows = ["a", 1, "bb", "bad", "ccc", None, "d"]
    good, failed, p = run(pipeline, rows, Model(poison("bad"), **settings))
    assert good == answers(["a", "bb", "ccc", "d"])
    assert [(row, failure.error_type) for row, failure in failed["inferences"]] == [
        *((1, "TypeError"), ("bad", "ValueError"), (None, "TypeError")),
    ]
    assert p.result.counts["Ask"].rows_in == 7


def test_measures_that_are_no_numbers(pipeline):
    handler = Model(batch_length_fn=lambda row: row, element_size_fn=lambda row: abs(row), max_batch_weight=5)
    good, failed, _ = run(pipeline, [1, -1, 2, 0.5], handler)
    assert good == answers([1, 2])
    assert failed_rows(failed["inferences"]) == [-1, 0.5]


def test_rows_that_are_batches_already(pipeline):
    def check(batch):
        if batch == ["refused"]:
            raise ValueError("refused")
        return batch

    rows = [[1, 2, 3], 5, ["refused"], [4], [], [2]]
    good, failed, _ = run(pipeline, rows, Model(poison(2)).with_no_batching().with_preprocess_fn(check))
    assert good == answers([1, 3, 4])
    assert failed_rows(failed["pre0"]) == [["refused"]]
    assert failed_rows(failed["inferences"]) == [[2], 5, [2]], "an example that fails is a batch of one"


def test_order_over_many_blocks_and_splits(pipeline):
    def refuse(row):
        if row % 7 == 0:
            raise ValueError("seven")
        return row

    trouble = lambda batch: ValueError("eleven") if any(row % 11 == 0 for row in batch) else None  # noqa: E731
    handler = Model(trouble, max_batch_size=50).with_preprocess_fn(refuse)
    good, failed, _ = run(pipeline, range(5000), handler)
    assert good == answers(row for row in range(5000) if row % 7 and row % 11)
    assert failed_rows(failed["pre0"]) == list(range(0, 5000, 7))
    assert failed_rows(failed["inferences"]) == [row for row in range(0, 5000, 11) if row % 7]


def test_errors_of_other_classes_end_the_run(pipeline):
    def trouble(batch):
        if "wrong type" in batch:
            return TypeError("other")
        return ValueError("handled") if "bad" in batch else None

    rows = ["a", "bad", "b", "wrong type", "c"]
    with pytest.raises(StepError, match="step 'Ask': TypeError: other\n  row: 'wrong type'"):
        run(pipeline, rows, Model(trouble, max_batch_size=5), exc_class=ValueError)
    good, failed, _ = run(pipeline, rows, Model(trouble, max_batch_size=5), exc_class=(ValueError, TypeError))
    assert good == answers(["a", "b", "c"])
    assert failed_rows(failed["inferences"]) == ["bad", "wrong type"]


def test_functions_and_measures_with_errors_of_other_classes_end_the_run(pipeline):
    for handler, row in [
        (Model().with_preprocess_fn(lambda row: row / 0), 1),
        (Model().with_postprocess_fn(lambda answer: 1 / 0), ("answer", 1)),
        (Model(element_size_fn=lambda row: row / 0, max_batch_weight=1), 1),
    ]:
        with pytest.raises(StepError) as caught:
            run(pipeline, [1], handler, exc_class=ValueError)
        assert "ZeroDivisionError" in str(caught.value)
        assert f"row: {row!r}" in str(caught.value)


def test_machinery_errors_of_a_handler_end_the_run(pipeline):
    with pytest.raises(TransientError):
        run(pipeline, range(4), Model(poison(2, error=TransientError)))


def test_failures_are_written_as_they_are(pipeline, tmp_path):
    p = pipeline()
    good, failures = p | ps.Create(range(10)) | "Ask" >> ps.RunInference(Model(poison(3))).with_exception_handling()
    good | ps.WriteToJsonl(str(tmp_path / "good"))
    failures | ps.WriteToJsonl(str(tmp_path / "failed"))
    p.run()
    (path,) = (tmp_path / "failed").glob("*.jsonl")
    row, failure = json.loads(path.read_text())
    assert row == 3
    assert (failure["step"], failure["kind"], failure["error_type"]) == ("Ask", "raised", "ValueError")


RECIPES = {  # as the page on inference has them
    ("jsonl", False): lambda failed: failed[0],
    ("jsonl", True): lambda failed: tuple(failed[0]),
    ("parquet", False): lambda failed: failed["row"],
    ("parquet", True): lambda failed: (failed["key"], failed["row"]),
}


@pytest.mark.parametrize(("kind", "keyed"), RECIPES)
def test_rows_that_failed_are_run_again_from_the_file_that_they_were_written_to(tmp_path, kind, keyed):
    rows = [(f"key {n}", n) if keyed else n for n in range(6)]
    read, write = {
        "jsonl": (ps.ReadFromJsonl, ps.WriteToJsonl),
        "parquet": (ps.ReadFromParquet, ps.WriteToParquet),
    }[kind]

    def asked(pcoll, trouble):
        model = Model(trouble)
        return pcoll | ps.RunInference(ps.KeyedModelHandler(model) if keyed else model).with_exception_handling()

    p = ps.Pipeline(workers=0)
    _, failures = asked(p | ps.Create(rows), poison(1, 4))
    failures | write(tmp_path)
    p.run()
    again = ps.Pipeline(workers=0) | read(tmp_path / f"*.{kind}") | ps.Map(RECIPES[kind, keyed])
    good, failures = asked(again, poison())
    expected = [("answer", 1), ("answer", 4)]
    assert good.collect() == ([("key 1", expected[0]), ("key 4", expected[1])] if keyed else expected)
    assert (failures | ps.Map(str)).collect() == []


def test_a_key_that_a_file_made_a_list_is_answered_with_what_helps(pipeline):
    rows = [["a", 1], ["b", 2]]
    _, failed, _ = run(pipeline, rows, ps.KeyedModelHandler(Model()))
    [hint] = {failure.message.splitlines()[1].strip() for _, failure in failed["inferences"]}
    assert hint.startswith("put ps.Map(tuple) before it: ")
    good = pipeline() | ps.Create(rows) | ps.Map(tuple) | ps.RunInference(ps.KeyedModelHandler(Model()))
    assert good.collect() == [("a", ("answer", 1)), ("b", ("answer", 2))]


def test_a_step_that_fails_for_every_row_is_logged_once(pipeline, caplog):
    run(pipeline, [1, 2], Model(poison(1)))
    assert caplog.messages == []
    run(pipeline, [1, 2], Model(poison(1, 2)))
    [told] = caplog.messages
    assert told.startswith("step 'Ask' failed for all 2 rows; the commonest error: ")


def test_all_failures_as_one_collection(pipeline):
    handler = Model(poison(3)).with_preprocess_fn(lambda row: 6 // row and row)
    _, failures = pipeline() | ps.Create([0, 3, 1]) | ps.RunInference(handler).with_exception_handling()
    assert failed_rows((failures | ps.Flatten()).collect()) == [0, 3]
    assert failed_rows((failures | ps.Map(lambda failed: failed)).collect()) == [0, 3]


def test_failures_cross_a_reshuffle(pipeline):
    _, failures = pipeline() | ps.Create(range(100)) | ps.RunInference(Model(poison(3, 40))).with_exception_handling()
    assert failed_rows((failures.failed_inferences | ps.Reshuffle()).collect()) == [3, 40]


def test_tables_stay_tables(pipeline, tmp_path):
    pq.write_table(pa.table({"x": range(10), "y": ["y"] * 10}), tmp_path / "in.parquet")

    class Columns(Model):
        def takes_columns(self):
            return True

        def run_inference_columns(self, table, model, inference_args=None):
            if 3 in table["x"].to_pylist():
                raise ValueError("three")
            return np.stack([table["x"].to_numpy()] * 2, axis=1)

    p = pipeline()
    rows = p | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
    good, failures = rows | ps.RunInference(Columns(columns=["x"], output_column="z")).with_exception_handling()
    good | ps.WriteToParquet(str(tmp_path / "out"))
    assert failed_rows(failures.failed_inferences.collect()) == [{"x": 3, "y": "y"}]
    p.run()
    got = pq.read_table(tmp_path / "out")
    assert got.column_names == ["x", "y", "z", "z_model_id"]
    assert got["z"].to_pylist() == [[x, x] for x in range(10) if x != 3]
    assert got.schema.field("z").type == pa.list_(pa.int64(), 2)
    assert "takes columns" in p.explain()


# How a step is described.


def test_names_hints_and_settings():
    plain = ps.RunInference(Model())
    handled = plain.with_exception_handling(exc_class=(ValueError, KeyError), use_subprocess=True, timeout=2.5)
    assert plain.handling is None
    assert handled.handling == Handling(exc_class=(ValueError, KeyError), use_subprocess=True, timeout=2.5)
    p = ps.Pipeline()
    rows = p | ps.Create([1])
    good, failures = rows | "Named" >> handled.with_resource_hints(cpus=2)
    assert good.producer.label == "Named"
    assert good.producer.hints.cpus == 2
    assert good.producer.transform.handling is handled.handling
    assert (rows | handled)[0].producer.label == "RunInference(Model)"
    assert (rows | ("Before" >> plain).with_exception_handling())[0].producer.label == "Before"
    assert len(failures.failed_preprocessing) == len(failures.failed_postprocessing) == 0
    assert list(failures) == [failures.failed_inferences] == [failures["failed_inferences"]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0}, "timeout=0: expected seconds, more than 0"),
        ({"timeout": "10"}, "timeout='10': expected seconds"),
        ({"timeout": float("nan")}, "timeout=nan: expected seconds"),
        ({"timeout": True}, "timeout=True: expected seconds"),
        ({"use_subprocess": 1}, "use_subprocess=1: expected True or False"),
        ({"threshold": 1.5}, "threshold=1.5: expected the share of rows that may fail, from 0 to 1"),
        ({"threshold": -0.1}, "threshold=-0.1: expected"),
        ({"threshold": True}, "threshold=True: expected"),
        ({"threshold": float("nan")}, "threshold=nan: expected"),
        ({"exc_class": "ValueError"}, "exc_class='ValueError': expected a class of errors"),
        ({"exc_class": BaseException}, "exc_class=.*: each must be an Exception|Ctrl-C"),
        ({"exc_class": KeyboardInterrupt}, "Ctrl-C"),
        ({"exc_class": (ValueError, GeneratorExit)}, "Ctrl-C"),
        ({"exc_class": ()}, r"exc_class=\(\): expected a class"),
        ({"exc_class": ValueError("x")}, "exc_class=ValueError"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        ps.RunInference(Model()).with_exception_handling(**settings)


def test_only_a_collection_has_rows():
    with pytest.raises(PenstockError, match="RunInference"):
        p = ps.Pipeline()
        (p | ps.Create([1]), p | "more" >> ps.Create([2])) | ps.RunInference(Model()).with_exception_handling()


# The failure itself.


def test_a_failure_is_text():
    try:
        raise NotPicklableError(1, 2)
    except NotPicklableError as exc:
        failure = Failure.of(exc, "Ask", model_id="m", attempts=2, group=3)
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert json.loads(json.dumps(failure.as_dict())) == {
        "step": "Ask",
        "kind": "raised",
        "error_type": "NotPicklableError",
        "message": "lost on the way",
        "traceback": failure.traceback,
        "attempts": 2,
        "model_id": "m",
        "group": 3,
    }
    assert "raise NotPicklableError(1, 2)" in failure.traceback


def test_a_failure_keeps_the_cause_of_its_error():
    try:
        try:
            raise KeyError("inner")
        except KeyError as exc:
            raise ValueError("outer") from exc
    except ValueError as exc:
        failure = Failure.of(exc, "Ask")
    assert (failure.error_type, failure.message) == ("ValueError", "outer")
    assert "KeyError: 'inner'" in failure.traceback
    assert failure.traceback.endswith("ValueError: outer")


def test_a_failure_is_bounded():
    failure = Failure.of(ValueError("x" * 1_000_000), "Ask")
    assert len(failure.message) == len(failure.traceback) == 20_000


# One model copy.


def copy_of(handler):
    copy = ModelCopy("Ask", handler)
    copy.load()
    return copy


def outcomes(handler, rows, **handling):
    return copy_of(handler).outcomes(list(rows), How(None, "Ask", Handling(**handling)))


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 100, 1024])
@pytest.mark.parametrize("bad", [1, 2, 5])
def test_few_bad_rows_are_found_in_few_calls(rows, bad):
    for seed in range(5):
        guilty = set(random.Random(seed).sample(range(rows), min(bad, rows)))
        handler = Model(poison(*guilty))
        got = outcomes(handler, range(rows))
        assert set(got.failures) == guilty
        assert got.answers == [None if row in guilty else ("answer", row) for row in range(rows)]
        assert got.calls == len(handler.batches)
        assert len(handler.batches) <= 2 * len(guilty) * (math.log2(rows) + 1) + 1


def test_a_half_is_not_called_when_the_other_has_passed():
    handler = Model(poison(7))
    outcomes(handler, range(8))
    assert handler.batches == [list(range(8)), [0, 1, 2, 3], [4, 5], [6], [7]]


def test_every_row_is_answered_by_one_call():
    handler = Model(poison(2, 5, 11))
    outcomes(handler, range(16))
    passed = [row for batch in handler.batches if handler.trouble(batch) is None for row in batch]
    assert sorted(passed) == [row for row in range(16) if row not in (2, 5, 11)]


@pytest.mark.parametrize(("pair", "group"), [((4, 5), [4, 5]), ((5, 6), [4, 5, 6, 7]), ((1, 6), list(range(8)))])
def test_rows_that_fail_only_together_fail_as_the_smallest_group(pair, group):
    handler = Model(lambda batch: ValueError("both") if set(pair) <= set(batch) else None)
    got = outcomes(handler, range(16))
    assert {at: failure.group for at, failure in got.failures.items()} == dict.fromkeys(group, len(group))
    assert got.answers == [None if at in group else ("answer", at) for at in range(16)]


def test_rows_that_fail_in_any_company_fail_in_pairs(pipeline):
    handler = Model(lambda batch: ValueError("too many") if len(batch) > 1 else None).with_no_batching()
    good, failed, _ = run(pipeline, [[1, 2, 3], [4]], handler)
    assert good == answers([1, 4])
    assert [(row, failure.group) for row, failure in failed["inferences"]] == [([2], 2), ([3], 2)]


def test_a_batch_that_fails_once_and_then_works():
    once = [ValueError("not now")]
    handler = Model(lambda batch: once.pop() if once else None)
    got = outcomes(handler, range(8))
    assert got.failures == {}
    assert got.answers == answers(range(8))


def test_a_row_that_fails_twice_and_then_works_is_no_reason_to_lose_another():
    left = [2]

    def trouble(batch):
        if 3 in batch and left[0]:
            left[0] -= 1
            return ValueError("not now")
        return None

    got = outcomes(Model(trouble), range(8))
    assert got.failures == {}
    assert got.answers == answers(range(8))


def test_a_handler_that_is_not_safe_to_call_again_is_called_once():
    for error in (ValueError, MemoryError):
        handler = Model(poison(3, error=error))
        handler.retry_safe = False
        got = outcomes(handler, range(8))
        assert len(handler.batches) == 1
        assert {failure.group for failure in got.failures.values()} == {8}
        with pytest.raises(StepError, match="raised for a batch of 8 rows, which are not safe to call again"):
            copy_of(handler).outcomes(list(range(8)), How(None, "Ask"))
        assert len(handler.batches) == 2


def test_memory_that_runs_out_tells_nothing_of_the_other_half():
    handler = Model(lambda batch: MemoryError("too many") if len(batch) > 2 else None)
    got = outcomes(handler, range(8))
    assert got.failures == {}
    assert got.answers == answers(range(8))


def test_memory_errors_that_are_not_handled_still_make_batches_smaller():
    def trouble(batch):
        return MemoryError("too many") if len(batch) > 2 else ValueError("bad") if 5 in batch else None

    got = outcomes(Model(trouble), range(8), exc_class=ValueError)
    assert list(got.failures) == [5]
    with pytest.raises(StepError, match="MemoryError: cannot take .5.\n  row: 5"):
        outcomes(Model(poison(5, error=MemoryError)), range(8), exc_class=ValueError)


def test_keyboard_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt):
        outcomes(Model(poison(5, error=KeyboardInterrupt)), range(8))


def test_steps_that_share_a_model_have_failures_of_their_own(pipeline):
    p = pipeline()
    rows = p | ps.Create(range(20))
    handler = Model(poison(3, 15), max_batch_size=64)
    both = [
        (rows | name >> ps.RunInference(handler, model_identifier="m").with_exception_handling())[1].failed_inferences
        for name in ("one", "two")
    ]
    made = (both | ps.Flatten()).collect()
    assert [(row, failure.step) for row, failure in made] == [(3, "one"), (15, "one"), (3, "two"), (15, "two")]


def test_a_step_that_handles_errors_shares_a_model_with_one_that_does_not(pipeline):
    p = pipeline()
    handler = Model(poison("bad"))
    rows = p | ps.Create(["a", "bad"])
    good, _ = rows | ps.RunInference(handler, model_identifier="m").with_exception_handling()
    checked = p | "fine" >> ps.Create(["b", "c"]) | ps.RunInference(handler, model_identifier="m")
    assert ((good, checked) | ps.Flatten()).collect() == answers(["a", "b", "c"])


# The search, without a model.


@pytest.mark.parametrize("seed", range(20))
def test_the_search_blames_exactly_the_bad(seed):
    chance = random.Random(seed)
    rows = chance.randint(1, 200)
    bad = {row for row in range(rows) if chance.random() < chance.choice([0.01, 0.3, 1.0])} or {chance.randrange(rows)}

    def call(start, stop):
        return min(bad & set(range(start, stop)), default=None)

    found = list(blamed(isolate(rows, min(bad), lambda error: False), call))
    assert found == [Blame(row, row + 1, row) for row in sorted(bad)]


# Accounting.


def test_a_lost_failure_is_noticed():
    p = ps.Pipeline()
    good, _ = p | "rows" >> ps.Create(range(10)) | "Ask" >> ps.RunInference(Model()).with_exception_handling()
    good | "after" >> ps.Map(str)
    graph = p.graph()
    counts = {"rows": StepCount(0, 10), "Ask": StepCount(10, 8, 2), "after": StepCount(8, 8)}
    check_counts(graph, counts)
    with pytest.raises(AccountingError, match="'Ask' took 10 rows and gave 8 and 1 failures"):
        check_counts(graph, counts | {"Ask": StepCount(10, 8, 1)})
    with pytest.raises(AccountingError, match="'after' was given 8 rows and took 7"):
        check_counts(graph, counts | {"after": StepCount(7, 7)})


# Handlers that change their rows in place.


class Halves(ps.ModelHandler):
    """The sum of a row, halved in place; then it fails for batches with a negative row, or for those that are too large."""

    def __init__(self, most=1000, **settings):
        super().__init__(**settings)
        self.most = most

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        for row in batch:
            row /= 2
        if len(batch) > self.most:
            raise MemoryError
        if any(row[0] < 0 for row in batch):
            raise ValueError("negative")
        return [ps.PredictionResult(row, float(row.sum())) for row in batch]


@pytest.fixture(params=[{}, {"large_model": True}], ids=["here", "host"])
def place(request):
    return request.param


@pytest.mark.parametrize("size", [2, 20_000], ids=["small", "large"])
def test_rows_that_a_handler_changes_are_as_they_were_when_they_run_again(pipeline, place, size):
    rows = [np.full(size, -1.0 if at == 5 else float(at)) for at in range(16)]
    good, failed, _ = run(pipeline, rows, Halves(max_batch_size=8, **place))
    assert [(answer.example[0], answer.inference) for answer in good] == [(at, at * size / 2) for at in range(16) if at != 5]
    ((dead_letter, _),) = failed["inferences"]
    assert dead_letter.tolist() == [-1.0] * size


def test_rows_that_a_handler_changes_are_as_they_were_in_smaller_batches(pipeline, place):
    rows = pipeline() | ps.Create(range(16)) | ps.Map(lambda at: np.full(2, float(at)))
    answers = (rows | ps.RunInference(Halves(most=3, max_batch_size=8, **place))).collect()
    assert [(answer.example[0], answer.inference) for answer in answers] == [(at, at) for at in range(16)]


def test_a_batch_that_is_filled_up_has_its_last_row_once():
    rows = ps.Pipeline(workers=0) | ps.Create(range(3)) | ps.Map(lambda at: np.full(2, float(at)))
    answers = (rows | ps.RunInference(Halves(batch_size_buckets=[8]))).collect()
    assert [answer.inference for answer in answers] == [0, 1, 2]


@pytest.mark.parametrize("changes", [True, False])
def test_a_handler_that_only_reads_its_rows_can_have_the_rows_themselves(changes):
    class Returns(Model):
        def changes_rows(self):
            return changes

        def run_inference(self, batch, model, inference_args=None):
            return [each is row for each in batch]

    copy, row = ModelCopy("step", Returns()), np.ones(3)
    copy.load()
    assert copy.outcomes([row], How(None, "step")).answers == [not changes]


def test_functions_around_the_model_may_change_rows_and_failures_have_them_as_they_were(pipeline):
    def add(row):
        row.append("seen")
        if row[0] == 2:
            raise ValueError("no")
        return row

    handler = Model().with_preprocess_fn(add).with_postprocess_fn(lambda answer: add([*answer[1], answer[1][0]]))
    _, failed, _ = run(pipeline, [[1], [2], [3]], handler)
    assert failed_rows(failed["pre0"]) == [[2]]


# Errors that are no Exceptions.


class PanicError(BaseException):
    """As Rust libraries raise it."""


@pytest.mark.parametrize("error", [PanicError, asyncio.CancelledError, SystemExit])
def test_an_error_that_is_no_exception_costs_its_row(pipeline, place, error):
    good, failed, _ = run(pipeline, range(20), Model(poison(7, error=error), max_batch_size=8, **place))
    assert good == answers(row for row in range(20) if row != 7)
    ((row, failure),) = failed["inferences"]
    assert (row, failure.kind, failure.error_type) == (7, RAISED, error.__name__)


@pytest.mark.parametrize("error", [PanicError, asyncio.CancelledError, SystemExit])
def test_an_error_that_is_no_exception_names_step_and_row(pipeline, place, error):
    rows = pipeline() | ps.Create(range(20)) | "Ask" >> ps.RunInference(Model(poison(7, error=error), **place))
    with pytest.raises(StepError, match=f"step 'Ask': {error.__name__}: .*\n  row: 7"):
        rows.collect()


def test_failed_rows_of_a_table_that_json_cannot_hold_are_written_to_parquet(tmp_path):
    row = {"bytes": b"\xff", "time": datetime(2026, 1, 2, 3, 4, 5), "price": Decimal("1.50"), "n": 1}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "in.parquet")
    for sink in (ps.WriteToJsonl, ps.WriteToParquet):
        p = ps.Pipeline(workers=0)
        asked = ps.RunInference(Model(poison(1), columns="n", output_column="said")).with_exception_handling()
        _, failures = p | ps.ReadFromParquet(tmp_path / "in.parquet") | asked
        failures | sink(tmp_path / "failed")
        if sink is ps.WriteToJsonl:
            with pytest.raises(
                OutputError, match=r"a value of type \w+; .* or use WriteToParquet, whose columns take bytes"
            ):
                p.run()
        else:
            p.run()
    again = ps.Pipeline(workers=0) | ps.ReadFromParquet(tmp_path / "failed/*.parquet") | ps.Map(lambda failed: failed["row"])
    assert again.collect() == [row]
