"""A model server on this machine: started on a free port, waited for, looked after and ended.

    the model's process -- a socket --> its guardian (server_guardian.py) --> the server, in a process group of its own

The server ends when this process lets go of it, and when it is killed; with a guardian that is killed, too. What the server
prints is read here; its end is kept.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from penstock.errors import ModelLoadError, ModelLostError
from penstock.handlers import server_guardian
from penstock.transport.interpreters import describe_exit, proportional_bytes

HOST = "127.0.0.1"
PORT, KEY = "{port}", "{key}"
LOG_LINES = 40
COMMAND_SHOWN = 300  # characters
LINE_BYTES = 2000
LOOK = (0.05, 1.0)  # seconds between two looks whether a server is ready: the first, the longest
LOOK_TIMEOUT = 5.0
PORTS = 3  # tried, where another process took the one that was free
END_IS_SEEN = 2.0  # seconds after a request failed
PATIENCE = 2 * server_guardian.GRACE + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCommand:
    """How a server is started, and when it is ready. `{port}` stands for the port in the command and in the URL."""

    command: tuple[str, ...]
    ready_url: str
    start_timeout: float  # seconds
    key_variable: str | None = None  # of the environment, where the server looks for the key that requests must carry
    log_file: str | None = None  # all that the server prints is appended to it

    def __str__(self) -> str:
        text = shlex.join(self.command)
        return text if len(text) <= COMMAND_SHOWN else f"{text[:COMMAND_SHOWN]}..."


class ServerProcess:
    """A server that is ready. It ends with close(), when nothing refers to this any more, and with this process."""

    def __init__(self, port: int, key: str, ready_url: str, guardian: ServerGuardian, log: ServerLog) -> None:
        self.port = port
        self.key = key
        self.url = f"http://{HOST}:{port}"
        self.guardian = guardian.process  # this process's child, whose exit code is the server's
        self.ready_url = ready_url
        self._guardian = guardian
        self._log = log
        self._hangs = ""
        self.close = weakref.finalize(self, guardian.end)  # runs once, whoever calls it; at exit, too

    def lost(self) -> ModelLostError | None:
        """Asked after a request got no answer: why, if the server has ended; None: it is there."""
        if self._hangs:
            return ModelLostError(f"the server {self._hangs}, and was ended{self._log.told()}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.guardian.wait(END_IS_SEEN)
            self._guardian.end_group()
            return ModelLostError(f"the server ended: {describe_exit(code)}{self._log.told()}")
        return None

    def answers(self, timeout: float) -> bool:
        """Whether it still says anything where it says that it is ready. Waits."""
        told = _look(self.ready_url, self.key, timeout)
        return not told or told.startswith("HTTP ")

    def end_hanging(self, seconds: float) -> None:
        """It has answered nothing for so long: requests that wait there break off, and lost() says why. Waits."""
        self._hangs = f"has answered no request for {seconds:.0f} s, nor {self.ready_url}"
        self.close()  # after that: requests which it breaks off ask lost() at once

    def memory_bytes(self) -> int | None:
        """That the server and what it started hold in RAM; None where that cannot be seen."""
        return sum(map(proportional_bytes, descendants(self.guardian.pid))) or None

    def log(self) -> str:
        """The end of what it printed."""
        return self._log.text()


class ServerGuardian:
    """The guardian of a server, as the process sees it that has started it."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._link, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-I", server_guardian.__file__, *command],
                stdin=its.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,  # it outlives the group of this process, to end the server
            )
        self._group = int(self._link.recv(32) or 0)  # 0: the program cannot be run

    def end(self) -> None:
        """Let go of the server, and wait until it has ended."""
        self._link.close()  # is what the guardian waits for
        try:
            self.process.wait(PATIENCE)  # longer than it may take: SIGTERM, GRACE, SIGKILL, GRACE
        except subprocess.TimeoutExpired:
            self.process.kill()  # the server goes with it
            self.process.wait()
        self.end_group()

    def end_group(self) -> None:
        """What the server has started and a guardian that was killed has left. Called when the guardian has ended."""
        group, self._group = self._group, 0  # once: the number may be another's later
        if group and self.process.returncode == -signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


