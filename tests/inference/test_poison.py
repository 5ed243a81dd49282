"""The acid test of rows that fail: every kind of them at once, among very many good ones."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.testing import FaultyModelHandler

ROWS = 100_000
SEGFAULT, EXIT, HANG, NOT_PICKLABLE = ({base + 20_000 * n for n in range(5)} for base in (1_111, 4_444, 7_777, 9_999))
RAISES = set(range(50, ROWS, 100))


KINDS = {
    "segfault": "crashed",
    "exit": "crashed",
    "hang": "timed out",
    "not picklable": "not picklable",
    "out of memory": "out of memory",
    "raise": "raised",
}


def fault_of(row):
    for fault, rows in (("segfault", SEGFAULT), ("exit", EXIT), ("hang", HANG), ("not picklable", NOT_PICKLABLE)):
        if row in rows:
            return fault
    if row in RAISES:
        return "out of memory" if row % 300 == 50 else "raise"
    return None


@pytest.mark.timeout(600)
def test_every_kind_of_poison_costs_its_rows_alone():
    bad = {row: KINDS[fault] for row in range(ROWS) if (fault := fault_of(row)) is not None}
    assert len(bad) == 1_020
    pipeline = ps.Pipeline(workers=2)
    poisoned = FaultyModelHandler(fault_of, answer=lambda row: row * 3, max_batch_size=64)
    handled = ps.RunInference(poisoned).with_exception_handling(timeout=1)
    good, failures = pipeline | ps.Create(range(ROWS)) | "Poison" >> handled
    tagged = (good | ps.Map(lambda answer: (answer, None)), failures.failed_inferences) | ps.Flatten()
    found = tagged.collect()
    assert [answer for answer, failure in found if failure is None] == [row * 3 for row in range(ROWS) if row not in bad]
    assert {row: failure.kind for row, failure in found if failure is not None} == bad
    assert all(failure.group == 1 for _, failure in found if failure is not None)
    assert pipeline.result is not None
    counts = pipeline.result.counts["Poison"]
    assert (counts.rows_in, counts.rows_out, counts.rows_failed) == (ROWS, ROWS - len(bad), len(bad))
