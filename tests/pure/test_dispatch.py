"""The dispatch of a model host, driven through random runs by a simulator that keeps its own books, and rule by rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.entry import Entry
from penstock.batching.limits import BatchLimits
from penstock.models import dispatch as dispatches
from penstock.models.commands import BreakBatch, End, GiveUp, KillCopy, RunBatch, StartCopy
from penstock.models.dispatch import Dispatch
from penstock.models.front import LINGER
from penstock.models.host_batches import HostBatch, Submission
from penstock.models.messages import HostSpec
from penstock.models.uses import FORGIVEN

# Random runs.


@dataclass
class World:
    """A host and its clients, and how much trouble there is."""

    copies: int
    concurrent: int
    in_turn: bool
    retry_safe: bool
    max_size: int | None
    max_wait: float | None
    timeout: float | None
    load_timeout: float | None
    clients: int
    lanes: int  # of each client
    groups: int
    trouble: int  # percent of events that are not good news
    steps: int  # after these, only good things happen


worlds = st.builds(
    World,
    copies=st.integers(1, 3),
    concurrent=st.integers(1, 3),
    in_turn=st.booleans(),
    retry_safe=st.sampled_from([True, True, False]),
    max_size=st.sampled_from([1, 2, 3, 5, None]),
    max_wait=st.sampled_from([None, None, 0.0, 0.5]),
    timeout=st.sampled_from([None, 3.0]),
    load_timeout=st.sampled_from([None, 4.0]),
    clients=st.integers(1, 3),
    lanes=st.integers(1, 2),
    groups=st.integers(1, 2),
    trouble=st.sampled_from([0, 10, 30, 60]),
    steps=st.integers(5, 60),
)


@dataclass
class Sent:
    """What the simulator itself knows of a submission."""

    client: int
    lane: int
    size: int
    group: int
    alone: bool
    arrived: float
    wanted: bool = True
    rows: dict[int, str] = field(default_factory=dict)  # queued, running, again, ended

    @property
    def left(self):
        return self.wanted and any(state != "ended" for state in self.rows.values())


@dataclass
class Process:
    """A copy's process. What it is told to run, it runs in this order, so many at once."""

    since: float
    state: str = "starting"  # ready; dying: it was killed, but may have said something before
    loading: bool = True
    innocent: bool = False  # it was killed because of one batch, which is broken: the others are not to blame
    batches: list[HostBatch] = field(default_factory=list)


class HostEndedError(Exception):
    """The dispatch gave up, and may."""


