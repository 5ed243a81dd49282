"""Where a model lives that nobody has placed: the first copy is loaded alone and measured, and decides for all workers."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import penstock as ps
from adding import Adds, Slices, loads
from penstock.errors import ModelLoadError
from penstock.inference.lane import Caller
from penstock.inference.model import ModelCopy
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.models.decision import decided
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a script: no worker imports this file

PATIENCE = 20  # seconds until a thread or a process counts as hanging


@pytest.fixture
def worker(tmp_path):
    """Makes what a worker process has: its sessions, in the folder of one run."""
    made = []

    def make(workers=4):
        made.append(ProcessSessions(Metrics(), Surroundings(folder=str(tmp_path / "run"), workers=workers, cores=2)))
        return made[-1]

    yield make
    for sessions in made:
        sessions.close()


@pytest.fixture
def memory(monkeypatch):
    """Says how much memory is available."""

    def there_is(free):
        for module in ("sessions", "first_copy"):
            monkeypatch.setattr(f"penstock.inference.{module}.available_bytes", lambda: free)

    return there_is


def ask(sessions, handler, rows, step="model"):
    lane = sessions.open(step, InferenceSpec.of(handler)).join(Caller())
    try:
        lane.submit(ticket := Ticket(list(rows)))
        return lane.wait(ticket)
    finally:
        lane.close()


class Big(Adds):
    """Takes 256 MB: more than Python's allocator would have lying about, or other tests have left to be freed."""

    def load_model(self):
        super().load_model()
        return np.ones(32 << 20)

    def run_inference(self, batch, model, inference_args=None):
        return [(row, os.getpid()) for row in batch]


def test_copies_that_do_not_fit_become_one_host(worker, memory, tmp_path, caplog):
    memory(400 << 20)
    workers = [worker(), worker()]
    with caplog.at_level(logging.WARNING):
        answers = [ask(sessions, Big(tmp_path / "loads"), range(5)) for sessions in workers]
    assert [[row for row, _ in each] for each in answers] == [list(range(5))] * 2
    pids = {pid for each in answers for _, pid in each}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert [*map(int, loads(tmp_path / "loads"))] == [os.getpid(), *pids]  # the first was measured
    (warning,) = [record.getMessage() for record in caplog.records if "model host" in record.getMessage()]
    assert re.search(r"step 'model': one model host for all workers: a copy takes 0\.\d+ GB, and 4 workers", warning)
    for sessions in workers:
        (note,) = [note for key, note in sessions.drain_metrics().notes.items() if key.name == "model_place"]
        assert "one host for all workers: a copy takes" in note


class FromFile(Big):
    """Its file is of a given size; loading waits for others, if there is a barrier."""

    def __init__(self, folder, size, together=None, **settings):
        super().__init__(folder / "loads", **settings)
        self.file, self.together = folder / "weights", together
        with open(self.file, "wb") as file:
            file.truncate(size)

    def model_files(self):
        return [str(self.file)]

    def load_model(self):
        if self.together is not None:
            self.together.wait(PATIENCE)
        return super().load_model()


