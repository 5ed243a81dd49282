"""Random numbers in deterministic runs: those of a step repeat, and those of the user's own program go on as before."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.seeding import seeded


class Splits(ps.Source):
    """Three splits, in blocks of 700 rows, however many workers read them."""

    def __init__(self, rows=50):
        self.rows = rows

    def splits(self, goal):
        return range(3)

    def read(self, split):
        for at in range(0, self.rows, 700):
            yield list(range(at, min(at + 700, self.rows)))


def three_numbers(row):
    return random.random(), np.random.rand(), torch.nn.functional.dropout(torch.arange(20.0)).tolist()


def run(*steps, rows=50, **options):
    pcoll = ps.Pipeline(**{"deterministic": True, "workers": 0, **options}) | ps.Read(Splits(rows))
    for step in steps:
        pcoll = pcoll | step
    return pcoll.collect()


def test_random_numbers_repeat_in_every_way_of_running():
    first = run(ps.Map(three_numbers))
    assert len({number for number, _, _ in first}) == len({number for _, number, _ in first}) == 150, "also between splits"
    assert run(ps.Map(three_numbers)) == first
    assert run(ps.Map(three_numbers), workers=1) == first
    assert run(ps.Map(three_numbers), workers=2) == first
    assert run(ps.Map(three_numbers), seed=0) == first
    assert not {number for number, _, _ in run(ps.Map(three_numbers), seed=1)} & {number for number, _, _ in first}


class Samples(ps.ModelHandler):
    """A model that was made of random numbers, and answers with some."""

    def load_model(self):
        return random.random(), np.random.rand()

    def run_inference(self, batch, model, inference_args=None):
        return [(model, random.random(), np.random.rand()) for _ in batch]


def test_loading_a_model_uses_none_of_a_splits_numbers():
    """In one worker the first split alone loads it, in three each does. Every copy is made of the same numbers."""
    first = run(ps.RunInference(Samples()))
    assert len({numbers for numbers, _, _ in first}) == 1
    assert run(ps.RunInference(Samples()), workers=1) == first
    assert run(ps.RunInference(Samples()), workers=3) == first


class Echo(ps.ModelHandler):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return batch


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}])
def test_steps_around_a_model_see_their_rows_in_the_same_order_wherever_it_lives(options):
    def around(handler):
        before, after = ps.Map(lambda row: (row, random.random())), ps.Map(lambda row: (*row, random.random()))
        return run(before, ps.RunInference(handler), after, rows=20_000, **options)

    assert around(Echo(large_model=True)) == around(Echo())


class Setup(ps.DoFn):
    def setup(self):
        self.made = random.random()

    def start_bundle(self):
        self.begun = random.random()

    def process(self, row):
        yield self.made, self.begun


def test_the_life_of_a_dofn_repeats():
    first = run(ps.ParDo(Setup()))
    assert len({made for made, _ in first}) == 1
    assert len({begun for _, begun in first}) == 3
    assert run(ps.ParDo(Setup()), workers=3) == first


def state():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_the_users_own_numbers_go_on_as_before():
    before = state()
    run(ps.Map(three_numbers))
    assert state() == before


def test_without_it_nothing_is_seeded():
    random.seed(7)
    expected = [random.random() for _ in range(150)]
    random.seed(7)
    assert run(ps.Map(lambda row: random.random()), deterministic=False, seed=3) == expected


def test_a_framework_that_a_model_loads_is_seeded_for_the_split():
    script = """
import sys
from penstock.seeding import seeded
if sys.argv[1] == "before":
    import numpy
with seeded(0, "split"):
    with seeded(0, "model"):
        import numpy
        numpy.random.rand(5)
    print(numpy.random.rand())
"""
    runs = [[sys.executable, "-c", script, when] for when in ("before", "inside")]
    before, inside = [subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in runs]
    assert before == inside != ""


def test_what_is_seeded_alike_gives_the_same_numbers():
    def numbers(*what):
        with seeded(*what):
            return random.random(), np.random.rand(), torch.rand(1).item()

    assert numbers(0, "a", (1, 2)) == numbers(0, "a", (1, 2))
    assert len({numbers(0, (1,)), numbers(1, (1,)), numbers(0, (2,)), numbers(None), numbers(None)}) == 5
