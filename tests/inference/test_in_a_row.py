"""Batches of one caller that run one after the other: answers, failures and calls as if each ran by itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import PredictionCountError, StepError

ROWS, SIZE = 10_000, 8
CALLS = []  # of the handlers below, in this process


@pytest.fixture(autouse=True)
def none_yet():
    CALLS.clear()


class Recording(ps.ModelHandler):
    """Twice the row; CALLS has the batches that it was called with."""

    def __init__(self, fails_at=None, **settings):
        super().__init__(max_batch_size=SIZE, **settings)
        self.fails_at = fails_at

    def load_model(self):
        return 2

    def run_inference(self, batch, model, inference_args=None):
        CALLS.append(list(batch))
        if self.fails_at in batch:
            raise ValueError(f"no {self.fails_at}")
        return self.answer([row * model for row in batch])

    def answer(self, made):
        return made


class Once(Recording):
    """Not to be called again with rows that it has seen."""

    retry_safe = False


class UsesUpItsList(Recording):
    def run_inference(self, batch, model, inference_args=None):
        return [batch.pop(0) * model for _ in range(len(batch))]


class GivesArrays(Recording):
    def answer(self, made):
        return np.array(made)


class GivesOneTooFew(Recording):
    def answer(self, made):
        return made[1:] if 800 in made else made


def run(handler, rows=range(ROWS)):
    return ps.Pipeline(workers=0) | ps.Create(list(rows)) | ps.RunInference(handler)


def run_handled(handler):
    """The answers and what failed, of one run."""
    p = ps.Pipeline(workers=0)
    good, failures = p | ps.Create(list(range(ROWS))) | ps.RunInference(handler).with_exception_handling()
    bad = failures.failed_inferences | ps.Map(lambda failed: ("bad", failed[0]))
    both = ((good | ps.Map(lambda answer: ("good", answer))), bad) | ps.Flatten()
    made = both.collect()
    return [row for kind, row in made if kind == "good"], [row for kind, row in made if kind == "bad"]


@pytest.mark.parametrize("kind", [Recording, UsesUpItsList, GivesArrays])
def test_each_row_has_its_answer(kind):
    assert run(kind()).collect() == list(range(0, 2 * ROWS, 2))


def test_no_batch_is_larger_than_asked_for():
    run(Recording()).collect()
    assert max(len(batch) for batch in CALLS) == SIZE
    assert [row for batch in CALLS for row in batch] == list(range(ROWS))


def test_an_error_names_its_row():
    with pytest.raises(StepError, match="no 5001") as caught:
        run(Recording(fails_at=5001)).collect()
    assert "5001" in str(caught.value).split("no 5001", 1)[1]


def test_a_row_that_fails_costs_that_row():
    good, bad = run_handled(Recording(fails_at=5001))
    assert bad == [5001]
    assert good == [2 * row for row in range(ROWS) if row != 5001]
    first = CALLS.index(list(range(5000, 5008)))
    assert CALLS.count(CALLS[first]) == 1, "its batch runs again in parts, not whole"


def test_a_batch_that_is_not_to_run_again_fails_whole():
    good, bad = run_handled(Once(fails_at=5001))
    assert bad == list(range(5000, 5008))
    assert len(good) == ROWS - SIZE
    assert [row for batch in CALLS for row in batch] == list(range(ROWS)), "each row was seen once"


def test_a_wrong_number_of_answers_is_found():
    with pytest.raises(PredictionCountError, match="returned 7 predictions for 8 examples"):
        run(GivesOneTooFew()).collect()


def test_rows_that_a_handler_could_change_are_copied():
    class Changes(Recording):
        def run_inference(self, batch, model, inference_args=None):
            for row in batch:
                row.append(model)
            if [5001, 2] in batch:
                raise ValueError("no 5001")
            return [sum(row) for row in batch]

    rows = [[number] for number in range(ROWS)]
    p = ps.Pipeline(workers=0)
    good, _ = p | ps.Create(rows) | ps.RunInference(Changes()).with_exception_handling()
    assert good.collect() == [number + 2 for number in range(ROWS) if number != 5001]


def test_arrays_stay_arrays(tmp_path):
    """A vector for each row, from row to column: without a list of numbers for any of them."""

    class Vectors(Recording):
        def answer(self, made):
            return np.array(made, dtype=np.float32)[:, None] + np.arange(4, dtype=np.float32)

    with ps.Pipeline(workers=0) as p:
        rows = p | ps.Create([{"x": number} for number in range(ROWS)])
        answered = rows | ps.RunInference(Vectors(columns="x", output_column="vector"))
        answered | ps.WriteToParquet(str(tmp_path / "out"))
    found = pq.read_table(tmp_path / "out")
    assert found.schema.field("vector").type == pa.list_(pa.float32(), 4)
    assert [each[0] for each in found["vector"].to_pylist()] == list(range(0, 2 * ROWS, 2))


def test_a_first_batch_that_fails_costs_that_row():
    good, bad = run_handled(Recording(fails_at=3))
    assert bad == [3]
    assert good == [2 * row for row in range(ROWS) if row != 3]
