"""How many bytes of a loaded model can be seen: what its objects hold, counted one by one.

Frameworks are looked for in sys.modules and never imported: a model that uses one has imported it. Memory that a library
keeps to itself, as the trees of a forest in C, is not seen here.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

MOST_OBJECTS = 200_000
MOST_SECONDS = 0.2  # of this thread on a core
LOOK_AT_CLOCK = 512  # objects between two looks
MANY = 1000  # objects in one: they are rather the words of a vocabulary than layers, and are looked at last

RAM = "cpu"  # as torch calls it

Look: TypeAlias = Callable[[Any], Iterable[Any]]  # counts an object, and gives those that it holds

# Their referents are the program, and no part of a model.
_PROGRAM = (
    *(type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType, types.GeneratorType),
    *(types.CoroutineType, types.AsyncGeneratorType, property, weakref.ref),
)
_CONTAINERS = (list, tuple, dict, set, frozenset)


@dataclass(frozen=True, slots=True)
class SizeCount:
    """Bytes of a model, by where they are."""

    ram: int = 0
    devices: Mapping[str, int] = field(default_factory=dict)  # by the names that torch has for them: "cuda:0"


class Reached:
    """All that can be reached from an object now. It is kept alive, so that nothing new is taken for a part of it."""

    def __init__(self, root: object) -> None:
        walk = _Walk()
        walk.go(root)
        self.objects, self.buffers = walk.seen, walk.buffers


def counted_bytes(model: object, beside: Reached | None = None) -> SizeCount:
    """What can be counted in a model within about 0.2 s, short lists of parts before long ones. Arrays and tensors that
    share memory count once; what is in `beside` was there before, and does not count. No code of the model's own is called
    to look at it, and nothing is raised."""
    walk = _Walk() if beside is None else _Walk(beside.objects.keys(), beside.buffers)
    walk.go(model)
    walk.seen.clear()
    devices = {name: size for name, size in walk.bytes.items() if name != RAM}
    return SizeCount(walk.bytes.get(RAM, 0), devices)


class _Walk:
    """Over all objects below one, those next to it first."""

    def __init__(self, known: Container[int] = (), buffers: Iterable[tuple[str, int]] = ()) -> None:
        """known, buffers: what does not count, by ids and by devices and addresses."""
        self.seen: dict[int, object] = {}  # kept, since an object that is made for the walk would leave its id to the next
        self.buffers = set(buffers)
        self.bytes: dict[str, int] = {}
        self._known = known
        self._looks: dict[type, Look] = {}

    def go(self, root: object) -> None:
        """All that can be reached is in `seen` then. Nothing refers to the walk itself any more: a model that nobody uses is
        freed at once, and not when its cycle is found."""
        try:
            self._go(root)
        finally:
            self._looks.clear()

    def _go(self, root: object) -> None:
        waiting = deque([root])
        many: deque[list[Any]] = deque()
        until = time.thread_time() + MOST_SECONDS
        for steps in itertools.count(1):
            if not waiting and many:
                waiting.extend(many.popleft())
            if not waiting or len(self.seen) >= MOST_OBJECTS:
                return
            if not steps % LOOK_AT_CLOCK and time.thread_time() > until:
                return
            each = waiting.popleft()
            if id(each) not in self.seen:
                self.seen[id(each)] = each
                held = self._held_by(each)
                (many.append if len(held) > MANY else waiting.extend)(held)

    def _held_by(self, each: object) -> list[Any]:
        try:
            return list(self._look(type(each))(each))
        except Exception:  # of a framework that is given half an object: it is not counted
            return []

    def _look(self, kind: type) -> Look:
        look = self._looks.get(kind)
        if look is None:
            look = self._looks[kind] = self._new_look(kind)
        return look

    def _new_look(self, kind: type) -> Look:
        """How objects of a class are counted. It is decided by their type: __class__ may be any code."""
        for module, name, look in [
            ("numpy", "ndarray", self._array),
            ("torch", "Tensor", self._tensor),
            ("torch.jit", "ScriptModule", self._script),
            ("pyarrow", "Buffer", self._buffer),
            ("pyarrow", "Array", self._arrow),
            ("pyarrow", "ChunkedArray", lambda column: column.chunks),
            ("pyarrow", "RecordBatch", lambda table: table.columns),
            ("pyarrow", "Table", lambda table: table.columns),
        ]:
            known = getattr(sys.modules.get(module), name, None)
            if isinstance(known, type) and issubclass(kind, known):
                return look
        if issubclass(kind, _PROGRAM):
            return _nothing
        if issubclass(kind, types.FunctionType):
            return _closure
        sizeof = _c_sizeof(kind)
        inside: Look = _some if issubclass(kind, _CONTAINERS) else gc.get_referents

        def look_at(each: Any) -> Iterable[Any]:
            if id(each) not in self._known:
                self._add(RAM, sizeof(each))
            return inside(each)

        return look_at

    def _add(self, place: str, size: int) -> None:
        self.bytes[place] = self.bytes.get(place, 0) + size

    def _add_once(self, place: str, address: int, size: int) -> None:
        if (place, address) not in self.buffers:
            self.buffers.add((place, address))
            self._add(place, size)

    def _array(self, array: Any) -> Iterable[Any]:
        held = gc.get_referents(array)
        numpy = sys.modules["numpy"]
        while issubclass(type(array.base), numpy.ndarray):
            array = array.base
        owner = array.base.obj if type(array.base) is memoryview else array.base
        if type(owner) in (bytes, bytearray):
            return (*held, owner)
        self._add_once(RAM, array.__array_interface__["data"][0], array.nbytes)
        return itertools.chain(held, itertools.islice(array.flat, MOST_OBJECTS) if array.dtype.hasobject else ())

    def _tensor(self, tensor: Any) -> Iterable[Any]:
        with contextlib.suppress(Exception):  # a sparse one has no storage; nor has one that is made of others
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta" and type(tensor).__name__ != "FakeTensor":  # of exported programs: shapes alone
                self._add_once(str(tensor.device), storage.data_ptr(), storage.nbytes())
        return gc.get_referents(tensor)

    def _script(self, module: Any) -> Iterable[Any]:
        """Its tensors are objects of C++."""
        return [*module.parameters(), *module.buffers()]

    def _arrow(self, array: Any) -> Iterator[Any]:
        yield from filter(None, array.buffers())
        if hasattr(array, "dictionary"):
            yield array.dictionary

    def _buffer(self, buffer: Any) -> Iterable[Any]:
        self._add_once(RAM, buffer.address, buffer.size)
        return ()


def _nothing(each: Any) -> Iterable[Any]:
    return ()


def _closure(function: Any) -> Iterable[Any]:
    """What a function holds, beside the module that it is in."""
    return [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]


def _some(container: Any) -> Iterable[Any]:
    """What is in a container; of a very long one its begin, since a list of all would take memory itself."""
    kind = next(kind for kind in _CONTAINERS if issubclass(type(container), kind))
    if kind.__len__(container) <= MOST_OBJECTS:
        return gc.get_referents(container)
    values = dict.values(container) if kind is dict else kind.__iter__(container)
    return itertools.islice(values, MOST_OBJECTS)


def _c_sizeof(kind: type) -> Callable[[Any], int]:
    """The __sizeof__() of a class that is written in C: one of Python counts what it likes, and may raise."""
    for base in kind.__mro__:
        found = base.__dict__.get("__sizeof__")
        if isinstance(found, types.MethodDescriptorType):
            return found
    return object.__sizeof__