class Simulator:
    def __init__(self, world, random):
        self.world = world
        self.random = random
        self.spec = HostSpec(
            name="step",
            program=b"",
            limits=BatchLimits(max_size=world.max_size, max_wait=world.max_wait),
            copies=world.copies,
            concurrent=world.concurrent,
            in_turn=world.in_turn,
            retry_safe=world.retry_safe,
            timeout=world.timeout,
            load_timeout=world.load_timeout,
        )
        self.now = 100.0
        self.dispatch = Dispatch(self.spec, self.now)
        self.processes: dict[int, Process] = {}
        self.failed_loads = dict.fromkeys(range(world.copies), 0)
        self.sent: dict[int, Sent] = {}
        self.lanes: dict[tuple[int, int], object] = {}  # open ones -> "adds", "waits", or the submission that it waits for
        self.clients = set(range(world.clients))
        self.seconds = 0.0
        self.ended: dict[int, float] = {}  # when a copy was last heard of
        self.alike = world.max_size is not None  # all copies aim at batches of the same size
        self.started: dict[int, float] = {}  # of batches that run: when they came to it
        self.called: set[tuple[int, int]] = set()
        self.harm: dict[tuple[int, int], int] = {}  # row -> processes that died with its batch alone, or hung in it
        self.suspects: set[tuple[int, int]] = set()
        for client in self.clients:
            self.dispatch.joined(client)
            for lane in range(world.lanes):
                self.dispatch.opened(client, lane)
                self.lanes[client, lane] = "adds"

    # Carrying out commands, as the broker would, and checking each.

    def decide(self):
        for process in self.processes.values():
            self.take_late(process)
        for command in self.dispatch.decide(self.now):
            self.do(command)
        assert all(process.state == "dying" for process in self.processes.values() if process.innocent)
        self.check_nothing_is_forgotten()
        self.check_next_time()
        for number, sent in self.sent.items():
            assert self.dispatch.submissions.is_left(number) == sent.left

    def take_late(self, process):
        """What should be noticed now: batches that have run for too long."""
        if process.state == "ready" and self.world.timeout is not None:
            for batch in list(process.batches):
                if self.now >= self.started.get(batch.number, math.inf) + self.world.timeout:
                    process.innocent = True
                    process.batches.remove(batch)
                    self.is_to_blame(batch)
                    self.take_back(batch)

    def do(self, command):
        if isinstance(command, StartCopy):
            assert command.copy not in self.processes
            assert self.lanes, "a model is loaded for nobody"
            self.processes[command.copy] = Process(self.now)
        elif isinstance(command, KillCopy):
            self.kill(self.processes[command.copy])
        elif isinstance(command, RunBatch):
            self.run_batch(command.copy, self.processes[command.copy], command.batch)
        else:
            assert isinstance(command, BreakBatch), command
            self.break_rows(command)

    def kill(self, process):
        assert process.state in ("starting", "ready"), "killed twice"
        if process.state == "starting":
            assert self.now >= process.since + self.world.load_timeout
        else:
            assert process.innocent, "no batch was late"
        process.state = "dying"

    def break_rows(self, command):
        for process in self.processes.values():
            if command.batch in process.batches:  # it was not late, but must not be called again
                assert process.innocent
                assert not self.world.retry_safe
                process.batches.remove(command.batch)
                self.take_back(command.batch)
        harm = [self.harm.get(row, 0) for row in self.numbers(command.batch)]
        need = (2 if command.kind == "crashed" else 1) if self.world.retry_safe else 0
        assert min(harm) >= need, "broken without need"
        assert command.message
        self.end_rows(command.batch, "again")

    def is_to_blame(self, batch):
        for row in self.numbers(batch):
            self.harm[row] = self.harm.get(row, 0) + 1
            self.suspects.add(row)

    def take_back(self, batch):
        self.started.pop(batch.number, None)
        self.put(batch, "running", "again")

    def run_batch(self, copy, process, batch):
        assert process.state == "ready"
        self.check_batch(batch)
        others = [p for p in self.processes.values() if p.state == "ready" and not p.batches]
        if self.alike:
            assert not process.batches or not others, "it went to a busy copy while another was free"
        company = len(process.batches)
        again = "again" in self.states(batch)
        if not again and company and not batch.spans[0].entry.alone:
            full = batch.rows >= batch.aim.rows
            at_once = 1 if self.world.in_turn else self.world.concurrent
            assert full or company < at_once, "a small batch behind one that runs"
        elif not again and batch.rows < batch.aim.rows and not batch.spans[0].entry.alone:
            patient = self.now < self.oldest() + self.patience()
            assert not patient or "adds" not in self.lanes.values(), "it left although it might have grown"
        assert self.world.retry_safe or not self.called.intersection(self.numbers(batch)), "called twice"
        suspect = bool(self.suspects.intersection(self.numbers(batch)))
        assert batch.suspect == suspect
        assert not company or not any(each.suspect for each in [batch, *process.batches]), "a suspect has company"
        self.put(batch, "again" if again else "queued", "running")
        process.batches.append(batch)
        assert len(process.batches) <= self.world.concurrent + (not again)
        self.begin(process)

    def check_batch(self, batch):
        assert batch.rows
        assert self.world.max_size is None or batch.spans[0].entry.alone or batch.rows <= self.world.max_size
        assert len({self.sent[span.entry.item.number].group for span in batch.spans}) == 1, "groups are mixed"
        assert any(self.sent[span.entry.item.number].wanted for span in batch.spans), "it runs for nobody"
        if "queued" in self.states(batch):
            assert all(self.sent[span.entry.item.number].wanted for span in batch.spans)

    def numbers(self, batch):
        return [(span.entry.item.number, index) for span in batch.spans for index in range(span.start, span.stop)]

    def states(self, batch):
        return {self.sent[number].rows[index] for number, index in self.numbers(batch)}

    def put(self, batch, old, new):
        """Its rows go from one state to another; none of them twice."""
        rows = self.numbers(batch)
        assert len(rows) == len(set(rows))
        for number, index in rows:
            assert self.sent[number].rows[index] == old, "a row twice, or out of nowhere"
            self.sent[number].rows[index] = new

    def begin(self, process):
        for batch in process.batches[: 1 if self.world.in_turn else self.world.concurrent]:
            if process.state == "ready":
                self.started.setdefault(batch.number, self.now)
                self.called.update(self.numbers(batch))

    def end_rows(self, batch, old):
        self.started.pop(batch.number, None)
        self.put(batch, old, "ended")
        for lane, waits in self.lanes.items():
            if isinstance(waits, int) and not self.sent[waits].left:
                self.lanes[lane] = "adds"

    # What must hold after every decision.

    def check_nothing_is_forgotten(self):
        if self.lanes:
            assert self.processes.keys() == set(range(self.world.copies))
        for process in self.processes.values():
            if process.state == "starting" and self.world.load_timeout is not None:
                assert self.now < process.since + self.world.load_timeout
            if process.state == "ready" and self.world.timeout is not None:
                for batch in process.batches:
                    assert self.now < self.started.get(batch.number, math.inf) + self.world.timeout
        if any(process.state == "ready" and not process.batches for process in self.processes.values()):
            hunted = {row for process in self.processes.values() for batch in process.batches for row in self.hunted(batch)}
            again = {(n, at) for n, sent in self.sent.items() if sent.wanted for at, s in sent.rows.items() if s == "again"}
            assert again <= hunted, "a copy is free, and rows that could run again do not"
            if waiting := self.waiting():
                assert "adds" in self.lanes.values(), "a copy is free, rows wait, nobody can add, and nothing happens"
                assert self.now < self.oldest() + self.patience()
                assert not any(sent.alone for sent in waiting)

    def waiting(self):
        return [sent for sent in self.sent.values() if sent.wanted and "queued" in sent.rows.values()]

    def oldest(self):
        return min(sent.arrived for sent in self.waiting())

    def patience(self):
        lingers = min(LINGER[1], max(LINGER[0], self.seconds))
        return lingers if self.world.max_wait is None else self.world.max_wait

    def hunted(self, batch):
        """Rows that wait until it is known how this part of their batch behaves."""
        return [] if batch.hunt is None else [(entry.item.number, at) for entry, at in batch.hunt.rows]

    def check_next_time(self):
        time = self.dispatch.next_time()
        assert time is None or time > self.now, "the broker would spin"
        before = self.now + 1e6 if time is None else math.nextafter(time, 0)
        assert self.dispatch.decide(before) == [], "something was due before"

    # What may happen.

    def happen(self):
        """One event, drawn from all that are possible now."""
        good, bad = self.possible()
        trouble = self.random.randint(1, 100) <= self.world.trouble
        chosen = bad if bad and (trouble or not good) else good
        if chosen:
            self.random.choice(chosen)()

    def possible(self):
        good = [lambda lane=lane: self.submit(*lane) for lane, state in self.lanes.items() if state == "adds"]
        good += [lambda lane=lane: self.wait(*lane) for lane in self.lanes]
        good += [lambda lane=lane: self.go(*lane) for lane, state in self.lanes.items() if state == "waits"]
        good += self.answers()
        good.append(self.pass_time)
        bad = [lambda n=number, p=process: self.die(n, p) for number, process in self.processes.items()]
        bad += [self.let_all_time_pass]  # whatever runs hangs
        if self.random.random() < 0.2:
            bad += [lambda lane=lane: self.close(*lane) for lane in self.lanes]
            bad += [lambda c=client: self.lose(c) for client in self.clients if len(self.clients) > 1]
        return good, bad

    def answers(self):
        """What the processes may say."""
        found = []
        for number, process in self.processes.items():
            if process.loading:
                found.append(lambda n=number, p=process: self.load(n, p))
            for batch in process.batches[: self.world.concurrent]:
                found.append(lambda n=number, p=process, b=batch: self.end(n, p, b))
        return found

    def submit(self, client, lane):
        number = len(self.sent)
        size, alone = self.random.randint(1, 6), self.random.random() < 0.1
        sent = Sent(client, lane, size, self.random.randrange(self.world.groups), alone, self.now)
        sent.rows = dict.fromkeys(range(size), "queued")
        self.sent[number] = sent
        entry = Entry(Submission(number, client, lane, number, None), size, group=sent.group, alone=alone)
        self.dispatch.submitted(entry, self.now)

    def wait(self, client, lane):
        own = [
            n
            for n, sent in self.sent.items()
            if (sent.client, sent.lane) == (client, lane) and self.dispatch.submissions.is_left(n)
        ]
        submission = self.random.choice([None, *own])
        self.dispatch.submissions.waits((client, lane), submission)
        self.lanes[client, lane] = "waits" if submission is None else submission

    def go(self, client, lane):
        self.dispatch.submissions.goes((client, lane))
        self.lanes[client, lane] = "adds"

    def close(self, client, lane):
        self.dispatch.closed(client, lane)
        self.forget(client, lane)
        if self.random.random() < 0.5:  # another bundle comes
            lane = 1 + max(number for number in range(100) if any(number == n for _, n in [*self.lanes, (0, lane)]))
            self.dispatch.opened(client, lane)
            self.lanes[client, lane] = "adds"

    def lose(self, client):
        self.dispatch.gone(client, self.now)
        self.clients.remove(client)
        for each, lane in list(self.lanes):
            if each == client:
                self.forget(client, lane)

    def forget(self, client, lane):
        del self.lanes[client, lane]
        for sent in self.sent.values():
            if (sent.client, sent.lane) == (client, lane):
                sent.wanted = False

    def load(self, copy, process):
        process.loading = False
        self.dispatch.loaded(copy)
        if process.state == "starting":
            process.state = "ready"
            self.failed_loads[copy] = 0

    def end(self, copy, process, batch):
        """It is answered, or raised: to the dispatch that is one."""
        ended = self.dispatch.ended(copy, batch.number, self.now)
        assert ended is batch
        assert self.dispatch.ended(copy, batch.number, self.now) is None
        if self.random.random() < 0.8:
            took = self.random.choice([0.0001, 0.01, 0.3, 5.0])
            short = self.random.random() < 0.1
            self.alike = self.alike and not short
            too_large = batch.rows if short else None
            self.dispatch.front.ran(batch.spans, batch.aim, took, self.now, too_large=too_large, copy=copy)
            self.seconds = min(took, self.now - self.ended.get(copy, 0.0)) if self.world.in_turn else took
            self.ended[copy] = self.now
        process.batches.remove(batch)
        self.end_rows(batch, "running")
        self.begin(process)

    def die(self, copy, process):
        del self.processes[copy]
        commands = self.dispatch.died(copy, "of boredom")
        if process.state == "dying" and not process.innocent:
            assert commands == [GiveUp("of boredom")]
            raise HostEndedError
        if process.state == "starting":
            self.failed_loads[copy] += 1
            if self.failed_loads[copy] == dispatches.LOADS:
                (command,) = commands
                assert isinstance(command, GiveUp)
                assert "died 5 times: of boredom" in command.message
                raise HostEndedError
            assert commands == []
            return
        guilty = [] if process.innocent else [batch for batch in process.batches if batch.number in self.started]
        for batch in guilty:
            self.suspects.update(self.numbers(batch))
            if len(guilty) == 1:
                self.is_to_blame(batch)
        for batch in process.batches:
            self.take_back(batch)
        assert not commands or len(guilty) == 1 or not self.world.retry_safe, "a batch was charged that had company"
        for command in commands:
            assert command.kind == "crashed"
            self.do(command)

    def pass_time(self):
        self.now += self.random.choice([0.001, 0.1, 0.4])

    def let_all_time_pass(self):
        self.now = max(self.now, self.dispatch.next_time() or 0.0)

    def run(self):
        self.decide()
        for _ in range(self.world.steps):
            for _ in range(self.random.randint(1, 3)):  # several events may come between two decisions
                self.happen()
            self.decide()
        self.finish()

    def finish(self):
        """Nobody adds any more, and all goes well: everything that is wanted is answered before nothing can happen."""
        for client, lane in self.lanes:
            self.dispatch.submissions.waits((client, lane), None)
            self.lanes[client, lane] = "waits"
        self.decide()
        for _ in range(10_000):
            dying = [(n, p) for n, p in self.processes.items() if p.state == "dying" and not p.batches]
            if dying:
                self.die(*dying[0])
            elif events := self.answers():
                self.random.choice(events)()
            else:
                break
            self.decide()
        assert not any(sent.left for sent in self.sent.values()), "rows wait, and nothing will ever happen"
        assert self.dispatch.next_time() is None


