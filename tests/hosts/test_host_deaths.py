"""Breaking model hosts: what is killed, what hangs, what is left of it, and who may come in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import EngineError, ModelCrashError, ModelLoadError, ModelLostError, ModelTimeoutError, StepError
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.models import host_address
from penstock.models.host_address import Address, end_hosts, make_private, run_folder, same_user
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a script: no host imports this file

KILLS = int(os.environ.get("PENSTOCK_TEST_KILLS", "40"))  # 200 for a long night
MARK = "PENSTOCK_TEST_MARK"


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    """The processes that this test has started, wherever they were born. After it there are none, and nothing of theirs."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    folders, shared_memory = run_folders(), set(os.listdir("/dev/shm"))

    def find(what=""):
        return [pid for pid in pids() if what in command_line(pid) and f"{MARK}={mark}" in environment(pid)]

    yield find
    wait_until(lambda: not find(), 5)
    wait_until(lambda: not abandoned(run_folders() - folders), 5)
    assert not {name for name in set(os.listdir("/dev/shm")) - shared_memory if "penstock" in name}


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def command_line(pid):
    return read_process(pid, "cmdline")


def environment(pid):
    return read_process(pid, "environ")  # of a zombie: empty


def read_process(pid, what):
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def run_folders():
    """The folders of all runs of this user that are there now."""
    base = os.path.dirname(run_folder("any"))
    return {os.path.join(base, name) for name in os.listdir(base)} if os.path.isdir(base) else set()


def abandoned(folders):
    """Those that are still there, and belong to no process: others may be running pipelines too."""
    lines = [command_line(pid) for pid in pids()]
    return {folder for folder in folders if os.path.exists(folder) and not any(folder in line for line in lines)}


def wait_until(condition, seconds):
    """Look again and again until it is so; the tests' own clock, for things that other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        threading.Event().wait(0.02)


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


class Slices(ps.Source):
    """Many small splits, so that every worker has some at any time."""

    def __init__(self, rows, size=500):
        self.rows, self.size = rows, size

    def splits(self, goal):
        return [range(start, min(start + self.size, self.rows)) for start in range(0, self.rows, self.size)]

    def read(self, split):
        yield list(split)


class Triples(ps.ModelHandler):
    """Three times the row. Loads and batches leave a line each in a folder."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = str(folder)

    def load_model(self):
        self.note("loads", os.getpid())
        return 3

    def run_inference(self, batch, model, inference_args=None):
        return [row * model for row in batch]

    def note(self, name, what):
        with open(os.path.join(self.folder, name), "a") as file:
            file.write(f"{what}\n")


class Unhurried(Triples):
    """Takes its time until a file `enough` is there."""

    def run_inference(self, batch, model, inference_args=None):
        if not os.path.exists(os.path.join(self.folder, "enough")):
            self.note("batches", "")
            threading.Event().wait(0.004)
        return super().run_inference(batch, model, inference_args)


@contextlib.contextmanager
def killing(victims, folder, times, seed, kinds):
    """Meanwhile that many processes are killed at random; then the model hurries. Yields what was killed.

    Never more than three in a row: then it waits for more batches than one worker has in flight, so that everybody gets
    some answers. What is never answered is given up in the end, as it should be.
    """
    chance, kills, done = random.Random(seed), [], threading.Event()

    def killer():
        before, in_a_row = 0, 0
        while len(kills) < times and not done.wait(chance.uniform(0.02, 0.3)):
            batches = len(lines_of(folder / "batches"))
            if batches >= before + 40:
                before, in_a_row = batches, 0
            kind = chance.choice(kinds)
            found = victims(kind)
            if found and in_a_row < 3:
                kill(chance.choice(found))
                kills.append(kind)
                in_a_row += 1
        (folder / "enough").touch()

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        yield kills
    finally:
        done.set()
        thread.join()


BROKER, MODEL, WORKER = "penstock.models.broker:main", "penstock.models.server:main", "penstock.engines.local.worker:main"


