"""Worker processes: fresh interpreters that the library starts, watches and ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from penstock.engines.local import guardian
from penstock.models.place import Surroundings
from penstock.transport.channel import Channel
from penstock.transport.interpreters import above_standard, start_interpreter, thread_variables


class WorkerProcess:
    """One worker: the leader of a process group of its own, so that what it starts ends with it."""

    def __init__(self, threads: int, cores: int, around: Surroundings, variables: Mapping[str, str]) -> None:
        ours, theirs = map(above_standard, socket.socketpair())
        with theirs:  # the worker has a copy; held open here, its end would not be seen on ours
            self._process = start_interpreter(
                "penstock.engines.local.worker:main",
                [theirs.fileno(), threads, json.dumps(asdict(around))],
                [theirs.fileno()],
                {**thread_variables(cores), **variables},
            )
        self.channel = Channel(ours)  # closed by close(), or with this process: then the worker leaves
        self.pid = self._process.pid  # and the number of its group

    def kill(self) -> None:
        """End it and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a zombie
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Its exit code (negative: the signal), or None if it still runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """After kill(), or when it has left: it is waited for without a limit, so that no zombie stays."""
        self.channel.close()
        self._process.wait()


class Guardian:
    """The parent's side of the guardian. Used in a `with` block around everything that could be left behind, by one thread.
    Whatever ends this process without __exit__() closes the pipe without a farewell: then the guardian acts."""

    def __init__(self, folders: Iterable[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,  # what ends the group of this process must not end the guardian
            text=True,
        )
        for folder in folders:
            self._say("folder", folder)

    def started(self, pid: int) -> None:
        self._say("started", pid)

    def ended(self, pid: int) -> None:
        self._say("ended", pid)

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        self._say("farewell", None)  # before the pipe is closed, or it would kill and remove
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, verb: str, what: int | str | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: there is no guardian then, and the run goes on
            self._process.stdin.write(json.dumps([verb, what]) + "\n")
            self._process.stdin.flush()
