"""What a call had at hand when it raised is let go of with its rows: nothing waits for a garbage collection."""

from __future__ import annotations

import dataclasses
import gc
import traceback
import weakref

import pytest

import penstock as ps
from penstock.errors import PenstockError

ROWS, BAD_EVERY = 20_000, 10
AT_ONCE = 3  # calls whose variables may be there when the run ends


class Held:
    """Something large."""

    alive: weakref.WeakSet[Held] = weakref.WeakSet()

    def __init__(self):
        Held.alive.add(self)


def checked(row):
    held = Held()  # noqa: F841
    if row % BAD_EVERY == 0:
        raise ValueError(f"bad {row}")
    return row


class Checks(ps.DoFn):
    def process(self, row):
        held = Held()  # noqa: F841
        yield checked(row)


class Plain(ps.ModelHandler):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return list(batch)


class Refuses(Plain):
    def run_inference(self, batch, model, inference_args=None):
        held = Held()  # noqa: F841
        return list(map(checked, batch))


class KnowsBadRows(Plain):
    def run_inference(self, batch, model, inference_args=None):
        held, errors = Held(), {}  # noqa: F841
        for at, row in enumerate(batch):
            try:
                checked(row)
            except ValueError as exc:
                errors[at] = exc
        if errors:
            raise ps.BadRowsError(errors, list(batch))
        return batch


class Prepares(Plain):
    def load_prepare(self):
        return None

    def prepare(self, examples, tool, inference_args=None):
        held = Held()  # noqa: F841
        return list(map(checked, examples))


STEPS = {
    "Map": lambda: ps.Map(checked),
    "FlatMap": lambda: ps.FlatMap(lambda row: [checked(row)]),
    "Filter": lambda: ps.Filter(lambda row: checked(row) >= 0),
    "ParDo": lambda: ps.ParDo(Checks()),
    "model": lambda: ps.RunInference(Refuses(max_batch_size=64)),
    "model of single rows": lambda: ps.RunInference(Refuses(max_batch_size=1)),
    "model that knows bad rows": lambda: ps.RunInference(KnowsBadRows(max_batch_size=64)),
    "prepare": lambda: ps.RunInference(Prepares(max_batch_size=64)),
    "preprocess": lambda: ps.RunInference(Plain().with_preprocess_fn(checked)),
    "postprocess": lambda: ps.RunInference(Plain().with_postprocess_fn(checked)),
    "weights": lambda: ps.RunInference(Plain(max_batch_weight=100, element_size_fn=lambda row: 1 + 0 * checked(row))),
    "lengths": lambda: ps.RunInference(Plain(max_batch_size=64, batch_length_fn=lambda row: int(1 + 0 * checked(row)))),
}


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Row(float):
    """A number that can be watched."""

    alive: weakref.WeakSet[Row] = weakref.WeakSet()

    def __new__(cls, number):
        made = super().__new__(cls, number)
        Row.alive.add(made)
        return made

    __hash__ = object.__hash__


def numbers(step):
    """What comes out of a step whose rows are watched, as plain numbers."""
    good, _ = ps.Pipeline(workers=0) | ps.Create(range(ROWS)) | "watched" >> ps.Map(Row) | step
    return (good | ps.Map(lambda answer: 0 + getattr(answer, "inference", answer))).collect()


@pytest.mark.parametrize("step", STEPS)
def test_nothing_of_a_failed_call_stays(step, without_collector):
    assert len(numbers(STEPS[step]().with_exception_handling())) == ROWS - ROWS // BAD_EVERY
    assert len(Held.alive) <= AT_ONCE
    assert len(Row.alive) <= ROWS // 10


@pytest.mark.parametrize("passes", [True, False])
def test_nothing_stays_of_a_call_that_was_tried_again(passes, without_collector):
    tried = []

    def checked_at_first(row):
        held = Held()  # noqa: F841
        tried.append(row)
        if row % BAD_EVERY == 0 and (not passes or tried.count(row) == 1):
            raise OSError(f"bad {row}")
        return row

    step = ps.Map(checked_at_first).with_retry(ps.Retry(attempts=2, on=OSError, backoff=0)).with_exception_handling()
    good, _ = ps.Pipeline(workers=0) | ps.Create(range(200)) | step
    assert len(good.collect()) == (200 if passes else 180)
    assert len(Held.alive) <= AT_ONCE


