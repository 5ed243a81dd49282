"""Shared memory that is used again and again: its pages are there already, and mapped.

The writer copies buffers into a segment and sends its descriptor; the reader sees the same memory and copies nothing. A
segment is used again when its writer is done with it and no reader's object refers to it any more, which readers find out
from Python's reference counts and report. A report that never comes costs a new segment, nothing else: what is not reported
for long is given up, and the system frees it when the last process lets go of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.transport.channel import anonymous_file, write_all
from penstock.transport.packing import length

KEPT_BYTES = 256 << 20  # in segments that are free, or that a reader has not reported
LEAST_BYTES = 1 << 16
MADV_POPULATE_READ = 22  # of Linux since 5.14: all pages at once, in place of a fault for every few of them
MAPS = 64  # segments of others that stay mapped


class SegmentRef(NamedTuple):
    """Where packed blocks are: which of a message's descriptors, whose segment, and how many bytes of it."""

    at: int
    owner: str
    number: int
    size: int


class Segment:
    """Some of this process's shared memory; without a capacity a file on disk, used once."""

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.size = 0
        self.fd = anonymous_file(on_disk=not capacity)  # this object's: readers have copies, and keep what they have mapped
        self.mine = True  # this process needs what is in it; guarded, as `theirs`, by the lock of Segments
        self.theirs = True  # a reader may refer to it
        self._reserved = 0
        self._map: mmap.mmap | None = None
        if capacity:
            try:
                os.ftruncate(self.fd, capacity)
                self._map = mmap.mmap(self.fd, capacity)
            except BaseException:
                os.close(self.fd)
                raise

    def write(self, buffers: Sequence[Any], size: int) -> None:
        self.size = size
        self.mine = self.theirs = True
        if self._map is None:
            write_all(self.fd, buffers, 0)
            return
        if size > self._reserved and sys.platform == "linux":  # an error here, not a signal there, when memory runs out
            os.posix_fallocate(self.fd, self._reserved, size - self._reserved)
            self._reserved = size
        at = 0
        for buffer in buffers:
            end = at + length(buffer)
            self._map[at:end] = memoryview(buffer).cast("B")
            at = end

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        os.close(self.fd)


class Segments:
    """The segments of one process. Any thread may use them."""

    def __init__(self) -> None:
        self.owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = threading.Lock()  # guards what follows; not held while memory is written
        self._numbers = 0
        self._free: list[Segment] = []
        self._used: OrderedDict[int, Segment] = OrderedDict()  # by number, the oldest use first

    def write(self, buffers: Sequence[Any]) -> Segment:
        """A segment that holds these, for a reader that will be told of it."""
        size = sum(map(length, buffers))
        segment = None
        try:
            segment = self._take(size)
            segment.write(buffers, size)  # without the lock: it is nobody else's until it is sent
        except OSError as exc:
            if segment is not None:
                self._give_up(segment)
            if exc.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            segment = self._new(0)  # memory is full
            segment.write(buffers, size)
        return segment

    def ref(self, segment: Segment, at: int) -> SegmentRef:
        return SegmentRef(at, self.owner, segment.number, segment.size)

    def done(self, segment: Segment) -> None:
        """This process does not need it any more."""
        with self._lock:
            segment.mine = False
            self._tidy(segment)

    def freed(self, numbers: Sequence[int]) -> None:
        """No reader refers to these any more."""
        with self._lock:
            for number in numbers:
                segment = self._used.get(number)
                if segment is not None:
                    segment.theirs = False
                    self._tidy(segment)

    def close(self) -> None:
        with self._lock:
            for segment in [*self._free, *self._used.values()]:
                segment.close()
            self._free, self._used = [], OrderedDict()

    def _tidy(self, segment: Segment) -> None:
        if segment.number not in self._used or segment.mine:
            return
        if not segment.capacity:  # on disk: not used again, and readers have descriptors of their own
            del self._used[segment.number]
            segment.close()
            return
        if not segment.theirs:
            del self._used[segment.number]
            self._free.append(segment)
        while sum(each.capacity for each in self._free) > KEPT_BYTES:
            self._free.pop(0).close()
        waiting = [each for each in self._used.values() if not each.mine]  # for a report that may never come
        while sum(each.capacity for each in waiting) > KEPT_BYTES:
            given_up = waiting.pop(0)
            del self._used[given_up.number]
            given_up.close()

    def _take(self, size: int) -> Segment:
        with self._lock:
            fitting = [segment for segment in self._free if segment.capacity >= size]
            if fitting:
                segment = min(fitting, key=lambda each: each.capacity)
                self._free.remove(segment)
                self._numbers += 1
                segment.number = self._numbers  # a new one for each use: a late report is about an earlier one
                self._used[segment.number] = segment
                segment.mine = segment.theirs = True
                return segment
        return self._new(max(LEAST_BYTES, 1 << (size - 1).bit_length()))

    def _new(self, capacity: int) -> Segment:
        with self._lock:
            self._numbers += 1
            segment = self._used[self._numbers] = Segment(self._numbers, capacity)
            return segment

    def _give_up(self, segment: Segment) -> None:
        with self._lock:
            self._used.pop(segment.number, None)
        segment.close()