@pytest.mark.timeout(400)  # to find a small failing run takes its time
@settings(max_examples=500)
@given(world=worlds, random=st.randoms(use_true_random=False))
def test_random_runs(world, random):
    simulator = Simulator(world, random)
    try:
        simulator.run()
    except HostEndedError:
        assert world.trouble, "it gave up without any trouble"
        return
    for client in simulator.clients:
        simulator.dispatch.gone(client, simulator.now)
    end = simulator.now + simulator.spec.grace
    assert simulator.dispatch.next_time() == end
    assert End() not in simulator.dispatch.decide(math.nextafter(end, 0))
    assert simulator.dispatch.decide(end) == [End()]


@pytest.mark.timeout(400)  # to find a small failing run takes its time
@settings(max_examples=200)
@given(world=worlds, random=st.randoms(use_true_random=False))
def test_without_trouble_every_row_runs_once(world, random):
    world.trouble, world.timeout, world.load_timeout = 0, None, None
    simulator = Simulator(world, random)
    simulator.run()
    assert all(set(sent.rows.values()) == {"ended"} for sent in simulator.sent.values())
    assert not simulator.suspects


# The rules, one by one.


class Host:
    """A dispatch with one client, told in few words: a submission is a letter, a batch the letters of its rows."""

    def __init__(self, *, lanes=1, ready=True, max_size=4, max_wait=None, **given):
        limits = BatchLimits(max_size=max_size, max_wait=max_wait)
        self.dispatch = Dispatch(HostSpec(name="step", program=b"", limits=limits, **given), 0.0)
        self.numbers: dict[str, int] = {}
        self.at: dict[int, list[HostBatch]] = {}
        self.dispatch.joined(1)
        for lane in range(lanes):
            self.dispatch.opened(1, lane)
        if ready:
            self.load(*range(given.get("copies", 1)))

    def load(self, *copies, now=0.0):
        assert self.decide(now) == [("start", copy) for copy in copies]
        for copy in copies:
            self.dispatch.loaded(copy)

    def submit(self, name, rows, now=0.0, lane=0, client=1, group=None, alone=False):
        self.numbers[name] = len(self.numbers) + 1
        submission = Submission(self.numbers[name], client, lane, 0, name)
        self.dispatch.submitted(Entry(submission, rows, group=group, alone=alone), now)

    def waits(self, lane=0, name=None, client=1):
        self.dispatch.submissions.waits((client, lane), None if name is None else self.numbers[name])

    def decide(self, now=0.0):
        """Commands as short tuples: ("start", copy), ("kill", copy), ("break", rows), ("end",), (copy, rows)."""
        return self.short(self.dispatch.decide(now))

    def end(self, copy=0, now=0.0, index=0):
        """A copy answers the oldest batch it has; or another."""
        batch = self.at[copy].pop(index)
        assert self.dispatch.ended(copy, batch.number, now) is batch
        return batch

    def learn(self, batch, seconds, too_large=None):
        self.dispatch.front.ran(batch.spans, batch.aim, seconds, 0.0, too_large=too_large)

    def die(self, copy=0, now=0.0, how="exit code 1", **circumstances):
        self.at.pop(copy, None)
        return self.dispatch.died(copy, how, **circumstances)

    def again(self, *copies, now=0.0):
        """New processes for copies that died; what they get to run."""
        self.load(*copies, now=now)
        return self.decide(now)

    def short(self, commands):
        found = []
        for command in commands:
            if isinstance(command, RunBatch):
                self.at.setdefault(command.copy, []).append(command.batch)
                found.append((command.copy, letters(command.batch)))
            elif isinstance(command, BreakBatch):
                for batches in self.at.values():
                    if command.batch in batches:
                        batches.remove(command.batch)
                found.append(("break", letters(command.batch)))
            elif isinstance(command, StartCopy):
                found.append(("start", command.copy))
            elif isinstance(command, KillCopy):
                found.append(("kill", command.copy))
            else:
                found.append((type(command).__name__.lower(),))
        return found