def test_nothing_stays_of_groups_of_errors(without_collector):
    def several(row):
        held, errors = Held(), []  # noqa: F841
        try:
            checked(BAD_EVERY)
        except ValueError as exc:
            errors.append(exc)
        raise ExceptionGroup("several", errors)

    _, bad = ps.Pipeline(workers=0) | ps.Create(range(200)) | ps.Map(several).with_exception_handling()
    assert len(bad.collect()) == 200
    assert len(Held.alive) <= AT_ONCE


def test_failures_have_their_tracebacks_all_the_same():
    rows = ps.Pipeline(workers=0) | ps.Create(range(20)) | ps.RunInference(Refuses()).with_exception_handling()
    failed = rows[1].failed_inferences.collect()
    assert [row for row, _ in failed] == [0, 10]
    assert all("in checked\n    raise ValueError" in failure.traceback for _, failure in failed)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Nothing can be set on it."""

    row: int


@pytest.mark.parametrize("is_cause", [True, False])
@pytest.mark.parametrize("make", [ps.Map, ps.FlatMap, ps.Filter, "model"])
def test_errors_that_are_frozen_cost_their_rows(make, is_cause):
    def refuses(row):
        if row % 3 == 0 and is_cause:
            try:
                raise FrozenError(row)
            except FrozenError as exc:
                raise ValueError(row) from exc
        if row % 3 == 0:
            raise FrozenError(row)
        return [row]

    class Model(Plain):
        def run_inference(self, batch, model, inference_args=None):
            return list(map(refuses, batch))

    step = ps.RunInference(Model()) if make == "model" else make(refuses)
    good, bad = ps.Pipeline(workers=0) | ps.Create(range(7)) | step.with_exception_handling()
    failed = (bad.failed_inferences if make == "model" else bad).collect()
    assert [(row, failure.error_type) for row, failure in failed] == [
        (row, "ValueError" if is_cause else "FrozenError") for row in (0, 3, 6)
    ]
    assert all("FrozenError" in failure.traceback for _, failure in failed)
    assert len(good.collect()) == 4


def test_rows_that_share_an_error_share_its_traceback():
    class Prepared(Plain):
        def prepare(self, examples, tool, inference_args=None):
            try:
                checked(BAD_EVERY)
            except ValueError as exc:
                raise ps.BadRowsError(dict.fromkeys(range(len(examples)), exc), list(examples)) from None

    class KeepsError(Plain):
        def load_model(self):
            return []

        def run_inference(self, batch, model, inference_args=None):
            if not model:
                try:
                    checked(BAD_EVERY)
                except ValueError as exc:
                    model.append(exc)
            raise ps.BadRowsError(dict.fromkeys(range(len(batch)), model[0]))

    for handler in (Prepared(), KeepsError(max_batch_size=5)):
        _, bad = ps.Pipeline(workers=0) | ps.Create(range(20)) | ps.RunInference(handler).with_exception_handling()
        failed = bad.failed_inferences.collect()
        assert len(failed) == 20
        assert all("in checked\n    raise ValueError" in failure.traceback for _, failure in failed)


@pytest.mark.parametrize("settings", [{}, {"large_model": True}])
def test_a_model_of_a_key_that_cannot_be_loaded_says_where(settings):
    class NotThere(Plain):
        def load_model(self):
            raise OSError("the model is not there")

    keyed = ps.KeyedModelHandler([ps.KeyModelMapping(["a"], NotThere(**settings))])
    rows = ps.Pipeline(workers=0) | ps.Create([("a", 1), ("a", 2)])
    with pytest.raises(PenstockError) as error:
        (rows | ps.RunInference(keyed)).collect()
    assert "in load_model" in "".join(traceback.format_exception(error.value))
    _, bad = rows | "handled" >> ps.RunInference(keyed).with_exception_handling()
    failed = bad.failed_inferences.collect()
    assert len(failed) == 2
    assert all("in load_model" in failure.traceback for _, failure in failed)
