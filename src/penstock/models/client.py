"""A process's connection to a model host: it finds or starts the host, and survives its death.

What is in flight is kept until it is answered, large blocks in the shared memory that the host reads, so that it can be
submitted again to a host that is started anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from penstock.errors import EngineError, ModelCrashError, NotShippableError, PenstockError
from penstock.models.host_address import Address
from penstock.models.measures import Report
from penstock.models.messages import (
    Answers,
    Broken,
    Ended,
    Freed,
    Goes,
    Happened,
    HostSpec,
    Join,
    Leave,
    Refused,
    Started,
    Submit,
    Waits,
)
from penstock.rows import safe_str
from penstock.transport.channel import INLINE_BYTES, Channel
from penstock.transport.packing import length, unpack
from penstock.transport.segments import Leases, Segment, Segments

LOSSES = 20  # of the host, one after the other, without any answer in between


class Listener(Protocol):
    """Who is told what comes back. Called on the connection's own thread."""

    def answered(self, message: Answers, answers: list[Any]) -> None: ...

    def broken(self, message: Broken) -> None: ...

    def refused(self, tickets: Iterable[int], error: PenstockError) -> None: ...

    def again(self, tickets: Iterable[int]) -> None:
        """These are submitted once more: what was answered of them does not count."""

    def reported(self, report: Report) -> None: ...

    def happened(self, what: str) -> None:
        """Something that a person may want to know: a death, a restart."""


