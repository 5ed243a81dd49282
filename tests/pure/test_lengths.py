"""Batches of rows of like length: nothing lost, nothing twice, nobody starved, no batch over its limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.batching.batcher import Batcher
from penstock.batching.entry import Aim, Entry
from penstock.batching.limits import BatchLimits, up_to_bucket
from penstock.errors import StepError, UsageError

arrivals = st.lists(
    st.tuples(
        st.floats(0, 2),  # time since the last one
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=12),  # lengths and weights of its rows
    ),
    max_size=12,
)
aims = st.builds(Aim, st.integers(1, 9), st.none() | st.integers(1, 200), st.integers(1, 20))
limit_sets = st.builds(
    lambda weight, wait, buckets, new_shapes_cost: BatchLimits(
        max_weight=weight,
        weigh=None if weight is None else len,
        max_wait=wait,
        length_buckets=buckets,
        new_shapes_cost=new_shapes_cost,
    ),
    st.none() | st.integers(1, 30),
    st.none() | st.floats(0, 3),
    st.sampled_from([(), (8, 16, 64)]),
    st.booleans(),
)


def check_batch(spans, limits, aim):
    lengths = [span.entry.lengths[span.start] for span in spans]
    weights = [span.entry.weights[span.start] for span in spans]
    if len(spans) > 1:
        assert len(spans) <= aim.rows
        assert aim.cost is None or len(spans) * max(1, limits.padded_length(max(lengths))) <= aim.cost
        assert limits.max_weight is None or sum(weights) <= limits.max_weight
    return [(span.entry.item, span.start) for span in spans]


@settings(max_examples=300)
@given(arrivals, limit_sets, st.lists(aims, min_size=1, max_size=4), st.data())
def test_every_row_leaves_once_within_its_limits(groups, limits, several_aims, data):
    batcher = Batcher(limits, several_aims[0])
    now, taken, added = 0.0, [], []
    for number, (pause, rows) in enumerate(groups):
        now += pause
        entry = Entry(number, len(rows), lengths=[r[0] for r in rows], weights=[r[1] for r in rows], bytes=10 * len(rows))
        batcher.add(entry, now)
        added += [(number, index) for index in range(len(rows))]
        batcher.set_aim(data.draw(st.sampled_from(several_aims)))
        while (spans := batcher.take(now)) is not None:
            taken += check_batch(spans, limits, batcher.aim_of())
        if limits.max_wait is not None:
            assert batcher.deadline() is None or batcher.deadline() > now  # nobody is left beyond its time
        assert batcher.waiting == len(added) - len(taken)
        assert batcher.waiting < batcher.aim_of().lookahead
    while (spans := batcher.take(now, flush=True)) is not None:
        taken += check_batch(spans, limits, batcher.aim_of())
    assert sorted(taken) == sorted(added)
    assert batcher.waiting == 0


@settings(max_examples=100)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(1, 40), st.integers(1, 500))
def test_nobody_waits_for_more_than_two_generations(lengths, lookahead, cost):
    """However the lengths of its neighbours fall, a row leaves before twice the lookahead has come after it."""
    batcher = Batcher(BatchLimits(), Aim(1000, cost, lookahead))
    left = set()
    for number, length in enumerate(lengths):
        batcher.add(Entry(number, 1, lengths=[length]), 0.0)
        while (spans := batcher.take(0.0)) is not None:
            left |= {span.entry.item for span in spans}
        assert all(old in left for old in range(number - 2 * lookahead))


def test_the_longest_leave_first_and_equals_in_order():
    batcher = Batcher(BatchLimits(), Aim(2, None, 6))
    batcher.add(Entry("a", 6, lengths=[1, 9, 5, 9, 5, 1]), 0.0)
    batches = []
    while (spans := batcher.take(0.0)) is not None:
        batches.append([span.start for span in spans])
    assert [sorted(batch) for batch in batches] == [[1, 3], [2, 4], [0, 5]]


@pytest.mark.parametrize(("on_device", "first"), [(True, [9, 5, 1]), (False, [60, 50, 40])])
def test_in_front_of_a_device_a_generation_is_of_those_that_came_first(on_device, first):
    """So that the callers of the first rows have their answers, and can bring new ones, while the others run."""
    batcher = Batcher(BatchLimits(new_shapes_cost=on_device), Aim(3, None, 3))
    batcher.add(Entry("a", 3, lengths=[1, 9, 5]), 0.0)
    batcher.add(Entry("b", 3, lengths=[50, 60, 40]), 0.0)
    spans = batcher.take(0.0)
    assert [span.entry.lengths[span.start] for span in reversed(spans)] == first


def test_a_due_row_takes_its_like_along():
    batcher = Batcher(BatchLimits(max_wait=1.0), Aim(3, None, 100))
    batcher.add(Entry("old", 1, lengths=[5]), 0.0)
    batcher.add(Entry("new", 5, lengths=[50, 4, 60, 5, 1]), 0.5)
    assert batcher.take(0.9) is None
    assert {(span.entry.item, span.start) for span in batcher.take(1.0)} == {("old", 0), ("new", 3), ("new", 1)}


def test_many_bytes_fill_the_window():
    batcher = Batcher(BatchLimits(lookahead_bytes=1000), Aim(10, None, 100))
    batcher.add(Entry("a", 2, lengths=[1, 2], bytes=999), 0.0)
    assert batcher.take(0.0) is None
    batcher.add(Entry("b", 1, lengths=[1], bytes=1), 0.0)
    assert len(batcher.take(0.0)) == 3


@pytest.mark.parametrize(("value", "bucket"), [(1, 8), (8, 8), (9, 32), (33, 33)])
def test_buckets(value, bucket):
    assert up_to_bucket((8, 32), value) == bucket


# In a pipeline.


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
