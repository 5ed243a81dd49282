"""What a call had at hand when it raised is let go of with its rows: nothing waits for a garbage collection."""

from __future__ import annotations

import gc
import weakref

import pytest

import penstock as ps

ROWS, BAD_EVERY = 2000, 10
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
    "lengths": lambda: ps.RunInference(Plain(max_batch_size=64, batch_length_fn=lambda row: 1 + 0 * checked(row))),
}


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("step", STEPS)
def test_nothing_of_a_failed_call_stays(step, without_collector):
    good, _ = ps.Pipeline(workers=0) | ps.Create(range(ROWS)) | STEPS[step]().with_exception_handling()
    assert len(good.collect()) == ROWS - ROWS // BAD_EVERY
    assert len(Held.alive) <= AT_ONCE


def test_failures_have_their_tracebacks_all_the_same():
    rows = ps.Pipeline(workers=0) | ps.Create(range(20)) | ps.RunInference(Refuses()).with_exception_handling()
    failed = rows[1].failed_inferences.collect()
    assert [row for row, _ in failed] == [0, 10]
    assert all("in checked\n    raise ValueError" in failure.traceback for _, failure in failed)
