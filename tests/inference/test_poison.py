"""The acid test of rows that fail: every kind of them at once, among very many good ones."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

import penstock as ps

ROWS = 100_000
SEGFAULT, EXIT, HANG, NOT_PICKLABLE = ({base + 20_000 * n for n in range(5)} for base in (1_111, 4_444, 7_777, 9_999))
RAISES = set(range(50, ROWS, 100))


def kind_of(row):
    if row in SEGFAULT or row in EXIT:
        return "crashed"
    if row in HANG:
        return "timed out"
    if row in NOT_PICKLABLE:
        return "not picklable"
    if row in RAISES:
        return "out of memory" if row % 300 == 50 else "raised"
    return None


class Poisoned(ps.ModelHandler):
    def load_model(self):
        return 3

    def run_inference(self, batch, model, inference_args=None):
        answers = []
        for row in batch:
            if row in SEGFAULT:
                ctypes.string_at(0)
            if row in EXIT:
                os._exit(3)
            if row in HANG:
                ctypes.PyDLL(None).sleep(1000)  # in C, with the interpreter's lock
            if row in RAISES:
                assert row % 300 != 150, "a check that fails"
                raise MemoryError("too large") if row % 300 == 50 else ValueError("bad row")
            answers.append(threading.Lock() if row in NOT_PICKLABLE else row * model)
        return answers


@pytest.mark.timeout(600)
def test_every_kind_of_poison_costs_its_rows_alone():
    bad = {row: kind for row in range(ROWS) if (kind := kind_of(row)) is not None}
    assert len(bad) == 1_020
    pipeline = ps.Pipeline(workers=2)
    handled = ps.RunInference(Poisoned(max_batch_size=64)).with_exception_handling(timeout=1)
    good, failures = pipeline | ps.Create(range(ROWS)) | "Poison" >> handled
    tagged = (good | ps.Map(lambda answer: (answer, None)), failures.failed_inferences) | ps.Flatten()
    found = tagged.collect()
    assert [answer for answer, failure in found if failure is None] == [row * 3 for row in range(ROWS) if row not in bad]
    assert {row: failure.kind for row, failure in found if failure is not None} == bad
    assert all(failure.group == 1 for _, failure in found if failure is not None)
    assert pipeline.result is not None
    counts = pipeline.result.counts["Poison"]
    assert (counts.rows_in, counts.rows_out, counts.rows_failed) == (ROWS, ROWS - len(bad), len(bad))
