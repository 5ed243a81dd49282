"""Map, FlatMap, Filter and ParDo with a timeout or in a subprocess: rows that hang or crash cost themselves alone."""

from __future__ import annotations

import ctypes
import os

import pytest

import penstock as ps
from penstock.errors import UsageError

HANGS, CRASHES, RAISES, EXITS = 7, 23, 40, 61
EXPECTED = {HANGS: "timed out", CRASHES: "crashed", RAISES: "raised", EXITS: "crashed"}


def trouble(row):
    if row == HANGS:
        ctypes.PyDLL(None).sleep(1000)  # in C, with the interpreter's lock
    if row == CRASHES:
        ctypes.string_at(0)
    if row == EXITS:
        os._exit(3)
    if row == RAISES:
        raise ValueError("bad")
    return row


def twice(row):
    yield trouble(row)
    yield row


class Sorts(ps.DoFn):
    def setup(self):
        self.ready = True

    def process(self, row):
        assert self.ready
        yield ps.TaggedOutput("odd" if trouble(row) % 2 else "even", row)


def is_even(row):
    return trouble(row) % 2 == 0


GOOD = [row for row in range(80) if row not in EXPECTED]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (ps.Map(trouble), GOOD),
        (ps.FlatMap(twice), [row for row in GOOD for _ in range(2)]),
        (ps.Filter(is_even), [row for row in GOOD if row % 2 == 0]),
        (ps.ParDo(twice), [row for row in GOOD for _ in range(2)]),
    ],
    ids=["Map", "FlatMap", "Filter", "ParDo"],
)
def test_rows_that_hang_or_crash_are_found(step, expected, workers):
    pipeline = ps.Pipeline(workers=workers)
    good, failures = pipeline | ps.Create(range(80)) | "Trouble" >> step.with_exception_handling(timeout=0.5)
    together = (good | ps.Map(lambda row: (row, None)), failures) | ps.Flatten()
    found = together.collect()
    assert [row for row, failure in found if failure is None] == expected
    assert {row: failure.kind for row, failure in found if failure is not None} == EXPECTED
    assert [failure.message for _, failure in found if failure is not None and "model" in failure.message] == []
    assert pipeline.result is not None
    counts = pipeline.result.counts["Trouble"]
    assert (counts.rows_in, counts.rows_out, counts.rows_failed) == (80, len(expected), 4)


@pytest.mark.parametrize("step", [ps.FlatMap, ps.ParDo])
def test_a_row_where_rows_are_expected_is_a_failure(step):
    steps = step(lambda row: {"row": row}).with_exception_handling(use_subprocess=True)
    _, failed = ps.Pipeline() | ps.Create([12]) | steps
    [(row, failure)] = failed.collect()
    assert row == 12
    assert "returned a dict; expected an iterable of rows" in failure.message


def test_tagged_outputs_of_a_process():
    step = ps.ParDo(Sorts()).with_outputs("odd", "even").with_exception_handling(use_subprocess=True)
    rows = [row for row in range(80) if row != HANGS]
    outputs, failures = ps.Pipeline(workers=0) | ps.Create(rows) | step
    assert outputs.odd.collect() == [row for row in GOOD if row % 2]
    assert sorted(row for row, _ in failures.collect()) == [CRASHES, RAISES, EXITS]


def test_the_timeout_is_for_one_row():
    def wait(row):
        import time

        time.sleep(0.1)
        return row

    good, failures = ps.Pipeline(workers=0) | ps.Create(range(20)) | ps.Map(wait).with_exception_handling(timeout=1)
    assert good.collect() == list(range(20))
    assert failures.collect() == []


class Bundles(ps.DoFn):
    def finish_bundle(self):
        yield 1


def test_a_dofn_with_bundles_is_refused():
    with pytest.raises(
        UsageError, match=r"Bundles.process\(\) in a process of many bundles, where there is no finish_bundle\(\)"
    ):
        ps.ParDo(Bundles()).with_exception_handling(timeout=1)
