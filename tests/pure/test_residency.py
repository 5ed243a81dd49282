"""Which models are loaded in a place, on simulated processes: the budget, who goes, who is served first."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, deque

import pytest

from penstock.batching.entry import Entry
from penstock.models.budget import MemoryBudget
from penstock.models.residency import PATIENCE, Admit, LoadNow, Refuse, Residency, UnloadNow
from penstock.models.uses import ATTEMPTS, FORGIVEN

MODEL = 10


class Place:
    """A place whose loads take no time, and whose rows are answered when run() is called."""

    def __init__(self, budget, copies=1, sizes=None, at_once=2, files=()):
        """files: bytes of those of a model, where they are known."""
        self.inside = Counter()  # rows that were let in
        in_use, known = lambda model: self.inside[model] > 0, dict(files)
        self.residency = Residency(budget, in_use, copies=copies, at_once=at_once, files=lambda model: known.get(model, 0))
        for copy in range(copies):
            self.residency.ready(copy)
        self.sizes = sizes or {}
        self.held = {}  # what is really loaded: model -> copy
        self.loads, self.refused, self.loading = [], [], []
        self.most_bytes = 0
        self.now = 0.0

    def submit(self, model, rows=1, owner=None):
        entry = Entry(object(), rows, model=model, owner=owner)
        if self.residency.add(entry, self.now) is not None:
            assert model in self.held
            self.inside[model] += rows

    def decide(self):
        steps = self.residency.decide(self.now)
        for step in steps:
            if isinstance(step, UnloadNow):
                assert not self.inside[step.model], "in use"
                assert self.held.pop(step.model) == step.copy
            elif isinstance(step, LoadNow):
                assert step.model not in {*self.held, *self.loading}
                self.loading.append(step.model)
                self.loads.append(step.model)
                self.held[step.model] = step.copy
            elif isinstance(step, Admit):
                assert self.held[step.model] == step.copy
                self.inside[step.model] += sum(entry.stop - entry.start for entry in self.residency.take(step.model))
            else:
                self.refused += self.residency.take(step.model)
        self.most_bytes = max(self.most_bytes, sum(self.size(model) for model in self.held))
        return steps

    def finish_loads(self):
        loading, self.loading = self.loading, []
        for model in loading:
            self.residency.loaded(model, self.size(model), 0.1)

    def size(self, model):
        return self.sizes.get(model, MODEL)

    def run(self):
        """All that was let in is answered."""
        answered, self.inside = sum(self.inside.values()), Counter()
        return answered

    def settle(self, rounds=10_000):
        """Until nothing is left to do; how many rows were answered."""
        answered = 0
        for _ in range(rounds):
            is_busy = bool(self.decide() or self.loading)
            self.finish_loads()
            ran = self.run()
            answered += ran
            if not is_busy and not ran:
                return answered
        raise AssertionError("it never ends")


def test_a_model_is_loaded_once_for_all_who_wait():
    place = Place(MemoryBudget())
    for _ in range(10):
        place.submit("a")
    assert [type(step) for step in place.decide()] == [LoadNow]
    place.submit("a")
    assert place.decide() == []
    place.finish_loads()
    assert place.decide() == [Admit("a", 0)]
    assert place.inside["a"] == 11
    place.submit("a")
    assert place.inside["a"] == 12
    assert place.residency.uses["a"].hits == 1


def test_the_least_recently_used_goes_first_and_none_in_use():
    place = Place(MemoryBudget(2 * MODEL))
    for model in "ab":
        place.submit(model)
        place.settle()
    place.submit("a")
    place.run()
    place.submit("c")
    assert place.decide() == [UnloadNow("b", 0), LoadNow("c", 0)]
    place.finish_loads()
    place.decide()
    place.submit("a")
    place.submit("d")
    assert place.decide() == [], "both are in use"
    place.inside["c"] = 0
    assert place.decide() == [UnloadNow("c", 0), LoadNow("d", 0)]


def test_rows_that_wait_too_long_close_a_model_that_is_never_idle():
    place = Place(MemoryBudget(MODEL))
    place.submit("busy")
    place.settle()
    place.submit("busy")
    place.submit("other")
    assert place.decide() == []
    place.now = PATIENCE / 2
    place.submit("busy")
    assert place.inside["busy"] == 2
    assert place.residency.next_time() == PATIENCE
    place.now = PATIENCE
    place.decide()
    place.submit("busy")
    assert place.inside["busy"] == 2, "new rows wait"
    place.run()
    assert place.decide() == [UnloadNow("busy", 0), LoadNow("other", 0)]
    assert place.settle() == 2


def test_a_model_that_closes_is_opened_again_where_another_one_went():
    place = Place(MemoryBudget(2 * MODEL))
    for model in "ab":
        place.submit(model)
        place.settle()
    for model in "abc":
        place.submit(model)
    place.now = PATIENCE
    place.decide()  # "a" closes
    place.submit("a")
    place.inside["b"] = 0
    assert place.decide() == [UnloadNow("b", 0), LoadNow("c", 0)]
    place.inside["a"] = 0
    assert place.decide() == [Admit("a", 0)]


def test_the_first_one_is_loaded_alone_and_then_several_at_once():
    place = Place(MemoryBudget(100 * MODEL), at_once=3, files=dict.fromkeys("abcde", 1))
    for model in "abcde":
        place.submit(model)
    assert place.decide() == [LoadNow("a", 0)]
    place.finish_loads()
    assert [step for step in place.decide() if isinstance(step, LoadNow)] == [LoadNow(m, 0) for m in "bcd"]


def test_models_of_which_nothing_is_known_are_loaded_one_at_a_time_where_bytes_count():
    for budget, loads in [(MemoryBudget(100 * MODEL), 1), (MemoryBudget(models=100), 2)]:
        place = Place(budget)
        place.submit("a")
        place.settle()
        place.submit("b")
        place.submit("c")
        assert [type(step) for step in place.decide()] == [LoadNow] * loads


def test_large_models_after_small_ones_overrun_the_budget_by_none_if_their_files_are_known_else_by_one():
    sizes = {**{f"small{n}": 1 for n in range(100)}, **{f"large{n}": 60 for n in range(5)}}
    for unpacked in (1, 2):  # times the size of their files
        place = Place(MemoryBudget(100), sizes=sizes, files={model: size / unpacked for model, size in sizes.items()})
        assert asked_for(place, sizes) <= 100
    most = asked_for(Place(MemoryBudget(100), sizes=sizes), sizes)
    assert 100 < most <= 100 + 60


def asked_for(place, models):
    """The most bytes that are taken while all of these are asked for."""
    for model in models:
        place.submit(model)
    assert place.settle() == len(models)
    return place.most_bytes


def test_a_model_whose_files_are_larger_than_the_budget_is_loaded_alone_and_measured():
    place = Place(MemoryBudget(3 * MODEL), sizes={"packed": 2 * MODEL, "huge": 50}, files={"packed": 40, "huge": 60})
    for model in ["a", "b", "packed", "huge"]:
        place.submit(model)
    assert place.settle() == 3
    assert [entry.model for entry in place.refused] == ["huge"]


def test_a_model_larger_than_the_budget_is_refused_and_not_loaded_again():
    place = Place(MemoryBudget(3 * MODEL), sizes={"huge": 50})
    place.submit("a")
    place.settle()
    place.submit("huge", 5)
    assert place.settle() == 0
    assert [entry.model for entry in place.refused] == ["huge"]
    assert place.residency.uses["huge"].bytes == 50
    place.submit("huge")
    assert place.decide() == [Refuse("huge", True)]
    assert place.loads.count("huge") == 1
    place.submit("a")
    assert place.settle() == 1


def test_models_that_turn_out_larger_make_others_go():
    place = Place(MemoryBudget(4 * MODEL), sizes={"big": 3 * MODEL})
    for model in ["a", "b", "c", "big"]:
        place.submit(model)
        place.settle()
    place.decide()
    assert sum(place.size(model) for model in place.held) <= 4 * MODEL
    assert "big" in place.held


def test_a_load_that_fails_is_tried_again_and_then_refused():
    place = Place(MemoryBudget())
    place.submit("bad")
    for _ in range(ATTEMPTS):
        assert place.decide() == [LoadNow("bad", 0)]
        place.residency.load_failed(*place.loading)
        place.held.clear()
        place.loading.clear()
    assert place.decide() == [Refuse("bad", False)]
    assert len(place.refused) == 1
    place.submit("bad")
    assert place.decide() == [Refuse("bad", False)]
    assert not place.residency.are_waiting


def test_a_model_that_finds_no_memory_is_loaded_when_the_others_are_gone():
    place = Place(MemoryBudget())
    for model in "ab":
        place.submit(model)
        place.settle()
    place.submit("large")
    assert place.decide() == [LoadNow("large", 0)], "nobody knows its size"
    place.loading.clear()
    del place.held["large"]
    place.residency.load_failed("large", no_memory=True)
    place.submit("b")
    assert place.decide() == [], "one of the others is in use"
    place.run()
    assert place.decide() == [UnloadNow("a", 0), UnloadNow("b", 0), LoadNow("large", 0)]
    for _ in range(ATTEMPTS):
        place.residency.load_failed("large", no_memory=True)
        steps = place.residency.decide(place.now)
    assert steps == [Refuse("large", False)], "it was alone, and still found none"


def test_a_model_that_is_expected_is_loaded_before_its_rows_come_where_nothing_has_to_go_for_it():
    place = Place(MemoryBudget(2 * MODEL))
    place.residency.expect("a")
    place.residency.expect("b")
    assert place.decide() == [LoadNow("a", 0)], "the first is measured alone"
    place.finish_loads()
    assert place.decide() == [LoadNow("b", 0)]
    place.finish_loads()
    place.residency.expect("c")
    assert place.decide() == [], "there is no room"
    place.submit("b")
    assert place.inside["b"] == 1
    place.run()
    place.submit("c")
    assert place.decide() == [UnloadNow("a", 0), LoadNow("c", 0)]


def test_where_a_budget_is_soft_a_larger_model_is_loaded_alone_and_stays():
    place = Place(MemoryBudget(is_soft=True, by_default=True, of_each=True), sizes={"large": 5 * MODEL})
    place.residency.ready(0, 2 * MODEL)
    for model in ("a", "large"):
        place.submit(model)
        place.settle()
    place.run()
    place.decide()
    assert set(place.held) == {"large"}
    assert place.decide() == []
    place.submit("a")
    place.settle()
    assert set(place.held) == {"a"}


def test_a_process_that_dies_takes_its_models_and_those_in_use_come_back_first():
    place = Place(MemoryBudget(), copies=2, at_once=1)
    for model in "abcd":
        place.submit(model)
        place.settle()
    where = {model: place.residency.copy_of(model) for model in "abcd"}
    assert sorted(Counter(where.values()).values()) == [2, 2]
    lost = [model for model in "abcd" if where[model] == 0]
    place.submit(lost[1])
    place.submit("new")
    assert place.residency.lost(0) == []
    for model in lost:
        del place.held[model]
    place.residency.ready(0)
    steps = place.decide()
    assert steps[0] == LoadNow(lost[1], 0)
    assert place.inside[lost[1]] == 1
    assert place.settle() == 2


def test_a_death_while_one_loads_alone_is_charged_to_it_and_of_several_to_none():
    place = Place(MemoryBudget(), at_once=2)
    place.submit("a")
    place.settle()
    for model in "bc":
        place.submit(model)
    place.decide()
    assert place.residency.lost(0) == ["b", "c"]
    place.held.clear()
    place.loading.clear()
    assert [place.residency.uses[model].failed for model in "bc"] == [0, 0]
    place.residency.ready(0)
    assert place.decide() == [LoadNow("b", 0)], "one at a time now"
    assert place.residency.lost(0) == ["b"]
    assert place.residency.uses["b"].failed == 1


def test_a_model_whose_process_is_killed_from_outside_while_it_loads_is_forgiven_so_many_times():
    place = Place(MemoryBudget())
    attempts = []
    for killed in (FORGIVEN, FORGIVEN + ATTEMPTS):  # it loads after the first of these: then all of it is forgotten
        place.submit("a")
        for _ in range(killed):
            assert place.decide() == [LoadNow("a", 0)]
            attempts.append(place.residency.lost(0, from_outside=True))
            place.held.clear()
            place.loading.clear()
            place.residency.ready(0)
        if killed == FORGIVEN:
            assert place.settle() == 1
            assert place.residency.uses["a"].kills == 0
            place.residency.lost(0, from_outside=True)
            place.held.clear()
            place.residency.ready(0)
    assert attempts == [["a"]] * (2 * FORGIVEN + ATTEMPTS)
    assert place.decide() == [Refuse("a", False)]


def test_rows_of_an_owner_that_has_gone_wait_no_more():
    place = Place(MemoryBudget())
    place.submit("a", owner="gone")
    place.submit("b", owner="gone")
    place.submit("b", owner="here")
    place.residency.discard("gone")
    assert [step.model for step in place.decide()] == ["b"]
    place.finish_loads()
    place.decide()
    assert place.inside["b"] == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_row_is_answered_and_the_budget_holds(seed):
    chance = random.Random(seed)
    copies = chance.randint(1, 3)
    budget = MemoryBudget(chance.randint(2, 8) * MODEL, chance.choice([None, 1, 3]))
    sizes = {model: chance.choice([1, MODEL, 2 * MODEL]) for model in range(20)} if seed % 2 else {}
    files = {model: size for model, size in sizes.items() if chance.random() < 0.5}
    place = Place(budget, copies=copies, at_once=chance.randint(1, 3), sizes=sizes, files=files)
    submitted = answered = 0
    for _ in range(400):
        place.now += chance.random()
        for _ in range(chance.randint(0, 4)):
            place.submit(chance.randrange(20))
            submitted += 1
        place.decide()
        if chance.random() < 0.8:
            place.finish_loads()
        for model in list(place.inside):
            if chance.random() < 0.5:
                answered += place.inside.pop(model)
        if chance.random() < 0.03:
            copy = chance.randrange(copies)
            place.residency.lost(copy)
            place.held = {model: where for model, where in place.held.items() if where != copy}
            place.loading = [model for model in place.loading if model in place.held]
            place.residency.ready(copy)
    for _ in range(100):
        place.now += PATIENCE
        answered += place.settle()
    uses = {model: use for model, use in place.residency.uses.items() if use.resident}
    assert {model: use.resident for model, use in uses.items()} == {model: place.size(model) for model in place.held}
    assert sum(use.resident for use in place.residency.uses.news().values()) == sum(map(place.size, place.held))
    assert answered + len(place.refused) == submitted
    assert not place.residency.are_waiting
    assert place.most_bytes <= budget.bytes + max(sizes.values(), default=0), "by one model, unless all are of one size"


# What it is for: many models, few of them in memory.

ROWS, MODELS, ROOM, WINDOW, BLOCK = 40_000, 1000, 50, 8192, 1024


def zipf(rows, models):
    weights = [1 / (rank + 1) for rank in range(models)]
    return random.Random(0).choices(range(models), weights=weights, k=rows)


def loads_in_order_of_arrival(keys):
    """Of a cache from which the least recently used goes."""
    cache, loads = OrderedDict(), 0
    for key in keys:
        if key in cache:
            cache.move_to_end(key)
            continue
        loads += 1
        cache[key] = None
        if len(cache) > ROOM:
            cache.popitem(last=False)
    return loads


def fewest_loads(keys):
    """By whoever knows all rows of a window, answers them in the best order, and keeps the models that are needed soonest
    (Belady)."""
    windows = [set(keys[start : start + WINDOW]) for start in range(0, len(keys), WINDOW)]
    held, loads = set(), 0
    for number, needed in enumerate(windows):
        loads += len(needed - held)
        later = {key: next((n for n, w in enumerate(windows[number + 1 :]) if key in w), ROWS) for key in held | needed}
        held = set(sorted(later, key=later.get)[:ROOM])
    return loads


def test_far_fewer_loads_than_a_cache_of_the_same_size_and_hardly_more_than_the_fewest():
    keys = zipf(ROWS, MODELS)
    place = Place(MemoryBudget(ROOM * MODEL), at_once=1)
    blocks = deque()
    left = Counter()
    for number, start in enumerate(range(0, ROWS, BLOCK)):
        for key in keys[start : start + BLOCK]:
            entry = Entry(number, 1, model=key)
            left[number] += 1
            if place.residency.add(entry, 0.0) is not None:
                left[number] -= 1
        blocks.append(number)
        while blocks and (len(blocks) * BLOCK > WINDOW or start + BLOCK >= ROWS):
            while left[blocks[0]]:
                for step in place.residency.decide(0.0):
                    if isinstance(step, LoadNow):
                        place.loads.append(step.model)
                        place.residency.loaded(step.model, MODEL, 0.0)
                    elif isinstance(step, Admit):
                        for entry in place.residency.take(step.model):
                            left[entry.item] -= 1
            blocks.popleft()
    assert not +left
    assert len(place.loads) * 5 < loads_in_order_of_arrival(keys)
    assert len(place.loads) <= 1.15 * fewest_loads(keys)


def test_ten_thousand_models_that_wait_cost_a_decision_nothing():
    looked = itertools.count()
    residency = Residency(MemoryBudget(2 * MODEL), lambda model: next(looked) < 0)
    residency.ready(0)
    for model in range(10_000):
        residency.add(Entry(None, 1, model=model), 0.0)
    assert residency.decide(0.0) == [LoadNow(0, 0)]
    residency.loaded(0, MODEL, 0.0)
    steps = residency.decide(0.0)
    assert steps[0] == Admit(0, 0)
    assert next(looked) < 10


def test_on_devices_their_memory_counts_where_nobody_has_set_a_budget():
    place = Place(MemoryBudget(1000 * MODEL, by_default=True), copies=2)
    place.residency.ready(0, 2 * MODEL)
    place.residency.ready(1, 3 * MODEL)
    assert place.residency.budget[:3] == (2 * MODEL, None, True)
    for model in "abcdef":
        place.submit(model)
        place.settle()
    assert sorted(Counter(place.held.values()).values()) == [2, 2], "each has room for two"
    given = Place(MemoryBudget(5 * MODEL))
    given.residency.ready(0, 2 * MODEL)
    assert given.residency.budget.bytes == 5 * MODEL
