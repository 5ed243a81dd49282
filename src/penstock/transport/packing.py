"""Blocks as buffers: rows pickled with their arrays beside them, tables as Arrow IPC."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import cloudpickle

from penstock.blocks import Block
from penstock.errors import NotShippableError
from penstock.rows import let_through, safe_str, shorten

_COUNT = struct.Struct("!QQ")  # the kind and the number of buffers, then that many sizes
_PICKLED, _ARROW = 0, 1
STACKED_BYTES = 16 << 10  # of an array that is packed together with others
_SURE = {"builtins", "collections", "datetime", "decimal", "numpy", "pandas", "penstock", "PIL", "pyarrow", "torch", "uuid"}
ALIGNMENT = 64  # of every buffer in a chunk: arrays that lie askew are slow, and some frameworks refuse them


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """By value what the other process cannot import; and of a tensor that is a view, its own elements only."""

    foreign = False  # whether it has met an object whose unpickling may do anything

    def reducer_override(self, obj: Any) -> Any:
        self.foreign = self.foreign or str(type(obj).__module__).partition(".")[0] not in _SURE
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is getattr(torch, "Tensor", None) and _is_plain(torch, obj):
            if _is_beyond_numpy(obj.dtype):
                bits = torch.int16 if obj.itemsize == 2 else torch.int8
                return _tensor_of, (obj.contiguous().view(bits).numpy(), str(obj.dtype).removeprefix("torch."))
            return _tensor_of, (obj.contiguous().numpy(),)
        return super().reducer_override(obj)


class _StepPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """For what a step refers to. cloudpickle copies a text file that is open for reading: each copy would read it all."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            for held in _held_by_name(obj):
                _refuse_open(held)
        _refuse_open(obj)
        return super().reducer_override(obj)


def _held_by_name(function: types.FunctionType) -> list[Any]:
    """What a function refers to and that does not travel with it if it can be imported by name."""
    names = (name for name in function.__code__.co_names if name in function.__globals__)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*(function.__globals__[name] for name in names), *defaults]


def _refuse_open(thing: Any) -> None:
    if not isinstance(thing, io.IOBase) or isinstance(thing, (io.BytesIO, io.StringIO)) or thing.closed:
        return
    if thing not in (sys.stdout, sys.stderr) and thing.readable():
        name = getattr(thing, "name", type(thing).__name__)
        raise TypeError(f"the file {name!r} is open for reading, and each copy of the step would have its own place in it")


def dump_step(step: Any) -> bytes:
    """A step, with all that it refers to."""
    with io.BytesIO() as file:
        _StepPickler(file, protocol=5).dump(step)
        return file.getvalue()


def _is_plain(torch: Any, tensor: Any) -> bool:
    strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return strided and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def _is_beyond_numpy(dtype: Any) -> bool:
    """Whether it is a type of tensors of which NumPy has no arrays."""
    return str(dtype).startswith(("torch.bfloat16", "torch.float8"))


def _tensor_of(array: Any, kind: str | None = None) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    return tensor if kind is None else tensor.view(getattr(torch, kind))


