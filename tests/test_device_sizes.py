"""The search for a size on a device, on simulated devices; and what it found, kept for the next run."""

from __future__ import annotations

import functools
import random
from collections import Counter

import pytest

from penstock.batching.aim import MOST_COST, Aiming
from penstock.batching.batcher import Batcher
from penstock.batching.entry import Entry
from penstock.batching.limits import BatchLimits

ON_DEVICE = BatchLimits(new_shapes_cost=True)
SEEDS = 5
SETTLED = 8  # batches
SWEEP = [1 << power for power in range(14, 21)]


class Device:
    """Seconds for a batch: so many, and so many for each padded unit; more where rows are long or a shape is new."""

    def __init__(self, fixed, per_second, *, seed=0, noise=0.1, long=0.1, new=0.0, most=None):
        self.fixed, self.unit, self.long, self.new, self.most = fixed, 1 / per_second, long, new, most
        self._noise, self._random, self._shapes = noise, random.Random(seed), set()

    def costs(self, rows, length):
        """Where the shape is known."""
        return self.fixed + self.unit * rows * length * (1 + self.long * length / 512)

    def runs(self, rows, length):
        """Once."""
        first = self.new if (rows, length) not in self._shapes else 0.0
        self._shapes.add((rows, length))
        return first + self.costs(rows, length) * self._random.uniform(1 - self._noise, 1 + self._noise)


@functools.cache
def texts(seed, count=30_000):
    """Lengths as texts have them, of 77 tokens in the mean."""
    draw = random.Random(seed)
    return [min(512, max(8, round(draw.lognormvariate(4.0, 0.85)))) for _ in range(count)]


def batches(limits, lengths, aim, *, block=8192):
    """The lengths of the rows of each batch, cut for what aim() says, where rows come block by block."""
    batcher, at = Batcher(limits), 0
    while True:
        batcher.set_aim(wanted := aim())
        spans = batcher.take(0.0, flush=at >= len(lengths))
        if spans is not None:
            yield wanted, [length for span in spans for length in span.entry.lengths[span.start : span.stop]]
        elif at >= len(lengths):
            return
        else:
            part = lengths[at : at + block]
            batcher.add(Entry("rows", len(part), lengths=part), 0.0)
            at += block


def searched(device, lengths, behind=0):
    """The sizes that were aimed at, one for each batch, and the search. `behind`: so many batches were cut before the
    first of them is known."""
    aiming, aims, waiting = Aiming(ON_DEVICE, by_length=True), [], []
    for aim, taken in batches(ON_DEVICE, lengths, aiming.aim):
        aims.append(aim.cost)
        waiting.append((aim, taken))
        if len(waiting) > behind:
            learn(aiming, device, *waiting.pop(0))
    return aims, aiming


def learn(aiming, device, aim, taken):
    rows, length = len(taken), ON_DEVICE.padded_length(max(taken))
    if device.most is not None and rows * length > device.most:
        aiming.out_of_memory(rows, taken)
    else:
        aiming.ran(aim, rows, taken, 100.0, device.runs(rows, length))  # how long it took in all says nothing


@functools.cache
def shapes(seed, size):
    """Of the batches of this size."""
    limits = BatchLimits(new_shapes_cost=True, max_padded_cost=size)
    aiming, made = Aiming(limits, by_length=True), []
    for aim, taken in batches(limits, texts(seed), aiming.aim):
        made.append((len(taken), limits.padded_length(max(taken))))
        aiming.ran(aim, len(taken), taken, 1.0)
    return made


def seconds_with(device, seed, size):
    """That all batches of this size take."""
    made = shapes(seed, size)
    return sum(device.costs(*shape) for shape in made) + device.new * len(set(made))


DEVICES = {
    "flat": {"fixed": 0.0005, "per_second": 1.84e6},
    "flat, long rows are slow": {"fixed": 0.0005, "per_second": 1.84e6, "long": 0.5},
    "large fixed cost": {"fixed": 0.020, "per_second": 1.6e6},
    "small": {"fixed": 0.003, "per_second": 2e5},
    "slow": {"fixed": 0.003, "per_second": 2e4},
    "new shapes": {"fixed": 0.012, "per_second": 2.5e6, "new": 0.04},
    "little memory": {"fixed": 0.020, "per_second": 1.6e6, "most": 300_000},
}


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("kind", DEVICES)
def test_after_few_batches_the_size_is_near_the_best(kind, behind):
    for seed in range(SEEDS):
        device = Device(**DEVICES[kind], seed=seed)
        aims, aiming = searched(device, texts(seed), behind)
        sweep = [size for size in SWEEP if size <= (device.most or MOST_COST)]
        best = min(seconds_with(device, seed, size) for size in sweep)
        settled = Counter(aims[SETTLED:]).most_common(1)[0][0]
        assert seconds_with(device, seed, settled) <= best / 0.9, (aims, aiming.explain())
