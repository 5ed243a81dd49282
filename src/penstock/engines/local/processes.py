"""Worker processes: fresh interpreters that the library starts, watches and ends."""

from __future__ import annotations

import contextlib
import fcntl
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

_ENTRY = "import sys; sys.path[:] = eval(sys.argv[1]); from penstock.engines.local.worker import main; main()"

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
        ours, theirs = map(_above_standard, socket.socketpair())
        environment = dict.fromkeys(_THREAD_VARIABLES, str(cores)) | {"TOKENIZERS_PARALLELISM": "false"} | os.environ
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _ENTRY, repr(_import_path()), str(theirs.fileno()), str(threads)],
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
            self._say("folder", folder)

    def started(self, pid: int) -> None:
        self._say("started", pid)

    def ended(self, pid: int) -> None:
        self._say("ended", pid)

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._say("farewell", None)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, verb: str, what: int | str | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: there is no guardian then, and the run goes on
            self._process.stdin.write(json.dumps([verb, what]) + "\n")
            self._process.stdin.flush()


def _above_standard(sock: socket.socket) -> socket.socket:
    """The socket at a descriptor that nobody takes for standard input, output or error: those may be closed."""
    if sock.fileno() > 2:
        return sock
    with sock:
        return socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _import_path() -> list[str]:
    """Where this process imports from, in a form that holds wherever a worker starts."""
    return [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]


def describe_exit(code: int | None) -> str:
    """How a process ended, for people, with the likely causes."""
    if code is None:
        return "it stopped answering"
    if code >= 0:
        return f"exit code {code} (its code, or a library, ended the process: os._exit, sys.exit or abort)"
    if -code not in {number.value for number in signal.Signals}:
        return f"signal {-code}"
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