class HostClient:
    """One connection, shared by all threads of the process. It is opened with the first rows; where the model is for a
    device, which takes long to load, before they are prepared."""

    def __init__(self, address: Address, spec: HostSpec, listener: Listener, model: str | None = None) -> None:
        """model: for which all rows are, where models of several steps share the host."""
        self._model = model
        self._address = address
        self._spec = spec
        self._listener = listener
        # Guards what follows, and is held while something is sent: whoever connects anew (a caller, or the listening thread)
        # has told the host all that is in flight before anybody adds to it. The host never waits for a client, so that
        # sending ends. Order of locks: this one, then that of the session, in again(); sessions call in here without theirs.
        self._lock = threading.Lock()
        self._channel: Channel | None = None  # closed by the listening thread alone, which may be blocked in it
        self._thread: threading.Thread | None = None  # listens; it ends with its connection, unless it finds another host
        self._lanes: set[int] = set()
        self._waiting: dict[int, int | None] = {}  # lanes that wait: for a ticket; None: at another model
        self._in_flight: dict[int, tuple[Submit, Segment | None]] = {}
        self._closed = False
        # Not guarded by it:
        self._segments = Segments()  # any thread's; has a lock of its own
        self._leases = Leases(private=False)  # read by the listening thread; any thread takes what was freed, with the lock
        self._groups: set[int] = set()  # process groups of the host's models; the listening thread's own
        self._losses = 0  # the same

    # The callers' side.

    def join(self, lane: int) -> None:
        with self._lock:
            self._lanes.add(lane)
            if self._channel is None and self._spec.devices and not self._closed:
                self._connect()
            else:
                self._send(Join(lane, self._model))

    def submit(self, message: Submit, buffers: Sequence[Any]) -> None:
        """Rows for the host: what is in the buffers is their payload."""
        segment = None  # written before the lock is taken: large blocks of several threads are copied at once
        if sum(map(length, buffers)) <= INLINE_BYTES // 4:
            message = message._replace(payload=b"".join(buffers))
        else:
            segment = self._segments.write(buffers)
            message = message._replace(payload=self._segments.ref(segment, 0))
        with self._lock:
            if self._closed:
                raise EngineError(f"step {self._spec.name!r}: the run has ended")
            self._in_flight[message.ticket] = message, segment  # first: _connect() sends all that is in it
            try:
                if self._channel is None:
                    self._connect()
                else:
                    self._send(message, [] if segment is None else [segment.fd])
            except BaseException:  # the caller has an error instead: these rows are not to be sent again
                self._forget([message.ticket])
                raise
            for owner, numbers in self._leases.take_freed().items():
                self._send(Freed(owner, numbers))

    def waits(self, lane: int, ticket: int | None) -> None:
        with self._lock:
            self._waiting[lane] = ticket
            self._send(Waits(lane, ticket))

    def goes(self, lane: int) -> None:
        """It may add rows again. The host knows when a ticket is answered; it is told only where it cannot."""
        with self._lock:
            if self._waiting.pop(lane, 0) is None:
                self._send(Goes(lane))

    def leave(self, lane: int, tickets: Iterable[int]) -> None:
        with self._lock:
            self._lanes.discard(lane)
            self._waiting.pop(lane, None)
            self._send(Leave(lane))
            self._forget(tickets)

    def forget(self, tickets: Iterable[int]) -> None:
        """These are answered."""
        with self._lock:
            self._forget(tickets)

    def close(self, wait: bool) -> None:
        with self._lock:
            self._closed = True  # before the shutdown: the listening thread then looks for no other host
            self._forget(list(self._in_flight))
            if self._channel is not None:
                with contextlib.suppress(OSError):  # not close(): that would not wake the thread that reads from it
                    self._channel.sock.shutdown(socket.SHUT_RDWR)
        if wait and self._thread is not None:  # without the lock, which the thread takes on its way out
            self._thread.join()
        self._segments.close()  # last: nothing is sent out of them any more

    # The connection. The lock is held, except in _listen.

    def _connect(self) -> None:
        """Reach the host and tell it all that it should know."""
        channel = self._channel = Channel(self._address.reach(self._spec), plain=True)
        try:
            self._tell_all()
        except BaseException:  # such as too many open files; nobody listens there yet, so that the next caller connects
            self._channel = None
            channel.close()
            raise
        # Else it is the listening thread that connects anew, and goes on with the new channel.
        if self._thread is None or self._thread is not threading.current_thread():
            self._thread = threading.Thread(target=self._listen, args=[channel], daemon=True)
            self._thread.start()

    def _tell_all(self) -> None:
        """Lanes, then their rows, then who waits for which: the broker knows a ticket only after its rows."""
        for lane in self._lanes:
            self._send(Join(lane, self._model))
        for message, segment in self._in_flight.values():
            self._send(message, [] if segment is None else [segment.fd])
        for lane, ticket in self._waiting.items():
            self._send(Waits(lane, ticket))

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        if self._channel is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the listening thread sees to that
                self._channel.send(message, fds)

    def _forget(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            _, segment = self._in_flight.pop(ticket, (None, None))
            if segment is not None:
                self._segments.done(segment)

    def _listen(self, channel: Channel) -> None:
        """The listening thread. Callers wait for what it hands on, so it never ends without telling them."""
        try:
            over = False
            while not over:
                try:
                    message, fds = channel.receive()
                except (EOFError, OSError):
                    found = self._reconnected()
                    if found is None:
                        return
                    channel = found
                    continue
                try:
                    over = self._hear(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except BaseException as exc:  # callers wait for this thread
            error = EngineError(f"step {self._spec.name!r}: {type(exc).__name__}: {safe_str(exc)}")
            error.__cause__ = exc
            self._fail(error)

    def _hear(self, message: Any, fds: list[int]) -> bool:
        """Pass a message on. True: the host has ended for good, until somebody submits rows again."""
        if isinstance(message, Answers):
            self._losses = 0
            try:
                (answers,) = unpack(self._leases.read(message.payload, fds))
            except BaseException as exc:  # a class that cannot be imported here, or whose unpickling raises
                what = f"its answers cannot be unpickled ({type(exc).__name__}: {safe_str(exc)})"
                error = NotShippableError(f"step {self._spec.name!r}: {what}")
                error.__cause__ = exc
                self._listener.refused({ticket for ticket, _, _ in message.pieces}, error)
                return False
            assert isinstance(answers, list)
            self._listener.answered(message, answers)
        elif isinstance(message, Started):
            self._groups.add(message.group)
        elif isinstance(message, Ended):
            self._groups.discard(message.group)
        elif isinstance(message, Broken):
            self._losses = 0
            self._listener.broken(message)
        elif isinstance(message, Freed):
            with self._lock:  # what is in flight may be sent to another process: it will be freed again
                in_flight = {segment.number for _, segment in self._in_flight.values() if segment is not None}
            self._segments.freed([number for number in message.numbers if number not in in_flight])
        elif isinstance(message, Report):
            self._listener.reported(message)
        elif isinstance(message, Happened):
            self._listener.happened(message.what)
        elif isinstance(message, Refused):
            if not message.pieces:
                self._fail(message.error.error())
                return True
            self._listener.refused({ticket for ticket, _, _ in message.pieces}, message.error.error())
        return False

    def _reconnected(self) -> Channel | None:
        """The host is gone: find or start it again, and submit what was in flight."""
        with self._lock:
            assert self._channel is not None
            self._channel.close()
            self._channel = None
            groups, self._groups = self._groups, set()  # of that host; the next one names its own
            if self._closed:
                return None
            for group in groups:  # models die with their broker; what they have started does not
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            if not self._lanes:
                return None  # nobody needs a host now; whoever submits next connects, and starts a thread
            self._losses += 1
            if self._in_flight and not self._spec.retry_safe:
                error: PenstockError = ModelCrashError(
                    f"step {self._spec.name!r}: its model host died with {len(self._in_flight)} blocks of rows in flight; "
                    "they may have been called, and its handler says that they must not be called again (retry_safe)"
                )
            elif self._losses <= LOSSES:
                self._listener.again(list(self._in_flight))  # before they are sent: answers of the new host do count
                try:
                    self._connect()
                except (PenstockError, OSError) as exc:
                    error = EngineError(f"step {self._spec.name!r}: its model host cannot be reached: {exc}")
                    error.__cause__ = exc
                else:
                    return self._channel
            else:
                error = EngineError(
                    f"step {self._spec.name!r}: its model host died {LOSSES} times without an answer in between; "
                    "was it killed from outside, or is the machine out of memory?"
                )
        self._fail(error)
        return None

    def _fail(self, error: PenstockError) -> None:
        """Nothing that is in flight will be answered."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            self._groups.clear()
            tickets = list(self._in_flight)
            self._forget(tickets)
        self._listener.refused(tickets, error)  # without the lock: it ends in forget(), which takes it