def letters(batch):
    return "".join(span.entry.item.content * (span.stop - span.start) for span in batch.spans)


# When a batch leaves.


def test_no_model_is_loaded_before_somebody_may_have_rows():
    host = Host(lanes=0, ready=False, copies=2)
    assert host.decide() == []
    host.dispatch.opened(1, 0)
    assert host.decide() == [("start", 0), ("start", 1)]
    assert host.decide() == [], "they are coming"


def test_a_copy_that_is_not_loaded_gets_nothing():
    host = Host(copies=2, ready=False)
    host.submit("a", 8)
    assert host.decide() == [("start", 0), ("start", 1)]
    host.dispatch.loaded(1)
    assert host.decide() == [(1, "aaaa"), (1, "aaaa")]


def test_a_free_copy_takes_what_waits_when_nobody_can_add():
    host = Host(lanes=2)
    host.submit("a", 1)
    host.submit("b", 2, lane=1)
    host.waits(0, "a")
    assert host.decide() == [], "the other lane can add"
    host.waits(1, "b")
    assert host.decide() == [(0, "abb")]


def test_lanes_that_are_closed_do_not_count_among_those_that_can_add():
    host = Host(lanes=2)
    host.submit("a", 1)
    host.waits(0, "a")
    assert host.decide() == []
    host.dispatch.closed(1, 1)
    assert host.decide() == [(0, "a")]


def test_a_client_that_is_gone_cannot_add():
    host = Host()
    host.dispatch.joined(2)
    host.dispatch.opened(2, 0)
    host.submit("a", 1)
    host.waits(0, "a")
    assert host.decide() == []
    host.dispatch.gone(2, 0.0)
    assert host.decide() == [(0, "a")]


@pytest.mark.parametrize(("seconds", "lingers"), [(0.0, 0.002), (0.0001, 0.002), (0.25, 0.25), (30.0, 1.0)])
def test_a_free_copy_lingers_about_as_long_as_its_last_batch_took(seconds, lingers):
    host = Host()
    host.submit("a", 4)
    assert host.decide() == [(0, "aaaa")]
    host.learn(host.end(), seconds, None)
    host.submit("b", 1, now=64.0)
    host.submit("c", 1, now=64.001)
    assert host.decide(64.001) == []
    until = host.dispatch.next_time()
    assert until == 64 + lingers
    assert host.decide(math.nextafter(until, 0)) == []
    assert host.decide(until) == [(0, "bc")]


def test_a_full_batch_does_not_wait():
    host = Host()
    host.submit("a", 3)
    assert host.decide() == []
    host.submit("b", 2)
    assert host.decide() == [(0, "aaab")]


def test_rows_that_waited_while_the_copy_was_busy_do_not_wait_again():
    host = Host()
    host.submit("a", 4)
    host.decide()
    host.submit("b", 1, now=0.0)
    assert host.decide(0.9) == [], "it may grow"
    host.learn(host.end(now=1.0), 0.5, None)
    assert host.decide(1.0) == [(0, "b")]


def test_with_a_duration_only_the_deadline_counts():
    host = Host(max_wait=5.0)
    host.submit("a", 1, now=1.0)
    assert host.decide(1.0) == []
    assert host.dispatch.next_time() == 6.0
    host.submit("b", 1, now=5.0)
    assert host.decide(math.nextafter(6.0, 0)) == []
    assert host.decide(6.0) == [(0, "ab")]


def test_with_a_duration_a_full_batch_leaves_at_once_and_so_does_what_nobody_can_add_to():
    host = Host(max_wait=5.0)
    host.submit("a", 5)
    assert host.decide() == [(0, "aaaa")]
    host.end()
    assert host.decide() == []
    host.waits(0, "a")
    assert host.decide() == [(0, "a")]


def test_with_a_duration_a_due_batch_uses_a_place_that_is_free():
    host = Host(max_wait=5.0, concurrent=2)
    host.submit("a", 4)
    assert host.decide() == [(0, "aaaa")]
    host.submit("b", 1, now=1.0)
    assert host.decide(1.0) == []
    assert host.dispatch.next_time() == 6.0
    assert host.decide(6.0) == [(0, "b")]


