"""Rows that fail in Map, FlatMap, Filter and ParDo, and the share of them that may."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import AccountingError, GraphError, StepError, TooManyFailuresError, UsageError
from penstock.failures import RAISED, Handling
from penstock.observe.result import StepCount
from penstock.run.accounting import check_counts
from penstock.run.plan import make_plan
from penstock.run.thresholds import Thresholds

BAD = (0, 7, 8, 300, 599)


class Answer(ps.ModelHandler):
    """The model is a function of one row."""

    def __init__(self, function, **settings):
        super().__init__(**settings)
        self.function = function

    def load_model(self):
        return self.function

    def run_inference(self, batch, model, inference_args=None):
        return [model(row) for row in batch]


def refuse_bad(row):
    if row in BAD:
        raise ValueError(f"no {row}")
    return row


def collected(**outputs):
    """The rows of several outputs, of one run."""
    tagged = [pcoll | f"as {name}" >> ps.Map(lambda row, name: (name, row), name) for name, pcoll in outputs.items()]
    made = {name: [] for name in outputs}
    for name, row in (tagged | ps.Flatten()).collect():
        made[name].append(row)
    return made


def failed_rows(failed):
    return [row for row, _ in failed]


def run(pipeline, rows, step, **handling):
    """The good rows, the failures, and what the step counted."""
    p = pipeline()
    good, failures = p | ps.Create(rows) | "Step" >> step.with_exception_handling(**handling)
    made = collected(good=good, failures=failures)
    return made["good"], made["failures"], p.result.counts["Step"]


# Each step, on every way of running.


def test_map(pipeline):
    good, failed, count = run(pipeline, range(600), ps.Map(lambda row: -refuse_bad(row)))
    assert good == [-row for row in range(600) if row not in BAD]
    assert failed_rows(failed) == list(BAD)
    for row, failure in failed:
        assert (failure.step, failure.kind) == ("Step", RAISED)
        assert (failure.error_type, failure.message) == ("ValueError", f"no {row}")
        assert (failure.attempts, failure.group, failure.model_id) == (1, 1, None)
        assert failure.traceback.endswith(f"ValueError: no {row}")
        assert "in refuse_bad" in failure.traceback
        assert str(Path(ps.__file__).parent) not in failure.traceback  # no frames of the library's own
    assert (count.rows_in, count.rows_out, count.rows_failed) == (600, 595, 5)
    assert count.errors == {("ValueError", f"no {row}"): 1 for row in BAD}


def test_filter(pipeline):
    good, failed, count = run(pipeline, range(600), ps.Filter(lambda row: refuse_bad(row) % 2))
    assert good == [row for row in range(600) if row % 2 and row not in BAD]
    assert failed_rows(failed) == list(BAD)
    assert (count.rows_in, count.rows_out, count.rows_failed) == (600, 298, 5)


def test_flat_map_gives_all_of_a_row_or_nothing(pipeline):
    def twice(row):
        yield row
        yield -refuse_bad(row)

    good, failed, count = run(pipeline, range(600), ps.FlatMap(twice))
    assert good == [each for row in range(600) if row not in BAD for each in (row, -row)]
    assert failed_rows(failed) == list(BAD)
    assert (count.rows_in, count.rows_out, count.rows_failed) == (600, 1190, 5)


def test_flat_map_of_few_rows_that_become_many(pipeline):
    good, failed, _ = run(pipeline, [3, "x", 20_000, 2], ps.FlatMap(range))
    assert good == [*range(3), *range(20_000), *range(2)]
    assert failed_rows(failed) == ["x"]


class Sort(ps.DoFn):
    def start_bundle(self):
        self.seen = 0

    def process(self, element, even):
        self.seen += 1
        yield element
        if element % 2 == even:
            yield ps.TaggedOutput("even", element)
        refuse_bad(element)
        yield ps.TaggedOutput("twice", 2 * element)

    def finish_bundle(self):
        yield ps.TaggedOutput("seen", self.seen)


def test_pardo_with_outputs_gives_all_of_a_row_or_nothing(pipeline):
    p = pipeline()
    step = ps.ParDo(Sort(), 0).with_outputs("even", "twice", "seen", main="all").with_exception_handling()
    outs, failures = p | ps.Create(range(600)) | "Step" >> step
    made = collected(all=outs.all, even=outs.even, twice=outs["twice"], seen=outs.seen, failures=failures)
    good = [row for row in range(600) if row not in BAD]
    assert made["all"] == good
    assert made["even"] == [row for row in good if row % 2 == 0]
    assert made["twice"] == [2 * row for row in good]
    assert sum(made["seen"]) == 600
    assert failed_rows(made["failures"]) == list(BAD)
    assert p.result.counts["Step"].rows_in == 600
    assert p.result.counts["Step"].rows_failed == 5


def test_pardo_without_outputs(pipeline):
    def process(row):
        return None if row == 1 else [refuse_bad(row)]

    good, failed, _ = run(pipeline, range(10), ps.ParDo(process))
    assert good == [2, 3, 4, 5, 6, 9]
    assert failed_rows(failed) == [0, 7, 8]


def test_pardo_with_wrong_results(pipeline):
    results = {0: 5, 1: [ps.TaggedOutput("unknown", 1)], 2: [2], 3: {"a": 1}}
    good, failed, _ = run(pipeline, range(4), ps.ParDo(lambda row: results[row]))
    assert good == [2]
    assert [(row, failure.error_type) for row, failure in failed] == [(0, "TypeError"), (1, "ValueError"), (3, "TypeError")]
    assert "returned a dict" in failed[2][1].message
    assert "expected an iterable of rows: yield each row, or return [row]" in failed[0][1].message
    assert "output 'unknown', which is not named" in failed[1][1].message


@pytest.mark.parametrize("method", ["setup", "start_bundle", "finish_bundle"])
def test_what_is_no_rows_fault_ends_the_run(pipeline, method):
    def fail(self):
        raise ValueError("not a row's")

    dofn = type("Broken", (ps.DoFn,), {"process": lambda self, row: [row], method: fail})()
    with pytest.raises(StepError, match=rf"ValueError in {method}\(\): not a row's"):
        run(pipeline, range(3), ps.ParDo(dofn))


def test_all_rows_fail_and_none_does(pipeline):
    good, failed, _ = run(pipeline, range(5000), ps.Map(lambda row: row / 0))
    assert good == []
    assert failed_rows(failed) == list(range(5000))
    assert run(pipeline, range(5000), ps.Map(lambda row: row))[:2] == (list(range(5000)), [])


def test_system_exit_counts_and_errors_of_other_classes_end_the_run(pipeline):
    def choose(row):
        if row:
            raise row
        return "fine"

    rows = [None, SystemExit("bye"), StopIteration("over"), KeyError("k")]
    good, failed, _ = run(pipeline, rows, ps.Map(choose))
    assert good == ["fine"]
    assert [failure.error_type for _, failure in failed] == ["SystemExit", "StopIteration", "KeyError"]
    assert failed_rows(run(pipeline, rows[3:], ps.Map(choose), exc_class=LookupError)[1])
    with pytest.raises(StepError, match="step 'Step': SystemExit: bye\n  row: SystemExit"):
        run(pipeline, rows[:2], ps.Map(choose), exc_class=LookupError)


@pytest.mark.parametrize("kind", [ps.Map, ps.Filter, ps.FlatMap, ps.ParDo])
def test_keyboard_interrupt_passes(kind):
    def interrupt(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lambda: ps.Pipeline(workers=0), [1], kind(interrupt))


class UnspeakableError(Exception):
    def __init__(self, *held):
        self.held = held, threading.Lock()

    def __str__(self):
        raise ValueError("no words")

    __repr__ = __reduce__ = __str__


def test_errors_and_rows_that_nothing_can_be_done_with(pipeline):
    knot = [1]
    knot.append(knot)

    def fail(row):
        raise UnspeakableError(row)

    good, failed, _ = run(pipeline, [knot, {"unhashable": set()}], ps.Map(fail))
    assert good == []
    assert failed[0][0][1] is failed[0][0]
    assert failed[1][0] == {"unhashable": set()}
    for _, failure in failed:
        assert (failure.error_type, failure.message) == ("UnspeakableError", "(its message cannot be shown)")


def test_one_step_after_the_other(pipeline):
    p = pipeline()
    numbers, no_numbers = p | ps.Create(["4", "x", "0", "2"]) | "Parse" >> ps.Map(int).with_exception_handling()
    inverse, no_inverse = numbers | "Invert" >> ps.Map(lambda row: 8 // row).with_exception_handling()
    made = collected(good=inverse, failures=(no_numbers, no_inverse) | ps.Flatten())
    assert made["good"] == [2, 4]
    assert [(row, failure.step) for row, failure in made["failures"]] == [("x", "Parse"), (0, "Invert")]


# How a step is described.


def test_names_hints_and_settings():
    rows = ps.Pipeline() | ps.Create([1])
    plain = "Named" >> ps.Map(str)
    good, failures = rows | plain.with_exception_handling(exc_class=ValueError, threshold=0.5).with_resource_hints(cpus=2)
    assert plain.handling is None
    assert good.producer is failures.producer
    assert (good.producer.label, good.producer.hints.cpus) == ("Named", 2)
    assert good.producer.transform.handling == Handling(exc_class=ValueError, threshold=0.5)
    assert (rows | ps.Map(len).with_exception_handling())[0].producer.label == "Map(len)"


def test_retries_stay_with_their_step():
    rows = ps.Pipeline() | ps.Create([1])
    retry, plain = ps.Retry(attempts=2), ps.Map(str)
    assert (rows | plain.with_retry(retry).with_exception_handling())[0].producer.transform.retry is retry
    assert (rows | plain.with_exception_handling().with_retry(retry))[0].producer.transform.retry is retry
    assert plain.retry is None
    tagged = ps.ParDo(Sort()).with_outputs("even", main="all")
    outs, _ = rows | tagged.with_retry(retry).with_exception_handling()
    assert outs.all.producer.transform.retry is retry
    assert (rows | tagged.with_retry(retry)).even.producer.transform.retry is retry
    assert (rows | ps.ParDo(Sort()).with_retry(retry).with_outputs("even")).even.producer.transform.retry is retry


@pytest.mark.parametrize("kind", [ps.Map, ps.FlatMap, ps.Filter, ps.ParDo, lambda fn: ps.ParDo(fn).with_outputs("a")])
def test_wrong_settings_are_refused(kind):
    step = kind(str)
    with pytest.raises(UsageError, match="threshold=2: expected the share"):
        step.with_exception_handling(threshold=2)
    with pytest.raises(UsageError, match="timeout=0: expected seconds"):
        step.with_exception_handling(timeout=0)


def test_wrong_uses_are_refused():
    with pytest.raises(UsageError, match=r"with_exception_handling\(\) comes last"):
        ps.ParDo(str).with_exception_handling().with_outputs("a")
    with pytest.raises(UsageError, match="the name is taken"):
        ps.ParDo(str).with_outputs("(failures)").with_exception_handling()
    with pytest.raises(GraphError, match="Map needs one PCollection on its left"):
        p = ps.Pipeline()
        (p | ps.Create([1]), p | "more" >> ps.Create([2])) | ps.Map(str).with_exception_handling()


# The share of rows that may fail.


def test_a_share_over_the_threshold_stops_the_run(pipeline, tmp_path):
    p = pipeline()
    step = ps.Map(lambda row: 1 // (row % 4)).with_exception_handling(threshold=0.2)
    good, failures = p | ps.Create(range(400)) | "Step" >> step
    good | ps.WriteToJsonl(tmp_path / "good")
    failures | ps.WriteToJsonl(tmp_path / "failed")
    with pytest.raises(TooManyFailuresError) as caught:
        p.run()
    assert "step 'Step': 100 of 400 rows failed; its threshold is 0.2 of them" in str(caught.value)
    assert "100 x ZeroDivisionError: integer division or modulo by zero" in str(caught.value)
    assert not list(tmp_path.rglob("*.jsonl")), "nothing is published"
    assert run(pipeline, range(400), ps.Map(lambda row: 1 // (row % 4)), threshold=0.25)[2].rows_failed == 100


def test_the_threshold_of_a_model(pipeline):
    p = pipeline()
    model = Answer(lambda row: 1 // (row % 2), max_batch_size=8).with_preprocess_fn(lambda row: row if row < 98 else row / 0)
    _, failures = p | ps.Create(range(100)) | "Ask" >> ps.RunInference(model).with_exception_handling(threshold=0.4)
    with pytest.raises(TooManyFailuresError, match="step 'Ask': 51 of 100 rows failed"):
        failures.failed_inferences.collect()


def test_the_run_stops_long_before_its_end(tmp_path):
    def fail(row):
        (tmp_path / str(row)).touch()
        raise ValueError(row)

    _, failures = ps.Pipeline(workers=0) | ps.Create(range(40_000)) | ps.Map(fail).with_exception_handling(threshold=0.5)
    with pytest.raises(TooManyFailuresError):
        failures.collect()
    assert len(list(tmp_path.iterdir())) < 20_000


def thresholds_of(threshold):
    p = ps.Pipeline()
    p | ps.Create([1]) | "Step" >> ps.Map(str).with_exception_handling(threshold=threshold)
    return Thresholds(make_plan(p.graph()))


def test_few_rows_say_nothing_until_the_end():
    thresholds = thresholds_of(0.1)
    few = {"Step": StepCount(999, 0, 999)}
    thresholds.check(few, few)
    with pytest.raises(TooManyFailuresError):
        thresholds.check_all(few)
    for rows, failed in [(1000, 100), (0, 0), (10, 1)]:
        thresholds.check_all({"Step": StepCount(rows, rows - failed, failed)})
    many = {"Step": StepCount(1000, 899, 101)}
    with pytest.raises(TooManyFailuresError, match="101 of 1,000 rows"):
        thresholds.check(many, many)
    thresholds.check(["another"], many)
    thresholds_of(1.0).check_all({"Step": StepCount(1000, 0, 1000)})
    with pytest.raises(TooManyFailuresError):
        thresholds_of(0).check_all({"Step": StepCount(1000, 999, 1)})


def test_the_commonest_errors_are_shown_and_their_number_is_bounded():
    count = StepCount(5000, 0, 5000)
    for number in range(1000):
        count.count_error("ValueError", f"message {number}" + "x" * 1000)
        count.count_error("KeyError", "often", 3)
        count.count_error(f"Error{number}", "each another type")
    assert len(count.errors) < 200
    total = StepCount()
    for _ in range(3):
        total.add(count)
    assert sum(total.errors.values()) == 15_000
    assert len(total.errors) < 200
    assert max(map(len, map(str, total.errors))) < 500
    with pytest.raises(TooManyFailuresError) as caught:
        thresholds_of(0.1).check_all({"Step": count})
    lines = str(caught.value).splitlines()
    assert lines[2] == "  3,000 x KeyError: often"
    assert len(lines) == 7


# Where failures go, and whether all rows are there.


def test_failures_are_written_as_they_are_and_run_again(pipeline, tmp_path):
    p = pipeline()
    step = ps.Map(lambda row: 8 // row["x"])
    good, failures = p | ps.Create([{"x": 4}, {"x": 0}]) | "Step" >> step.with_exception_handling()
    good | ps.WriteToJsonl(tmp_path / "good")
    failures | ps.WriteToJsonl(tmp_path / "failed")
    failures | ps.WriteToParquet(tmp_path / "table")
    p.run()
    (path,) = (tmp_path / "failed").glob("*.jsonl")
    row, failure = json.loads(path.read_text())
    assert (row, failure["step"], failure["error_type"], failure["attempts"]) == ({"x": 0}, "Step", "ZeroDivisionError", 1)
    (record,) = (pipeline() | ps.ReadFromParquet(tmp_path / "table" / "*.parquet")).collect()
    assert record == {"row": row, **failure}
    again = pipeline() | ps.ReadFromJsonl(tmp_path / "failed" / "*.jsonl") | ps.Map(lambda failed: failed[0])
    assert again.collect() == [{"x": 0}]


def test_rows_that_json_cannot_express_are_refused(tmp_path):
    p = ps.Pipeline()
    _, failures = p | ps.Create([{1, 2}]) | ps.Map(lambda row: row / 0).with_exception_handling()
    failures | ps.WriteToJsonl(tmp_path / "failed")
    with pytest.raises(ps.PenstockError, match="is not JSON: .*set.*put a ps.Map before it"):
        p.run()


def test_lost_and_doubled_rows_are_noticed():
    p = ps.Pipeline()
    good, failures = p | "rows" >> ps.Create(range(10)) | "Map" >> ps.Map(str).with_exception_handling()
    kept, _ = good | "Filter" >> ps.Filter(str).with_exception_handling()
    made, _ = kept | "FlatMap" >> ps.FlatMap(str).with_exception_handling()
    (made, failures) | ps.Flatten() | "after" >> ps.Map(str)
    counts = {"rows": StepCount(0, 10), "Map": StepCount(10, 8, 2), "Filter": StepCount(8, 5, 1)}
    counts |= {"FlatMap": StepCount(5, 100, 1), "after": StepCount(102, 102)}
    check_counts(p.graph(), counts)
    for step, wrong, message in [
        ("Map", StepCount(10, 8, 1), "'Map' took 10 rows and gave 8 and 1 failures"),
        ("Filter", StepCount(8, 8, 1), "'Filter' took 8 rows and gave 8 and 1 failures; it must give at most one"),
        ("FlatMap", StepCount(4, 100, 1), "'FlatMap' was given 5 rows and took 4"),
        ("FlatMap", StepCount(5, 100, 6), "'FlatMap' took 5 rows, of which 6 failed"),
        ("after", StepCount(100, 100), "'after' was given 102 rows and took 100"),
    ]:
        with pytest.raises(AccountingError, match=message):
            check_counts(p.graph(), counts | {step: wrong})


# Functions that change their rows in place.


def pops(row):
    row["seen"].append(row.pop("n"))
    if row["seen"] == [2]:
        raise ValueError("no 2")
    return row


@pytest.mark.parametrize(
    "step", [ps.Map(pops), ps.FlatMap(lambda row: [pops(row)]), ps.Filter(pops), ps.ParDo(lambda row: [pops(row)])]
)
def test_failures_have_rows_as_they_came_and_others_as_they_were_made(pipeline, step):
    good, failed, _ = run(pipeline, [{"n": row, "seen": []} for row in range(4)], step)
    assert good == [{"seen": [row]} for row in (0, 1, 3)]
    assert failed_rows(failed) == [{"n": 2, "seen": []}]


def test_every_try_sees_the_row_as_it_came(pipeline):
    step = ps.Map(pops).with_retry(ps.Retry(attempts=3, on=ValueError, backoff=0))
    good, failed, _ = run(pipeline, [{"n": row, "seen": []} for row in range(4)], step)
    assert good == [{"seen": [row]} for row in (0, 1, 3)]
    assert [(row, failure.message, failure.attempts) for row, failure in failed] == [({"n": 2, "seen": []}, "no 2", 3)]


# Errors that are no Exceptions.


class PanicError(BaseException):
    """As Rust libraries raise it."""


def panic(row):
    if row == 7:
        raise PanicError("at the disco")
    return row


class Cancels(ps.DoFn):
    def process(self, row):
        yield panic(row)


PANICS = [ps.Map(panic), ps.FlatMap(lambda row: [panic(row)]), ps.Filter(lambda row: panic(row) >= 0), ps.ParDo(Cancels())]


@pytest.mark.parametrize("step", PANICS)
def test_an_error_that_is_no_exception_costs_its_row(pipeline, step):
    good, failed, _ = run(pipeline, range(10), step)
    assert good == [row for row in range(10) if row != 7]
    assert [(row, failure.error_type, failure.message) for row, failure in failed] == [(7, "PanicError", "at the disco")]


@pytest.mark.parametrize("step", PANICS)
def test_an_error_that_is_no_exception_names_step_and_row(pipeline, step):
    with pytest.raises(StepError, match="step 'Step': PanicError: at the disco\n  row: 7"):
        (pipeline() | ps.Create(range(10)) | "Step" >> step).collect()


def test_such_errors_can_be_the_only_ones_that_are_handled(pipeline):
    good, failed, _ = run(pipeline, range(10), ps.Map(panic), exc_class=PanicError)
    assert (len(good), failed_rows(failed)) == (9, [7])