@pytest.mark.timeout(60 + 3 * KILLS)
@pytest.mark.parametrize("workers", [2])
def test_hosts_killed_at_random(mine, tmp_path, workers):
    rows = 1000 * KILLS
    p = ps.Pipeline(workers=workers)
    handler = Unhurried(tmp_path, model_copies=2, max_batch_size=16)
    with killing(mine, tmp_path, KILLS, seed=KILLS, kinds=[BROKER, MODEL]) as kills:
        answers = (p | ps.Read(Slices(rows)) | ps.RunInference(handler)).collect()
    assert answers == [row * 3 for row in range(rows)]
    assert len(kills) == KILLS, "the run was over too soon"
    assert {BROKER, MODEL} <= set(kills)
    assert p.result.worker_deaths == 0
    assert p.result.metrics.counter("num_inferences") >= 1


@pytest.mark.parametrize("deaths", [2, host_address.STARTS])
def test_a_host_that_is_killed_before_it_is_reached_is_started_again(tmp_path, monkeypatch, deaths):
    started, start = [], Address.start_process

    def and_die(address, spec):
        process = start(address, spec)
        started.append(process)
        if len(started) <= deaths:
            process.kill()
            process.wait()
        return process

    monkeypatch.setattr(Address, "start_process", and_die)
    rows = ps.Pipeline(workers=0) | ps.Create([1, 2]) | ps.RunInference(Triples(tmp_path, large_model=True))
    if deaths == host_address.STARTS:
        with pytest.raises(EngineError, match=f"died {deaths} times before it could be reached"):
            rows.collect()
    else:
        assert rows.collect() == [3, 6]
        assert len(started) == deaths + 1


def test_arrays_survive_the_deaths_of_hosts(mine, tmp_path):
    """Rows in shared memory are submitted again from there, as they were: this model changes its own."""
    import numpy as np

    class Changes(Unhurried):
        def run_inference(self, batch, model, inference_args=None):
            for array in batch:
                array *= model
            return super().run_inference(batch, 1, inference_args)

    rows = ps.Pipeline(workers=0) | ps.Create(range(3000)) | ps.Map(lambda row: np.full(5000, row, dtype=np.int32))
    with killing(mine, tmp_path, 8, seed=3, kinds=[BROKER, MODEL]) as kills:
        handler = Changes(tmp_path, large_model=True, max_batch_size=8)
        answers = (rows | ps.RunInference(handler) | ps.Map(lambda array: (int(array.min()), int(array.max())))).collect()
    assert answers == [(row * 3, row * 3) for row in range(3000)]
    assert len(kills) >= 3


def test_workers_and_hosts_killed_at_random(mine, tmp_path):
    p = ps.Pipeline(workers=2)
    handler = Unhurried(tmp_path, large_model=True, max_batch_size=16)
    with killing(mine, tmp_path, 10, seed=5, kinds=[WORKER, BROKER, MODEL]) as kills:
        rows = (p | ps.Read(Slices(20_000, 100)) | ps.RunInference(handler)).collect()
    assert rows == [row * 3 for row in range(20_000)]
    assert WORKER in kills
    assert p.result.worker_deaths >= 1


def test_a_killed_client_costs_the_others_nothing(mine, tmp_path):
    """The host goes on for the worker that is left; what the dead one had there is forgotten."""
    p = ps.Pipeline(workers=2)
    handler = Unhurried(tmp_path, large_model=True, max_batch_size=16)
    with killing(mine, tmp_path, 2, seed=1, kinds=[WORKER]):
        rows = (p | ps.Read(Slices(10_000, 100)) | ps.RunInference(handler)).collect()
    assert rows == [row * 3 for row in range(10_000)]
    assert p.result.worker_deaths == 2
    assert len(lines_of(tmp_path / "loads")) == 1


STOPS = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_host_deaths import *

sessions = ProcessSessions(Metrics(), Surroundings(folder={folder!r}, workers=2, cores=2))
lane = sessions.open("step", InferenceSpec.of(Waits({log!r}, large_model=True, max_batch_size=1))).join(Caller())
for number in range(400):
    lane.submit(Ticket(["x" * 2000]))
