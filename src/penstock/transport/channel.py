"""What passes between processes: messages over a Unix socket, file descriptors beside them.

A message is a pickle. It is written by this library's own processes only, over a socket that no other user can open.
Large messages travel as anonymous files, so that a side which is slow to read never blocks the other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle

INLINE_BYTES = 32 << 10
_HEADER = struct.Struct("!IBB")  # bytes that follow, descriptors, whether the message itself is in the last one
MAX_FDS = 250


class Channel:
    """One end of a connection. send() and receive() may be used by different threads, each by one at a time.

    `plain`: its messages hold nothing of the user's, so that the standard pickle does.
    """

    def __init__(self, sock: socket.socket, plain: bool = False) -> None:
        self.sock = sock  # the channel's own: close() closes it
        self._plain = plain

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message; the receiver gets its own copies of the descriptors. Raises OSError if the peer is gone."""
        with frame(message, fds, self._plain) as (data, beside):
            sent = socket.send_fds(self.sock, [data], beside)
            if sent < len(data):  # the descriptors went with the first byte
                self.sock.sendall(memoryview(data)[sent:])

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message. The descriptors are the caller's to close. Raises EOFError when the peer is gone."""
        # No more than the header: there is no buffer here for the beginning of the next message.
        header, fds, _, _ = socket.recv_fds(self.sock, _HEADER.size, MAX_FDS)
        if not header:
            raise EOFError("the other side is gone")
        try:
            header += self._read(_HEADER.size - len(header))
            size, expected, in_file = _HEADER.unpack(header)
            data = self._read(size)
            if len(fds) != expected:
                raise EOFError(f"{len(fds)} of {expected} file descriptors arrived: too many open files?")
            if in_file:
                data = read_all(fds[-1], 0, os.fstat(fds[-1]).st_size)
                os.close(fds.pop())
            return pickle.loads(data), fds
        except BaseException:  # the caller gets none of them
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        self.sock.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self.sock.recv_into(view)
            if not got:
                raise EOFError("the other side is gone")
            view = view[got:]
        return data


@contextlib.contextmanager
def frame(message: Any, fds: Sequence[int], plain: bool = False) -> Iterator[tuple[bytes, list[int]]]:
    """A message as bytes for the socket, and the descriptors to send with the first of them."""
    if len(fds) >= MAX_FDS:
        raise ValueError(f"{len(fds)} file descriptors in one message; at most {MAX_FDS - 1} can be sent")
    data: bytes = (pickle if plain else cloudpickle).dumps(message, protocol=5)
    if len(data) <= INLINE_BYTES:
        yield _HEADER.pack(len(data), len(fds), False) + data, list(fds)
        return
    file = anonymous_file()
    try:
        write_all(file, [data], 0)
        yield _HEADER.pack(0, len(fds) + 1, True), [*fds, file]
    finally:  # whoever sends it has done so, or has a copy
        os.close(file)


class Frames:
    """Messages out of what a socket has to read, without ever waiting for the rest of one. Nothing waits at that socket from
    then on: sending does not either."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._data = bytearray()  # of a message that is not complete
        self._fds: list[int] = []  # that came with it, or before it: in the order of the messages

    def receive(self) -> list[tuple[Any, list[int]]]:
        """The messages that are complete. Raises EOFError when the peer is gone, and OSError; BlockingIOError when there
        is nothing to read."""
        data, fds, _, _ = socket.recv_fds(self._sock, 256 << 10, MAX_FDS)
        if not data:
            raise EOFError("the other side is gone")
        self._data += data
        self._fds += fds
        messages = []
        while len(self._data) >= _HEADER.size:
            size, expected, in_file = _HEADER.unpack_from(self._data)
            end = _HEADER.size + size
            if len(self._data) < end:
                break
            if len(self._fds) < expected:  # they come with the first byte: the others were dropped by the system
                raise EOFError(f"{len(self._fds)} of {expected} file descriptors arrived: too many open files?")
            payload: bytes | bytearray = bytes(self._data[_HEADER.size : end])
            beside, self._fds = self._fds[:expected], self._fds[expected:]
            del self._data[:end]
            if in_file:
                file = beside.pop()
                payload = read_all(file, 0, os.fstat(file).st_size)
                os.close(file)
            messages.append((pickle.loads(payload), beside))
        return messages

    def close(self) -> None:
        """Descriptors of a message that never became complete; the socket is its owner's to close."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def anonymous_file(on_disk: bool = False) -> int:
    """A file without a name, which vanishes when no process has it open: in memory, or on disk."""
    if not on_disk and sys.platform == "linux":
        return os.memfd_create("penstock", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_all(file: int, pieces: Sequence[Any], offset: int) -> int:
    """Write the pieces one after the other; return how many bytes."""
    start = offset
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            wrote = os.pwrite(file, view[: 1 << 30], offset)
            offset += wrote
            view = view[wrote:]
    return offset - start


def read_all(file: int, offset: int, size: int) -> bytearray:
    """Copy bytes out of a file."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = os.preadv(file, [view[: 1 << 30]], offset)
        if not got:
            raise EOFError(f"an anonymous file ended {len(view)} bytes early")
        offset += got
        view = view[got:]
    return data