def dump_rows(rows: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Rows as a pickle that pickle.loads() reads; with a callback, the contents of arrays go there instead."""
    return _dump(rows, buffer_callback)[0]


def _dump(rows: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> tuple[bytes, bool]:
    """The pickle, and whether it may fail to load."""
    with io.BytesIO() as file:
        pickler = _Pickler(file, protocol=5, buffer_callback=buffer_callback)
        pickler.dump(rows)
        return file.getvalue(), pickler.foreign


class _Stacked:
    """Small arrays, or tensors, of one kind and shape as one array. Unpickled, it is a list of them."""

    def __init__(self, array: Any, tensors: bool) -> None:
        self._made_of = array, tensors

    def __reduce__(self) -> Any:
        return _unstacked, self._made_of


def _unstacked(array: Any, tensors: bool) -> list[Any]:
    return list(_tensor_of(array).unbind(0) if tensors else array)


def _stacked(rows: list[Any]) -> _Stacked | None:
    """Rows that are small arrays and alike are pickled as one: each by itself costs more than its copy."""
    if len(rows) < 2:
        return None
    kind, shape, dtype = type(rows[0]), getattr(rows[0], "shape", ()), cast(Any, getattr(rows[0], "dtype", None))
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    tensors = kind is getattr(torch, "Tensor", None)  # a module may be half imported, by another thread
    arrays = kind is getattr(numpy, "ndarray", None) and dtype.kind in "biufc"
    if not (tensors or arrays) or not shape or rows[0].nbytes > STACKED_BYTES or _is_beyond_numpy(dtype):
        return None
    if any(type(row) is not kind or row.shape != shape or row.dtype != dtype for row in rows):
        return None
    if arrays:
        return _Stacked(numpy.stack(rows), False)  # type: ignore[union-attr]
    return _Stacked(torch.stack(rows).numpy(), True) if all(_is_plain(torch, row) for row in rows) else None  # type: ignore[union-attr]


def pack(block: Block, step: str = "", *, checked: bool = False) -> list[Any]:
    """A block as buffers: its arrays are not copied into the pickle, its columns are not turned into rows.

    checked: objects of classes that are not known to load are loaded once, here. A row that does not load is then refused
    where it was made, in a process that may be killed if that hangs, and not where others wait for it."""
    buffers: list[Any] = []
    if not isinstance(block, list):
        kind = _ARROW
        buffers.append(_to_ipc(block))
    else:
        kind = _PICKLED
        outside: list[pickle.PickleBuffer] = []
        try:
            data, foreign = _dump(_stacked(block) or block, outside.append)
            buffers.append(data)
            if checked and foreign:
                _check_loads(data, outside)
        except BaseException as exc:
            let_through(exc)
            raise _not_shippable(block, step, exc) from exc
        buffers.extend(buffer.raw() for buffer in outside)
    header = _COUNT.pack(kind, len(buffers)) + struct.pack(f"!{len(buffers)}Q", *map(length, buffers))
    return [padded for buffer in (header, *buffers) for padded in (buffer, bytes(-length(buffer) % ALIGNMENT))]


def _check_loads(data: bytes, outside: Sequence[pickle.PickleBuffer]) -> None:
    load_pickle(data, [bytearray(buffer.raw()) for buffer in outside])  # copies: loading may change what it is given


def why_not_packed(row: Any) -> BaseException | None:
    """What keeps a row from being packed, or from being loaded again, if anything does."""
    outside: list[pickle.PickleBuffer] = []
    try:
        data, foreign = _dump(row, outside.append)
        if foreign:
            _check_loads(data, outside)
    except BaseException as exc:
        let_through(exc)
        return exc
    return None


def unpack(data: memoryview) -> Iterator[Block]:
    """The blocks in a run of packed ones. Arrays are views of `data`, which should be writable."""
    at = 0
    while at < len(data):
        kind, count = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        sizes = struct.unpack_from(f"!{count}Q", data, at)
        at += 8 * count
        buffers = []
        for size in sizes:
            at += -at % ALIGNMENT
            buffers.append(data[at : at + size])
            at += size
        at += -at % ALIGNMENT
        yield _from_ipc(buffers[0]) if kind == _ARROW else load_pickle(buffers[0], buffers[1:])


_LOADING = threading.RLock()  # reentrant: what is unpickled may unpickle something itself
_here = threading.local()  # .is_loading: of each thread


def load_pickle(data: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """pickle.loads(), by one thread at a time: it imports modules, and two threads that begin at different ends of a circle
    of imports wait for each other."""
    with _LOADING:
        before, _here.is_loading = is_loading(), True
        try:
            return pickle.loads(data, buffers=buffers)
        finally:
            _here.is_loading = before


def is_loading() -> bool:
    """Whether this thread is unpickling something, and perhaps importing modules for it."""
    return getattr(_here, "is_loading", False)


def _to_ipc(table: Any) -> Any:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _from_ipc(data: memoryview) -> Block:
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_all()


def length(buffer: Any) -> int:
    return memoryview(buffer).nbytes


def _not_shippable(rows: list[Any], step: str, exc: BaseException) -> NotShippableError:
    row = next((row for row in rows if why_not_packed(row) is not None), rows)
    return NotShippableError(
        f"step {step!r}: a row of type {type(row).__name__} cannot be sent to another process "
        f"({type(exc).__name__}: {safe_str(exc)})\n  row: {shorten(row)}\n  turn it into plain data with ps.Map(...) "
        "before it leaves the worker, or run in one process with Pipeline(workers=0)"
    )
