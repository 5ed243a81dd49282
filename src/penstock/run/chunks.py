"""Payloads of one machine: blocks on their way from one process to another, as chunks, and rows that stay where they are.

Each chunk is the input of one bundle of the next stage.

A bundle's output for one outlet is written to one anonymous file, in memory first and on disk when it grows large. The
coordinator passes the file on without reading it. A bundle's output is one chunk, of at most 64 MB; only where the stage
has few splits, chunks start small and grow, so that few rows are shared out among all workers.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.blocks import Block, byte_size, row_count, slice_rows
from penstock.errors import NotShippableError
from penstock.failures import Failure
from penstock.rows import shorten
from penstock.run.fleet import Work
from penstock.run.locality import ANYWHERE, Locality
from penstock.steps.stage import Outlet
from penstock.transport.channel import INLINE_BYTES, anonymous_file, read_all, write_all
from penstock.transport.packing import length, pack, unpack, why_not_packed

CHUNK_BYTES = 64 << 20
SPREAD_ROWS = (16, 16384)  # rows of the first chunk, and of the largest, where there are few splits to share out
MEMORY_BYTES = 64 << 20  # of one outlet's output; the rest goes to disk


@dataclass(eq=False, slots=True)
class Chunk:
    """Some packed blocks: as bytes, or as a part of an anonymous file."""

    rows: int
    size: int  # bytes
    data: bytes | None = None
    file: AnonymousFile | int | None = None  # while it travels: the position of its descriptor in the message
    offset: int = 0
    locality: Locality = ANYWHERE

    def read(self) -> Iterator[Block]:
        """The blocks, copied out."""
        if self.data is not None:
            data = bytearray(self.data)
        else:
            assert isinstance(self.file, AnonymousFile)
            data = read_all(self.file.fd, self.offset, self.size)
        yield from unpack(memoryview(data))

    def release(self) -> None:
        """Let go of the file. Nobody will read these blocks again."""
        if isinstance(self.file, AnonymousFile):
            self.file.release()


class KeptRows:
    """Blocks as they are, in the process that made them: a shipment that is its own payload."""

    packs = False
    size = 0  # nothing was copied
    locality = ANYWHERE

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    @property
    def rows(self) -> int:
        return sum(map(row_count, self._blocks))

    def add(self, block: Block) -> None:
        self._blocks.append(block)

    def seal(self) -> list[KeptRows]:
        return [self]

    def read(self) -> Iterator[Block]:
        return iter(self._blocks)

    def release(self) -> None:
        self._blocks = []

    discard = release


class AnonymousFile:
    """A descriptor that is closed when its last chunk is done with. One thread at a time counts its chunks: no lock."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._chunks = 0  # that are not released

    def shared(self) -> AnonymousFile:
        """This file, for one more chunk."""
        self._chunks += 1
        return self

    def release(self) -> None:
        self._chunks -= 1
        if self._chunks == 0:
            os.close(self.fd)


class Cutter:
    """Cuts blocks into pieces that fill chunks: up to a number of bytes, or to `spread` 16 rows, then 32, 64 ..."""

    def __init__(self, spread: bool) -> None:
        self.target = SPREAD_ROWS[0] if spread else sys.maxsize
        self.rows = 0
        self.bytes = 0

    def cut(self, block: Block) -> Iterator[tuple[Block, bool]]:
        """Pieces of the block, each with whether a chunk ends after it."""
        at, end = 0, row_count(block)
        per_row = byte_size(block) / max(1, end)
        while at < end:
            room = min(self.target - self.rows, max(1, int((CHUNK_BYTES - self.bytes) / max(per_row, 1e-9))))
            stop = min(end, at + room)
            self.rows += stop - at
            self.bytes += int(per_row * (stop - at))
            full = self.rows >= self.target or self.bytes >= CHUNK_BYTES
            yield slice_rows(block, at, stop), full
            if full:
                self.rows, self.bytes = 0, 0
                self.target = min(SPREAD_ROWS[1], self.target * 2) if self.target < sys.maxsize else self.target
            at = stop


class PackedShipment:
    """Blocks packed for another process."""

    packs = True

    def __init__(self, step: str, cutter: Cutter, models_of: Callable[[Block], Iterable[int]] | None = None) -> None:
        """models_of: gives the numbers of the models that rows are for, where that matters."""
        self.chunks: list[Chunk] = []
        self.files: list[AnonymousFile] = []  # one in memory, and when that is full one on disk
        self._step = step
        self._cutter = cutter
        self._models_of = models_of
        self._models: set[int] = set()  # of the chunk that is being filled
        self._packed: list[Any] = []
        self._rows = 0
        self._at = 0

    def add(self, block: Block) -> None:
        """All of the block, or nothing and an error. A failed row that cannot be packed goes as text."""
        cutter = copy.copy(self._cutter)
        try:
            pieces = [(pack(piece, self._step, checked=True), piece, full) for piece, full in self._cutter.cut(block)]
        except NotShippableError:
            self._cutter = cutter
            if (told := _with_rows_as_text(block)) is None:
                raise
            self.add(told)
            return
        for packed, piece, full in pieces:
            self._packed.extend(packed)
            self._rows += row_count(piece)
            if self._models_of is not None:
                self._models.update(self._models_of(piece))
            if full:
                self._close_chunk()

    def seal(self) -> list[Chunk]:
        """The end of the bundle: what is small travels in the message itself. Who takes the chunks owns their files."""
        if len(self.chunks) == 0 and sum(map(length, self._packed)) <= INLINE_BYTES // 2:
            if self._rows:
                data = b"".join(self._packed)
                self.chunks.append(Chunk(self._rows, len(data), data=data, locality=self._locality()))
        elif self._rows:
            self._close_chunk()
        return self.chunks

    def discard(self) -> None:
        """Nobody will take the chunks."""
        for chunk in self.chunks:
            chunk.release()

    def _close_chunk(self) -> None:
        if not self.files or (len(self.files) == 1 and self._at > MEMORY_BYTES):
            self.files.append(AnonymousFile(anonymous_file(on_disk=bool(self.files))))
            self._at = 0
        file = self.files[-1].shared()
        # Before it is written: discard() must see it.
        self.chunks.append(Chunk(self._rows, 0, file=file, offset=self._at, locality=self._locality()))
        self.chunks[-1].size = write_all(file.fd, self._packed, self._at)
        self._at += self.chunks[-1].size
        self._packed, self._rows = [], 0

    def _locality(self) -> Locality:
        models, self._models = frozenset(self._models), set()
        return Locality(models=models) if models else ANYWHERE


def packed(work: Work, outlet: Outlet) -> PackedShipment:
    """The way out of a bundle in a worker process."""
    return PackedShipment(outlet.after, Cutter(work.spread and outlet.kind == "stage"))


def packed_or_kept(work: Work, outlet: Outlet) -> PackedShipment | KeptRows:
    """The way out in the user's process. Rows for another stage are packed here too: a step that changes rows in place
    changes its own copies."""
    return KeptRows() if outlet.kind == "collect" else packed(work, outlet)


def _with_rows_as_text(block: Block) -> Block | None:
    """Failures, with the rows that cannot be packed as shortened text; None if no row of the block is such a one."""
    if not isinstance(block, list):
        return None
    told = [(shorten(row[0]), row[1]) if _is_failed(row) and why_not_packed(row) else row for row in block]
    return told if any(old is not new for old, new in zip(block, told, strict=True)) else None


def _is_failed(row: Any) -> bool:
    return type(row) is tuple and len(row) == 2 and isinstance(row[1], Failure)
