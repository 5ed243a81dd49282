"""Where a host is found, or started by whoever comes first: a lock file and a Unix socket in a private folder.

    <temporary folder>/penstock-<user>/<run>/<model>.sock, .lock

The folder belongs to this user alone (0700), and both sides check who the other is. The lock is the system's, so that a
process which is killed leaves none behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import shutil
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import EngineError
from penstock.transport.channel import Channel, anonymous_file, write_all
from penstock.transport.interpreters import above_standard, start_interpreter

# Imported where there is a host: most runs have none, and a first one waits for every import.
if TYPE_CHECKING:
    import subprocess

    from penstock.models.messages import HostSpec

BACKLOG = 256
STARTS = 5  # of a host that dies before it is reached

# Hosts that this process has started, by folder: it has to wait for them, or they stay zombies. They are not ended with it.
_children: dict[str, list[subprocess.Popen[bytes]]] = {}


_starters: list[Callable[[Address, HostSpec], None]] = []  # the last one starts hosts in the place of this process


def start_hosts_by(starter: Callable[[Address, HostSpec], None]) -> None:
    """From now on another process starts the hosts that this one wants: one that outlives it, and has the devices."""
    _starters[:] = [starter]


def run_folder(run: str) -> str:
    """The folder of one run's hosts. It is made when it is needed."""
    base = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())  # short: sockets need short names
    return str(base / f"penstock-{os.geteuid()}" / run)


def own_run_folder(run: str) -> str:
    """The same for a run whose processes are all told of it: elsewhere, if somebody else has taken the usual place."""
    usual = run_folder(run)
    try:
        make_private(usual)
        os.rmdir(usual)
    except (EngineError, OSError):
        return os.path.join(tempfile.mkdtemp(prefix="penstock-"), run)
    return usual


def end_hosts(folder: str, patience: float = 5.0) -> None:
    """Tell the hosts of a run to end, wait for them, and remove the folder."""
    lines = []
    with contextlib.suppress(FileNotFoundError, EngineError):
        _check_private(Path(folder).parent)
        for path in Path(folder).glob("*.sock"):
            if (sock := Address(folder, path.stem).connect()) is not None:
                from penstock.models.messages import Shutdown

                with contextlib.suppress(OSError):
                    Channel(sock, plain=True).send(Shutdown())
                lines.append(sock)
    deadline = time.monotonic() + patience
    for sock in lines:  # all were told before any is waited for: one deadline does for all
        with sock, contextlib.suppress(OSError):
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            while sock.recv(65536):  # until it closes, which the broker does after its models have ended
                pass
    shutil.rmtree(folder, ignore_errors=True)
    for process in _children.pop(folder, []):  # that this process has started: they are gone, or will be soon
        import subprocess

        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()) if lines else 0)


def await_hosts(folder: str) -> None:
    """Wait for the hosts of a run that this process has started: they end when their last client has gone, which may be
    another process."""
    for process in _children.pop(folder, []):
        process.wait()


@dataclass(frozen=True)
class Address:
    """One host's place in the folder of a run."""

    folder: str
    name: str

    @property
    def socket_path(self) -> str:
        return os.path.join(self.folder, f"{self.name}.sock")

    def reach(self, spec: HostSpec) -> socket.socket:
        """A connection to the host; it is started if it is not there."""
        sock = self.connect()  # without the lock: mostly it is there
        if sock is not None:
            return sock
        with self.locked():
            sock = self.connect()  # again: another process may have started it while this one waited for the lock
            if sock is not None:
                return sock
            for _ in range(STARTS):  # it may be killed before it is reached
                (_starters[-1] if _starters else Address.start)(self, spec)
                sock = self.connect()
                if sock is not None:
                    return sock
            raise EngineError(
                f"the model host at {self.socket_path} died {STARTS} times before it could be reached; see what it printed"
            )

    def connect(self) -> socket.socket | None:
        """A connection to the host, if one is there and it is this user's."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(self.socket_path)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            sock.close()
            return None
        if not same_user(sock):
            sock.close()
            raise EngineError(f"{self.socket_path} is served by another user; remove it")
        return above_standard(sock)

    def remove(self) -> None:
        """Called by a host that ends: nobody finds it any more."""
        with contextlib.suppress(OSError, EngineError), self.locked():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.socket_path)
            with contextlib.suppress(FileNotFoundError):  # while it is held: those who wait for it see that it is gone
                os.unlink(self._lock_path)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)

    @property
    def _lock_path(self) -> str:
        return os.path.join(self.folder, f"{self.name}.lock")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process starts or removes this host."""
        while True:
            make_private(self.folder)
            try:
                file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the folder was removed just now
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                with contextlib.suppress(FileNotFoundError):  # removed, or made anew, while this process waited: once more
                    if os.path.samestat(os.fstat(file), os.stat(self._lock_path)):
                        yield
                        return
            finally:
                os.close(file)  # gives the lock back

    def start(self, spec: HostSpec) -> None:
        """Start the host, as a child of this process. Called by one at a time: see reach()."""
        children = _children.setdefault(self.folder, [])
        for child in [*children]:  # takes the exit codes of those that have ended; hosts of other names may start meanwhile
            if child.poll() is not None:
                with contextlib.suppress(ValueError):
                    children.remove(child)
        children.append(self.start_process(spec))

    def start_process(self, spec: HostSpec) -> subprocess.Popen[bytes]:
        """The socket listens before the process runs: whoever connects from now on waits for it there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)  # of a host that was killed
        told = anonymous_file()
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                write_all(told, [pickle.dumps(spec, protocol=5)], 0)
                listening.bind(self.socket_path)
                listening.listen(BACKLOG)
                fds = [listening.fileno(), told]
                arguments = [self.folder, self.name, *fds]
                return start_interpreter("penstock.models.broker:main", arguments, fds, {})
            finally:  # the host has its own copies: closed here, the socket goes on listening there
                os.close(told)


def name_of(key: str) -> str:
    """A short name for files."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def make_private(folder: str) -> None:
    """The folder and the one above it, for this user alone."""
    for path in (Path(folder).parent, Path(folder)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _check_private(path)


def _check_private(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise EngineError(f"{path} is not a private folder of this user (mode {found.st_mode & 0o777:o}); remove it")


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    if sys.platform == "linux":
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return bool(struct.unpack("3i", credentials)[1] == os.geteuid())
    local_peercred = 0x001  # macOS: struct xucred { u_int version; uid_t uid; ... }
    credentials = sock.getsockopt(0, local_peercred, 76)
    return bool(struct.unpack_from("II", credentials)[1] == os.geteuid())
