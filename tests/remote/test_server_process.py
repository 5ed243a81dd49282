"""Model servers as processes: started, waited for, watched and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from penstock.errors import ModelLoadError, ModelLostError
from penstock.handlers import server_process
from penstock.handlers.server_process import ServerCommand, start_server

SERVER = str(Path(__file__).with_name("model_server.py"))


def command(*options, **settings):
    given = {"ready_url": "http://127.0.0.1:{port}/health", "start_timeout": 60.0, **settings}
    return ServerCommand(command=(sys.executable, SERVER, "{port}", *map(str, options)), **given)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        threading.Event().wait(0.02)


def pids_of(server):
    return server_process.descendants(server.guardian.pid)


def test_a_server_is_ready_and_ends_with_what_it_started(tmp_path):
    server = start_server(command("--child", tmp_path / "child"))
    with urllib.request.urlopen(f"{server.url}/health") as reply:
        assert reply.status == 200
    pids = {*pids_of(server), server.guardian.pid}
    assert int((tmp_path / "child").read_text()) in pids
    assert server.memory_bytes() > 10 << 20
    assert "the server starts" in server.log()
    server.close()
    assert not any(map(is_running, pids))


def test_a_server_ends_when_nothing_refers_to_it():
    server = start_server(command())
    pids = pids_of(server)
    assert pids
    del server
    assert not any(map(is_running, pids))


def test_a_server_ends_when_the_process_that_wants_it_is_killed(tmp_path):
    """The whole group of that process is killed, as a model's process is."""
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from test_server_process import command, pids_of, start_server
server = start_server(command("--child", {str(tmp_path / "child")!r}))
print(*pids_of(server), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
        start_new_session=True,
    )
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) == 2
    assert all(map(is_running, pids))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("ask", [lambda server: server.lost(), lambda server: server.close()], ids=["lost", "close"])
def test_a_server_ends_with_what_it_started_when_its_guardian_is_killed(tmp_path, ask):
    server = start_server(command("--child", tmp_path / "child"))
    pids = pids_of(server)
    assert len(pids) == 2
    os.kill(server.guardian.pid, signal.SIGKILL)
    assert "SIGKILL" in str(ask(server) or "SIGKILL")
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_server_that_dies_is_told_with_its_signal_and_its_log():
    server = start_server(command())
    assert server.guardian.poll() is None
    (pid,) = pids_of(server)
    os.kill(pid, signal.SIGSEGV)
    lost = server.lost()
    assert isinstance(lost, ModelLostError)
    assert "SIGSEGV" in str(lost)
    assert "the server starts" in str(lost)
    assert server.guardian.poll() is not None


def test_a_server_that_exits_at_its_start_is_an_error_with_its_log():
    with pytest.raises(ModelLoadError, match="exit code 1; it was started with: .*model_server.py.*") as caught:
        start_server(command("--fail"))
    assert "the weights are not there" in str(caught.value)


def test_a_server_that_is_never_ready_is_an_error_with_its_log():
    with pytest.raises(ModelLoadError, match=r"not ready after 1.5 s \(start_timeout\): .*HTTP 503") as caught:
        start_server(command("--never-ready", start_timeout=1.5))
    assert "the server starts" in str(caught.value)


def test_a_program_that_is_not_there_is_an_error():
    with pytest.raises(ModelLoadError, match="'no-such-program' cannot be run"):
        start_server(ServerCommand(command=("no-such-program",), ready_url="http://127.0.0.1:{port}/", start_timeout=60.0))


def test_a_port_that_another_process_took_is_tried_no_more(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        ports = [other.getsockname()[1], server_process.free_port()]
        monkeypatch.setattr(server_process, "free_port", lambda: ports.pop(0))
        server = start_server(command())
    assert ports == []
    server.close()


def test_the_key_is_in_the_environment_and_not_in_the_command():
    server = start_server(command(key_variable="MODEL_SERVER_KEY"))
    (pid,) = pids_of(server)
    assert len(server.key) >= 24
    assert f"MODEL_SERVER_KEY={server.key}" in Path(f"/proc/{pid}/environ").read_text()
    assert server.key not in Path(f"/proc/{pid}/cmdline").read_text()
    server.close()


def test_all_that_a_server_prints_goes_to_a_file(tmp_path):
    server = start_server(command(log_file=str(tmp_path / "log")))
    server.close()
    wait_until(lambda: "the server starts" in (tmp_path / "log").read_text())


def test_no_server_is_started_without_its_log(tmp_path, descendants):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        start_server(command(log_file=str(tmp_path / "nowhere" / "log")))
    assert not descendants()