@pytest.mark.parametrize("max_wait", [None, 0.5])
def test_only_full_batches_queue_up_behind_one_that_runs(max_wait):
    host = Host(max_wait=max_wait)
    host.submit("a", 11)
    assert host.decide() == [(0, "aaaa"), (0, "aaaa")]
    host.end(now=1.0)
    assert host.decide(1.0) == [], "what is left may grow while the other runs"
    host.end(now=1.1)
    assert host.decide(1.1) == [(0, "aaa")]


@pytest.mark.parametrize("concurrent", [1, 2, 3])
def test_a_copy_has_at_most_one_batch_more_than_it_runs(concurrent):
    host = Host(concurrent=concurrent, max_size=1)
    host.submit("a", 9)
    assert host.decide() == [(0, "a")] * (concurrent + 1)
    assert host.decide() == []
    host.end(index=1)
    assert host.decide() == [(0, "a")]


def test_batches_go_to_whichever_copy_is_free():
    host = Host(copies=3, max_size=1)
    host.submit("a", 1)
    assert host.decide() == [(0, "a")]
    host.submit("b", 2)
    assert host.decide() == [(1, "b"), (2, "b")]
    host.end(1)
    host.submit("c", 1)
    assert host.decide() == [(1, "c")]
    host.submit("d", 3)
    assert host.decide() == [(0, "d"), (1, "d"), (2, "d")], "behind what runs, when none is free"


def test_a_copy_that_can_run_several_leaves_some_to_the_others():
    host = Host(copies=2, concurrent=2, max_size=1)
    host.submit("a", 2)
    assert sorted(host.decide()) == [(0, "a"), (1, "a")]
    host.submit("b", 2)
    assert sorted(host.decide()) == [(0, "b"), (1, "b")]


def test_groups_are_not_mixed():
    host = Host(copies=2)
    host.submit("a", 1, group="x")
    host.submit("b", 1, group="y")
    host.submit("c", 1, group="x")
    host.waits()
    assert host.decide() == [(0, "ac"), (1, "b")]


def test_a_batch_of_its_own_is_not_held_back():
    host = Host()
    host.submit("a", 1)
    host.submit("b", 9, alone=True)
    assert host.decide() == [(0, "b" * 9)]
    host.submit("c", 1, alone=True)
    assert host.decide() == [(0, "c")]


# Who can add.


def test_a_lane_waits_until_its_submission_is_answered_and_no_longer():
    host = Host()
    host.submit("a", 5)
    host.waits(0, "a")
    assert host.decide() == [(0, "aaaa")]
    host.end()
    assert host.dispatch.submissions.is_left(host.numbers["a"])
    assert host.decide() == [(0, "a")], "one row of it is left, and nobody can add"
    host.end()
    assert not host.dispatch.submissions.is_left(host.numbers["a"])
    host.submit("b", 1, now=9.0)
    assert host.decide(9.0) == [], "the lane can add again"


def test_a_broken_submission_is_waited_for_no_longer():
    host = Host(timeout=5.0)
    host.submit("a", 1)
    host.waits(0, "a")
    host.decide()
    assert host.decide(5.0) == [("break", "a"), ("kill", 0)]
    host.die(now=5.0)
    host.submit("b", 1, now=6.0)
    assert host.again(0, now=6.0) == []


def test_a_lane_that_waits_for_nothing_in_particular_says_when_it_goes_on():
    host = Host()
    host.submit("a", 1)
    host.waits()
    assert host.decide() == [(0, "a")]
    host.end()
    host.submit("b", 1)
    assert host.decide() == [(0, "b")], "it still waits"
    host.end()
    host.dispatch.submissions.goes((1, 0))
    host.submit("c", 1)
    assert host.decide() == []


def test_what_comes_too_late_to_matter():
    host = Host()
    host.submit("a", 4)
    host.decide()
    host.end()
    host.waits(0, "a")  # answered meanwhile
    host.waits(7)  # no such lane
    host.dispatch.submissions.goes((1, 7))
    host.submit("b", 1)
    assert host.decide() == []


# Giving up rows.


def test_a_lane_that_closes_takes_its_rows_along():
    host = Host(lanes=2)
    host.submit("a", 3)
    host.submit("b", 2, lane=1)
    host.dispatch.closed(1, 0)
    assert not host.dispatch.submissions.is_left(host.numbers["a"])
    assert host.decide() == []
    host.waits(1, "b")
    assert host.decide() == [(0, "bb")]


def test_a_client_that_is_lost_takes_its_rows_along():
    host = Host()
    host.dispatch.joined(2)
    for lane in (0, 1):
        host.dispatch.opened(2, lane)
    host.submit("a", 1, client=2)
    host.submit("b", 1, client=2, lane=1)
    host.submit("c", 1)
    host.waits(0, "c")
    host.dispatch.gone(2, 0.0)
    assert host.decide() == [(0, "c")]


def test_what_runs_for_nobody_ends_like_the_rest():
    host = Host(lanes=2)
    host.submit("a", 1)
    host.submit("b", 3, lane=1)
    assert host.decide() == [(0, "abbb")]
    host.dispatch.closed(1, 0)
    host.end()
    assert not host.dispatch.submissions.is_left(host.numbers["b"])


def test_what_waits_to_run_again_is_forgotten_too():
    host = Host(lanes=2)
    host.submit("a", 4)
    host.submit("b", 4, lane=1)
    assert host.decide() == [(0, "aaaa"), (0, "bbbb")]
    host.die()
    host.dispatch.closed(1, 0)
    assert host.again(0) == [(0, "bbbb")]


def test_what_waits_to_run_again_is_forgotten_when_the_last_of_its_lanes_closes():
    host = Host(lanes=3)
    host.submit("a", 2)
    host.submit("b", 2, lane=1)
    host.submit("c", 4, lane=2)
    assert host.decide() == [(0, "aabb"), (0, "cccc")]
    host.die()
    host.dispatch.closed(1, 0)
    host.dispatch.closed(1, 1)
    assert host.again(0) == [(0, "cccc")]


def test_what_is_wanted_by_one_of_its_lanes_runs_again_whole():
    host = Host(lanes=2)
    host.submit("a", 2)
    host.submit("b", 2, lane=1)
    assert host.decide() == [(0, "aabb")]
    host.die()
    host.dispatch.closed(1, 0)
    assert host.again(0) == [(0, "aabb")]


