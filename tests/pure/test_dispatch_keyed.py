"""The dispatch of a host that holds many models, on simulated processes: random runs whose rows and models misbehave as they
are told, and the rules one by one."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from penstock.batching.entry import Entry
from penstock.batching.limits import BatchLimits
from penstock.failures import CRASHED, LOADING, OUT_OF_MEMORY
from penstock.models.budget import MemoryBudget
from penstock.models.commands import BreakBatch, KillCopy, RunBatch, StartCopy
from penstock.models.dispatch import Dispatch
from penstock.models.host_batches import Submission
from penstock.models.messages import HostSpec, Leaks, LoadFailed
from penstock.models.residency import PATIENCE, LoadNow, UnloadNow
from penstock.models.uses import ATTEMPTS, KILLS
from penstock.transport.reports import ErrorReport

SIZE = 10
LOAD_TIMEOUT = 50.0
LATE = f"it took longer than the {LOAD_TIMEOUT:g} s"


class Process:
    def __init__(self):
        self.ready = False
        self.dying = False
        self.models = set()
        self.loading = []
        self.batches = []


class Host:
    """A dispatch, and processes that do what it says. A row is (model, what it does): "ok", "kill" its process, or "fill"
    its memory. Models whose name begins with "crash", "raise" or "hang" do so when they are loaded, and "huge" ones are over
    the budget."""

    def __init__(self, *, copies=1, budget=None, lanes=1, max_size=4, seed=0, **given):
        self.budget = budget or MemoryBudget(3 * SIZE)
        limits = BatchLimits(max_size=max_size)
        spec = HostSpec(
            name="s", program=b"", limits=limits, copies=copies, budget=self.budget, load_timeout=LOAD_TIMEOUT, **given
        )
        self.now = 0.0
        self.dispatch = Dispatch(spec, self.now)
        self.concurrent = spec.concurrent
        self.random = random.Random(seed)
        self.processes = {}
        self.numbers = itertools.count()
        self.rows = {}  # (submission, at) -> (model, what it does)
        self.outcome = {}  # of those that are over
        self.why = {}  # messages of broken rows
        self.loads = []  # (copy, model)
        self.deaths = 0
        self.most_bytes = 0
        self.dispatch.joined(1)
        for lane in range(lanes):
            self.dispatch.opened(1, lane)

    def submit(self, *parts, lane=0):
        """Each part is a model and what its rows do, or how many there are that do well."""
        number, at = next(self.numbers), 0
        submission = Submission(number, 1, lane, number, None)
        for model, rows in parts:
            does = ["ok"] * rows if isinstance(rows, int) else rows
            self.rows |= {(number, at + n): (model, what) for n, what in enumerate(does)}
            self.dispatch.submitted(Entry(submission, at + len(does), start=at, model=model), self.now)
            at += len(does)
        return number

    def wait(self, lane=0):
        self.dispatch.submissions.waits((1, lane), None)

    # What it is told.

    def decide(self):
        made = self.dispatch.decide(self.now)
        for command in made:
            self.do(command)
        time = self.dispatch.next_time()
        assert time is None or time > self.now, "the broker would spin"
        assert self.dispatch.decide(math.nextafter(self.now + 1e6 if time is None else time, 0)) == [], "due before"
        alive = [each for each in self.processes.values() if not each.dying]
        held = [model for each in alive for model in [*each.models, *each.loading]]
        assert len(held) == len(set(held)), "a model is in two copies"
        self.most_bytes = max(self.most_bytes, len(held) * SIZE)
        return made

    def do(self, command):
        if isinstance(command, StartCopy):
            assert command.copy not in self.processes
            self.processes[command.copy] = Process()
        elif isinstance(command, KillCopy):
            assert not self.processes[command.copy].dying
            self.processes[command.copy].dying = True
        elif isinstance(command, BreakBatch):
            for row in self.rows_of(command.batch):
                self.end_row(row, command.kind)
                self.why[row] = command.message
        else:
            process = self.processes[command.copy]
            assert process.ready
            if isinstance(command, LoadNow):
                assert command.model not in {*process.models, *process.loading}
                process.loading.append(command.model)
                self.loads.append((command.copy, command.model))
            elif isinstance(command, UnloadNow):
                assert all(batch.model != command.model for batch in process.batches), "in use"
                process.models.remove(command.model)
            else:
                assert isinstance(command, RunBatch)
                assert command.batch.model in process.models
                assert {self.rows[row][0] for row in self.rows_of(command.batch)} == {command.batch.model}
                assert not command.batch.suspect or not process.loading, "whose fault it is could not be seen"
                process.batches.append(command.batch)
                assert len(process.batches) <= self.concurrent + 1

    def rows_of(self, batch):
        return [(span.entry.item.number, at) for span in batch.spans for at in range(span.start, span.stop)]

    def end_row(self, row, how):
        assert row not in self.outcome, "answered twice"
        self.outcome[row] = how

    # What happens.

    def events(self):
        found = []
        for copy, process in self.processes.items():
            if process.dying:
                found.append(lambda c=copy: self.die(c))
                continue
            if not process.ready:
                found.append(lambda c=copy, p=process: self.start(c, p))
            found += [
                lambda c=copy, p=process, m=model: self.load(c, p, m)
                for model in process.loading
                if not model.startswith("hang")
            ]
            found += [lambda c=copy, p=process, b=batch: self.run(c, p, b) for batch in process.batches[: self.concurrent]]
        return found

    def start(self, copy, process):
        process.ready = True
        self.dispatch.loaded(copy)

    def load(self, copy, process, model):
        if model.startswith("crash"):
            self.die(copy)
            return
        process.loading.remove(model)
        if model.startswith("raise"):
            error = ValueError(f"no {model}")
            self.dispatch.keyed.load_failed(copy, LoadFailed(ErrorReport.of(error), model))
            return
        process.models.add(model)
        size = 100 * SIZE if model.startswith("huge") else SIZE
        self.dispatch.keyed.loaded(copy, model, size, 0.1)

    def run(self, copy, process, batch):
        if any(self.rows[row][1] == "kill" for row in self.rows_of(batch)):
            self.die(copy)
            return
        process.batches.remove(batch)
        rows = self.rows_of(batch)
        full = [at for at, row in enumerate(rows) if self.rows[row][1] == "fill"]
        for at, row in enumerate(rows):
            if at not in full or batch.final:
                self.end_row(row, "failed" if at in full else "answered")
        if full and not batch.final:
            found, commands = self.dispatch.exhausted(copy, batch.number, full)
            for command in commands:
                self.do(command)
        else:
            found = self.dispatch.ended(copy, batch.number, self.now, len(full))
        assert found is batch

    def die(self, copy):
        self.deaths += 1
        del self.processes[copy]
        for command in self.dispatch.died(copy, "signal 11"):
            self.do(command)

    def step(self):
        """One event, or the time that is next; False: nothing will ever happen."""
        self.decide()
        events = self.events()
        if events:
            self.random.choice(events)()
            return True
        time = self.dispatch.next_time()
        self.now = self.now if time is None else time
        return time is not None

    def settle(self):
        """Until all rows are over."""
        for _ in range(20_000):
            if not self.step():
                break
        assert self.rows.keys() == self.outcome.keys(), "rows wait, and nothing will ever happen"
        return self.outcome

    def kinds(self):
        return {(self.rows[row][0], how) for row, how in self.outcome.items()}


def expected(model, does):
    for prefix, kind in (("crash", LOADING), ("raise", LOADING), ("hang", LOADING), ("huge", OUT_OF_MEMORY)):
        if model.startswith(prefix):
            return kind
    return {"kill": CRASHED, "fill": "failed", "ok": "answered"}[does]


@pytest.mark.parametrize("seed", range(150))
def test_whatever_models_and_rows_do_nobody_else_pays_for_it(seed):
    chance = random.Random(seed)
    names = [f"m{n}" for n in range(chance.randint(1, 12))] + chance.sample(
        ["crash", "raise", "hang", "huge"], chance.randint(0, 4)
    )
    budget = MemoryBudget(chance.randint(2, 6) * SIZE, chance.choice([None, None, 1, 2]))
    given = {"copies": chance.randint(1, 3), "concurrent": chance.randint(1, 2), "in_turn": chance.random() < 0.3}
    host = Host(budget=budget, lanes=3, seed=seed, **given)
    poison = chance.choice([0, 0, 0.01, 0.05])
    kinds = chance.choice([["kill"], ["fill"], ["kill", "fill"]])
    for _ in range(chance.randint(1, 40)):
        parts = [
            (name, [chance.choice(kinds) if chance.random() < poison else "ok" for _ in range(chance.randint(1, 5))])
            for name in chance.sample(names, chance.randint(1, min(4, len(names))))
        ]
        host.submit(*parts, lane=chance.randrange(3))
        for _ in range(chance.randint(0, 6)):
            host.step()
    for lane in range(3):
        host.wait(lane)
    host.settle()
    for row, how in host.outcome.items():
        assert how == expected(*host.rows[row]), (row, host.rows[row], host.why.get(row))
    if not any(name.startswith("huge") for name in names):
        assert host.most_bytes <= max(budget.bytes, SIZE), "all are of one size"


@pytest.mark.parametrize("seed", range(60))
def test_processes_that_are_killed_from_outside_lose_no_row_and_the_lanes_that_close_leave_nothing(seed):
    chance = random.Random(seed)
    host = Host(budget=MemoryBudget(chance.randint(2, 6) * SIZE), lanes=4, copies=chance.randint(1, 3), seed=seed)
    gone, unwanted = set(), set()
    for _ in range(60):
        lane = chance.randrange(4)
        if lane not in gone:
            host.submit(*((f"m{n}", chance.randint(1, 3)) for n in chance.sample(range(9), 3)), lane=lane)
        for _ in range(chance.randint(0, 4)):
            host.step()
        if chance.random() < 0.05 and host.processes:
            host.die(chance.choice(list(host.processes)))
        if chance.random() < 0.03 and len(gone) < 3 and lane not in gone:
            gone.add(lane)
            host.dispatch.closed(1, lane)
            unwanted |= {row for row in host.rows if not host.dispatch.submissions.is_left(row[0])}
    for lane in set(range(4)) - gone:
        host.wait(lane)
    for _ in range(20_000):
        if not host.step():
            break
    assert host.rows.keys() - unwanted <= host.outcome.keys()
    assert set(host.outcome.values()) == {"answered"}, "nobody but an outsider has killed anything"
    assert not host.dispatch.keyed.residency.are_waiting


# The rules, one by one.


def test_one_load_for_all_who_ask_and_rows_of_loaded_models_go_before_loads():
    host = Host(budget=MemoryBudget(2 * SIZE), lanes=5)
    for lane in range(5):
        host.submit(("a", 2), ("b", 1), lane=lane)
        host.wait(lane)
    host.settle()
    assert sorted(model for _, model in host.loads) == ["a", "b"]


def test_a_key_stays_with_its_copy():
    host = Host(copies=2, budget=MemoryBudget(100 * SIZE))
    names = [f"m{n}" for n in range(6)]
    for _ in range(20):
        host.submit(*((name, 2) for name in names))
        host.wait()
        host.settle()
        host.dispatch.submissions.goes((1, 0))
    assert len(host.loads) == 6
    assert {copy for copy, _ in host.loads} == {0, 1}


def test_the_model_that_was_needed_longest_ago_goes():
    host = Host(budget=MemoryBudget(2 * SIZE))
    host.wait()
    for name in ["a", "b", "a", "c", "a", "b"]:
        host.submit((name, 1))
        host.settle()
    assert [model for _, model in host.loads] == ["a", "b", "c", "b"]


def test_a_model_that_kills_its_process_when_called_costs_its_neighbours_no_row():
    host = Host(budget=MemoryBudget(30 * SIZE))
    good = [(f"good{n}", 8) for n in range(20)]
    host.submit(*good[:10], ("bad", ["kill"] * 4), *good[10:])
    host.wait()
    host.settle()
    assert host.kinds() == {*((name, "answered") for name, _ in good), ("bad", CRASHED)}
    assert "the process of the model of key 'bad' died with these rows: signal 11" in host.why.values()


@pytest.mark.parametrize("copies", [1, 2])
def test_a_model_that_has_killed_its_process_twice_is_loaded_apart_and_costs_nobody_a_load(copies):
    host = Host(budget=MemoryBudget(30 * SIZE), copies=copies)
    good = [(f"good{n}", 8) for n in range(6)]
    host.wait()
    host.submit(*good, ("bad", ["kill"]))
    host.settle()
    assert host.loads.count((copies, "bad")) >= 1, "beside those that others share"
    assert [copy for copy, model in host.loads if model == "bad"][:KILLS] != [copies] * KILLS
    host.submit(*good)
    host.settle()
    before = list(host.loads)
    for _ in range(3):
        host.submit(*good, ("bad", ["kill"]), ("bad2", 1))
        host.settle()
    later = host.loads[len(before) :]
    assert {model for _, model in later} == {"bad", "bad2"}
    assert {copy for copy, model in later if model == "bad"} == {copies}
    assert {copy for copy, model in later if model == "bad2"} <= set(range(copies))


def test_of_the_models_that_are_apart_one_is_loaded_at_a_time():
    host = Host(budget=MemoryBudget(30 * SIZE))
    host.wait()
    for _ in range(2):
        host.submit(("bad1", ["kill"]), ("bad2", ["kill"]), ("good", 2))
        host.settle()
    host.submit(("bad1", 3), ("bad2", 3), ("good", 2))
    host.settle()
    room = host.dispatch.keyed.residency.room
    assert room.models == [1, 1]
    assert host.kinds() == {*((bad, how) for bad in ("bad1", "bad2") for how in (CRASHED, "answered")), ("good", "answered")}


@pytest.mark.parametrize("name", ["crash", "raise", "hang"])
def test_a_model_that_cannot_be_loaded_is_tried_three_times_and_fails_its_rows(name):
    host = Host(budget=MemoryBudget(30 * SIZE))
    host.submit(("a", 6), (name, 3), ("b", 6))
    host.wait()
    host.settle()
    assert host.kinds() == {("a", "answered"), ("b", "answered"), (name, LOADING)}
    assert [model for _, model in host.loads].count(name) == ATTEMPTS + (name == "crash" and host.deaths > ATTEMPTS)
    (message,) = set(host.why.values())
    assert f"the model of key {name!r} could not be loaded, in {ATTEMPTS} attempts: " in message
    assert {"crash": "died: signal 11", "raise": f"ValueError: no {name}", "hang": LATE}[name] in message
    host.submit((name, 1))
    host.settle()
    assert [model for _, model in host.loads].count(name) <= ATTEMPTS + 1, "it is not tried again"


def test_a_model_over_the_budget_fails_its_rows_with_both_numbers():
    host = Host(budget=MemoryBudget(3_000_000), seed=1)
    host.submit(("a", 2))
    host.wait()
    host.settle()
    host.processes[0].models.add("x")
    host.submit(("x", 2))
    host.processes[0].models.remove("x")
    (load,) = host.decide()
    assert load == LoadNow("x", 0)
    host.processes[0].loading.clear()
    host.processes[0].models.add("x")
    host.dispatch.keyed.loaded(0, "x", 5_200_000_000, 0.1)
    host.settle()
    assert host.kinds() == {("a", "answered"), ("x", OUT_OF_MEMORY)}
    told = "the model of key 'x' takes 5.2 GB, and the budget is 3 MB (memory_budget)"
    assert all(message.startswith(told) for message in host.why.values())


def test_a_size_that_was_measured_beside_other_loads_refuses_nothing_before_it_was_measured_alone():
    host = Host(budget=MemoryBudget(50))
    host.submit(("first", 1))
    host.wait()
    host.settle()
    host.dispatch.keyed.files.update({"a": SIZE, "b": SIZE})
    host.submit(("a", 1), ("b", 1))
    assert host.decide() == [LoadNow("a", 0), LoadNow("b", 0)]
    for name in "ab":  # each saw both grow
        host.processes[0].loading.remove(name)
        host.processes[0].models.add(name)
        host.dispatch.keyed.loaded(0, name, 60, 0.1)
    host.settle()
    assert host.kinds() == {("first", "answered"), ("a", "answered"), ("b", "answered")}
    assert sorted(model for _, model in host.loads) == ["a", "a", "b", "b", "first"]


def test_a_death_with_a_batch_and_a_load_is_charged_to_neither_before_each_has_run_alone():
    host = Host(budget=MemoryBudget(30 * SIZE))
    host.submit(("a", 1))
    host.wait()
    while not host.processes or not host.processes[0].models:  # it starts, and loads
        host.step()
    host.submit(("b", 1))
    host.decide()
    assert host.processes[0].batches
    assert host.processes[0].loading == ["b"]
    host.die(0)
    assert host.dispatch.keyed.residency.uses["b"].failed == 0
    host.settle()
    assert host.kinds() == {("a", "answered"), ("b", "answered")}


def test_a_process_that_leaks_is_started_anew_when_it_is_idle_and_no_row_is_lost():
    host = Host(budget=MemoryBudget(30 * SIZE), max_size=1)
    host.submit(("a", 3))
    host.wait()
    while not host.processes or not host.processes[0].batches:
        host.step()
    host.dispatch.keyed.leaks(0, Leaks(3_000_000_000, 1_000_000_000))
    assert not any(isinstance(command, KillCopy) for command in host.decide()), "it is not idle"
    for batch in list(host.processes[0].batches):
        host.run(0, host.processes[0], batch)
    (kill,) = host.decide()
    assert isinstance(kill, KillCopy)
    assert "it holds 3 GB, where 1 GB are expected" in kill.why
    assert host.settle()
    assert host.kinds() == {("a", "answered")}
    assert host.deaths == 1


def test_rows_wait_no_longer_than_patience_for_a_model_while_another_is_never_idle():
    host = Host(budget=MemoryBudget(SIZE), lanes=2)
    host.wait(0)
    host.wait(1)
    host.submit(("busy", 4))
    host.settle()
    host.submit(("busy", 4))
    host.decide()
    host.submit(("other", 1), lane=1)
    for _ in range(20):  # it always has rows
        host.decide()
        host.submit(("busy", 4))
        host.decide()
        if host.processes[0].batches:
            host.run(0, host.processes[0], host.processes[0].batches[0])
        host.now += PATIENCE / 10
    host.settle()
    assert [model for _, model in host.loads][:2] == ["busy", "other"]
    first_other = next(index for index, row in enumerate(host.outcome) if host.rows[row][0] == "other")
    assert first_other < 70


def test_a_row_that_needs_a_fresh_process_gets_one_with_its_model():
    host = Host(budget=MemoryBudget(30 * SIZE), copies=2)
    host.submit(("a", 2), ("b", 2), ("c", 2))
    host.wait()
    host.settle()
    host.submit(("a", ["ok", "fill"]), ("b", 2), ("c", 6))
    host.settle()
    assert host.kinds() == {*((name, "answered") for name in "abc"), ("a", "failed")}
    assert host.deaths == 1


def test_ten_thousand_models_that_wait_cost_a_decision_nothing():
    host = Host(budget=MemoryBudget(2 * SIZE))
    host.submit(("first", 1))
    host.wait()
    host.settle()
    host.submit(*((f"m{n}", 1) for n in range(10_000)))
    host.decide()
    looked = []
    keyed = host.dispatch.keyed
    inner = keyed.is_in_use
    keyed.residency.in_use = lambda model: looked.append(model) or inner(model)
    for _ in range(100):
        host.decide()
    assert looked == [], "nothing has happened"
    for _ in range(100):
        host.step()
    assert len(looked) < 1000
