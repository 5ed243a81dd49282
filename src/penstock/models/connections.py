"""Whom a broker talks to: connections that never make it wait, its clients, and the processes that hold the model."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.models.messages import Freed, HostSpec, Payload
from penstock.transport.channel import Frames, frame
from penstock.transport.interpreters import above_standard, describe_exit, open_pidfd, start_interpreter
from penstock.transport.segments import SegmentRef


class Held:
    """A submitted block: bytes, or shared memory that is let go of with the last batch that needs it. It owns its
    descriptor; the broker has one thread, so that nothing here has a lock."""

    def __init__(self, payload: Payload, fds: Sequence[int], how: bytes) -> None:
        self.payload = payload
        self.fd = fds[payload.at] if isinstance(payload, SegmentRef) else None
        self.how = how

    def __del__(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


class Connection:
    """A connection: what is to be sent waits here, never the broker."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector, owner: Any) -> None:
        self.sock = sock
        self.frames = Frames(sock)
        self._selector = selector
        self._owner = owner
        self._out: deque[tuple[memoryview, list[int]]] = deque()  # with descriptors that are this connection's to close
        selector.register(sock, selectors.EVENT_READ, owner)

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        with frame(message, fds, plain=True) as (data, beside):  # copies: the caller may close its own before they are sent
            self._out.append((memoryview(data), [os.dup(fd) for fd in beside]))
        if len(self._out) == 1:  # else the socket is full, and the selector says when it is not
            self.flush()

    def flush(self) -> None:
        """Send what can be sent. A peer that is gone is noticed when it is read from."""
        while self._out:
            data, fds = self._out[0]
            try:
                sent = socket.send_fds(self.sock, [data], fds)
            except BlockingIOError:
                break
            except OSError:
                self._drop()
                break
            for fd in fds:
                os.close(fd)
            if sent == len(data):
                self._out.popleft()
            else:  # descriptors go with the first byte: they are there by now
                self._out[0] = data[sent:], []
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._selector.get_key(self.sock).events != wanted:
            self._selector.modify(self.sock, wanted, self._owner)

    def close(self) -> None:
        self._drop()
        self._selector.unregister(self.sock)  # before it is closed: the next socket may have the same number
        self.frames.close()
        self.sock.close()

    def _drop(self) -> None:
        for _, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()


class Lent:
    """Segments of shared memory: whose they are, and which models' processes may refer to those of clients."""

    def __init__(self) -> None:
        self._owners: dict[str, Client | Model] = {}  # by the name that a process gives its segments
        self._readers: dict[tuple[str, int], set[Model]] = {}  # of clients' segments, by owner and number

    def owns(self, payload: Payload, owner: Client | Model) -> None:
        if isinstance(payload, SegmentRef):
            self._owners[payload.owner] = owner

    def lend(self, payload: SegmentRef, model: Model) -> None:
        self._readers.setdefault((payload.owner, payload.number), set()).add(model)

    def freed(self, message: Freed) -> None:
        """By a client, which refers to answers no more."""
        if (owner := self._owners.get(message.owner)) is not None:
            owner.line.send(message)

    def returned(self, model: Model, owner: str, numbers: Iterable[int]) -> None:
        """A model refers to these segments no more. Their owner is told when no model does."""
        for number in numbers:
            readers = self._readers.get((owner, number))
            if readers is not None:
                readers.discard(model)
                if not readers:
                    del self._readers[owner, number]
                    if (client := self._owners.get(owner)) is not None:
                        client.line.send(Freed(owner, [number]))

    def lost(self, owner: Client | Model) -> None:
        for name in [name for name, known in self._owners.items() if known is owner]:
            del self._owners[name]
        if isinstance(owner, Model):
            for segment, number in list(self._readers):
                self.returned(owner, segment, [number])


class Client:
    """A process that submits rows; it comes and goes by itself, and its connection with it."""

    def __init__(self, number: int, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        self.number = number
        self.line = Connection(sock, selector, self)
        self.submissions: dict[int, int] = {}  # ticket -> submission, while it is not answered


class Model:
    """The process that holds one copy. The broker starts it, and ends it by bury(), however it died."""

    def __init__(self, copy: int, spec: HostSpec, selector: selectors.BaseSelector, dumps: bool) -> None:
        self.copy = copy
        self.sent: set[int] = set()  # submissions whose rows it has
        self.killed_because: str | None = None
        self.killed_from_outside = False  # known after bury()
        self.last_word: str | None = None  # of a process that ends by itself, why
        self._selector = selector
        device = spec.devices[copy % len(spec.devices)] if spec.devices else {}
        ours, theirs = map(above_standard, socket.socketpair())
        with theirs:  # the child has its own copy; held open here, its death would not be seen on the socket
            timed = "untimed" if spec.timeout is None else "timed"
            arguments = [theirs.fileno(), spec.concurrent, timed, "dumps" if dumps else "silent"]
            self.process: subprocess.Popen[bytes] = start_interpreter(
                "penstock.models.server:main", arguments, [theirs.fileno()], {**spec.variables, **device}
            )
        self.line = Connection(ours, selector, self)
        self.pidfd = open_pidfd(self.process.pid)  # a death is seen by it also if a grandchild holds the socket open
        if self.pidfd is not None:
            selector.register(self.pidfd, selectors.EVENT_READ, self)
        self.line.send(spec.program)  # what it waits for, before anything else: see serve() in server.py

    def kill(self, why: str | None = None) -> None:
        self.killed_because = why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def bury(self) -> str:
        """It is gone, or as good as: end what it started, and say how it ended."""
        self.line.close()
        if self.pidfd is not None:
            self._selector.unregister(self.pidfd)
            os.close(self.pidfd)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5 if self.killed_because is None else 0)
        code = self.process.poll()  # before the kill: how it ended by itself
        self.killed_from_outside = self.killed_because is None and code == -signal.SIGKILL
        self.kill(self.killed_because)  # the whole group: what it has started may live on
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nobody can wait for that
            self.process.wait(2)
        return self.killed_because or self.last_word or describe_exit(code)
