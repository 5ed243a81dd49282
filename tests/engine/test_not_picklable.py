"""Rows and answers that cannot be sent to another process: where errors are handled, they cost themselves alone."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

import penstock as ps
from penstock.errors import NotShippableError, StepError
from penstock.failures import CRASHED, NOT_PICKLABLE, RAISED, TIMED_OUT, Handling
from penstock.inference.calls import How
from penstock.inference.served import ServedModel
from penstock.models.outcome import Outcome
from penstock.row_copies import own_rows


class Answer(ps.ModelHandler):
    """The model is a function of one row."""

    def __init__(self, function, **settings):
        super().__init__(**settings)
        self.function = function

    def load_model(self):
        return self.function

    def run_inference(self, batch, model, inference_args=None):
        return [model(row) for row in batch]


def collected(**outputs):
    """The rows of several outputs, of one run."""
    tagged = [pcoll | f"as {name}" >> ps.Map(lambda row, name: (name, row), name) for name, pcoll in outputs.items()]
    made = {name: [] for name in outputs}
    for name, row in (tagged | ps.Flatten()).collect():
        made[name].append(row)
    return made


def lock_at(*bad):
    return lambda row: threading.Lock() if row in bad else row


@pytest.fixture(params=["Map", "FlatMap", "ParDo", "RunInference"])
def step(request):
    """A step whose output for 3 and 11 cannot be pickled, and which raises for 5."""

    def make(row):
        return threading.Lock() if row in (3, 11) else 10 // (row - 5)

    return {
        "Map": ps.Map(make),
        "FlatMap": ps.FlatMap(lambda row: [make(row)]),
        "ParDo": ps.ParDo(lambda row: [make(row)]),
        "RunInference": ps.RunInference(Answer(make, max_batch_size=4).with_postprocess_fn(lambda row: row)),
    }[request.param]


def test_an_output_that_cannot_be_packed_costs_its_row(pipeline, step):
    p = pipeline()
    good, failures = p | ps.Create(range(20)) | "Step" >> step.with_exception_handling()
    failures = failures if isinstance(failures, ps.PCollection) else failures.failed_inferences
    made = collected(good=good | ps.Reshuffle(), failures=failures)
    assert made["good"] == [10 // (row - 5) for row in range(20) if row not in (3, 5, 11)]
    assert [(row, failure.kind, failure.error_type) for row, failure in made["failures"]] == [
        *((3, NOT_PICKLABLE, "TypeError"), (5, RAISED, "ZeroDivisionError"), (11, NOT_PICKLABLE, "TypeError")),
    ]
    assert (p.result.counts["Step"].rows_out, p.result.counts["Step"].rows_failed) == (17, 3)


@pytest.mark.parametrize("shipped", [("a",), ("b",), ("a", "b")])
def test_one_of_several_outputs_that_cannot_be_packed_costs_the_whole_row(pipeline, shipped):
    def both(row):
        yield ps.TaggedOutput("a", row)
        yield ps.TaggedOutput("b", threading.Lock() if row == 4 else -row)

    outs, failures = pipeline() | ps.Create(range(8)) | ps.ParDo(both).with_outputs("a", "b").with_exception_handling()
    made = collected(
        failures=failures | ps.Map(lambda failed: (failed[0], failed[1].kind)),
        **{tag: outs[tag] | tag >> ps.Reshuffle() for tag in shipped},
    )
    good = [row for row in range(8) if row != 4 or shipped == ("a",)]
    assert made["failures"] == ([] if shipped == ("a",) else [(4, NOT_PICKLABLE)])
    assert made.get("a", good) == good
    assert made.get("b", []) == [-row for row in good if "b" in shipped]


def test_a_row_that_a_filter_keeps_and_that_cannot_be_packed(pipeline):
    rows = pipeline() | ps.Create(range(8)) | ps.Map(lock_at(2, 5))
    kept, failures = rows | ps.Filter(lambda row: row != 0 and row != 6).with_exception_handling()
    kinds = failures | ps.Map(lambda failed: failed[1].kind)
    assert collected(kept=kept | ps.Reshuffle(), kinds=kinds) == {"kept": [1, 3, 4, 7], "kinds": [NOT_PICKLABLE] * 2}


def test_an_output_that_cannot_be_packed_ends_the_run_where_that_is_not_handled(pipeline):
    rows = pipeline() | ps.Create(range(4))
    for step in (ps.Map(lock_at(2)), ps.Map(lock_at(2)).with_retry(ps.Retry(backoff=0))):
        with pytest.raises(NotShippableError, match="a row of type lock cannot be sent to another process"):
            (rows | step | ps.Reshuffle()).collect()
    good, _ = rows | ps.Map(lock_at(2)).with_exception_handling(exc_class=LookupError)
    with pytest.raises(NotShippableError):
        (good | ps.Reshuffle()).collect()


def test_what_a_later_step_cannot_send_is_not_the_row_of_an_earlier_one(pipeline):
    good, _ = pipeline() | ps.Create(range(4)) | ps.Map(lambda row: row).with_exception_handling()
    with pytest.raises(NotShippableError):
        (good | ps.Map(lock_at(2)) | ps.Reshuffle()).collect()


def test_a_failed_row_that_cannot_be_packed_goes_as_text(pipeline):
    rows = pipeline() | ps.Create(range(6)) | ps.Map(lock_at(1, 4))
    _, failures = rows | ps.Map(lambda row: row // (row % 2)).with_exception_handling()
    made = (failures | ps.Reshuffle()).collect()
    lock = "<unlocked _thread.lock"
    assert [row if isinstance(row, int) else row[: len(lock)] for row, _ in made] == [0, lock, 2, lock]
    assert made[1][1].error_type == "TypeError"


def test_a_row_that_cannot_be_sent_to_the_models_process(pipeline):
    rows = pipeline() | ps.Create(range(20)) | ps.Map(lock_at(1, 14))
    model = Answer(lambda row: 10 // (row - 5), max_batch_size=4)
    good, failures = rows | ps.RunInference(model).with_exception_handling(use_subprocess=True)
    made = collected(good=good, kinds=failures.failed_inferences | ps.Map(lambda failed: failed[1].kind))
    assert made["good"] == [10 // (row - 5) for row in range(20) if row not in (1, 5, 14)]
    assert made["kinds"] == [NOT_PICKLABLE, RAISED, NOT_PICKLABLE]
    assert [type(row) for row, _ in (failures.failed_inferences | ps.Reshuffle()).collect()] == [str, int, str]


def test_an_answer_that_a_host_cannot_send_fails_alone():
    served = ServedModel("Ask", Answer(str))
    outcome = Outcome([1, threading.Lock(), None], {2: "failed"})
    got = served.without_unpackable(outcome, How(None, "Ask", Handling()))
    assert got.answers == [1, None, None]
    assert got.failures[2] == "failed"
    assert (got.failures[1].kind, got.failures[1].error_type, got.failures[1].step) == (NOT_PICKLABLE, "TypeError", "Ask")
    assert served.without_unpackable(outcome, How(None, "Ask")) is None
    assert served.without_unpackable(outcome, How(None, "Ask", Handling(exc_class=LookupError))) is None
    assert served.without_unpackable(Outcome([1], {}), How(None, "Ask", Handling())) is None


# What is pickled, and does not come back.


class Sulks:
    """Pickles; when it is unpickled it raises, hangs or ends the process."""

    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        return self.how


HANG = (time.sleep, (1000,))
LEAVE = (os._exit, (3,))
FAIL = (int, ("no number",))
EXIT = (sys.exit, ("enough",))


@pytest.mark.parametrize("how", [FAIL, EXIT])
@pytest.mark.parametrize("workers", [2, 0])
def test_an_output_that_does_not_unpickle_costs_its_row(workers, how):
    step = ps.Map(lambda row: Sulks(how) if row == 3 else row)
    good, failures = ps.Pipeline(workers=workers) | ps.Create(range(20)) | "Step" >> step.with_exception_handling()
    made = collected(good=good | ps.Reshuffle(), failures=failures)
    assert made["good"] == [row for row in range(20) if row != 3]
    assert [(row, failure.step, failure.kind) for row, failure in made["failures"]] == [(3, "Step", NOT_PICKLABLE)]


def test_an_output_that_does_not_unpickle_names_its_step():
    rows = ps.Pipeline(workers=2) | ps.Create(range(20)) | "Step" >> ps.Map(lambda row: Sulks(FAIL) if row == 3 else row)
    with pytest.raises(NotShippableError, match="(?s)step 'Step': a row of type Sulks.*no number"):
        rows.collect()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "kind"), [(FAIL, NOT_PICKLABLE), (EXIT, NOT_PICKLABLE), (HANG, TIMED_OUT), (LEAVE, CRASHED)]
)
@pytest.mark.parametrize("workers", [2, 0])
def test_an_answer_that_does_not_unpickle_costs_its_row(workers, how, kind):
    """The model's process finds it out: there it can be killed."""
    step = ps.RunInference(Answer(lambda row: Sulks(how) if row == 3 else row, max_batch_size=4))
    handled = step.with_exception_handling(timeout=1.5)
    good, failures = ps.Pipeline(workers=workers) | ps.Create(range(8)) | "Step" >> handled
    made = collected(good=good, failures=failures.failed_inferences)
    assert made["good"] == [row for row in range(8) if row != 3]
    assert [(row, failure.kind) for row, failure in made["failures"]] == [(3, kind)]


