"""The guardian of a model server: a process of its own that starts the server, and ends it when nobody needs it any more.

It is run as a script, without importing the package. Its standard input is a socket that the process which wants the server
holds open: when that closes it, or is killed, the server's whole process group ends. The number of that group is written
there, for the case that the guardian itself is killed. The server's own end is the guardian's: with the
same exit code, or by the same signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time

DIES_WITH_PARENT, ADOPTS_ORPHANS = 1, 36  # prctl(2)
GRACE = 3.0  # seconds in which a server may end by itself


def main() -> None:
    """Start sys.argv[1:], and end as it does; earlier, if standard input is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _control(ADOPTS_ORPHANS, 1)  # of the server, to wait for them at the end
    # Before the server starts: its end writes a byte, so that select() wakes also if it came just before select().
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler no byte is written
    try:
        server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_as_server)
    except OSError as exc:
        sys.exit(f"{sys.argv[1]!r} cannot be run: {exc}")
    with contextlib.suppress(OSError):  # nobody is there any more, which select() says next
        os.write(0, b"%d\n" % server.pid)
    while not _has_ended(server.pid):
        ready, _, _ = select.select([0, reading], [], [])
        if reading in ready:
            os.read(reading, 1024)
        if 0 in ready and not os.read(0, 1024):  # closed, or its holder is gone
            _end(server.pid, signal.SIGTERM)
            _await_end(server.pid, reading)
            break
    _end(server.pid, signal.SIGKILL)  # what the server started, too: its group has a number as long as it is not waited for
    code = server.wait()
    _await_group(server.pid)
    _end_like(code)


def _as_server() -> None:
    """In the server, before it runs: signals as usual; and it does not outlive a guardian that is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _control(DIES_WITH_PARENT, signal.SIGKILL)


def _control(what: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def _has_ended(pid: int) -> bool:
    """It stays a zombie (WNOWAIT), so that its number, which is its group's, is nobody else's."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _await_end(pid: int, reading: int) -> None:
    deadline = time.monotonic() + GRACE
    while not _has_ended(pid) and (left := deadline - time.monotonic()) > 0:
        if select.select([reading], [], [], left)[0]:
            os.read(reading, 1024)


def _await_group(group: int) -> None:
    """What was killed is gone a moment later: memory and devices are free then."""
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            with contextlib.suppress(ChildProcessError):  # orphans that this process has adopted would stay zombies
                os.waitpid(-group, os.WNOHANG)
            time.sleep(0.005)


def _end(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_like(code: int) -> None:
    if code >= 0:
        sys.exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would be the guardian's, and not the server's
    with contextlib.suppress(OSError, ValueError):  # SIGKILL is as it is
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main()
