"""Rows in Ray's object store: how they get there from a worker, and what the driver holds of them.

worker: chunks -> taken_apart() -> Ray keeps each in the store of the node -> driver: with_payloads(), references
driver: a reference beside the work -> Ray has it in the store of the next worker's node -> InStore
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from penstock.blocks import Block
from penstock.engines.ray.cluster import import_ray
from penstock.run.chunks import AnonymousFile, Chunk, Cutter, PackedShipment
from penstock.run.fleet import Done, Payload, Work
from penstock.run.locality import ANYWHERE, Locality
from penstock.steps.stage import Outlet
from penstock.transport.packing import unpack

SENT_ALONG = 100 << 10  # bytes up to which Ray sends an answer to the driver, and keeps it in no node's store


@dataclass(eq=False)
class InStore:
    """Rows that came with the work, in the memory of Ray's object store, which nobody may change."""

    buffer: Any
    rows: int
    size: int
    locality: ClassVar[Locality] = ANYWHERE

    def read(self) -> Iterator[Block]:
        yield from unpack(memoryview(bytearray(self.buffer)))  # a copy, which steps may change

    def release(self) -> None: ...


@dataclass(eq=False)
class StorePayload:
    """Rows between two stages, in Ray's object store."""

    rows: int
    size: int
    locality: Locality
    ref: Any  # in the driver alone, which owns the rows by it; None in a worker

    def read(self) -> Any:
        return InStore(import_ray().get(self.ref), self.rows, self.size).read()

    def release(self) -> None:
        self.ref = None  # the driver's only reference: Ray frees the rows, when no call uses them

    def __getstate__(self) -> tuple[int, int]:
        return self.rows, self.size  # what it refers to goes beside it

    def __setstate__(self, state: tuple[int, int]) -> None:
        (self.rows, self.size), self.locality, self.ref = state, ANYWHERE, None


def taken_apart(done: Done) -> tuple[Done, list[Any]]:
    """The same with empty chunks, and what was in them, in that order."""
    buffers = [_buffer(chunk) for chunk in done.payloads if isinstance(chunk, Chunk)]
    shipped = [(outlet, [_emptied(each) for each in payloads]) for outlet, payloads in done.shipped]
    return replace(done, shipped=shipped), buffers


def _buffer(chunk: Chunk) -> np.ndarray[Any, Any]:
    if chunk.data is not None:
        return np.frombuffer(chunk.data, np.uint8)
    assert isinstance(chunk.file, AnonymousFile)
    mapped = mmap.mmap(chunk.file.fd, 0, prot=mmap.PROT_READ)  # outlives the descriptor, which _emptied() lets go of
    return np.frombuffer(mapped, np.uint8, chunk.size, chunk.offset)


def _emptied(payload: Any) -> Chunk:
    payload.release()
    return Chunk(payload.rows, payload.size, locality=payload.locality)


def shipped(work: Work, outlet: Outlet) -> PackedShipment:
    """The way out of a bundle, which remembers whose models the rows are for, where there is one for each key."""
    models_of = None if outlet.keys is None else partial(_models_of, column=outlet.keys)
    return PackedShipment(outlet.after, Cutter(work.spread and outlet.kind == "stage"), models_of)


def _models_of(block: Block, column: str) -> set[int]:
    """Numbers for the keys of these rows, the same in all processes. Rows that have none are somebody else's trouble."""
    if not isinstance(block, list):
        keys = block.column(column).unique().to_pylist() if column in block.column_names else []
    elif column:
        keys = [row.get(column) for row in block if isinstance(row, dict)]
    else:
        keys = [row[0] for row in block if isinstance(row, tuple) and len(row) == 2]
    distinct = set(filter(_is_hashable, keys))
    return {zlib.crc32(repr(key).encode()) for key in distinct}


def _is_hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def with_payloads(done: Done, refs: Sequence[Any], node: str) -> Done:
    """In the driver: what is for the user is fetched; what is for another stage stays where it is, on this node."""
    ray = import_ray()
    kinds = [(outlet.kind, chunk) for outlet, chunks in done.shipped for chunk in chunks]
    if len(refs) < len(kinds):
        ray.get(refs[-1])  # raises: why Ray could not keep the others
    payloads: list[Payload] = []
    for (kind, empty), ref in zip(kinds, refs, strict=True):
        if kind == "stage":
            near = empty.locality._replace(place=node if empty.size > SENT_ALONG else "")
            payloads.append(StorePayload(empty.rows, empty.size, near, ref))
        else:
            payloads.append(InStore(ray.get(ref), empty.rows, empty.size))
    rest = iter(payloads)
    return replace(done, shipped=[(outlet, [next(rest) for _ in empty]) for outlet, empty in done.shipped])
