"""Whether the memory of models that were unloaded is free again, in a process that loads one after the other. RAM is
watched; that of devices is freed at once."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from penstock.models.loading import resident_bytes

SLACK = 32 << 20  # bytes that a process may hold beside its models, at least
ALLOWED = 0.25  # of its models, the same
TRIM_EVERY = 0.5  # seconds: what is given back has to be fetched again
GROWTHS = 3  # that cannot be undone, one on top of the other, until it counts as a leak


class FreedMemory:
    """Told of every load and unload; cheap but where too much is held. What cannot be freed, such as a library that came
    with the first model or the first call, is taken as given once: a leak is what grows again, and again."""

    def __init__(self, held: Callable[[], int] = resident_bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._held, self._clock = held, clock
        self._lock = threading.Lock()  # guards what follows: models are loaded by several threads
        self._besides: int | None = None  # bytes that are held and are no model's
        self._models: dict[str, int] = {}
        self._on_devices: set[str] = set()
        self._total = 0  # of the models
        self._largest = 0
        self._loading = 0
        self._growths = 0
        self._trimmed = float("-inf")

    def loads(self) -> None:
        """A load begins."""
        with self._lock:
            self._loading += 1

    def load_failed(self) -> None:
        """It is over."""
        with self._lock:
            self._loading -= 1

    def loaded(self, model: str, size: int, *, on_device: bool = False) -> None:
        """It is over, and the model takes so many bytes of RAM. on_device: and others, which are not watched."""
        with self._lock:
            self._loading -= 1
            if self._besides is None:  # the first: it is loaded alone
                self._besides = max(0, self._held() - size)
            self._models[model] = size
            self._total += size
            self._largest = max(self._largest, size)
            if on_device:
                self._on_devices.add(model)

    def unloaded(self, model: str) -> tuple[int, int] | None:
        """Nothing refers to it any more but itself. If it is a leak: the bytes that are held, and those that should be."""
        with self._lock:
            if model in self._on_devices:
                self._on_devices.remove(model)
                free_devices()
            self._total -= self._models.pop(model, 0)
            expected = (self._besides or 0) + self._total
            slack = self._largest * (1 + self._loading) + int(ALLOWED * self._total)
            most = expected + max(SLACK, slack)
            held = self._held()
            if held <= most:
                if held > expected + self._largest and self._clock() >= self._trimmed + TRIM_EVERY:
                    trim()
                    self._trimmed = self._clock()
                return None
            gc.collect()
            trim()
            held = self._held()
            if held <= most:
                return None
            self._besides = held - self._total
            self._growths += 1
            return (held, expected) if self._growths >= GROWTHS else None


def free_devices() -> None:
    """Free the memory of devices that nobody uses, and let other processes have it: torch keeps it for later."""
    gc.collect()  # a model that refers to itself: how full a device is starts no collection
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        with suppress(RuntimeError):  # of an earlier call: whoever waits for that is told
            cuda.empty_cache()


def trim() -> None:
    """Give back what the C library keeps for later."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