def test_what_runs_for_nobody_does_not_run_again():
    host = Host(lanes=2)
    host.submit("a", 4)
    host.submit("b", 4, lane=1)
    assert host.decide() == [(0, "aaaa"), (0, "bbbb")]
    host.dispatch.closed(1, 0)
    assert host.die() == []
    assert host.again(0) == [(0, "bbbb")]


# Time limits.


def test_only_the_late_batch_breaks_and_the_others_run_again_uncharged():
    host = Host(concurrent=2, timeout=5.0, max_size=1)
    host.submit("a", 1)
    assert host.decide() == [(0, "a")]
    host.submit("b", 1)
    host.submit("c", 1)
    assert host.decide(1.0) == [(0, "b"), (0, "c")]
    assert host.dispatch.next_time() == 5.0
    assert host.decide(math.nextafter(5.0, 0)) == []
    commands = host.dispatch.decide(5.0)
    assert "timeout of 5 s" in commands[0].message
    assert commands[0].kind == "timed out"
    assert host.short(commands) == [("break", "a"), ("kill", 0)]
    assert host.decide(100.0) == [], "killed already"
    assert host.die(now=100.0) == []
    assert host.again(0, now=200.0) == [(0, "b"), (0, "c")], "they have company: nobody suspects them"
    assert [(batch.deaths, batch.suspect) for batch in host.at[0]] == [(0, False)] * 2
    assert host.dispatch.next_time() == 205.0, "and all of their time"


def test_a_late_batch_that_is_answered_after_all_is_not_answered_twice():
    host = Host(timeout=5.0)
    host.submit("a", 4)
    host.decide()
    (late,) = host.at[0]
    assert ("kill", 0) in host.decide(5.0)
    assert host.dispatch.ended(0, late.number, 5.1) is None


def test_an_answer_that_was_on_its_way_when_the_process_was_killed_charges_nobody():
    host = Host(concurrent=3, timeout=5.0, max_size=1)
    host.submit("a", 1)
    host.decide()
    host.submit("b", 2)
    assert host.decide(1.0) == [(0, "b"), (0, "b")]
    assert host.decide(5.0) == [("break", "a"), ("kill", 0)]
    host.end(now=5.1)
    assert host.dispatch.next_time() is None
    (left,) = host.at[0]
    assert host.die(now=5.2) == []
    assert (left.deaths, left.suspect) == (0, False)


def test_a_batch_that_runs_again_has_all_of_its_time():
    host = Host(timeout=5.0, max_size=1)
    host.submit("a", 1)
    host.decide()
    host.die(now=4.0)
    assert host.again(0, now=7.0) == [(0, "a")]
    assert host.decide(7.0) == []
    assert host.dispatch.next_time() == 12.0
    assert host.decide(12.0) == [("break", "a"), ("kill", 0)]


def test_time_counts_from_when_a_batch_runs_not_from_when_it_waits():
    host = Host(timeout=5.0, max_size=1)
    host.submit("a", 2)
    assert host.decide() == [(0, "a"), (0, "a")]
    host.end(now=3.0)
    assert host.dispatch.next_time() == 8.0
    assert host.decide(5.0) == []
    assert host.decide(8.0) == [("break", "a"), ("kill", 0)]


@pytest.mark.parametrize(("in_turn", "late"), [(False, 2), (True, 1)])
def test_batches_that_take_turns_have_their_time_one_after_the_other(in_turn, late):
    host = Host(concurrent=2, in_turn=in_turn, timeout=5.0, max_size=1)
    host.submit("a", 2)
    assert host.decide() == [(0, "a"), (0, "a")]
    assert host.decide(5.0) == [("break", "a")] * late + [("kill", 0)]


def test_loading_may_take_so_long():
    host = Host(ready=False, load_timeout=30.0, copies=2)
    assert host.decide(1.0) == [("start", 0), ("start", 1)]
    host.dispatch.loaded(1)
    assert host.dispatch.next_time() == 31.0
    assert host.decide(math.nextafter(31.0, 0)) == []
    (command,) = host.dispatch.decide(31.0)
    assert command.copy == 0
    assert "30 s that loading may take (load_timeout)" in command.why
    assert host.decide(40.0) == []
    assert host.dispatch.next_time() is None
    assert host.die(0, now=41.0, how="too slow") == [GiveUp("too slow")]


def test_a_process_that_was_loaded_just_after_it_was_killed_gets_no_rows():
    host = Host(ready=False, load_timeout=30.0)
    host.submit("a", 4)
    assert host.decide() == [("start", 0)]
    assert host.decide(30.0) == [("kill", 0)]
    host.dispatch.loaded(0)
    assert host.decide(30.0) == []
    assert host.die(now=30.1, how="too slow") == [GiveUp("too slow")]


# Deaths.


def test_a_row_whose_process_dies_again_and_again_is_broken():
    host = Host(max_size=1)
    host.submit("a", 1)
    assert host.decide() == [(0, "a")]
    for _ in range(3):
        assert host.die(how="signal SIGSEGV") == []
        assert host.again(0) == [(0, "a")]
    (command,) = host.die(how="exit code 3")
    assert (command.kind, letters(command.batch)) == ("crashed", "a")
    assert command.message == "the process died with these rows: exit code 3"
    assert not host.dispatch.submissions.is_left(host.numbers["a"])
    host.submit("b", 1)
    assert host.again(0) == [(0, "b")]


def test_what_must_not_be_called_again_is_broken_at_once():
    host = Host(retry_safe=False, timeout=5.0)
    host.submit("a", 8)
    assert host.decide() == [(0, "aaaa"), (0, "aaaa")]
    assert host.short(host.die()) == [("break", "aaaa")]
    assert host.again(0) == [(0, "aaaa")], "it only waited there"
    assert host.decide(5.0) == [("break", "aaaa"), ("kill", 0)]


@pytest.mark.parametrize("late", [False, True])
def test_what_must_not_be_called_again_is_not_when_another_may_be_to_blame(late):
    host = Host(retry_safe=False, timeout=5.0, concurrent=2)
    host.submit("a", 4)
    assert host.decide(0.0) == [(0, "aaaa")]
    host.submit("b", 8)
    assert host.decide(1.0) == [(0, "bbbb"), (0, "bbbb")]
    broken = host.decide(5.0)[:-1] if late else []
    broken += host.short(host.die(now=5.0))
    assert sorted(broken) == [("break", "aaaa"), ("break", "bbbb")]
    assert host.again(0, now=5.0) == [(0, "bbbb")], "this one was not called"


