"""Worker processes: fresh interpreters that the library starts, watches and ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from penstock.engines.local import guardian
from penstock.engines.local.channel import Channel

_ENTRY = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from penstock.engines.local.worker import main; main()"

# What frameworks read, when they are loaded, to size their thread pools.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)


class WorkerProcess:
    """One worker: the leader of a process group of its own, so that what it starts ends with it."""

    def __init__(self, threads: int, cores: int) -> None:
        ours, theirs = socket.socketpair()
        environment = dict.fromkeys(_THREAD_VARIABLES, str(cores)) | {"TOKENIZERS_PARALLELISM": "false"} | os.environ
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, json.dumps(sys.path), str(theirs.fileno()), str(threads)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.channel = Channel(ours)
        self.pid = self._process.pid

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
        self.channel.close()
        self._process.wait()


class Guardian:
    """The parent's side of the guardian. Used in a `with` block around everything that could be left behind."""

    def __init__(self, folders: Iterable[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        for folder in folders:
            self._say(f"folder {folder}")

    def started(self, pid: int) -> None:
        self._say(f"started {pid}")

    def ended(self, pid: int) -> None:
        self._say(f"ended {pid}")

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._say("farewell")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: there is no guardian then, and the run goes on
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def describe_exit(code: int | None) -> str:
    """How a process ended, for people, with the likely causes."""
    if code is None:
        return "it stopped answering"
    if code >= 0:
        return f"exit code {code} (its code, or a library, ended the process: os._exit, sys.exit or abort)"
    name = signal.Signals(-code).name
    causes = {
        "SIGKILL": "killed from outside: often the system's out-of-memory killer",
        "SIGSEGV": "a native library crashed",
        "SIGBUS": "a native library crashed, or memory or disk ran out",
        "SIGILL": "a native library used an instruction that this CPU does not have",
        "SIGABRT": "a native library gave up",
        "SIGTERM": "asked to end from outside",
    }
    return f"signal {name}" + (f" ({causes[name]})" if name in causes else "")