os.kill(os.getpid(), signal.SIGSTOP)
"""


class Waits(Triples):
    """Begins when a file `go` is there."""

    def run_inference(self, batch, model, inference_args=None):
        while not os.path.exists(os.path.join(self.folder, "go")):
            threading.Event().wait(0.01)
        return super().run_inference(batch, model, inference_args)


@pytest.mark.timeout(30, method="signal")
def test_a_client_that_does_not_listen_holds_up_nobody(mine, session, tmp_path):
    """More answers wait for it than its socket holds; the host goes on for the others."""
    code = STOPS.format(tests=os.path.dirname(__file__), folder=str(tmp_path / "run"), log=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code]) as client:
        try:
            wait_until(lambda: read_process(client.pid, "stat").rpartition(")")[2].split()[0] == "T", 20)
            (tmp_path / "go").touch()
            assert ask(session(Waits(tmp_path, large_model=True, max_batch_size=1)), [1]) == [3]
        finally:
            client.kill()
    assert len(lines_of(tmp_path / "loads")) == 1


# The coordinator is killed.

SCRIPT = """
import os, sys, threading
import penstock as ps

class Hangs(ps.ModelHandler):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        open(os.path.join({folder!r}, "hangs"), "w").close()
        {hang}
        return batch

p = ps.Pipeline(workers={workers})
(p | ps.Create(range(5000)) | ps.RunInference(Hangs(model_copies=2, max_batch_size=10))).collect()
"""

HANGS = {"python": "threading.Event().wait(600)", "gil": "import ctypes; ctypes.PyDLL(None).sleep(600)"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("workers", "hang"), [(0, "python"), (2, "gil")])
def test_a_coordinator_that_ends_takes_its_hosts_with_it(mine, tmp_path, workers, hang, number):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path), workers=workers, hang=HANGS[hang]))
    before = run_folders()
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "hangs").exists(), 30)
    (folder,) = {line for line in run_folders() - before if any(line in command_line(pid) for pid in mine(BROKER))}
    assert len(mine(MODEL)) >= 1
    process.send_signal(number)
    process.wait(10)
    wait_until(lambda: not mine(), 5)
    wait_until(lambda: not os.path.exists(folder), 5)


# Who finds a host, and who may.

TOGETHER = """
import sys
import penstock as ps
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

class Counts(ps.ModelHandler):
    def load_model(self):
        with open({log!r}, "a") as log:
            log.write("loaded\\n")
        return 1

    def run_inference(self, batch, model, inference_args=None):
        return [row + model for row in batch]

sessions = ProcessSessions(Metrics(), Surroundings(folder={folder!r}, workers=8, cores=2))
lane = sessions.open("step", InferenceSpec.of(Counts(large_model=True))).join(Caller())
print("ready", flush=True)
sys.stdin.readline()
lane.submit(ticket := Ticket([int(sys.argv[1])]))
print(*lane.wait(ticket), flush=True)
sys.stdin.readline()
lane.close()
sessions.close()
"""


def test_eight_processes_at_the_same_instant_start_one_host(mine, tmp_path):
    code = TOGETHER.format(log=str(tmp_path / "loads"), folder=str(tmp_path / "run"))
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for number in range(8)
    ]
    assert [client.stdout.readline() for client in clients] == ["ready\n"] * 8
    for client in clients:
        client.stdin.write("go\n")
    assert [client.stdout.readline() for client in clients] == [f"{number + 1}\n" for number in range(8)]
    assert len(mine(BROKER)) == len(mine(MODEL)) == 1
    for client in clients:
        client.stdin.write("leave\n")
    for client in clients:
        assert client.wait(20) == 0
        client.stdin.close()
        client.stdout.close()
    assert lines_of(tmp_path / "loads") == ["loaded"]
    wait_until(lambda: not (tmp_path / "run").exists(), 10)  # its last client is gone


@pytest.fixture
def session(tmp_path):
    """Opens a session with a host in a folder, as another engine's process would."""
    opened = []

    def open_one(handler, folder=tmp_path / "run", **around):
        opened.append(ProcessSessions(Metrics(), Surroundings(folder=str(folder), workers=2, cores=2, **around)))
        return opened[-1].open("step", InferenceSpec.of(handler))

    yield open_one
    for sessions in opened:
        sessions.close()
    end_hosts(str(tmp_path / "run"))


def ask(session, rows):
    lane = session.join(Caller())
    try:
        lane.submit(ticket := Ticket(list(rows)))
        return lane.wait(ticket)
    finally:
        lane.close()


def files(folder):
    return sorted(path.suffix for path in folder.iterdir())