# Rows that cannot be copied: a function may change them, so they are given once.


class Locked:
    """A row that cannot be copied, and that a function changes."""

    def __init__(self, number):
        self.number, self.lock, self.given = number, threading.Lock(), 0


def mixed(number):
    return Locked(number) if number % 2 else {"number": number, "given": 0}


def give(row):
    """As a function that changes its row: another call sees that."""
    if isinstance(row, Locked):
        row.given += 1
        return row.number, row.given
    row["given"] += 1
    return row["number"], row["given"]


class Gives(ps.ModelHandler):
    """Fails for batches with one of the bad rows. Where it prepares, that does so."""

    def __init__(self, *bad, prepares=False, **settings):
        super().__init__(**settings)
        self.bad, self.early = bad, prepares

    def load_model(self):
        return None

    def _checked(self, batch):
        made = [give(row) for row in batch]
        if any(number in self.bad for number, _ in made):
            raise ValueError("a bad one")
        return made

    def prepare(self, examples, tool, inference_args=None):
        return self._checked(examples) if self.early else examples

    def run_inference(self, batch, model, inference_args=None):
        return batch if self.early else self._checked(batch)


@pytest.mark.parametrize("prepares", [False, True], ids=["run_inference", "prepare"])
@pytest.mark.parametrize("bad", [2, 3])
def test_a_row_that_cannot_be_copied_is_given_once_and_fails_with_its_batch(prepares, bad):
    rows = ps.Pipeline(workers=0) | ps.Create(range(8)) | ps.Map(mixed)
    handler = Gives(bad, prepares=prepares, max_batch_size=4 if not prepares else None)
    good, failures = rows | ps.RunInference(handler).with_exception_handling()
    told = failures.failed_inferences | ps.Map(lambda failed: (give(failed[0]), failed[1].message))
    made = collected(good=good, failed=told)
    answers = [getattr(each, "inference", each) for each in made["good"]]
    last = 8 if prepares else 4  # rows of the batch
    lost = {bad, *range(1, last, 2)}
    assert answers == [(number, 1) for number in range(8) if number not in lost]
    assert sorted(row for row, _ in made["failed"]) == [(number, 2 if number % 2 else 1) for number in sorted(lost)]
    for (number, _), message in made["failed"]:
        assert "a bad one" in message
        assert ("the row cannot be copied (TypeError: cannot pickle '_thread.lock' object)" in message) == bool(number % 2)


