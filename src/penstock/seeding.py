"""Random numbers that repeat: the generators of Python, NumPy and torch, seeded for a while.

Seeded are those that are loaded by then. A framework that is loaded inside the inner of two seeds, as by load_model(), is
seeded for the outer when the inner ends. Generators belong to the process: other threads that use them spoil it.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_outer = threading.local()  # .number: the seed that holds on this thread


class _Generator(NamedTuple):
    seed: Callable[[int], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


def seeded(seed: int | None, *what: object) -> contextlib.AbstractContextManager[None]:
    """Inside, random numbers are those that belong to the seed and to `what`; afterwards they go on as before. For None,
    nothing is seeded."""
    if seed is None:
        return contextlib.nullcontext()
    digest = hashlib.sha256(repr((seed, *what)).encode()).digest()
    return _seeded(int.from_bytes(digest[:4], "big"))


@contextlib.contextmanager
def _seeded(number: int) -> Iterator[None]:
    outer: int | None = getattr(_outer, "number", None)
    before = {name: generator.state() for name, generator in _loaded().items()}
    for generator in _loaded().values():
        generator.seed(number)
    _outer.number = number
    try:
        yield
    finally:
        _outer.number = outer
        for name, generator in _loaded().items():
            if name in before:
                generator.restore(before[name])
            elif outer is not None:
                generator.seed(outer)


def _loaded() -> dict[str, _Generator]:
    found = {"random": _Generator(random.seed, random.getstate, random.setstate)}
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "random"):  # a module may be half imported, by another thread
        found["numpy"] = _Generator(numpy.random.seed, numpy.random.get_state, numpy.random.set_state)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "manual_seed") and hasattr(torch, "cuda"):
        found["torch"] = _Generator(torch.manual_seed, torch.get_rng_state, torch.set_rng_state)
        if torch.cuda.is_initialized():
            cuda = torch.cuda
            found["cuda"] = _Generator(cuda.manual_seed_all, cuda.get_rng_state_all, cuda.set_rng_state_all)
    return found