def test_copies_of_a_small_model_are_loaded_at_once(worker, memory, tmp_path):
    memory(1 << 30)
    handler = FromFile(tmp_path, 1 << 20, threading.Barrier(2))
    answers = []
    threads = [
        threading.Thread(target=lambda s=sessions: answers.append(ask(s, handler, range(3))), daemon=True)
        for sessions in (worker(), worker())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert answers == [[(row, os.getpid()) for row in range(3)]] * 2


def test_copies_of_a_large_file_are_measured(worker, memory, tmp_path):
    memory(100 << 20)
    answers = [ask(worker(), FromFile(tmp_path, 64 << 20), [1]) for _ in range(2)]
    assert os.getpid() not in {pid for each in answers for _, pid in each}


def test_copies_that_fit_stay_in_the_workers(worker, memory, tmp_path, caplog):
    memory(10 << 30)
    with caplog.at_level(logging.WARNING):
        answers = [ask(worker(), Big(tmp_path / "loads"), range(5)) for _ in range(2)]
    assert answers == [[(row, os.getpid()) for row in range(5)]] * 2
    assert len(loads(tmp_path / "loads")) == 2
    assert not caplog.records


def test_a_single_worker_is_never_moved(worker, memory):
    memory(0)
    assert ask(worker(workers=1), Big(), [1]) == [(1, os.getpid())]


def test_what_the_user_said_is_not_overruled(worker, memory, tmp_path):
    memory(0)
    answers = ask(worker(), Adds(tmp_path / "loads", model_copies=2), range(5))
    assert answers == list(range(1000, 1005))
    assert 1 <= len(loads(tmp_path / "loads")) <= 2


class FailsFirst(Big):
    """Its first load raises."""

    def load_model(self):
        model = super().load_model()
        if len(loads(Path(self.log))) == 1:
            raise OSError("not yet")
        return model


def test_a_first_copy_that_cannot_be_loaded_decides_nothing(worker, memory, tmp_path):
    memory(10 << 30)
    first, second = worker(), worker()
    with pytest.raises(ModelLoadError, match="not yet"):
        ask(first, FailsFirst(tmp_path / "loads"), [1])
    for sessions in (second, first):
        assert ask(sessions, FailsFirst(tmp_path / "loads"), [1]) == [(1, os.getpid())]


class DiesFirst(Adds):
    """Its first load kills the process."""

    def load_model(self):
        model = super().load_model()
        if len(loads(Path(self.log))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return model


def test_workers_wait_for_no_copy_whose_process_has_died(tmp_path):
    rows = ps.Pipeline(workers=2) | ps.Read(Slices(1000)) | ps.RunInference(DiesFirst(tmp_path / "loads"))
    assert rows.collect() == list(range(1000, 2000))
    assert len(loads(tmp_path / "loads")) in (2, 3)  # a worker that comes late may find no rows left


def test_no_copy_is_loaded_where_no_row_comes(tmp_path):
    rows = ps.Pipeline(workers=2) | ps.Read(Slices(1000)) | ps.Filter(lambda row: False)
    assert (rows | ps.RunInference(Adds(tmp_path / "loads"))).collect() == []
    assert not (tmp_path / "loads").exists()


def test_workers_that_begin_together_measure_one_copy(memory, worker, tmp_path):
    memory(100 << 20)
    workers = [worker() for _ in range(4)]
    answers = []
    threads = [
        threading.Thread(target=lambda s=sessions: answers.append(ask(s, Big(tmp_path / "loads"), range(3))))
        for sessions in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [[row for row, _ in each] for each in answers] == [[0, 1, 2]] * 4
    assert len(loads(tmp_path / "loads")) == 2


class KeepsIt(Big):
    """Takes 56 MB, in pieces that the C library keeps for later, and holds on to them and to a lock."""

    def load_model(self):
        self.model, self.lock = [np.ones(7000) for _ in range(1000)], threading.Lock()
        return self.model


def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, and glibc's malloc")
def test_a_copy_that_is_dropped_leaves_nothing_behind(worker, memory):
    memory(0)
    sessions, before = worker(), held()
    assert os.getpid() not in {pid for _, pid in ask(sessions, KeepsIt(), range(5))}
    assert held() - before < 30e6


class Forks(Adds):
    """Loading leaves a child of its process behind, which lives until a pipe is closed."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def load_model(self):
        if os.fork() == 0:
            os.close(self.pipe[1])
            os.read(self.pipe[0], 1)
            os._exit(0)
        return super().load_model()


def test_a_child_that_loading_has_forked_makes_no_worker_wait(worker):
    pipe, answers = os.pipe(), []
    other = threading.Thread(target=lambda: answers.append(ask(worker(), Forks(pipe), [1])), daemon=True)
    try:
        assert ask(worker(), Forks(pipe), [1]) == [1001]
        other.start()
        other.join(PATIENCE)
        assert answers == [[1001]]
    finally:
        os.close(pipe[1])
        for _ in range(1 + len(answers)):
            os.wait()
        os.close(pipe[0])


def test_a_load_that_has_killed_many_workers_is_not_tried_again(worker, tmp_path):
    """Else each split would have its tries, one after the other."""
    for _ in range(8):
        if (child := os.fork()) == 0:
            decided(str(tmp_path / "run"), "step model", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        os.waitpid(child, 0)
    with pytest.raises(ModelLoadError, match=r"step 'model': 8 workers, one after the other, died while they loaded its mo"):
        ask(worker(), Adds(tmp_path / "loads"), [1])
    assert not loads(tmp_path / "loads")


class Takes(Adds):
    """Says what it takes of a memory that is counted here. Both are the class's: a copy of the handler is loaded."""

    free = 0
    size = 0

    def load_model(self):
        Takes.free -= self.size
        return 1000


@pytest.mark.parametrize(("sizes", "hosts"), [((14, 14), 1), ((9, 9), 0), ((14, 5), 0), ((14, 5, 5), 1)])
def test_copies_of_several_models_have_one_budget(worker, monkeypatch, sizes, hosts):
    """The first process has placed them all before another loads any: nothing of those copies is seen in what is free."""
    monkeypatch.setattr(Takes, "free", 100)
    for module in ("sessions", "first_copy"):
        monkeypatch.setattr(f"penstock.inference.{module}.available_bytes", lambda: Takes.free)
    monkeypatch.setattr(ModelCopy, "bytes", property(lambda copy: copy.handler.size))
    first, second = worker(), worker()
    for sessions in (first, second):
        for at, size in enumerate(sizes):
            handler = Takes()
            handler.size = size
            sessions.open(f"step {at}", InferenceSpec.of(handler))
    for sessions in (first, second):
        notes = [note for key, note in sessions.drain_metrics().notes.items() if key.name == "model_place"]
        assert len(notes) == hosts


def test_metrics_count_no_rows_where_none_come():
    rows = ps.Pipeline(workers=2) | ps.Read(Slices(1000)) | ps.Filter(lambda row: False)
    (rows | "model" >> ps.RunInference(Adds())).collect()
    assert rows.pipeline.result.metrics.by_step() == {"model": {"num_inferences": 0}}


def test_a_service_is_not_measured():
    class Service(ps.RemoteModelHandler):
        def create_client(self):
            return 1

        def request(self, batch, client, inference_args=None):
            return batch

    p = ps.Pipeline(workers=4)
    p | ps.Create(range(10)) | ps.RunInference(Service(namespace="x"))
    assert "measured" not in p.explain()
