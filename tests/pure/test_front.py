"""The front of a model as the session in a process uses it, driven through random runs by a simulator that keeps its own
books, and rule by rule. As a host uses it: test_dispatch.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.entry import Entry
from penstock.batching.limits import BatchLimits
from penstock.models.front import LINGER, Front

# Random runs.


@dataclass
class World:
    callers: int
    at_once: int
    max_size: int
    max_wait: float | None
    groups: int
    steps: int


worlds = st.builds(
    World,
    callers=st.integers(1, 4),
    at_once=st.integers(1, 2),
    max_size=st.integers(1, 6),
    max_wait=st.sampled_from([None, None, 0.0, 0.5]),
    groups=st.integers(1, 3),
    steps=st.integers(1, 60),
)


@dataclass(eq=False)
class Sent:
    """Rows that a caller submitted together."""

    caller: int
    group: int
    size: int
    arrived: float
    waiting: set[int] = field(default_factory=set)
    unanswered: int = 0


class Process:
    """A session without threads and without a model: callers that add, wait and leave, and batches that run a while."""

    def __init__(self, world, random):
        self.world = world
        self.random = random
        self.front = Front(BatchLimits(max_size=world.max_size, max_wait=world.max_wait))
        self.now = 100.0
        self.seconds = 0.0
        self.callers = dict.fromkeys(range(world.callers))  # open ones -> what each waits for
        self.sent = []
        self.running = []
        for caller in self.callers:
            self.front.opened(caller)

    # What the simulator knows by itself.

    def queued(self):
        return [sent for sent in self.sent if sent.waiting]

    def can_add(self):
        return [caller for caller, waits_for in self.callers.items() if waits_for is None]

    def is_full(self, group):
        return sum(len(sent.waiting) for sent in self.queued() if sent.group == group) >= self.world.max_size

    def leaves_at(self):
        """When the oldest row has waited long enough; never, if it only lingers and nobody waits."""
        oldest = min((sent.arrived for sent in self.queued()), default=math.inf)
        if self.world.max_wait is not None:
            return oldest + self.world.max_wait
        return (
            math.inf if len(self.can_add()) == len(self.callers) else oldest + min(LINGER[1], max(LINGER[0], self.seconds))
        )

    # What happens.

    def submit(self, caller):
        size = self.random.randint(1, 5)
        sent = Sent(caller, self.random.randrange(self.world.groups), size, self.now, set(range(size)), size)
        self.sent.append(sent)
        entry = Entry(sent, size, group=sent.group)
        self.front.add(entry, caller, self.now)
        while entry.taken < entry.stop and len(self.running) < self.world.at_once and self.take(idle=False):
            pass

    def wait(self, caller):
        own = [sent for sent in self.sent if sent.caller == caller and sent.unanswered]
        if own:
            self.callers[caller] = self.random.choice(own)
            self.front.waits(caller)

    def close(self, caller):
        del self.callers[caller]
        self.front.closed(caller)
        for sent in self.sent:
            if sent.caller == caller:
                sent.waiting.clear()

    def take(self, idle):
        taken = self.front.take(self.now, idle=idle)
        full = [group for group in range(self.world.groups) if self.is_full(group)]
        may = idle and (not self.can_add() or self.now >= self.leaves_at())
        if taken is None:
            assert not full
            assert not (may and self.queued()), "rows may leave, and do not"
            return False
        spans, _ = taken
        (group,) = {span.entry.item.group for span in spans}
        rows = sum(span.stop - span.start for span in spans)
        assert 0 < rows <= self.world.max_size
        assert group in full or may, "it left although it might have grown"
        for entry, start, stop in spans:
            left = set(range(start, stop))
            assert left <= entry.item.waiting, "a row twice, or of one who has left"
            entry.item.waiting -= left
        self.running.append(spans)
        return True

    def answer(self):
        spans = self.running.pop(self.random.randrange(len(self.running)))
        self.seconds = self.random.choice([0.0001, 0.01, 0.3, 5.0])
        for entry, start, stop in spans:
            entry.item.unanswered -= stop - start
        for caller, waits_for in self.callers.items():
            if waits_for is not None and not waits_for.unanswered:
                self.callers[caller] = None
                self.front.goes(caller)
        self.front.ran(spans, None, self.seconds, self.now)

    def run_what_may(self):
        """As callers that wait, and threads of the session, do."""
        while len(self.running) < self.world.at_once and self.take(idle=True):
            pass
        if len(self.running) < self.world.at_once:
            until = self.front.next_time()
            assert (math.inf if until is None else until) == (self.leaves_at() if self.queued() else math.inf)
            assert until is None or until > self.now, "it would spin"

    def happen(self):
        events = [lambda: setattr(self, "now", self.now + self.random.choice([0.001, 0.1, 0.4]))]
        for caller in self.can_add():
            events += [lambda c=caller: self.submit(c), lambda c=caller: self.wait(c)]
            if self.random.random() < 0.1:
                events.append(lambda c=caller: self.close(c))
        if self.running:
            events.append(self.answer)
        self.random.choice(events)()

    def finish(self):
        """An idle caller stays open and adds nothing: the others have all of their answers after some time."""
        idle = next(iter(self.can_add()), None)
        while waiting := [sent for sent in self.sent if sent.caller in self.callers and sent.unanswered]:
            for caller in self.can_add():
                if caller != idle or len(self.callers) == 1:
                    self.wait(caller)
            others = [sent for sent in waiting if sent.caller != idle]
            if not others and len(self.callers) > 1:
                return
            self.run_what_may()
            if self.running:
                self.answer()
            elif (until := self.front.next_time()) is not None:
                self.now = until
            else:
                raise AssertionError("somebody waits, nothing runs, and nothing will ever happen")


@settings(max_examples=400)
@given(world=worlds, random=st.randoms(use_true_random=False))
def test_random_runs_in_a_process(world, random):
    process = Process(world, random)
    for _ in range(world.steps):
        process.happen()
        process.run_what_may()
    process.finish()


# The rules, one by one.


def front_of(*lanes, **given):
    eager = given.pop("eager", False)
    copies = given.pop("copies", 1)
    front = Front(BatchLimits(**{"max_size": 4, **given}), copies=copies, eager=eager)
    for lane in lanes:
        front.opened(lane)
    return front


def taken(front, now=0.0, **how):
    """What leaves, in letters: an entry is as many of its own as it has rows."""
    found = front.take(now, **{"idle": True, **how})
    return None if found is None else "".join(span.entry.item * (span.stop - span.start) for span in found[0])


def add(front, name, rows, lane=1, now=0.0, **given):
    front.add(Entry(name, rows, **given), lane, now)


def test_one_caller_alone_makes_full_batches_at_its_own_pace():
    front = front_of(1)
    add(front, "a", 3)
    assert front.next_time() is None, "nothing lingers"
    assert taken(front, 99.0) is None
    add(front, "b", 3, now=99.0)
    assert taken(front, 99.0, idle=False) == "aaab"
    front.waits(1)
    assert taken(front, 99.0) == "bb"


def test_a_model_with_a_process_of_its_own_takes_what_has_lingered_though_nobody_waits():
    front = front_of(1, eager=True)
    add(front, "a", 3)
    assert front.next_time() == LINGER[0]
    assert taken(front, LINGER[0] / 2) is None
    assert taken(front, LINGER[0]) == "aaa"


@pytest.mark.parametrize(("seconds", "lingers"), [(0.0, 0.002), (0.25, 0.25), (30.0, 1.0)])
def test_an_open_lane_that_adds_nothing_holds_up_nobody(seconds, lingers):
    front = front_of(1, 2)
    add(front, "a", 4)
    spans, aim = front.take(0.0, idle=False)
    front.ran(spans, aim, seconds, 0.0)
    add(front, "b", 1, now=64.0)
    assert taken(front, 65.0) is None, "nobody waits for it"
    front.waits(1)
    assert front.next_time() == 64 + lingers
    assert taken(front, math.nextafter(64 + lingers, 0)) is None, "the other lane may add"
    assert taken(front, 64 + lingers, idle=False) is None, "a busy model takes full batches only"
    assert taken(front, 64 + lingers) == "b"


def test_when_all_wait_nothing_lingers_and_who_goes_on_may_add():
    front = front_of(1, 2)
    add(front, "a", 1)
    front.waits(1)
    front.waits(2)
    front.goes(2)
    assert taken(front) is None
    front.waits(2)
    assert taken(front) == "a"


def test_rows_of_a_lane_that_closes_are_forgotten():
    front = front_of(1, 2)
    add(front, "a", 3, lane=1)
    add(front, "b", 1, lane=2)
    front.closed(1)
    assert front.rows == 1
    front.waits(2)
    assert taken(front) == "b"


def test_each_model_has_limits_of_its_own():
    front = front_of(1)
    front.register("small", BatchLimits(max_size=2, max_wait=5.0))
    add(front, "s", 3, now=1.0, model="small")
    add(front, "a", 3, now=0.0)
    assert taken(front, 1.0, idle=False) == "ss"
    assert front.next_time() == 6.0
    assert taken(front, 6.0) == "s"
    assert taken(front, 6.0) is None


def test_rows_that_linger_take_no_others_along_that_have_their_time():
    front = front_of(1, 2)
    front.register("timed", BatchLimits(max_size=4, max_wait=5.0))
    add(front, "t", 1, model="timed")
    add(front, "a", 1, now=1.0)
    front.waits(1)
    assert taken(front, 1.5) == "a"
    assert taken(front, 1.5) is None
    assert front.next_time() == 5.0


def test_copies_and_models_learn_by_themselves():
    front = front_of(1, copies=2)
    front.register("other", BatchLimits(max_size=4))
    add(front, "a", 4)
    spans, _ = front.take(0.0, idle=False)
    front.ran(spans, None, 1.0, 0.0, too_large=4)
    add(front, "b", 4)
    add(front, "o", 4, now=1.0, model="other")
    assert taken(front, 1.0, idle=False) == "bb"
    assert taken(front, 1.0, idle=False, copy=1) == "oooo"
    assert taken(front, 1.0, idle=False, copy=1) is None, "two rows are a full batch for the first copy alone"
    assert taken(front, 1.0, idle=False) == "bb"


# Batches in a row.


def quick_front(seconds, limits=None, rows=20):
    """A front with so many rows of one entry, after a batch that took so long."""
    front = Front(limits or BatchLimits(max_size=4))
    front.opened("lane")
    front.add(Entry("first", 4), "lane", 0.0)
    spans, aim = front.take(0.0, idle=False, in_a_row=True)
    front.ran(spans, aim, seconds, 0.0)
    front.add(Entry("rows", rows), "lane", 0.0)
    return front


def taken_in_a_row(front, **options):
    taken = front.take(0.0, idle=False, **{"in_a_row": True, **options})
    return None if taken is None else [(span.start, span.stop) for span in taken[0]]


def test_quick_batches_of_one_entry_leave_in_a_row_without_the_last_that_is_not_full():
    front = quick_front(1e-4, rows=18)
    assert taken_in_a_row(front) == [(0, 16)]
    assert front.rows == 2


@pytest.mark.parametrize(
    ("seconds", "options", "left"),
    [(1e-4, {}, (0, 20)), (3e-4, {}, (0, 12)), (0.01, {}, (0, 4)), (1e-4, {"in_a_row": False}, (0, 4))],
    ids=["quick", "for a millisecond", "slow", "not asked for"],
)
def test_how_many_leave_in_a_row(seconds, options, left):
    assert taken_in_a_row(quick_front(seconds), **options) == [left]


def test_batches_of_a_size_that_is_searched_for_or_of_a_weight_leave_one_by_one():
    searched = Front(BatchLimits())
    searched.opened("lane")
    for _ in range(2):
        searched.add(Entry("rows", 1000), "lane", 0.0)
        spans, aim = searched.take(0.0, idle=False, in_a_row=True)
        assert sum(span.stop - span.start for span in spans) == aim.rows
        searched.ran(spans, aim, 1e-4, 0.0)
    weighed = Front(BatchLimits(max_size=4, max_weight=8, weigh=len))
    weighed.opened("lane")
    weighed.add(Entry("first", 4, weights=[1] * 4), "lane", 0.0)
    spans, aim = weighed.take(0.0, idle=False, in_a_row=True)
    weighed.ran(spans, aim, 1e-4, 0.0)
    weighed.add(Entry("rows", 20, weights=[1] * 20), "lane", 0.0)
    assert taken_in_a_row(weighed) == [(0, 4)]
