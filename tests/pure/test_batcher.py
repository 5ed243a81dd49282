"""The batcher against a model of it: a queue of rows for each group, all of them looked at each time, cut greedily."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.batching import batcher
from penstock.batching.batcher import SPARE, Batcher
from penstock.batching.entry import Aim, Entry
from penstock.batching.limits import BatchLimits
from penstock.errors import UsageError

# What is done to a batcher: each operation is its name and its arguments.

adds = st.tuples(
    st.just("add"),
    st.lists(st.integers(0, 6), max_size=7),  # the weights of its rows, and so their number
    st.sampled_from(["x", "y", "z", None]),  # the last two wait for a model with limits of its own
    st.sampled_from([False, False, False, True]),
)
copies = st.integers(0, 1)
operations = st.one_of(
    adds,
    adds,
    st.tuples(st.just("take"), st.sampled_from([0.0, 0.25, 1.0]), copies),
    st.just(("take at the deadline",)),
    st.tuples(st.just("flush"), copies),
    st.tuples(st.just("linger"), st.sampled_from([0.0, 0.5, 2.0]), copies),
    st.tuples(st.just("aim"), st.integers(1, 6), copies, st.sampled_from(["own", None])),
    st.tuples(st.just("discard"), st.integers(0, 4)),
)
limits = st.builds(
    BatchLimits,
    max_size=st.integers(1, 6),
    max_weight=st.none() | st.integers(1, 9),
    max_wait=st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.25]),
    weigh=st.just(len),
)


@dataclass
class Row:
    entry: int
    index: int
    weight: int
    arrived: float


@dataclass
class Model:
    """What the batcher should do, told the slow way."""

    limits: dict[object, BatchLimits]  # by model
    weighed: bool
    aims: dict[object, int] = field(default_factory=dict)  # by model and copy
    groups: dict[object, list[Row]] = field(default_factory=dict)
    alone: list[list[Row]] = field(default_factory=list)

    def add(self, entry, weights, group, alone, now):
        rows = [Row(entry, index, weight, now) for index, weight in enumerate(weights)]
        if rows and alone:
            self.alone.append(rows)
        elif rows:
            self.groups.setdefault(group, []).extend(rows)

    def limits_of(self, group):
        return self.limits[model_of(group)]

    def cut(self, group, copy):
        """The longest run of rows from the head of the group that is within the limits, but at least one row. What weighs
        as much as it may is full."""
        rows, size = self.groups[group], 1
        while (
            size < len(rows) and not self.is_full(group, rows[:size], copy) and not self.too_heavy(group, rows[: size + 1])
        ):
            size += 1
        return rows[:size]

    def too_heavy(self, group, rows):
        most = self.limits_of(group).max_weight
        return self.weighed and most is not None and sum(r.weight for r in rows) > most

    def is_full(self, group, rows, copy):
        most = self.limits_of(group).max_weight
        heavy = self.weighed and most is not None and sum(r.weight for r in rows) >= most
        return heavy or len(rows) >= self.aims[model_of(group), copy]

    def is_due(self, group, rows, now, linger):
        wait = self.limits_of(group).max_wait
        return now >= rows[0].arrived + (linger if wait is None else wait)

    def may_leave(self, now, flush, linger, copy):
        every = self.groups.items()
        return [g for g, rows in every if flush or self.is_full(g, rows, copy) or self.is_due(g, rows, now, linger)]

    def remove(self, group, batch):
        del self.groups[group][: len(batch)]
        if not self.groups[group]:
            del self.groups[group]

    @property
    def waiting(self):
        return sum(map(len, self.groups.values())) + sum(map(len, self.alone))


def model_of(group):
    return "own" if group in ("z", None) else None


class Run:
    """A batcher beside its model. Every batch that leaves is checked."""

    def __init__(self, limits, own, weighed):
        self.batcher = Batcher(limits)
        self.model = Model({None: limits, "own": own}, weighed)
        for model, each in self.model.limits.items():
            self.batcher.register(model, each, [Aim(each.max_size)] * 2)
            self.model.aims |= {(model, copy): each.max_size for copy in range(2)}
        self.now = 0.0
        self.entries = []
        self.left = []  # (entry, index) of all rows that came out
        self.added = set()
        self.discarded = set()

    def add(self, weights, group, alone):
        number = len(self.entries)
        own = {"weights": weights if self.model.weighed else None, "model": model_of(group), "owner": number % 5}
        entry = Entry(number, len(weights), group=group, alone=alone, **own)
        self.entries.append(entry)
        self.added |= {(number, index) for index in range(len(weights))}
        self.batcher.add(entry, self.now)
        self.model.add(number, weights, group, alone, self.now)

    def take(self, flush=False, linger=math.inf, copy=0):
        """One take(), compared with the model. Whether a batch came."""
        spans = self.batcher.take(self.now, flush=flush, linger=linger, copy=copy)
        ready = self.model.may_leave(self.now, flush, linger, copy)
        if spans is None:
            assert not self.model.alone
            assert not ready, f"{ready} could leave, but nothing was taken"
            return False
        batch = [(span.entry.item, index) for span in spans for index in range(span.start, span.stop)]
        assert batch, "an empty batch"
        assert all(span.entry.taken == span.stop for span in spans[-1:])
        self.left += batch
        if self.model.alone:
            assert batch == [(r.entry, r.index) for r in self.model.alone.pop(0)]
            return True
        (group,) = {span.entry.group for span in spans}  # never mixed
        assert group in ready
        assert group == min(ready, key=lambda g: self.model.groups[g][0].arrived), "not the oldest; of equals, the first"
        expected = self.model.cut(group, copy)
        assert batch == [(r.entry, r.index) for r in expected]
        assert len(batch) <= self.model.aims[model_of(group), copy]
        assert len(batch) == 1 or not self.model.too_heavy(group, expected)
        self.model.remove(group, expected)
        return True

    def discard(self, residue):
        def unwanted(number):
            return number % 5 == residue

        self.batcher.discard(residue)
        for rows in [*self.model.groups.values(), *self.model.alone]:
            self.discarded |= {(r.entry, r.index) for r in rows if unwanted(r.entry)}
        kept = {g: [r for r in rows if not unwanted(r.entry)] for g, rows in self.model.groups.items()}
        self.model.groups = {g: rows for g, rows in kept.items() if rows}
        self.model.alone = [rows for rows in self.model.alone if not unwanted(rows[0].entry)]

    def check_deadline(self):
        waits = [(self.model.limits_of(g).max_wait, rows[0].arrived) for g, rows in self.model.groups.items()]
        deadline = min((arrived + wait for wait, arrived in waits if wait is not None), default=None)
        assert self.batcher.deadline() == deadline
        lingers = min((arrived + (0.5 if wait is None else wait) for wait, arrived in waits), default=None)
        assert self.batcher.deadline(0.5) == lingers
        assert self.batcher.waiting == self.model.waiting

    def apply(self, operation):
        name, *args = operation
        if name == "add":
            self.add(*args)
        elif name == "take":
            self.now += args[0]
            self.take(copy=args[1])
        elif name == "flush":
            self.take(flush=True, copy=args[0])
        elif name == "linger":
            self.take(linger=args[0], copy=args[1])
        elif name == "aim":
            rows, copy, model = args
            self.batcher.set_aim(Aim(rows), model, copy)
            self.model.aims[model, copy] = rows
        elif name == "discard":
            self.discard(*args)
        elif (deadline := self.batcher.deadline()) is not None:
            self.now = max(self.now, deadline)
            while self.take():
                pass
            after = self.batcher.deadline()
            assert after is None or after > self.now, "a row was left beyond its deadline"
        self.check_deadline()


@settings(max_examples=400)
@given(
    limits=limits,
    own=limits,
    weighed=st.booleans(),
    operations=st.lists(operations, max_size=40),
    spare=st.sampled_from([0, SPARE]),
)
@example(
    limits=BatchLimits(max_size=4, max_weight=5, weigh=len),
    own=BatchLimits(max_size=1),
    weighed=True,
    spare=0,
    operations=[("add", [1, 6, 1], "x", False), ("take", 0.0, 0), ("discard", 1), ("flush", 0), ("add", [2], "x", False)],
)
def test_it_does_what_the_model_does_and_loses_nothing(limits, own, weighed, operations, spare):
    run = Run(limits, own, weighed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batcher, "SPARE", spare)  # with 0, groups are forgotten as soon as most of them are used up
        for operation in operations:
            run.apply(operation)
        while run.take(flush=True):
            pass
    run.check_deadline()
    assert run.batcher.waiting == 0
    assert run.batcher.deadline() is None
    assert len(run.left) == len(set(run.left)), "a row came out twice"
    assert set(run.left) == run.added - run.discarded


# The rules, one by one.


def batcher_of(**given):
    return Batcher(BatchLimits(weigh=len, **given))


def taken(batcher, now=0.0, flush=False):
    spans = batcher.take(now, flush=flush)
    return None if spans is None else [(s.entry.item, s.start, s.stop) for s in spans]


def test_a_batch_is_made_of_several_callers_rows():
    batcher = batcher_of(max_size=4)
    for name in "abc":
        batcher.add(Entry(name, 3), 0.0)
    assert taken(batcher) == [("a", 0, 3), ("b", 0, 1)]
    assert taken(batcher) == [("b", 1, 3), ("c", 0, 2)]
    assert taken(batcher) is None
    assert taken(batcher, flush=True) == [("c", 2, 3)]
    assert taken(batcher, flush=True) is None


def test_a_row_over_the_weight_goes_alone():
    batcher = batcher_of(max_size=10, max_weight=5)
    batcher.add(Entry("a", 4, weights=[1, 9, 2, 3]), 0.0)
    assert [taken(batcher, flush=True) for _ in range(4)] == [[("a", 0, 1)], [("a", 1, 2)], [("a", 2, 4)], None]


def test_rows_without_weight_are_bounded_by_their_number():
    batcher = batcher_of(max_size=3, max_weight=5)
    batcher.add(Entry("a", 7, weights=[0] * 7), 0.0)
    assert [taken(batcher) for _ in range(3)] == [[("a", 0, 3)], [("a", 3, 6)], None]


def test_a_due_row_takes_younger_ones_of_its_group_along_and_no_others():
    batcher = batcher_of(max_size=10, max_wait=1.0)
    batcher.add(Entry("a", 1, group="g"), 0.0)
    batcher.add(Entry("b", 1, group="h"), 0.5)
    batcher.add(Entry("c", 1, group="g"), 0.9)
    assert batcher.deadline() == 1.0
    assert taken(batcher, 0.99) is None
    assert taken(batcher, 1.0) == [("a", 0, 1), ("c", 0, 1)]
    assert taken(batcher, 1.0) is None
    assert batcher.deadline() == 1.5


def test_the_rest_of_an_entry_keeps_its_age():
    batcher = batcher_of(max_size=2, max_wait=1.0)
    batcher.add(Entry("a", 3), 0.0)
    assert taken(batcher, 0.0) == [("a", 0, 2)]
    assert batcher.deadline() == 1.0


def test_an_old_group_that_is_not_full_does_not_hold_up_a_full_one():
    batcher = batcher_of(max_size=2)
    batcher.add(Entry("old", 1, group="g"), 0.0)
    batcher.add(Entry("new", 2, group="h"), 1.0)
    assert taken(batcher, 1.0) == [("new", 0, 2)]
    assert taken(batcher, 1.0, flush=True) == [("old", 0, 1)]


def test_a_batch_of_its_own_is_neither_cut_nor_filled_nor_kept_waiting():
    batcher = batcher_of(max_size=2, max_wait=9.0)
    batcher.add(Entry("a", 1), 0.0)
    batcher.add(Entry("whole", 5, alone=True), 0.0)
    assert taken(batcher) == [("whole", 0, 5)]
    assert taken(batcher) is None
    assert batcher.waiting == 1


def test_discard_forgets_only_what_has_not_left():
    batcher = batcher_of(max_size=2)
    gone, kept = Entry("gone", 3, owner="gone"), Entry("kept", 2, owner="kept")
    batcher.add(gone, 0.0)
    batcher.add(kept, 0.0)
    assert taken(batcher) == [("gone", 0, 2)]
    batcher.discard("gone")
    assert gone.taken == 2
    assert taken(batcher) == [("kept", 0, 2)]
    assert batcher.waiting == 0


def test_rows_that_have_left_do_not_weigh_after_a_discard():
    batcher = batcher_of(max_size=10, max_weight=5)
    batcher.add(Entry("kept", 3, weights=[4, 2, 1], owner="kept"), 0.0)
    batcher.add(Entry("other", 1, weights=[4], owner="other"), 0.0)
    assert taken(batcher) == [("kept", 0, 1)]
    batcher.discard("other")
    assert taken(batcher) is None
    assert taken(batcher, flush=True) == [("kept", 1, 3)]


class Key:
    """A group whose end can be seen."""


def test_groups_whose_rows_have_left_are_forgotten():
    batcher, alive = batcher_of(max_size=2), weakref.WeakSet()
    batcher.add(Entry("old", 1, group="waits all the time"), 0.0)
    for number in range(10 * SPARE):
        alive.add(key := Key())
        batcher.add(Entry(number, 2, group=key), 1.0)
        assert taken(batcher, 1.0) == [(number, 0, 2)]
        del key
    assert len(alive) <= 2 * SPARE
    assert taken(batcher, 1.0, flush=True) == [("old", 0, 1)]


def test_the_group_whose_oldest_row_is_oldest_goes_first():
    batcher = batcher_of(max_size=2)
    batcher.add(Entry("a", 2, group="g"), 0.0)
    batcher.add(Entry("b", 1, group="h"), 1.0)
    batcher.add(Entry("c", 1, group="g"), 2.0)
    assert taken(batcher, 2.0) == [("a", 0, 2)]
    assert taken(batcher, 2.0, flush=True) == [("b", 0, 1)]
    assert taken(batcher, 2.0, flush=True) == [("c", 0, 1)]


# Limits.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_size": 0}, "max_batch_size=0: expected a whole number"),
        ({"max_size": -1}, "max_batch_size=-1"),
        ({"max_size": 2.0}, r"max_batch_size=2\.0"),
        ({"max_size": True}, "max_batch_size=True"),
        ({"max_weight": 0, "weigh": len}, "max_batch_weight=0"),
        ({"max_weight": 1.5, "weigh": len}, r"max_batch_weight=1\.5"),
        ({"max_weight": 5}, "needs element_size_fn"),
        ({"weigh": 3}, "element_size_fn=3: expected a function"),
        ({"max_wait": -0.1}, r"max_batch_duration_secs=-0\.1"),
        ({"max_wait": "1"}, "max_batch_duration_secs='1'"),
        ({"max_wait": math.nan}, "max_batch_duration_secs=nan"),
    ],
)
def test_wrong_limits(given, message):
    with pytest.raises(UsageError, match=message):
        BatchLimits(**given)


def test_a_wait_without_end_is_refused():
    with pytest.raises(UsageError, match="max_batch_duration_secs=inf"):
        BatchLimits(max_wait=math.inf)


def test_limits_of_a_handler():
    assert BatchLimits.of({}) == BatchLimits()
    assert BatchLimits.of({"min_batch_size": 100}).min_size == 100
    assert BatchLimits.of({"min_batch_size": 4, "max_batch_size": 4}).max_size == 4
    assert BatchLimits.of({"max_batch_duration_secs": None, "max_batch_size": 9}) == BatchLimits(max_size=9)
    made = BatchLimits.of({"max_batch_weight": 7, "element_size_fn": len, "max_batch_duration_secs": 0.5})
    assert made == BatchLimits(max_weight=7, weigh=len, max_wait=0.5)
    assert BatchLimits.of({"variance": 0.1, "target_batch_overhead": 0.05, "max_batch_size": 3}).max_size == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_batch_size": 8, "max_batch_size": 4}, "min_batch_size=8 is over max_batch_size=4"),
        ({"min_batch_size": 0}, "min_batch_size=0"),
        ({"min_batch_size": "2"}, "min_batch_size='2'"),
        ({"batch_length_fn": len}, "'batch_length_fn', which Penstock does not know"),
        ({"max_batch_weight": 3}, "needs element_size_fn"),
    ],
)
def test_wrong_limits_of_a_handler(given, message):
    with pytest.raises(UsageError, match=message):
        BatchLimits.of(given)
