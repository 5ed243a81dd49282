"""Shapes that cost when they are new: lengths that are rounded up, and first times that do not mislead the search."""

from __future__ import annotations

from penstock.batching.batcher import Batcher
from penstock.batching.entry import Entry
from penstock.batching.full_batches import Aiming
from penstock.batching.limits import BatchLimits
from penstock.batching.shapes import FirstTimes

# Lengths.


def test_lengths_are_rounded_up_where_new_shapes_cost():
    limits = BatchLimits(new_shapes_cost=True)
    assert [limits.padded_length(length) for length in (0, 1, 8, 9, 509, 512)] == [0, 8, 8, 16, 512, 512]
    assert BatchLimits().padded_length(9) == 9


def test_buckets_are_the_users_own_word():
    limits = BatchLimits(new_shapes_cost=True, length_buckets=(10, 20))
    assert [limits.padded_length(length) for length in (9, 11, 21)] == [10, 20, 21]


# First times.


def test_what_a_first_time_costs_is_learned_from_the_second():
    times = FirstTimes()
    assert times.taken_off((4, 8), 1.0) == 1.0  # nothing is known yet
    assert times.taken_off((4, 8), 0.25) == 0.25
    assert times.taken_off((4, 16), 2.0) == 1.25
    assert times.taken_off((4, 16), 1.25) == 1.25


def test_a_time_that_is_nearly_all_for_the_shape_is_left_out_once():
    times = FirstTimes()
    times.taken_off((1, 8), 1.0)
    times.taken_off((1, 8), 0.0)
    assert times.taken_off((2, 8), 1.1) is None
    assert times.taken_off((3, 8), 1.2) == 0.3  # a quarter: the difference is mostly noise
    assert times.taken_off((4, 8), 1.1) is None


def settled_cost(limits, lengths, seconds):
    """What the search settles on, on a device that takes seconds(rows, padded length, whether that is new)."""
    aiming, batcher, seen = Aiming(limits, by_length=True), Batcher(limits), set()
    batcher.add(Entry("rows", len(lengths), lengths=lengths), 0.0)
    while True:
        batcher.set_aim(aim := aiming.aim())
        spans = batcher.take(0.0, flush=True)
        if spans is None:
            return aim.cost
        taken = [lengths[span.start] for span in spans]
        shape = len(taken), limits.padded_length(max(taken))
        aiming.ran(aim, len(taken), taken, seconds(*shape, shape not in seen))
        seen.add(shape)


def test_first_times_do_not_keep_batches_small():
    def seconds(rows, length, new):
        return 0.012 + 4e-7 * rows * length + (0.075 if new else 0.0)

    lengths = [8 + (number * 37) % 505 for number in range(60_000)]
    assert settled_cost(BatchLimits(new_shapes_cost=True), lengths, seconds) > 100_000


def test_a_batch_that_no_row_can_join_is_full():
    """Also when three quarters of the size are more than one row, and less than two."""
    assert settled_cost(BatchLimits(), [512] * 20_000, lambda rows, length, new: 0.01 + 1e-6 * rows) > 50_000
