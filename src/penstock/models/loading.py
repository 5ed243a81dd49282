"""Loading one copy of a model into this process, measured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.models.memory import proportional_bytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model copy, and what it cost to load."""

    model: Any
    seconds: float
    bytes: int  # by which this process grew; 0 where that cannot be seen


def load(load_model: Callable[[], Any], env_vars: Mapping[str, str]) -> LoadedModel:
    """Call load_model() with the environment that its framework should see."""
    os.environ.update(env_vars)
    before, started = _held_bytes(), time.perf_counter()
    model = load_model()
    seconds = time.perf_counter() - started
    return LoadedModel(model, seconds, max(0, _held_bytes() - before))


def _held_bytes() -> int:
    return proportional_bytes() or resident_bytes()


def resident_bytes() -> int:
    """The memory that this process holds now (Linux), or has held at most (macOS)."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
