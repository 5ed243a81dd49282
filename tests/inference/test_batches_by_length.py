"""Batches of rows of like length in a pipeline, on every way of running: budgets, buckets, lengths that are none."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import StepError, UsageError


class Padding(ps.ModelHandler):
    """Tells the number of rows and the longest row of each call."""

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return [(text, len(batch), max(map(len, batch))) for text in batch]


TEXTS = ["x" * (200 if i % 50 == 0 else i % 7 + 1) for i in range(3000)]


def test_lengths_in_a_pipeline(pipeline):
    p = pipeline()
    made = (p | ps.Create(TEXTS) | ps.RunInference(Padding(batch_length_fn=len, max_padded_cost=400))).collect()
    assert [text for text, _, _ in made] == TEXTS
    assert all(rows * longest <= 400 for _, rows, longest in made)
    metrics = p.result.metrics
    assert metrics.counter("useful_cost") == sum(map(len, TEXTS))
    assert metrics.counter("useful_cost") > 0.7 * metrics.counter("padded_cost")


def test_keys_do_not_get_in_the_way_of_lengths(pipeline):
    handler = ps.KeyedModelHandler(Padding(batch_length_fn=len, max_padded_cost=400))
    made = (pipeline() | ps.Create(list(enumerate(TEXTS))) | ps.RunInference(handler)).collect()
    assert [(key, text) for key, (text, _, _) in made] == list(enumerate(TEXTS))
    assert all(rows * longest <= 400 for _, (_, rows, longest) in made)


def test_a_budget_that_nobody_set_is_found(pipeline):
    p = pipeline()
    made = (p | ps.Create(TEXTS) | "m" >> ps.RunInference(Padding(batch_length_fn=len))).collect()
    assert [text for text, _, _ in made] == TEXTS
    assert any(key.step == "m" and note.startswith("padded cost ") for key, note in p.result.metrics.notes.items())
    assert "found in the last run:\n  m: padded cost " in p.explain()


def test_a_length_function_that_raises_names_the_row(pipeline):
    rows = pipeline() | ps.Create(["a", "bb", 3]) | "m" >> ps.RunInference(Padding(batch_length_fn=len))
    with pytest.raises(StepError, match=r"step 'm \(length\)': TypeError.*\n  row: 3"):
        rows.collect()


@pytest.mark.parametrize("nonsense", [-1, None, 1.5, "2"])
def test_a_length_that_is_none(pipeline, nonsense):
    rows = pipeline() | ps.Create(["a"]) | "m" >> ps.RunInference(Padding(batch_length_fn=lambda row: nonsense))
    with pytest.raises(StepError, match="expected a whole number of at least 0"):
        rows.collect()


def test_a_row_over_the_budget_runs_alone(pipeline):
    texts = ["x" * 500, "y", "z" * 10]
    made = (pipeline() | ps.Create(texts) | ps.RunInference(Padding(batch_length_fn=len, max_padded_cost=40))).collect()
    assert made[0] == ("x" * 500, 1, 500)
    assert all(rows * longest <= 40 for _, rows, longest in made[1:])


def test_a_budget_needs_lengths():
    with pytest.raises(UsageError, match="max_padded_cost needs batch_length_fn"):
        ps.RunInference(Padding(max_padded_cost=5))


def test_few_shapes(pipeline):
    handler = Padding(batch_size_buckets=[4, 16])
    made = (pipeline() | ps.Create(["x"] * 1000) | ps.RunInference(handler)).collect()
    assert len(made) == 1000
    assert {rows for _, rows, _ in made} <= {4, 16}


@pytest.mark.parametrize("buckets", [[0], [4, 2], [3, 3], ["4"]])
def test_wrong_buckets(buckets):
    with pytest.raises(UsageError, match="batch_size_buckets="):
        ps.RunInference(Padding(batch_size_buckets=buckets))


def test_group_into_batches(pipeline):
    rows = [(i % 3, i) for i in range(300)]
    made = (pipeline() | ps.Create(rows) | ps.GroupIntoBatches(7)).collect()
    assert all(len(values) <= 7 for _, values in made)
    for key in range(3):
        assert [v for k, values in made if k == key for v in values] == list(range(key, 300, 3))
    with pytest.raises(StepError, match="expected a .key, value. pair"):
        (pipeline() | ps.Create([5]) | ps.GroupIntoBatches(7)).collect()
