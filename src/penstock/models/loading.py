"""Loading one copy of a model into this process, measured.

Other models may load meanwhile, and batches run. What is counted in the model's own objects is true even then; by how much
the process grew is looked at only where nothing else can have made it grow.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.models.activity import BATCHES, LOADS, Mark
from penstock.models.memory import file_bytes
from penstock.models.sizing import RAM, Reached, SizeCount, counted_bytes
from penstock.transport.interpreters import proportional_bytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model copy, and what it cost to load."""

    model: Any
    seconds: float
    bytes: int  # that a budget counts: what the handler says; else those on devices, if there are any; else those in RAM
    grown: int = 0  # by which this process grew meanwhile, with what was imported; 0 where that cannot be seen
    ram: int = 0  # measured
    devices: Mapping[str, int] = field(default_factory=dict)  # measured, by the names that torch has for them
    certain: int = 0  # of `bytes`: its own, whatever else this process did meanwhile

    @property
    def in_ram(self) -> int:
        """Those of its bytes that are in RAM."""
        return self.ram if self.devices else self.bytes

    def places(self, least: int, device: str | None) -> Mapping[str, int]:
        """The bytes of another model like this one, of at least so many, by where they are. device: what it is meant for,
        where nothing on devices was seen."""
        if measured := sum(self.devices.values()):
            larger = max(1.0, max(least, self.bytes) / measured)
            return {RAM: self.ram, **{name: int(size * larger) for name, size in self.devices.items()}}
        return {RAM: max(least, self.grown or self.ram)} if device is None else {device: max(least, self.bytes)}


def load(
    load_model: Callable[[], Any],
    env_vars: Mapping[str, str],
    *,
    model_files: Callable[[], Iterable[str]] = tuple,
    declared_bytes: Callable[[Any], int | None] = lambda model: None,
    beside: object = None,
    one_of_many: bool = False,
) -> LoadedModel:
    """Call load_model() with the environment that its framework should see. model_files: those that it reads.
    declared_bytes(model): how large it is, where somebody knows. beside: what is reached from it is no part of the model.
    one_of_many: it is done often, so that looking must cost little; memory that processes share is not seen then."""
    os.environ.update(env_vars)
    reached = Reached(beside)
    loads = LOADS.begin()
    try:
        before, started = _Before(loads, private_bytes if one_of_many else _held_bytes), time.perf_counter()
        model = load_model()
        seconds = time.perf_counter() - started
        grown = _Growth(before)
    finally:
        LOADS.end()
    counted, files = counted_bytes(model, reached), file_bytes(model_files)
    size = _size(counted, files, grown)
    declared = declared_bytes(model)
    total = declared if declared is not None else sum(size.devices.values()) or size.ram
    seen = sum(counted.devices.values()) if size.devices else max(counted.ram, files or 0)
    certain = seen if declared is None else declared
    return LoadedModel(model, seconds, total, grown.bytes, size.ram, size.devices, certain)


class _Before:
    """How things are as a load begins."""

    def __init__(self, loads: Mark, held_bytes: Callable[[], int]) -> None:
        self.held_bytes = held_bytes
        self.loads, self.batches = loads, BATCHES.mark()
        self.modules = len(sys.modules)
        self.bytes, self.devices = held_bytes(), _device_bytes()


class _Growth:
    """What has changed since a load began, and whether it can be the load's."""

    def __init__(self, before: _Before) -> None:
        self.bytes = max(0, before.held_bytes() - before.bytes)
        self.devices = {name: size - before.devices.get(name, 0) for name, size in _device_bytes().items()}
        self.alone = LOADS.was_quiet(before.loads, own=1)
        self.undisturbed = self.alone and BATCHES.was_quiet(before.batches)
        self.imported = len(sys.modules) > before.modules


def _size(counted: SizeCount, files: int | None, grown: _Growth) -> SizeCount:
    """The most that is known of a model. A batch that ran meanwhile, or a framework that was imported, can have made the
    process grow far more than the model did; a batch is put up with where there are no files to go by."""
    on_devices = {name: size for name, size in grown.devices.items() if size > 0} if grown.undisturbed else {}
    devices = {name: max(counted.devices.get(name, 0), on_devices.get(name, 0)) for name in {*counted.devices, *on_devices}}
    if devices:
        return SizeCount(counted.ram, devices)
    is_own = not grown.imported and (grown.undisturbed or (grown.alone and files is None))
    return SizeCount(max(counted.ram, files or 0, grown.bytes if is_own else 0))


def _held_bytes() -> int:
    return proportional_bytes() or resident_bytes()


def _device_bytes() -> dict[str, int]:
    """What torch has allocated on each GPU, if it is used here."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    return {f"cuda:{at}": int(cuda.memory_allocated(at)) for at in range(cuda.device_count())}


def private_bytes() -> int:
    """The memory that this process holds by itself (Linux), told a hundred times as fast as its share of all memory."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            resident, shared = statm.read().split()[1:3]
            return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resident_bytes()


def resident_bytes() -> int:
    """The memory that this process holds now (Linux), or has held at most (macOS)."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