def test_what_only_waited_in_a_process_that_died_is_not_charged():
    host = Host()
    host.submit("a", 4)
    host.submit("b", 4)
    assert host.decide() == [(0, "aaaa"), (0, "bbbb")]
    one, other = host.at[0]
    host.die()
    assert [(one.deaths, one.suspect), (other.deaths, other.suspect)] == [(1, True), (0, False)]
    host.submit("c", 4)
    assert host.again(0) == [(0, "aaaa")], "alone"
    host.end()
    assert host.decide() == [(0, "bbbb"), (0, "cccc")], "nobody suspects it: it may have company"


def test_batches_that_died_together_are_not_charged_and_run_alone_afterwards():
    host = Host(concurrent=2, max_size=1)
    host.submit("a", 1)
    host.submit("b", 1)
    assert host.decide() == [(0, "a"), (0, "b")]
    both = host.at[0]
    assert host.die() == []
    assert [(batch.deaths, batch.suspect) for batch in both] == [(0, True)] * 2
    host.submit("c", 2)
    assert host.again(0) == [(0, "a")]
    for _ in range(3):
        assert host.die() == []
        assert host.again(0) == [(0, "a")]
    assert host.short(host.die()) == [("break", "a")]
    assert host.again(0) == [(0, "b")]
    host.end()
    assert host.decide() == [(0, "c"), (0, "c")]


def test_many_batches_whose_process_died_run_together_once_more_and_alone_after_another_death():
    host = Host(concurrent=9, max_size=1)
    host.submit("a", 9)
    assert host.decide() == [(0, "a")] * 9
    assert host.die() == []
    assert host.again(0) == [(0, "a")] * 9, "the first death may have come from outside"
    host.end()
    host.submit("b", 1)
    assert host.decide() == [(0, "b")]
    assert host.die() == []
    assert host.again(0) == [(0, "a")], "it has seen two deaths"
    for _ in range(7):
        host.end()
        assert host.decide() == [(0, "a")]
    host.end()
    assert host.decide() == [(0, "b")], "it has seen one, among many"


def test_suspects_wait_for_an_empty_copy_but_do_not_hold_up_another():
    host = Host(copies=2, concurrent=2, max_size=1)
    host.submit("a", 4)
    host.decide()
    held = {copy: len(batches) for copy, batches in host.at.items()}
    assert held == {0: 2, 1: 2}
    host.die(0)
    assert host.decide() == [("start", 0)]
    host.end(1)
    assert host.decide() == [], "the other copy still runs something"
    host.end(1)
    assert host.decide() == [(1, "a")]
    host.dispatch.loaded(0)
    assert host.decide() == [(0, "a")]


# Which rows it is.


class Hunted:
    """Rows of one batch, some of which are fatal, until all of them are answered or broken."""

    def __init__(self, rows, is_fatal, *, hangs=False, more=0):
        self.host = Host(max_size=rows, timeout=5.0)
        self.is_fatal = is_fatal
        self.answered, self.broken = [], []
        self.restarts = -1
        self.now = 0.0
        self.hangs = hangs
        self.host.submit("a", rows + more)
        self.host.waits()
        while self.step():
            assert self.restarts < 100
        assert not self.host.dispatch.submissions.is_left(1)

    def step(self):
        host = self.host
        commands = host.dispatch.decide(self.now)
        host.short(commands)
        for command in commands:
            if isinstance(command, StartCopy):
                self.restarts += 1
                host.dispatch.loaded(0)
            elif isinstance(command, KillCopy):
                assert host.dispatch.died(0, "killed") == []
                host.at.clear()
            elif isinstance(command, BreakBatch):
                self.broken += indices(command.batch)
        idle = not commands and not host.at.get(0)
        if not commands and not idle:
            batch = host.at[0][0]
            if not self.is_fatal(set(indices(batch))):
                self.answered += indices(host.end(now=self.now))
            elif self.hangs:
                self.now += 5.0
            else:
                self.broken += [row for command in host.die(now=self.now) for row in indices(command.batch)]
        return not idle


def indices(batch):
    return [index for span in batch.spans for index in range(span.start, span.stop)]


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "hangs"])
@pytest.mark.parametrize("rows", [2, 3, 8, 13])
def test_the_fatal_row_of_a_batch_is_found(rows, hangs):
    for fatal in range(rows):
        hunted = Hunted(rows, lambda batch, fatal=fatal: fatal in batch, hangs=hangs)
        assert hunted.broken == [fatal]
        assert sorted(hunted.answered) == [row for row in range(rows) if row != fatal]
        assert hunted.restarts <= 2 * (rows.bit_length() + 3)


@settings(max_examples=150)
@given(rows=st.integers(2, 12), fatal=st.sets(st.integers(0, 11)), hangs=st.booleans(), more=st.integers(0, 3))
def test_every_row_of_a_hunt_ends_once(rows, fatal, hangs, more):
    hunted = Hunted(rows, lambda batch: bool(batch & fatal), hangs=hangs, more=more)
    assert sorted(hunted.answered + hunted.broken) == list(range(rows + more))
    assert fatal & set(range(rows + more)) <= set(hunted.broken)


@pytest.mark.parametrize(("deaths", "hangs"), [(1, False), (2, False), (3, False), (4, False), (1, True), (2, True)])
def test_deaths_that_came_from_outside_cost_no_row(deaths, hangs):
    left = [None] * deaths
    hunted = Hunted(4, lambda batch: bool(left and not left.pop()), hangs=hangs, more=3)
    assert sorted(hunted.answered) == list(range(7))
    assert hunted.broken == []


