"""The search for a size, on simulated costs, and what happens when memory runs out."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.full_batches import Aiming
from penstock.batching.limits import BatchLimits
from penstock.batching.sizes import Ceiling, SizeFinder, ladder

ROWS, MOST = 20_000, 1024

CURVES = {
    "linear": lambda size, done: 0.010 + 0.001 * size,
    "hardly any overhead": lambda size, done: 0.0001 + 0.001 * size,
    "plateau": lambda size, done: 0.020 * max(1, -(-size // 64)),
    "cliff": lambda size, done: (0.010 + 0.0005 * size) * (6 if size > 100 else 1),
    "drift up": lambda size, done: (0.001 if done < ROWS / 2 else 0.050) + 0.001 * size,
    "drift down": lambda size, done: (0.010 + 0.001 * size) * (1 if done < ROWS / 2 or size <= 48 else 4),
}


def fixed(cost, size):
    done, clock = 0, 0.0
    while done < ROWS:
        rows = min(size, ROWS - done)
        clock += cost(rows, done)
        done += rows
    return done / clock


def searched(cost):
    """Rows/s of the search, without its first 5% of the rows."""
    finder, done, clock, from_here = SizeFinder(ladder(1, MOST), 8), 0, 0.0, None
    while done < ROWS:
        if done >= ROWS * 0.05 and from_here is None:
            from_here = (done, clock)
        rows = min(finder.size, ROWS - done)
        seconds = cost(rows, done)
        finder.observe(finder.size, rows, rows, seconds)
        done, clock = done + rows, clock + seconds
    return (done - from_here[0]) / (clock - from_here[1])


@pytest.mark.parametrize("curve", CURVES)
def test_the_search_is_near_the_best_fixed_size(curve):
    cost = CURVES[curve]
    assert searched(cost) >= 0.95 * max(fixed(cost, size) for size in range(1, MOST + 1, 3))


@settings(max_examples=200)
@given(st.integers(1, 50), st.integers(1, 5000), st.integers(1, 100), st.integers(0, 2**32))
def test_the_search_never_leaves_its_ladder(least, more, start, seed):
    chance = random.Random(seed)
    sizes = ladder(least, least + more)
    finder = SizeFinder(sizes, start)
    for _ in range(200):
        assert finder.size in sizes
        amount = chance.choice([finder.size, finder.size // 2, 1])
        finder.observe(finder.size, amount, chance.uniform(0, amount), chance.choice([0.0, chance.uniform(1e-6, 10)]))
    assert str(finder.size) in finder.explain()


@given(st.integers(1, 1000), st.integers(1, 100_000))
def test_a_ladder_has_both_ends_and_small_steps(least, more):
    sizes = ladder(least, least + more)
    assert (sizes[0], sizes[-1]) == (least, least + more)
    assert all(one < other <= max(one + 1, 1.5 * one + 1) for one, other in pairwise(sizes))


def test_batches_that_are_far_from_full_tell_nothing():
    finder = SizeFinder(ladder(1, 100), 8)
    size = finder.size
    for _ in range(50):
        finder.observe(size, size // 2, size // 2, 0.1)
    assert finder.size == size


def test_the_least_and_the_most_are_kept():
    aiming = Aiming(BatchLimits(min_size=20, max_size=None, size_buckets=()), by_length=False)
    for _ in range(300):
        aim = aiming.aim()
        assert aim.rows >= 20
        aiming.ran(aim, aim.rows, None, aim.rows**2)  # small ones are best


def test_what_the_user_sets_is_not_searched_for():
    aiming = Aiming(BatchLimits(max_size=33), by_length=False)
    assert (aiming.aim().rows, aiming.explain()) == (33, None)


def test_a_ceiling_is_remembered_and_tried_again():
    ceiling = Ceiling()
    assert ceiling.under(1000) == 1000
    ceiling.out_of_memory(800)
    assert ceiling.under(1000) == 560
    for _ in range(99):
        ceiling.ran()
    assert ceiling.under(1000) == 560
    ceiling.ran()
    assert ceiling.under(1000) == 700
    for _ in range(2000):
        ceiling.ran()
    assert ceiling.under(1000) == 1000


class Device:
    """Batches of a token budget on a device whose memory somebody else uses at times: 2 ms and 0.5 us for each token, and
    four are cut before the first of them is answered."""

    def __init__(self, wanted):
        self.wanted = wanted
        self.ceiling = Ceiling()
        self.now = 0.0
        self.failures = 0
        self.queue = [wanted] * 4

    def run(self, until, fits):
        while self.now < until:
            size = self.queue.pop(0)
            seconds = 0.002 + size * 0.5e-6
            self.now += seconds
            if size > fits:
                while size / 2 > fits:  # halved until it fits: the least that did not is told
                    size //= 2
                self.failures += 1
                self.ceiling.out_of_memory(size)
            else:
                self.ceiling.ran(seconds)
            self.queue.append(self.ceiling.under(self.wanted))


@pytest.mark.parametrize("held", [0.5, 5, 60])
@pytest.mark.parametrize("fits", [300, 25_000, 100_000])
def test_sizes_come_back_when_memory_does(fits, held):
    device = Device(131_072)
    device.run(2, fits=10**6)
    assert device.failures == 0
    device.run(2 + held, fits=fits)
    assert device.failures > 0
    device.run(2 + 2 * held + 4, fits=10**6)  # at most as long again as it was short, and some steps
    assert min(device.queue) == 131_072


def test_memory_that_stays_short_is_not_tried_for_ever():
    device = Device(131_072)
    device.run(60, fits=50_000)
    early = device.failures
    device.run(3600, fits=50_000)
    assert early <= 40
    assert device.failures - early <= 59 * 2 * 4  # tries take turns of a minute; what is in flight fails with each
    assert max(device.queue) >= 0.5 * 50_000


@settings(max_examples=100)
@given(st.lists(st.integers(1, 10**6), max_size=30))
def test_a_ceiling_always_leaves_one_row(sizes):
    ceiling = Ceiling()
    for size in sizes:
        ceiling.out_of_memory(size)
        assert 1 <= ceiling.under(10**6) < max(2, size)


def test_an_estimate_without_numbers_says_so():
    assert "too few full batches" in SizeFinder(ladder(1, 8), 8).explain()
    assert math.isfinite(Ceiling().under(5))
