"""How much memory there is, how many cores, and which GPUs."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.models.cgroups import cpu_quota, memory_limits, read_file

DEVICE_SHARE = 0.8  # of the memory of a GPU that is free, for models: the rest is for what they compute


def available_bytes() -> int:
    """What processes may still take, on this machine, in this container, unit or job."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", read_file("/proc/meminfo"), re.MULTILINE)
    if match:
        available = int(match[1]) * 1024
    return min([available, *(limit.left for limit in memory_limits())])


def usable_cores() -> int:
    """How many cores this process may keep busy: those that it may run on, or what its container, unit or job may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def file_bytes(model_files: Callable[[], Iterable[str]]) -> int | None:
    """How large the files and folders are that a handler names; None if it names none, or one is not on this machine."""
    found = []
    try:
        named = [str(path) for path in model_files()]
        for path in map(Path, named if all(named) else ()):  # an empty name is no file, and not the working directory
            files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
            found += [each.stat().st_size for each in files]
    except Exception:  # of the user's function, too: it is asked for a hint only
        return None
    return sum(found) if found else None


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that a process of ours would see, by the names that CUDA_VISIBLE_DEVICES takes."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return named_gpus(chosen)
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return tuple(map(str, range(len(devices))))


def named_gpus(chosen: str) -> tuple[str, ...]:
    """The names in a value of CUDA_VISIBLE_DEVICES; CUDA does not see what is behind one that is none."""
    return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, chosen.split(","))))


def free_device_bytes(device: str | None = None) -> int | None:
    """What models may take on a GPU, by the name that torch has for it, or on the one of this process; with what torch keeps
    here for later, and gives back when it is needed. None where there is none. It imports torch."""
    at = () if device in (None, "gpu", "cuda") else (device,)
    if at and not str(device).startswith("cuda:"):
        return None
    try:
        import torch

        if not torch.cuda.is_available():
            return None
        free, _ = torch.cuda.mem_get_info(*at)
        kept = torch.cuda.memory_reserved(*at) - torch.cuda.memory_allocated(*at)
        return int(DEVICE_SHARE * (free + max(0, kept)))
    except (ImportError, RuntimeError, ValueError, AssertionError):  # torch has all of these for a device that is not there
        return None