def test_the_row_that_is_to_blame_is_named_also_beside_rows_that_cannot_be_copied():
    rows = ps.Pipeline(workers=0) | ps.Create(range(4)) | ps.Map(mixed)
    with pytest.raises(StepError, match="a bad one\n  row: {'number': 2"):
        (rows | ps.RunInference(Gives(2))).collect()
    with pytest.raises(StepError, match="a bad one\n  row: .*Locked") as raised:
        (rows | ps.RunInference(Gives(3))).collect()
    assert "raised for a batch of 4 rows; the row cannot be copied" in raised.value.__notes__[0]


def test_a_batch_is_not_filled_up_with_a_row_that_cannot_be_copied():
    rows = ps.Pipeline(workers=0) | ps.Create([1, 3, 5]) | ps.Map(mixed)
    assert (rows | ps.RunInference(Gives(batch_size_buckets=[8]))).collect() == [(1, 1), (3, 1), (5, 1)]


def test_a_row_that_cannot_be_copied_is_tried_once():
    def fails(row):
        if give(row)[1] == 1:
            raise ValueError("the first time")
        return row

    rows = ps.Pipeline(workers=0) | ps.Create([1, 3]) | ps.Map(mixed)
    step = ps.Map(fails).with_retry(ps.Retry(on=ValueError, backoff=0))
    good, failures = rows | step.with_exception_handling()
    made = collected(good=good, failures=failures | ps.Map(lambda failed: (failed[1].attempts, failed[1].message)))
    assert made["good"] == []
    assert [attempts for attempts, _ in made["failures"]] == [1, 1]
    assert "it is as the step left it, and is not tried again" in made["failures"][0][1]
    with pytest.raises(StepError, match="the first time") as raised:
        (rows | step).collect()
    assert "is not tried again" in raised.value.__notes__[0]


def test_a_row_that_cannot_be_copied_has_one_reader():
    rows = ps.Pipeline(workers=0) | ps.Create([2, 1]) | ps.Map(mixed)
    with pytest.raises(NotShippableError, match="a row of type Locked cannot be copied .*several steps read it"):
        ([rows | "one" >> ps.Map(give), rows | "two" >> ps.Map(give)] | ps.Flatten()).collect()
    assert (rows | ps.Map(give)).collect() == [(2, 1), (1, 1)]
    good, failures = ps.Pipeline(workers=0) | ps.Create([2, 1]) | ps.Map(mixed).with_exception_handling()
    made = collected(one=good, two=good | ps.Map(give), failed=failures | ps.Map(lambda failed: failed[1].kind))
    assert made == {"one": [{"number": 2, "given": 0}], "two": [(2, 1)], "failed": [NOT_PICKLABLE]}


def test_what_a_row_that_cannot_be_copied_shares_with_others_is_whole_in_their_copies():
    shared = {"x": [1]}
    rows = [{"shared": shared, "lock": threading.Lock()}, {"shared": shared}, {"with lock": {"of": shared}}]
    rows[0]["self"] = rows[2]["first"] = {"row": rows[0]}
    uncopied = {}
    made = own_rows(rows, uncopied)
    assert made[0] is rows[0]
    assert made[1] == rows[1]
    assert made[1] is not rows[1]
    assert made[2] is rows[2], "the first row is in it, which cannot be copied"
    assert list(uncopied) == [0, 2]