class Leases:
    """Segments of other processes, mapped here. What is not referred to any more is collected in `freed`. One thread reads;
    any thread may take what was freed."""

    def __init__(self, private: bool) -> None:
        # Filled by finalizers, on whichever thread drops the last reference, also inside of take_freed(): a deque needs no
        # lock for that, and a lock could be held already by the thread that a finalizer runs on.
        self.freed: deque[tuple[str, int]] = deque()
        self._private = private  # what is written here, only this process sees; mapped anew each time
        # By the file: a segment that is used again is mapped once. The thread's own that reads: no lock.
        self._maps: OrderedDict[tuple[int, int], mmap.mmap] = OrderedDict()

    def read(self, payload: bytes | SegmentRef, fds: Sequence[int]) -> memoryview:
        """What a message carries: in itself, or in a segment, for as long as something refers to it."""
        if isinstance(payload, bytes):
            return memoryview(bytearray(payload))
        ref = payload
        lease = (ctypes.c_char * ref.size).from_buffer(self._mapped(fds[ref.at], ref))
        # At exit nobody is told: the other side sees the connection close.
        weakref.finalize(lease, self.freed.append, (ref.owner, ref.number)).atexit = False
        return memoryview(lease).cast("B")

    def read_again(self, payload: bytes | SegmentRef, fds: Sequence[int]) -> Callable[[], memoryview]:
        """What gives, later, a copy of what a message carries as it is in the segment, whatever was written here since."""
        if isinstance(payload, bytes):
            return lambda: memoryview(bytearray(payload))
        shared = mmap.mmap(fds[payload.at], payload.size, prot=mmap.PROT_READ)
        return lambda: memoryview(bytearray(shared))

    def take_freed(self) -> dict[str, list[int]]:
        """What was freed since the last time, by owner."""
        found: dict[str, list[int]] = {}
        with contextlib.suppress(IndexError):  # empty. To look first would not do: another thread may take the last one
            while True:
                owner, number = self.freed.popleft()
                found.setdefault(owner, []).append(number)
        return found

    def forget(self) -> None:
        """Keep no map for segments to come; what is referred to stays."""
        self._maps.clear()

    def _mapped(self, fd: int, ref: SegmentRef) -> mmap.mmap:
        if self._private:
            found = mmap.mmap(fd, ref.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            with contextlib.suppress(OSError):
                if sys.platform == "linux":
                    found.madvise(MADV_POPULATE_READ)
            return found
        file = os.fstat(fd)
        inode = file.st_dev, file.st_ino
        known = self._maps.pop(inode, None)
        found = self._maps[inode] = mmap.mmap(fd, 0) if known is None or len(known) < ref.size else known
        while len(self._maps) > MAPS:  # what refers to such a mapping keeps it
            self._maps.popitem(last=False)
        return found
