"""Blocks as buffers: rows pickled with their arrays beside them, tables as Arrow IPC."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import struct
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import cloudpickle

from penstock.blocks import Block
from penstock.errors import NotShippableError
from penstock.rows import let_through, safe_str, shorten
from penstock.transport.tensors import is_beyond_numpy, is_plain, parts_of, tensor_of

_COUNT = struct.Struct("!QQ")  # the kind and the number of buffers, then that many sizes
_PICKLED, _ARROW = 0, 1
STACKED_BYTES = 16 << 10  # of an array that is packed together with others
_SURE = {"builtins", "collections", "datetime", "decimal", "numpy", "pandas", "penstock", "PIL", "pyarrow", "torch", "uuid"}
FEW = 100  # items
ALIGNMENT = 64  # of every buffer in a chunk: arrays that lie askew are slow, and some frameworks refuse them


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """By value what the other process cannot import; and of a tensor that is a view, its own elements only."""

    foreign = False  # whether it has met an object whose unpickling may do anything

    def reducer_override(self, obj: Any) -> Any:
        self.foreign = self.foreign or str(type(obj).__module__).partition(".")[0] not in _SURE
        parts = parts_of(obj)
        return super().reducer_override(obj) if parts is None else (tensor_of, parts)


class _StepPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """For what a step refers to. cloudpickle copies a text file that is open for reading, and pickle a list's iterator: each
    copy would read it all."""

    def reducer_override(self, obj: Any) -> Any:
        held = _held_by_name(obj) if isinstance(obj, types.FunctionType) else _attributes(obj)
        for name, thing in held.items():
            _refuse_open(thing)
            for each in (thing, *_items(thing)):
                _refuse_used_up(each, name)
        _refuse_open(obj)
        _refuse_used_up(obj)
        if names := getattr(type(obj), "loaded_when_called", ()):
            fields = {each.name: getattr(obj, each.name) for each in dataclasses.fields(obj)}
            return _with_fields, (type(obj), fields | {name: Later.of(fields[name]) for name in names})
        return super().reducer_override(obj)


class Later:
    """A function or class that was pickled by itself, and is loaded when it is first called: a process that only passes it
    on need not import what it needs."""

    def __init__(self, pickled: bytes, module: str, name: str) -> None:
        self._made_of = pickled, module, name
        self.__module__, self.__qualname__ = module, name  # what it is called

    @classmethod
    def of(cls, function: Callable[..., Any] | None) -> Later | None:
        if function is None or isinstance(function, Later):
            return function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return cls(dump_step(function), str(getattr(function, "__module__", "")), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return load_pickle(self._made_of[0])(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Later, self._made_of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Later) and self._made_of == other._made_of

    def __hash__(self) -> int:
        return hash(self._made_of)


def _with_fields(cls: type, fields: dict[str, Any]) -> Any:
    """A frozen dataclass that was checked when it was made."""
    made: Any = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _held_by_name(function: types.FunctionType) -> dict[str, Any]:
    """What a function refers to, by the names of its variables, also what does not travel with it if it can be imported."""
    held = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    held |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty yet
            held[name] = cell.cell_contents
    return held | (function.__kwdefaults__ or {})


def _attributes(thing: Any) -> dict[str, Any]:
    """Of an object that travels with them, as a DoFn does; classes and modules mostly go by name."""
    attributes = getattr(thing, "__dict__", None)
    return attributes if type(attributes) is dict and not isinstance(thing, types.ModuleType) else {}


def _items(thing: Any) -> Collection[Any]:
    """Of a small collection, such as a function's further arguments, to name it. Others are seen as they travel."""
    if type(thing) not in (list, tuple, dict) or len(thing) > FEW:
        return ()
    return thing.values() if type(thing) is dict else thing


def _refuse_used_up(thing: Any, name: str = "") -> None:
    if type(thing).__module__ in ("builtins", "itertools", "_csv") and isinstance(thing, Iterator):
        variable = f"the variable {name!r} is or holds" if name else "it refers to"
        raise TypeError(
            f"{variable} a {type(thing).__name__}, which is used up as it is read, and each copy of the step would have "
            "its own; make a list of it first, or make it inside the function"
        )


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
    return list(tensor_of(array).unbind(0) if tensors else array)


def _stacked(rows: list[Any]) -> _Stacked | None:
    """Rows that are small arrays and alike are pickled as one: each by itself costs more than its copy."""
    if len(rows) < 2:
        return None
    kind, shape, dtype = type(rows[0]), getattr(rows[0], "shape", ()), cast(Any, getattr(rows[0], "dtype", None))
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    tensors = kind is getattr(torch, "Tensor", None)  # a module may be half imported, by another thread
    arrays = kind is getattr(numpy, "ndarray", None) and dtype.kind in "biufc"
    if not (tensors or arrays) or not shape or rows[0].nbytes > STACKED_BYTES or is_beyond_numpy(dtype):
        return None
    if any(type(row) is not kind or row.shape != shape or row.dtype != dtype for row in rows):
        return None
    if arrays:
        return _Stacked(numpy.stack(rows), False)  # type: ignore[union-attr]
    return _Stacked(torch.stack(rows).numpy(), True) if all(is_plain(torch, row) for row in rows) else None  # type: ignore[union-attr]


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


# Held where modules are imported for what comes from elsewhere. Reentrant: what is unpickled may unpickle something itself.
IMPORTING = threading.RLock()
_here = threading.local()  # .is_loading: of each thread


def load_pickle(data: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """pickle.loads(), by one thread at a time: it imports modules, and two threads that begin at different ends of a circle
    of imports wait for each other."""
    with IMPORTING:
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
