"""What passes between the coordinator and a worker: messages over a Unix socket, file descriptors beside them.

A message is a pickle. It is written by this library's own processes only, over a socket pair that no one else can open.
Large messages travel as anonymous files, so that a side which is slow to read never blocks the other.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import cloudpickle

INLINE_BYTES = 32 << 10
_HEADER = struct.Struct("!IBB")  # bytes that follow, descriptors, whether the message itself is in the last one
_MAX_FDS = 250


class Channel:
    """One end of a connection. send() and receive() may be used by different threads, each by one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message; the receiver gets its own copies of the descriptors. Raises OSError if the peer is gone."""
        if len(fds) >= _MAX_FDS:
            raise ValueError(f"{len(fds)} file descriptors in one message; at most {_MAX_FDS - 1} can be sent")
        data = cloudpickle.dumps(message, protocol=5)
        if len(data) <= INLINE_BYTES:
            self._send(data, fds, in_file=False)
            return
        file = anonymous_file()
        try:
            write_all(file, [data], 0)
            self._send(b"", [*fds, file], in_file=True)
        finally:
            os.close(file)

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message. The descriptors are the caller's to close. Raises EOFError when the peer is gone."""
        header, fds, _, _ = socket.recv_fds(self.sock, _HEADER.size, _MAX_FDS)
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
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        self.sock.close()

    def _send(self, data: bytes, fds: Sequence[int], in_file: bool) -> None:
        header = _HEADER.pack(len(data), len(fds), in_file)
        socket.send_fds(self.sock, [header], list(fds))
        self.sock.sendall(data)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self.sock.recv_into(view)
            if not got:
                raise EOFError("the other side is gone")
            view = view[got:]
        return data


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
