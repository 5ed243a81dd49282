"""Hosts that hold many models by name, with real processes: what is in memory, and what becomes of models that misbehave."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest

import penstock as ps
from penstock.errors import ModelCrashError, ModelLoadError, StepError
from penstock.failures import CRASHED, LOADING, OUT_OF_MEMORY, Handling
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.models import freed_memory
from penstock.models.host_address import end_hosts, run_folder
from penstock.models.place import Surroundings
from penstock.models.uses import ATTEMPTS
from penstock.observe.metrics import Metrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a script: no host imports this file

KILLS = 50  # each costs the start of a process, or of two
PATIENCE = 60  # seconds until a thread counts as hanging
MB = 1 << 20
KEPT = []  # in a model's process: what a handler that leaks holds on to


class FromFile(ps.ModelHandler):
    """A file says what a model does; each load leaves a line in a log, with its process."""

    def __init__(self, folder, **settings):
        super().__init__(large_model=True, **settings)
        self.folder = str(folder)
        self.path = ""

    def update_model_path(self, model_path):
        self.path = model_path

    def model_id(self):
        return os.path.basename(self.path)

    def load_model(self):
        with open(self.path) as file:
            told = json.load(file)
        log(self.folder, told["name"])
        attempt = loads(self.folder).count(told["name"])
        if attempt <= told.get("raises", 0):
            raise OSError(f"the disk under {told['name']} is gone")
        if told.get("flaky") and fails(told["name"], attempt):
            raise OSError(f"the disk under {told['name']} is slow")
        if told.get("hangs"):
            time.sleep(600)
        if attempt <= told.get("killed", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if told.get("crashes"):
            signal.raise_signal(signal.SIGSEGV)  # in this thread, as a crash is: a signal to the process may reach another
        model = {**told, "array": np.ones(told.get("bytes", 1000) // 8)}
        if told.get("leaks"):
            KEPT.append(model)
        return model

    def run_inference(self, batch, model, inference_args=None):
        if model.get("kills"):
            signal.raise_signal(signal.SIGSEGV)  # in this thread, as a crash is: a signal to the process may reach another
        return [(model["name"], row, os.getpid()) for row in batch]


def fails(name, attempt):
    """Half of the time, and the same every time that this test runs."""
    return random.Random(f"{name} {attempt}").random() < 0.5


def log(folder, name):
    with open(os.path.join(folder, "loads"), "a") as file:
        file.write(f"{name} {os.getpid()}\n")


def loads(folder, of=0):
    """The names of models, in the order of their loads; or the processes."""
    path = os.path.join(folder, "loads")
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return [line.split()[of] for line in file]


class Got(NamedTuple):
    ticket: Ticket
    answers: list

    @property
    def failures(self):
        return self.ticket.failures


class Host:
    """Models in a folder, and a session whose host has them."""

    def __init__(self, folder, *, budget=None, most=None, load_timeout=600.0, handling=None, **settings):
        self.folder = folder
        self.run = run_folder(f"keyed-{os.getpid()}-{time.monotonic_ns()}")
        self.handling = handling
        handler = ps.KeyedModelHandler.from_pattern(
            str(folder / "{key}.json"), FromFile(folder, **settings), memory_budget=budget, max_models_per_worker_hint=most
        )
        self.metrics = Metrics()
        around = Surroundings(folder=self.run, load_timeout=load_timeout)
        self.sessions = ProcessSessions(self.metrics, around)
        self.session = self.sessions.open("step", InferenceSpec.of(handler, handling=handling))
        self.reports = []
        reported = self.session.reported
        self.session.reported = lambda report: (self.reports.append(report), reported(report))

    def model(self, *names, **told):
        for name in names:
            (self.folder / f"{name}.json").write_text(json.dumps({"name": name, **told}))

    def ask(self, *parts):
        """Rows for several models: (name, rows)."""
        rows, told = [], []
        for name, own in parts:
            told.append((name, len(rows), len(rows) + len(own)))
            rows += own
        ticket = Ticket(rows, parts=told)
        lane = self.session.join(Caller(), handling=self.handling)
        try:
            lane.submit(ticket)
            return Got(ticket, lane.wait(ticket))
        finally:
            lane.close()

    def names_and_rows(self, *parts):
        return [answer[:2] for answer in self.ask(*parts).answers]

    def close(self):
        self.sessions.close()
        end_hosts(self.run)


@pytest.fixture
def hosts(tmp_path):
    made = []

    def make(**settings):
        made.append(Host(tmp_path, **settings))
        return made[-1]

    yield make
    for host in made:
        host.close()


def pairs(names, rows):
    return [(name, row) for name in names for row in rows]


def broker_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


# What is in memory.


def test_many_models_in_a_small_budget_answer_rightly(hosts):
    host = hosts(most=3)
    names = [f"k{n}" for n in range(12)]
    host.model(*names)
    for _ in range(3):
        got = host.ask(*((name, [1, 2]) for name in names))
        assert [answer[:2] for answer in got.answers] == pairs(names, [1, 2])
        assert {got.ticket.model_id, *got.ticket.other_ids.values()} == {f"{name}.json" for name in names}
    assert set(loads(host.folder)) == set(names)
    assert len(loads(host.folder)) > 12, "three at a time"
    assert len(set(loads(host.folder, of=1))) == 1
    uses = [(name, use) for report in host.reports for name, use in report.models.items()]
    assert sum(use.loads for _, use in uses) == len(loads(host.folder))
    assert sum(use.unloads for _, use in uses) >= len(loads(host.folder)) - 3
    assert {name for name, _ in uses} == set(names)


def test_one_load_however_many_ask_and_the_least_recently_used_goes(hosts):
    host = hosts(most=2)
    host.model("a", "b", "c")
    tickets = in_threads(8, lambda n: host.names_and_rows(("a", [n])))
    assert tickets == [[("a", n)] for n in range(8)]
    assert loads(host.folder) == ["a"]
    for name in "bacab":
        host.ask((name, [0]))
    assert loads(host.folder) == ["a", "b", "c", "b"]


def in_threads(count, function, patience=PATIENCE):
    got = [None] * count

    def work(n):
        got[n] = function(n)

    threads = [threading.Thread(target=work, args=[n]) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
        assert not thread.is_alive()
    return got


def test_with_two_copies_each_key_stays_with_one(hosts):
    host = hosts(model_copies=2)
    names, found = [], {}
    while len(set(loads(host.folder, of=1))) < 2 or len(names) < 6:  # one process may be there long before the other
        names.append(f"k{len(names)}")
        host.model(names[-1])
        host.ask((names[-1], [0]))
    for _ in range(10):
        for name, _, pid in host.ask(*((name, [0]) for name in names)).answers:
            found.setdefault(name, set()).add(pid)
    assert all(len(pids) == 1 for pids in found.values())
    assert len(set.union(*found.values())) == 2
    assert loads(host.folder) == names


def test_a_model_larger_than_the_budget_fails_its_rows_with_both_numbers(hosts):
    host = hosts(budget=100 * MB, handling=Handling())
    host.model("small", bytes=10 * MB)
    host.model("huge", bytes=300 * MB)
    got = host.ask(("small", [1, 2]), ("huge", [3, 4]), ("small", [5]))
    assert [answer and answer[:2] for answer in got.answers] == [("small", 1), ("small", 2), None, None, ("small", 5)]
    assert {(at, failure.kind, failure.error_type, failure.group) for at, failure in got.failures.items()} == {
        (at, OUT_OF_MEMORY, "MemoryError", 1) for at in (2, 3)
    }
    assert re.search(r"the model of key 'huge' takes 3\d\d MB", got.failures[2].message)
    assert ", and the budget is 105 MB (memory_budget)" in got.failures[2].message
    assert got.failures[2].model_id == "huge.json"
    assert host.names_and_rows(("small", [1])) == [("small", 1)]


def test_a_model_that_is_larger_than_the_budget_by_itself_is_loaded_once(hosts):
    host = hosts(budget=100 * MB, handling=Handling())
    host.model("first", "beside", bytes=MB)
    host.model("huge", bytes=300 * MB)
    host.ask(("first", [1]))
    got = host.ask(("huge", [2]), ("beside", [3]))
    assert [answer and answer[:2] for answer in got.answers] == [None, ("beside", 3)]
    assert loads(host.folder).count("huge") == 1, "its arrays are its own, whatever is loaded beside it"


def test_a_model_larger_than_the_budget_ends_the_run_where_errors_are_not_handled(hosts):
    host = hosts(budget=50 * MB)
    host.model("huge", bytes=100 * MB)
    with pytest.raises(StepError, match=r"the model of key 'huge' takes 1\d\d MB, and the budget is 52.4 MB"):
        host.ask(("huge", [1]))


# Models that misbehave.


def test_a_model_that_crashes_when_it_is_called_costs_its_neighbours_no_row(hosts):
    host = hosts(handling=Handling(), most=40)
    names = [f"good{n}" for n in range(100)]
    host.model(*names)
    host.model("bad", kills=True)
    got = host.ask(*((name, [1, 2]) for name in names[:50]), ("bad", [1, 2]), *((name, [1, 2]) for name in names[50:]))
    assert [answer[:2] for answer in got.answers if answer is not None] == pairs(names, [1, 2])
    assert {(at, failure.kind) for at, failure in got.failures.items()} == {(100, CRASHED), (101, CRASHED)}
    assert "the process of the model of key 'bad' died with these rows: " in got.failures[100].message


def test_a_model_that_has_killed_its_process_twice_gets_one_of_its_own(hosts, caplog):
    host = hosts(handling=Handling())
    names = [f"good{n}" for n in range(3)]
    host.model(*names)
    host.model("bad", kills=True)
    got = host.ask(*((name, [1]) for name in names), ("bad", [1]))
    assert [failure.kind for failure in got.failures.values()] == [CRASHED]
    assert "the model of key 'bad' has killed 2 processes, and gets one of its own" in caplog.text
    home = host.ask(*((name, [1]) for name in names)).answers[0][2]
    before = loads(host.folder)
    for _ in range(2):
        got = host.ask(("bad", [1]), *((name, [1]) for name in names))
        assert {answer[2] for answer in got.answers if answer is not None} == {home}, "their process lives"
        assert [failure.kind for failure in got.failures.values()] == [CRASHED]
    assert set(loads(host.folder)[len(before) :]) == {"bad"}, "nobody else was loaded again"


def test_a_model_that_crashes_ends_the_run_where_errors_are_not_handled(hosts):
    host = hosts()
    host.model("good")
    host.model("bad", kills=True)
    with pytest.raises(ModelCrashError, match="the process of the model of key 'bad' died with these rows"):
        host.ask(("good", [1]), ("bad", [1]))


def test_a_load_that_raises_twice_is_tried_again(hosts, caplog):
    host = hosts()
    host.model("good")
    host.model("shy", raises=2)
    assert host.names_and_rows(("good", [1]), ("shy", [1])) == [("good", 1), ("shy", 1)]
    assert loads(host.folder).count("shy") == 3
    assert "the model of key 'shy' could not be loaded, attempt 1 of 3: OSError: the disk under shy is gone" in caplog.text


def test_loads_that_fail_half_of_the_time_fail_the_rows_of_those_that_do_so_three_times(hosts):
    host = hosts(handling=Handling(), most=8)
    names = [f"k{n}" for n in range(60)]
    host.model(*names, flaky=True)
    lost = {name for name in names if all(fails(name, attempt) for attempt in (1, 2, 3))}
    assert 3 < len(lost) < 20
    got = host.ask(*((name, [name]) for name in names))
    assert [answer and answer[:2] for answer in got.answers] == [None if name in lost else (name, name) for name in names]
    assert {(names[at], failure.kind, failure.attempts) for at, failure in got.failures.items()} == {
        (name, LOADING, 3) for name in lost
    }
    tries = {name: next((n for n in (1, 2) if not fails(name, n)), 3) for name in names}
    assert Counter(loads(host.folder)) == tries, "none is tried once more than that"


def test_a_load_that_always_raises_fails_its_rows(hosts):
    host = hosts(handling=Handling())
    host.model("good")
    host.model("bad", raises=99)
    got = host.ask(("bad", [1, 2]), ("good", [1]))
    assert got.answers[2][:2] == ("good", 1)
    failure = got.failures[0]
    assert (failure.kind, failure.error_type, failure.attempts) == (LOADING, "OSError", 3)
    assert (failure.message, failure.model_id, failure.step) == ("the disk under bad is gone", "bad.json", "step")
    assert 'raise OSError(f"the disk under' in failure.traceback
    assert got.failures.keys() == {0, 1}
    assert host.ask(("bad", [3])).failures[0].kind == LOADING
    assert loads(host.folder).count("bad") == 3, "it is not tried again"


def test_a_load_that_raises_ends_the_run_where_that_is_not_handled(hosts):
    for handling in (None, Handling(exc_class=ValueError)):
        host = hosts(handling=handling)
        host.model("bad", raises=99)
        with pytest.raises(
            ModelLoadError, match="the model of key 'bad' could not be loaded, in 3 attempts: OSError"
        ) as got:
            host.ask(("bad", [1]))
        assert isinstance(got.value.__cause__, OSError)
        assert 'raise OSError(f"the disk under' in "".join(got.value.__notes__)


@pytest.mark.parametrize("how", ["crashes", "hangs"])
def test_a_load_that_crashes_or_hangs_fails_its_rows_alone(hosts, how):
    host = hosts(load_timeout=2.0 if how == "hangs" else 60.0, handling=Handling())
    names = [f"good{n}" for n in range(5)]
    host.model(*names)
    host.model("bad", **{how: True})
    got = host.ask(("bad", [1]), *((name, [1]) for name in names))
    assert [answer and answer[:2] for answer in got.answers] == [None, *pairs(names, [1])]
    assert (got.failures[0].kind, got.failures[0].error_type) == (LOADING, "ModelLoadError")
    why = {"crashes": "the process that loaded it died", "hangs": "it took longer than the 2 s that loading may take"}[how]
    assert f"the model of key 'bad' could not be loaded, in 3 attempts: {why}" in got.failures[0].message


def test_a_load_whose_process_is_killed_more_often_than_a_load_may_fail_loses_no_row(hosts):
    host = hosts(handling=Handling())
    host.model("good")
    host.model("unlucky", killed=ATTEMPTS + 1)
    got = host.ask(("unlucky", [1]), ("good", [1]))
    assert [answer and answer[:2] for answer in got.answers] == [("unlucky", 1), ("good", 1)]
    assert loads(host.folder).count("unlucky") == ATTEMPTS + 2


def test_kills_from_outside_lose_no_row(hosts):
    host = hosts(most=4)
    names = [f"k{n}" for n in range(10)]
    host.model(*names)
    over = threading.Event()
    kills = []  # processes that were killed, or whose broker was

    def kill():
        while len(kills) < KILLS and not over.is_set():
            pids = loads(host.folder, of=1)
            if not pids or pids[-1] in kills:
                over.wait(0.01)
                continue
            victim = int(pids[-1]) if len(kills) % 5 else broker_of_or(pids[-1])
            if victim:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            kills.append(pids[-1])
        over.set()

    def ask(n):
        turn = 0
        while not over.is_set():
            asked = [names[(n + turn + k) % 10] for k in range(5)]
            got = host.names_and_rows(*((name, [turn, n]) for name in asked))
            assert got == pairs(asked, [turn, n])
            turn += 1
        return turn > 0

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert in_threads(4, ask, patience=100) == [True] * 4
    finally:
        over.set()
        killer.join(PATIENCE)
    assert len(set(kills)) == KILLS


def broker_of_or(pid):
    try:
        return broker_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None


# Memory.


def rss(pid):
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_models_that_were_unloaded_is_free(hosts):
    host = hosts(most=2)
    names = [f"k{n}" for n in range(30)]
    host.model(*names, bytes=20 * MB)
    for name in names:
        host.ask((name, [1]))
    (pid,) = set(loads(host.folder, of=1))
    assert rss(pid) < 300 * MB, "600 MB were loaded"


def test_a_process_whose_handler_keeps_its_models_is_started_anew(hosts, caplog):
    caplog.set_level(logging.WARNING)
    host = hosts(most=2)
    names = [f"k{n}" for n in range(30)]
    host.model(*names, bytes=20 * MB, leaks=True)
    for name in names:
        assert host.names_and_rows((name, [1])) == [(name, 1)]
    assert len(set(loads(host.folder, of=1))) >= 2
    assert "something keeps the memory of models that were unloaded: it holds " in caplog.text
    assert "it is started again, restart 1" in caplog.text


class Memory:
    """Of a process: what is there besides models, and what of an unloaded model stays."""

    def __init__(self, monkeypatch, besides=50 * MB, stays=0.0, frees=0.0):
        self.held, self.stays, self.frees, self.given_back = besides, stays, frees, 0
        monkeypatch.setattr(freed_memory, "trim", self.give_back)
        self.now = 0.0
        self.watch = freed_memory.FreedMemory(lambda: int(self.held), clock=lambda: self.now)
        self.garbage = 0

    def load(self, model, size, imports=0):
        self.watch.loads()
        self.held += size + imports
        self.watch.loaded(model, size + imports)

    def unload(self, model, size):
        self.now += 0.01
        self.held -= (1 - self.stays) * size
        self.garbage += self.frees * size
        return self.watch.unloaded(model)

    def give_back(self):
        self.given_back += 1
        self.held -= self.garbage
        self.garbage = 0


def test_a_leak_is_what_grows_and_does_not_go_away(monkeypatch):
    memory = Memory(monkeypatch, stays=1.0)
    found = []
    for n in range(60):
        memory.load(n, 10 * MB)
        found.append(memory.unload(n, 10 * MB))
    (held, expected), *_ = [leak for leak in found if leak is not None]
    assert held > expected + 32 * MB
    assert found.index((held, expected)) < 20
    assert memory.given_back < 30, "not after each of them"


def test_libraries_that_come_with_a_model_or_a_call_and_garbage_are_no_leak(monkeypatch):
    memory = Memory(monkeypatch, stays=1.0, frees=1.0)
    memory.load("first", 10 * MB, imports=500 * MB)
    memory.held += 2000 * MB  # what the first call brought
    found = [memory.unload("first", 10 * MB)]
    for n in range(1000):
        memory.load(n, 10 * MB)
        found.append(memory.unload(n, 10 * MB))
    assert found == [None] * 1001
    assert 1 < memory.given_back < 100