class ServerLog:
    """What a server prints: the last lines of it, and a file with all of it, if the user wants one."""

    def __init__(self, printed: IO[bytes], file: IO[bytes] | None, key: str) -> None:
        """key: of the server; it is not in text()."""
        self._key = key
        self._lines: deque[bytes] = deque(maxlen=LOG_LINES)  # the reader appends, others copy: no lock
        # It owns the pipe and the file, and ends when all who could write to the pipe are gone.
        self._reader = threading.Thread(target=_read, args=[printed, self._lines, file], daemon=True, name="server log")
        self._reader.start()

    def text(self) -> str:
        """The last lines that it printed, at most LOG_LINES. From any thread, while it runs."""
        text = b"".join(list(self._lines)).decode(errors="backslashreplace").rstrip()
        return text.replace(self._key, "***") if self._key else text

    def told(self) -> str:
        """For an error, after the server has ended."""
        self._reader.join(1.0)  # what it printed last; a process that has left its group may hold the pipe open
        text = self.text()
        return f"; its log ends with:\n{text}" if text else "; it printed nothing"


def start_server(command: ServerCommand) -> ServerProcess:
    """Start it and wait until it is ready. ModelLoadError with the end of its log if it exits or is not ready in time;
    ModelLostError if a signal ended it."""
    for attempt in range(1, PORTS + 1):
        port = free_port()
        try:
            return _started(command, port)
        except ModelLoadError:
            if attempt == PORTS or not _is_taken(port):
                raise
    raise AssertionError("the last attempt returns or raises")


def _started(command: ServerCommand, port: int) -> ServerProcess:
    key = secrets.token_urlsafe(24) if command.key_variable is not None else ""
    own = {} if command.key_variable is None else {command.key_variable: key}
    arguments = [argument.replace(PORT, str(port)) for argument in command.command]
    file = None if command.log_file is None else open(command.log_file, "ab", buffering=0)  # noqa: SIM115  # before it starts
    guardian = ServerGuardian(arguments, own)
    assert guardian.process.stdout is not None
    log = ServerLog(guardian.process.stdout, file, key)
    server = ServerProcess(port, key, command.ready_url.replace(PORT, str(port)), guardian, log)
    # The log is read from the start: a server whose pipe is full would wait, and never be ready.
    try:
        _await_ready(server, command)
    except BaseException:
        server.close()
        raise
    return server


def _await_ready(server: ServerProcess, command: ServerCommand) -> None:
    url = server.ready_url
    started, pause = time.monotonic(), LOOK[0]
    seen = "nothing answered"
    while time.monotonic() < started + command.start_timeout:
        seen = _look(url, server.key, LOOK_TIMEOUT)
        # After the look: what answered may be another program, if the server has ended because it took the port.
        if (code := server.guardian.poll()) is not None:
            _raise_ended(server, command, code)
        if not seen:
            return
        time.sleep(min(pause, max(0.0, started + command.start_timeout - time.monotonic())))
        pause = min(LOOK[1], pause * 1.5)
    server.close()
    raise ModelLoadError(
        f"the server was not ready after {command.start_timeout:g} s (start_timeout): {url}: "
        f"{seen}; it was started with: {command}{server._log.told()}"
    )


def _raise_ended(server: ServerProcess, command: ServerCommand, code: int) -> None:
    how = f"exit code {code}" if code >= 0 else describe_exit(code)
    what = f"the server ended before it was ready: {how}; it was started with: {command}{server._log.told()}"
    raise ModelLoadError(what) if code >= 0 else ModelLostError(what)  # by a signal from outside, maybe: it is started again


def _look(url: str, key: str, timeout: float) -> str:
    """What is wrong with a server; nothing when it is ready."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with _DIRECTLY.open(request, timeout=timeout):
            return ""
    except urllib.error.HTTPError as exc:
        with exc:
            return f"HTTP {exc.code} {exc.read(200).decode(errors='backslashreplace')}".strip()
    except Exception as exc:  # refused, reset, timed out, no HTTP
        return str(getattr(exc, "reason", exc)) or type(exc).__name__


_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach this machine's loopback


def free_port() -> int:
    with socket.socket() as sock:  # closed when this returns: another process may take the port before the server does
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError:
            return True
    return False


def _read(printed: IO[bytes], lines: deque[bytes], file: IO[bytes] | None) -> None:
    with printed, file or contextlib.nullcontext():
        while line := printed.readline(LINE_BYTES):
            lines.append(line)
            if file is not None:
                file.write(line)


def descendants(pid: int) -> set[int]:
    """The processes that this one has started, and those that they have."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else []:
        if name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    last = {pid}
    while last := {child for child, parent in parents.items() if parent in last} - found:
        found |= last
    return found