class Leaking:
    """Rows that each take memory which is not given back, until all of them are answered or to blame."""

    def __init__(self, rows, weights, memory, *, copies=1, batch=None, partly=True):
        self.host = Host(max_size=batch or rows, copies=copies)
        self.weight = [1] * rows
        for row, weight in weights.items():
            self.weight[row] = weight
        self.memory, self.partly = memory, partly
        self.used = [0] * copies
        self.answered, self.blamed = [], []
        self.restarts = -copies
        self.host.submit("a", rows)
        self.host.waits()
        self.do(self.host.dispatch.decide(0.0))
        while any(self.host.at.values()):
            for copy in range(copies):
                if self.host.at.get(copy):
                    self.call(copy)
            self.do(self.host.dispatch.decide(0.0))
            assert self.restarts < 200
        assert not self.host.dispatch.submissions.is_left(1)

    def do(self, commands):
        self.host.short(commands)
        for command in commands:
            if isinstance(command, StartCopy):
                self.restarts += 1
                self.used[command.copy] = 0
                self.host.dispatch.loaded(command.copy)
                self.do(self.host.dispatch.decide(0.0))
            elif isinstance(command, KillCopy):
                assert self.host.dispatch.died(command.copy, "killed") == []
                self.host.at[command.copy] = []
                self.do(self.host.dispatch.decide(0.0))
            elif isinstance(command, BreakBatch):
                self.blamed += indices(command.batch)

    def call(self, copy):
        batch = self.host.at[copy].pop(0)
        rows, fitting = indices(batch), []
        for row in rows:
            if self.used[copy] + self.weight[row] <= self.memory:
                self.used[copy] += self.weight[row]
                fitting.append(row)
        if not self.partly and len(fitting) < len(rows) and not batch.final:
            fitting = []
        left = [at for at, row in enumerate(rows) if row not in fitting]
        if left and not batch.final:
            _, commands = self.host.dispatch.exhausted(copy, batch.number, left)
            self.answered += fitting
            self.do(commands)
        else:
            assert self.host.dispatch.ended(copy, batch.number, 0.0, len(left)) is batch
            self.answered += fitting
            self.blamed += [rows[at] for at in left]


@pytest.mark.parametrize("partly", [True, False])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("rows", "memory", "batch"), [(40, 10, 8), (40, 3, 8), (16, 1, 16), (5, 100, 5)])
def test_a_model_that_leaks_costs_no_row(rows, memory, batch, copies, partly):
    leaking = Leaking(rows, {}, memory, copies=copies, batch=batch, partly=partly)
    assert sorted(leaking.answered) == list(range(rows))
    assert leaking.blamed == []


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("large", [[3], [0, 1], [2, 5, 7]])
def test_rows_that_do_not_fit_alone_are_to_blame(large, copies):
    leaking = Leaking(8, dict.fromkeys(large, 100), 20, copies=copies)
    assert sorted(leaking.blamed) == large
    assert sorted(leaking.answered) == [row for row in range(8) if row not in large]
    assert leaking.restarts <= len(large) + 1


def test_a_row_that_did_not_fit_runs_in_a_fresh_process_though_another_is_free():
    host = Host(copies=2, max_size=2)
    host.submit("a", 2)
    assert host.decide() == [(0, "aa")]
    host.end()
    host.submit("b", 2)
    host.submit("c", 2)
    assert host.decide() == [(0, "bb"), (1, "cc")]
    batch = host.at[0].pop()
    assert host.short(host.dispatch.exhausted(0, batch.number, [0])[1]) == [("kill", 0)]
    host.end(1)
    assert host.decide() == []
    host.die(0)
    assert host.again(0) == [(0, "b")]
    assert host.at[0][0].final


def test_a_hunt_ends_with_its_lane():
    host = Host(lanes=2)
    host.submit("a", 4)
    host.submit("b", 4, lane=1)
    assert host.decide() == [(0, "aaaa"), (0, "bbbb")]
    host.die()
    assert host.again(0) == [(0, "aaaa")]
    host.die()
    host.dispatch.closed(1, 0)
    assert host.again(0) == [(0, "bbbb")]


# Loading that fails.


def test_a_copy_that_never_loads_is_given_up():
    host = Host(ready=False)
    for _ in range(4):
        assert host.decide() == [("start", 0)]
        assert host.die() == []
    assert host.decide() == [("start", 0)]
    assert host.die(how="signal SIGKILL") == [GiveUp("the process that loads the model died 5 times: signal SIGKILL")]


def test_a_copy_that_somebody_kills_while_it_loads_is_given_up_later():
    host = Host(ready=False)
    for _ in range(5 + FORGIVEN - 1):
        assert host.decide() == [("start", 0)]
        assert host.die(from_outside=True) == []
    assert host.decide() == [("start", 0)]
    assert host.die(how="signal SIGKILL", from_outside=True) == [
        GiveUp("the process that loads the model died 12 times: signal SIGKILL")
    ]


def test_deaths_after_loading_do_not_count_as_failed_loads():
    host = Host(ready=False)
    for _ in range(3):
        for _ in range(4):
            assert host.decide() == [("start", 0)]
            assert host.die() == []
        assert host.decide() == [("start", 0)]
        host.dispatch.loaded(0)
        assert host.die() == []


def test_a_copy_that_dies_when_nobody_is_there_is_not_started_again():
    host = Host()
    host.dispatch.closed(1, 0)
    host.die()
    assert host.decide() == []
    host.dispatch.opened(1, 1)
    assert host.decide() == [("start", 0)]


# The end.


def test_it_waits_a_while_for_the_first_client():
    dispatch = Dispatch(HostSpec(name="step", program=b"", limits=BatchLimits(), grace=3.0), 10.0)
    assert dispatch.next_time() == 13.0
    assert dispatch.decide(math.nextafter(13.0, 0)) == []
    assert dispatch.decide(13.0) == [End()]


def test_it_ends_a_while_after_the_last_client_has_left():
    host = Host(grace=3.0)
    host.dispatch.joined(2)
    host.dispatch.gone(1, 10.0)
    assert host.dispatch.next_time() is None
    host.dispatch.gone(2, 20.0)
    assert host.dispatch.next_time() == 23.0
    assert host.decide(22.0) == []
    host.dispatch.joined(3)
    assert host.dispatch.next_time() is None
    assert host.decide(99.0) == [], "somebody came in time"
    host.dispatch.gone(3, 100.0)
    assert host.decide(103.0) == [("end",)]


# What is learned.


def test_a_batch_that_runs_again_teaches_nothing_about_sizes():
    host = Host(max_size=None)
    host.submit("a", 8)
    assert host.decide() == [(0, "a" * 8)]
    assert host.at[0][0].aim is not None
    host.die()
    assert host.again(0) == [(0, "a" * 8)]
    assert host.at[0][0].aim is None


def test_batches_are_smaller_after_memory_ran_out():
    host = Host(max_size=8)
    host.submit("a", 16)
    host.decide()
    host.learn(host.end(), 1.0, 5)
    host.end()
    host.submit("b", 8)
    assert {len(rows) for _, rows in host.decide()} <= {1, 2, 3, 4}
