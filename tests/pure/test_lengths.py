"""Batches of rows of like length: nothing lost, nothing twice, nobody starved, no batch over its limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.batcher import Batcher
from penstock.batching.entry import Aim, Entry
from penstock.batching.limits import BatchLimits, up_to_bucket

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
