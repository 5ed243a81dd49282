"""Fresh interpreters: how the library starts the processes that work for it, says how they ended, and what they take."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import UsageError
from penstock.transport.packing import is_loading

# Imported where a process is started: many runs start none, and a first one waits for every import.
if TYPE_CHECKING:
    import subprocess

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


_OURS = "PENSTOCK_THREAD_VARIABLES"  # which of them are set by us; set in all processes that Penstock starts

_ENTRY = """\
import importlib, sys
main, *arguments = sys.argv[2:]
sys.path[:], sys.argv = eval(sys.argv[1])
module, name = main.split(":")
getattr(importlib.import_module(module), name)(*arguments)
"""


def start_interpreter(
    main: str,
    arguments: Iterable[object],
    fds: Sequence[int],
    variables: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """A process that imports from where this one does, with the arguments of this one's script in sys.argv, and calls main
    ("module:function"), with these descriptors open and these variables in its environment. It leads a process group of
    its own."""
    if is_loading():  # that one would import the module too, and start another ...
        raise UsageError(
            "a module runs a pipeline when it is imported, and a process of another run imports it for what it defines: "
            "put what runs the pipeline under `if __name__ == '__main__':`, or into another module"
        )
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-P", "-c", _ENTRY, repr((import_path(), sys.argv)), main, *map(str, arguments)],
        pass_fds=fds,  # copies: the caller closes its own
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C does not reach it; whoever ends it ends all of its group
    )


def open_pidfd(pid: int) -> int | None:
    """What becomes readable when this child ends; None where the system has no such thing. The caller closes it."""
    try:
        return os.pidfd_open(pid) if sys.platform == "linux" else None
    except OSError:
        return None


def thread_variables(cores: int) -> dict[str, str]:
    """What tells frameworks how many threads they may use, unless the user has told them. A process that got its share from
    us hands on another one to those that it starts."""
    ours = os.environ.get(_OURS, "").split(",")
    wanted = dict.fromkeys(_THREAD_VARIABLES, str(cores)) | {"TOKENIZERS_PARALLELISM": "false"}
    told = {name: value for name, value in wanted.items() if name not in os.environ or name in ours}
    return told | {_OURS: ",".join(told)}


def is_own_process() -> bool:
    """Whether Penstock has started this process, a worker or a host, so that nothing else uses it."""
    return _OURS in os.environ


def above_standard(sock: socket.socket) -> socket.socket:
    """The socket at a descriptor that nobody takes for standard input, output or error: those may be closed. It takes the
    place of the one that is given, which it closes if it makes another."""
    if sock.fileno() > 2:
        return sock
    with sock:
        return socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def import_path() -> list[str]:
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


def proportional_bytes(process: int | str = "self") -> int:
    """The memory that a process holds, its share of what is shared (Linux); 0 where that cannot be seen."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