def test_what_a_killed_run_left_does_no_harm(mine, session, tmp_path):
    assert ask(session(Triples(tmp_path, large_model=True)), [1, 2]) == [3, 6]
    assert files(tmp_path / "run") == [".lock", ".sock"]
    for pid in mine(BROKER):
        kill(pid)
    wait_until(lambda: not mine(), 5)
    assert files(tmp_path / "run") == [".lock", ".sock"]  # stale
    assert ask(session(Triples(tmp_path, large_model=True)), [3]) == [9]
    assert len(lines_of(tmp_path / "loads")) == 2


def test_a_file_in_the_place_of_the_socket_does_no_harm(session, tmp_path):
    make_private(str(tmp_path / "run"))
    for suffix in ("sock", "lock"):
        (tmp_path / "run" / f"{host_address.name_of('step step')}.{suffix}").write_text("old")
    assert ask(session(Triples(tmp_path, large_model=True)), [1]) == [3]


def test_the_folder_is_for_this_user_alone(session, tmp_path):
    ask(session(Triples(tmp_path, large_model=True)), [1])
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(run_folder("any")).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["open", "link", "link above", "open above", "file"])
def test_a_folder_that_is_not_private_is_refused(session, tmp_path, how):
    folder = tmp_path / "above" / "run"
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    if how == "link above":
        folder.parent.symlink_to(private)
    else:
        folder.parent.mkdir(mode=0o700)
    if how == "open above":
        folder.parent.chmod(0o755)
    elif how == "open":
        folder.mkdir()
        folder.chmod(0o755)
    elif how == "link":
        folder.symlink_to(private)
    elif how == "file":
        folder.touch(mode=0o600)
    with pytest.raises(EngineError, match="is not a private folder of this user .*remove it"):
        ask(session(Triples(tmp_path, large_model=True), folder), [1])
    assert not lines_of(tmp_path / "loads")


