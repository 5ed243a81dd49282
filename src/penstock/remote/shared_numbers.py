"""A few numbers that all processes of a machine share: a file of doubles in memory, and a lock that the system keeps."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator


class SharedNumbers:
    """`count` doubles at a path, which begin as `first`; without a path, those of this process alone.

    Inside `with numbers.held() as values` nobody else reads or writes them; what the list holds at the end is kept. A
    process that is killed inside leaves them as they were, and no lock behind."""

    def __init__(self, path: str | None, first: list[float]) -> None:
        # Among threads, as flock() is among processes: all threads have the lock of an open file at once. Taken first, and
        # guards the two below as well.
        self._lock = threading.Lock()
        self._layout = struct.Struct(f"={len(first)}d")
        self._file: int | None = None
        self._memory: mmap.mmap | bytearray = bytearray(self._layout.pack(*first))
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # whoever comes first fills it, before anybody maps it
            try:
                if os.fstat(self._file).st_size < self._layout.size:
                    os.pwrite(self._file, self._layout.pack(*first), 0)
                self._memory = mmap.mmap(self._file, self._layout.size)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def held(self) -> Iterator[list[float]]:
        with self._lock:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                values = list(self._layout.unpack_from(self._memory))
                yield values
                # Not in a `finally`: a block that raises changes nothing.
                self._layout.pack_into(self._memory, 0, *values)
            finally:
                if self._file is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def read(self) -> list[float]:
        with self.held() as values:
            return list(values)

    def close(self) -> None:
        """The file stays, for other processes. Who asks later gets numbers of this process alone, all 0."""
        with self._lock:
            if self._file is not None:
                assert isinstance(self._memory, mmap.mmap)
                self._memory.close()
                os.close(self._file)
                self._file, self._memory = None, bytearray(self._layout.size)