INTRUDER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(10)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    print("no way")
else:
    try:
        print("heard", sock.recv(1000))
    except ConnectionResetError:
        print("heard", b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("reachable", [False, True])
def test_another_user_is_refused(session, tmp_path, reachable):
    mine = session(Triples(tmp_path, large_model=True))
    assert ask(mine, [1]) == [3]
    (path,) = (tmp_path / "run").glob("*.sock")
    if reachable:
        path.chmod(0o777)
        for folder in [*path.parents][:-2]:  # up to, not with, /tmp
            folder.chmod(0o755)
    try:
        heard = subprocess.run([sys.executable, "-c", INTRUDER, str(path)], capture_output=True, text=True, timeout=20)
        assert heard.stdout == ("heard b''\n" if reachable else "no way\n"), heard.stderr
    finally:
        for folder in [*path.parents][:-2]:
            folder.chmod(0o700)
    assert ask(mine, [2]) == [6]  # and nobody else is the worse for it


def test_the_user_at_the_other_end_is_asked_of_the_system(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert same_user(ours)
        monkeypatch.setattr(host_address.os, "geteuid", lambda: os.getuid() + 1)
        assert not same_user(ours)


def test_a_client_that_talks_nonsense_does_not_end_the_host(session, tmp_path):
    mine = session(Triples(tmp_path, large_model=True))
    assert ask(mine, [1]) == [3]
    (path,) = (tmp_path / "run").glob("*.sock")
    for nonsense in (b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n" * 100, struct.pack("!IBB", 4, 0, 0) + b"oops"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(nonsense)
    for _ in range(3):
        assert ask(session(Triples(tmp_path, large_model=True)), [2]) == [6]  # who comes later is heard later
    assert len(lines_of(tmp_path / "loads")) == 1


def test_a_host_that_ends_does_not_take_the_next_one_s_socket(session, tmp_path):
    """The host of a load that failed leaves while others are already starting the next."""

    class FailsFirst(Triples):
        def load_model(self):
            super().load_model()
            if len(lines_of(Path(self.folder) / "loads")) == 1:
                raise RuntimeError("scripted")
            return 3

    one, other = (session(FailsFirst(tmp_path, large_model=True)) for _ in range(2))
    with pytest.raises(ModelLoadError, match="scripted"):
        ask(one, [1])
    assert ask(one, [1]) == [3]
    assert ask(other, [2]) == [6]
    assert len(lines_of(tmp_path / "loads")) == 2


# What models do to their process.


def test_a_host_ends_with_its_last_client(mine, tmp_path):
    sessions = ProcessSessions(Metrics(), Surroundings(folder=str(tmp_path / "run"), cores=2))
    assert ask(sessions.open("step", InferenceSpec.of(Triples(tmp_path, large_model=True))), [1]) == [3]
    sessions.close()
    wait_until(lambda: not mine(), 10)
    wait_until(lambda: not (tmp_path / "run").exists(), 5)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_process_is_left_when_collect_returns(mine, descendants, tmp_path, workers):
    rows = ps.Pipeline(workers=workers) | ps.Create(range(100)) | ps.RunInference(Triples(tmp_path, model_copies=2))
    assert rows.collect() == [row * 3 for row in range(100)]
    wait_until(lambda: not mine(), 2)
    wait_until(lambda: not descendants(), 2)  # not even a zombie


class HasChildren(Triples):
    def load_model(self):
        subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait(600)"])
        if os.fork() == 0:  # one that has the model's socket, too
            threading.Event().wait(600)
        return super().load_model()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_children_of_a_model_end_with_it(mine, tmp_path, workers):
    p = ps.Pipeline(workers=workers)
    assert (p | ps.Create([1, 2]) | ps.RunInference(HasChildren(tmp_path, large_model=True))).collect() == [3, 6]
    wait_until(lambda: not mine(), 2)


@pytest.mark.parametrize("victim", [MODEL, BROKER])
def test_the_children_of_a_killed_model_end_with_it(mine, session, tmp_path, victim):
    here = session(HasChildren(tmp_path, large_model=True))
    assert ask(here, [1]) == [3]
    (model,) = map(int, lines_of(tmp_path / "loads"))
    family = [pid for pid in mine() if os.getpgid(pid) == model]
    assert len(family) == 3
    kill(model if victim == MODEL else mine(BROKER)[0])
    wait_until(lambda: not set(family) & set(mine()), 5)
    assert ask(here, [2]) == [6]


@pytest.mark.timeout(20, method="signal")
def test_a_model_whose_child_holds_the_socket_is_seen_to_die(mine, session, tmp_path):
    class DiesOnce(HasChildren):
        def run_inference(self, batch, model, inference_args=None):
            if len(lines_of(Path(self.folder) / "loads")) == 1:
                os._exit(1)
            return super().run_inference(batch, model, inference_args)

    assert ask(session(DiesOnce(tmp_path, large_model=True)), [1]) == [3]


PRINTS = """
import os, sys
import penstock as ps

class Prints(ps.ModelHandler):
    def load_model(self):
        print("loading")
        os.system("echo from a child")
        return None

    def run_inference(self, batch, model, inference_args=None):
        print("rows", *batch)
        return batch

print((ps.Pipeline(workers={workers}) | ps.Create([1, 2]) | ps.RunInference(Prints(large_model=True))).collect())
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_model_prints_appears(workers):
    code = PRINTS.format(workers=workers)
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40).stdout.splitlines()
    assert sorted(output) == ["[1, 2]", "from a child", "loading", "rows 1 2"]


@pytest.mark.parametrize("descriptors", [(0,), (1,), (0, 1, 2)])
def test_a_model_that_closes_its_standard_streams(mine, tmp_path, descriptors):
    class Closes(Triples):
        def load_model(self):
            for number in descriptors:
                os.close(number)
                if number == 1:
                    sys.stdout.close = lambda: None
            return super().load_model()

        def run_inference(self, batch, model, inference_args=None):
            with contextlib.suppress(OSError):
                print("nobody hears this", flush=True)
            return super().run_inference(batch, model, inference_args)

    rows = ps.Pipeline(workers=1) | ps.Create(range(100)) | ps.RunInference(Closes(tmp_path, large_model=True))
    assert rows.collect() == [row * 3 for row in range(100)]
    assert len(lines_of(tmp_path / "loads")) == 1


def test_a_user_whose_standard_streams_are_closed(tmp_path):
    out = tmp_path / "out"
    code = PRINTS.format(workers=1) + f"\nopen({str(out)!r}, 'w').write('done')"
    quiet = code.replace("print((", "str((")
    subprocess.run(["/bin/sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, quiet], timeout=40, check=False)
    assert out.read_text() == "done"


class Breaks(Triples):
    """Does something to its process when it gets row 77."""

    def __init__(self, folder, how, **settings):
        super().__init__(folder, **settings)
        self.how = how

    def run_inference(self, batch, model, inference_args=None):
        if 77 in batch:
            self.note("tries", os.getpid())
            if self.how == "exit":
                os._exit(3)
            if self.how == "hang":
                ctypes.PyDLL(None).sleep(600)  # in C, with the interpreter's lock
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            ctypes.string_at(0)  # a real segmentation fault
        return super().run_inference(batch, model, inference_args)


@pytest.mark.parametrize(
    ("workers", "how", "told"),
    [
        (0, "exit", "exit code 3"),
        (0, "segfault", "signal SIGSEGV"),
        (2, "segfault", "signal SIGSEGV"),
        (0, "kill", "signal SIGKILL .*out-of-memory"),
    ],
)
def test_a_model_that_dies_of_a_row(mine, tmp_path, how, told, workers):
    handler = Breaks(tmp_path, how, large_model=True, max_batch_size=4)
    with pytest.raises(ModelCrashError, match=f"(?s)step 'model': the process died .*{told}.*row: 77"):
        (ps.Pipeline(workers=workers) | ps.Create(range(200)) | "model" >> ps.RunInference(handler)).collect()
    assert 2 <= len(lines_of(tmp_path / "tries")) <= 12  # the search for the row has a bound
    wait_until(lambda: not mine(MODEL), 2)


def test_a_model_that_dies_once_costs_nothing(tmp_path):
    class DiesOnce(Breaks):
        def run_inference(self, batch, model, inference_args=None):
            if len(lines_of(Path(self.folder) / "loads")) > 1:
                return [row * model for row in batch]
            return super().run_inference(batch, model, inference_args)

    p = ps.Pipeline(workers=0)
    answers = (p | ps.Create(range(200)) | ps.RunInference(DiesOnce(tmp_path, "segfault", large_model=True))).collect()
    assert answers == [row * 3 for row in range(200)]
    assert p.result.metrics.counter("num_inferences") == 200
    assert p.result.metrics.counter("model_restarts") == 1


@pytest.mark.parametrize(("how", "told"), [("exit", "exit code 3"), ("segfault", "signal SIGSEGV")])
def test_a_model_that_dies_while_it_loads(tmp_path, how, told):
    class DiesEarly(Breaks):
        def load_model(self):
            super().load_model()
            return self.run_inference([77], 3)

    with pytest.raises(ModelLoadError, match=f"step 'model': the process that loads the model died 5 times: {told}"):
        rows = ps.Pipeline(workers=0) | ps.Create(range(200))
        (rows | "model" >> ps.RunInference(DiesEarly(tmp_path, how, large_model=True))).collect()
    assert len(lines_of(tmp_path / "loads")) == 5


class LosesModel(Triples):
    """What the model stands for, such as a server, is gone at row 77, so many times; or after a load."""

    def __init__(self, folder, times, while_loading=False, **settings):
        super().__init__(folder, large_model=True, **settings)
        self.times, self.while_loading = times, while_loading

    def load_model(self):
        super().load_model()
        if self.while_loading:
            self.lose()
        return 3

    def run_inference(self, batch, model, inference_args=None):
        if 77 in batch and not self.while_loading:
            self.lose()
        return super().run_inference(batch, model, inference_args)

    def lose(self):
        if len(lines_of(Path(self.folder) / "loads")) <= self.times:
            raise ModelLostError("the server is gone")


@pytest.mark.parametrize("while_loading", [False, True])
def test_a_model_that_is_lost_is_loaded_again(tmp_path, while_loading):
    p = ps.Pipeline(workers=0)
    answers = (p | ps.Create(range(200)) | ps.RunInference(LosesModel(tmp_path, 2, while_loading))).collect()
    assert answers == [row * 3 for row in range(200)]
    assert p.result.metrics.counter("model_restarts") == 2
    assert len(lines_of(tmp_path / "loads")) == 3


def test_a_row_that_loses_its_model_each_time_is_found(tmp_path):
    handler = LosesModel(tmp_path, 1000, max_batch_size=16)
    _, bad = ps.Pipeline(workers=0) | ps.Create(range(200)) | ps.RunInference(handler).with_exception_handling()
    failed = {row: (failure.kind, failure.message) for row, failure in bad.failed_inferences.collect()}
    assert failed == {77: ("crashed", "the process died with these rows: the server is gone")}


def test_a_model_that_is_lost_in_each_load_ends_the_run(tmp_path):
    told = "step 'model': the process that loads the model died 5 times: the server is gone"
    with pytest.raises(ModelLoadError, match=told):
        rows = ps.Pipeline(workers=0) | ps.Create(range(200))
        (rows | "model" >> ps.RunInference(LosesModel(tmp_path, 1000, while_loading=True))).collect()


# Deadlines.


@pytest.mark.parametrize("gil", [False, True])
def test_a_load_that_takes_too_long(mine, tmp_path, gil):
    class Slow(Triples):
        def load_model(self):
            super().load_model()
            if gil:
                ctypes.PyDLL(None).sleep(600)
            threading.Event().wait(600)

    started = time.monotonic()
    with pytest.raises(ModelLoadError, match="step 'model'.*longer than the 0.5 s that loading may take .load_timeout"):
        rows = ps.Pipeline(workers=0, load_timeout=0.5) | ps.Create(range(10))
        (rows | "model" >> ps.RunInference(Slow(tmp_path, large_model=True))).collect()
    assert time.monotonic() - started < 20
    wait_until(lambda: not mine(), 2)


@pytest.mark.parametrize(("workers", "settings"), [(0, {"large_model": True}), (2, {"large_model": True}), (2, {})])
def test_a_model_that_hangs_in_c_is_killed(mine, tmp_path, workers, settings):
    handler = Breaks(tmp_path, "hang", max_batch_size=2, **settings)
    started = time.monotonic()
    with pytest.raises(ModelTimeoutError, match=r"(?s)step 'model': one call took longer than the timeout of 1 s.*row: 77"):
        rows = ps.Pipeline(workers=workers, element_timeout=1) | ps.Create(range(200))
        (rows | "model" >> ps.RunInference(handler)).collect()
    assert time.monotonic() - started < 30
    assert len(lines_of(tmp_path / "tries")) <= 3
    wait_until(lambda: not mine(), 2)


def test_a_deadline_is_for_one_batch_not_for_all_of_them(tmp_path):
    """Longer in all than the timeout, and long enough in the queue: nothing is killed."""

    class Steady(Triples):
        def run_inference(self, batch, model, inference_args=None):
            threading.Event().wait(0.2)
            return super().run_inference(batch, model, inference_args)

    p = ps.Pipeline(workers=0, element_timeout=1)
    answers = (p | ps.Create(range(80)) | ps.RunInference(Steady(tmp_path, max_batch_size=10))).collect()
    assert answers == [row * 3 for row in range(80)]
    assert len(lines_of(tmp_path / "loads")) == 1


def test_a_load_may_take_longer_than_a_batch(tmp_path):
    class Heavy(Triples):
        def load_model(self):
            threading.Event().wait(1.0)
            return super().load_model()

    rows = ps.Pipeline(workers=0, element_timeout=0.5) | ps.Create(range(10)) | ps.RunInference(Heavy(tmp_path))
    assert rows.collect() == [row * 3 for row in range(10)]
    assert len(lines_of(tmp_path / "loads")) == 1


# What is left open.


def test_the_lock_is_not_held_by_what_a_host_starts(mine, session, tmp_path):
    """A host, its model and the model's children hold no lock: the next one can be started while they are there."""
    ask(session(HasChildren(tmp_path, large_model=True)), [1])
    (path,) = (tmp_path / "run").glob("*.lock")
    for pid in mine():
        assert str(path) not in [os.path.realpath(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    address = Address(str(tmp_path / "run"), path.stem)
    with address.locked():
        pass


def test_a_full_shared_memory_is_not_the_end(monkeypatch, tmp_path, session):
    """Where there is no room for a segment, rows go by way of the disk."""
    import errno

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.transport.segments.os.posix_fallocate", full)
    (row,) = ask(session(Triples(tmp_path, large_model=True)), ["x" * 1_000_000])
    assert row == "x" * 3_000_000


# Memory that is not given back.


class Leaks(ps.ModelHandler):
    """Keeps all rows that it has seen, up to what its process has room for; some rows fit nowhere."""

    def __init__(self, room, too_large=(), **settings):
        super().__init__(**settings)
        self.room, self.too_large = room, too_large

    def load_model(self):
        return []

    def run_inference(self, batch, model, inference_args=None):
        for row in batch:
            if row in self.too_large or len(model) >= self.room:
                raise MemoryError(f"no room for {row}")
            model.append(row)
        return [-row for row in batch]

    def takes_columns(self):
        return True

    def run_inference_columns(self, table, model, inference_args=None):
        return self.run_inference(table["x"].to_pylist(), model)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_that_leaks_costs_no_row_but_those_that_do_not_fit_alone(mine, workers):
    pipeline = ps.Pipeline(workers=workers)
    step = ps.RunInference(Leaks(70, {13, 77, 78}, max_batch_size=30))
    good, failures = pipeline | ps.Create(range(200)) | "model" >> step.with_exception_handling(use_subprocess=True)
    assert good.collect() == [-row for row in range(200) if row not in {13, 77, 78}]
    failed = failures.failed_inferences.collect()
    assert [row for row, _ in failed] == [13, 77, 78]
    assert {(f.kind, f.error_type, f.group) for _, f in failed} == {("out of memory", "MemoryError", 1)}
    assert [f.message for _, f in failed] == ["no room for 13", "no room for 77", "no room for 78"]
    assert "in run_inference" in failed[0][1].traceback


def test_a_model_that_leaks_where_errors_are_not_handled(mine):
    step = ps.RunInference(Leaks(70, max_batch_size=30, large_model=True))
    assert (ps.Pipeline(workers=2) | ps.Create(range(200)) | step).collect() == [-row for row in range(200)]
    step = ps.RunInference(Leaks(70, {77}, max_batch_size=30, large_model=True))
    with pytest.raises(StepError, match="MemoryError: no room for 77\n  row: 77"):
        (ps.Pipeline(workers=2) | ps.Create(range(200)) | step).collect()


def test_a_model_of_columns_that_leaks(mine, tmp_path):
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "rows.parquet")
    step = ps.RunInference(Leaks(30, max_batch_size=20, large_model=True))
    made = (ps.Pipeline(workers=0) | ps.ReadFromParquet(str(tmp_path / "rows.parquet")) | step).collect()
    assert [result.inference for result in made] == [-row for row in range(100)]


def test_a_handler_that_must_not_be_called_again_is_not(mine):
    class Once(Leaks):
        retry_safe = False

    pipeline = ps.Pipeline(workers=0)
    step = ps.RunInference(Once(100, {3}, max_batch_size=1)).with_exception_handling(use_subprocess=True)
    _, failures = pipeline | ps.Create(range(6)) | "model" >> step
    assert [(row, f.kind) for row, f in failures.failed_inferences.collect()] == [(3, "out of memory")]


# What people are told.


def test_what_happens_to_a_host_is_logged_a_line_for_each_event(tmp_path, caplog):
    pipeline = ps.Pipeline(workers=0)
    step = ps.RunInference(Breaks(tmp_path, "segfault", max_batch_size=8)).with_exception_handling(use_subprocess=True)
    good, _ = pipeline | ps.Create(range(72, 80)) | "model" >> step
    assert len(good.collect()) == 7
    told = [record for record in caplog.records if record.name.startswith("penstock.")]
    lines = [record.getMessage() for record in told]
    assert {record.levelname for record in told} == {"WARNING"}
    assert all(line.startswith("step 'model': its process died: signal SIGSEGV") for line in lines)
    assert "it is started again, restart 1; 8 rows that it held run again, alone" in lines[0]
    assert "restart 2; looking for the row that is to blame, among 4" in lines[1]


def test_a_model_that_is_killed_is_logged(caplog):
    pipeline = ps.Pipeline(workers=0)
    good, _ = pipeline | ps.Create([0, 1]) | "model" >> ps.RunInference(Sleeps()).with_exception_handling(timeout=0.3)
    assert good.collect() == [0]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("penstock.")]
    assert lines
    assert all("its process was killed: one call took longer than 0.3 s; it is started" in line for line in lines)


class Sleeps(ps.ModelHandler):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        if 1 in batch:
            time.sleep(600)
        return batch


def test_a_crash_that_comes_again_and_again_is_dumped_twice(tmp_path, capfd):
    pipeline = ps.Pipeline(workers=0)
    step = ps.RunInference(Breaks(tmp_path, "segfault", max_batch_size=64)).with_exception_handling(use_subprocess=True)
    good, _ = pipeline | ps.Create(range(64, 128)) | "model" >> step
    assert len(good.collect()) == 63
    assert capfd.readouterr().err.count("Fatal Python error") == 2
