"""Resource hints: what a step needs of the machine it runs on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.errors import UsageError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_ACCELERATORS = re.compile(r"(gpu|tpu|cuda|mps|xpu|hip|npu)(:\d+)?|type:.+", re.IGNORECASE)
_NOT_GPUS = {"tpu": "TPU", "npu": "NPU"}  # of the accelerators: what Ray does not count as "GPU"
ACCELERATOR_TYPE = "accelerator_type:"  # so Ray's name begins for what the nodes with that type have


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceHints:
    """What one worker for a step needs. Steps with equal hints share workers; a change of hints cuts a stage."""

    min_ram: int | None = None  # bytes
    cpus: int | None = None
    accelerator: str | None = None
    resources: tuple[tuple[str, float], ...] | None = None  # what a cluster calls its own, and how much; by name

    def over(self, outer: ResourceHints) -> ResourceHints:
        """These hints, and the outer ones where these say nothing."""
        return ResourceHints(
            **{f.name: mine if (mine := getattr(self, f.name)) is not None else getattr(outer, f.name) for f in fields(self)}
        )

    def __str__(self) -> str:
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        if "min_ram" in given:
            given["min_ram"] = f"{given['min_ram'] / 1e9:.3g}GB"
        if "resources" in given:
            given["resources"] = dict(given["resources"])
        return ", ".join(f"{name}={value}" for name, value in given.items()) or "none"


NO_HINTS = ResourceHints()


def cluster_needs(hints: ResourceHints) -> dict[str, float]:
    """What these hints ask of a cluster besides cores and memory, by Ray's names: the accelerator, and what is named."""
    needs = {} if hints.accelerator is None else _accelerator_needs(hints.accelerator)
    return needs | dict(hints.resources or ())


def _accelerator_needs(accelerator: str) -> dict[str, float]:
    """The whole of it: which one of several is the cluster's choice."""
    kind, _, told = accelerator.partition(":")
    if kind.lower() != "type":
        return {_NOT_GPUS.get(kind.lower(), "GPU"): 1}
    name, _, settings = told.partition(";")  # as Beam has it: "nvidia-tesla-t4;count:2;install-nvidia-driver"
    count = re.search(r"count:(\d+)", settings)
    resource = "TPU" if "tpu" in name.lower() else "GPU"
    return {resource: int(count[1]) if count else 1, f"{ACCELERATOR_TYPE}{_type_of(name)}": 0.001}


def _type_of(name: str) -> str:
    """Ray's name for a type of accelerator: "T4" for a cloud's "nvidia-tesla-t4". Ray's own names stay as they are."""
    cloud = re.fullmatch(r"nvidia-(?:tesla-)?((?:[a-z]+-)*[a-z]*\d[a-z0-9]*)(?:-.*)?", name)
    return cloud[1].upper() if cloud else name


def resource_hints(
    min_ram: str | int | None = None,
    cpus: int | None = None,
    accelerator: str | None = None,
    resources: Mapping[str, float] | None = None,
) -> ResourceHints:
    """Check and normalise what a user wrote: min_ram="8GB" or bytes, cpus=2, accelerator="gpu", resources={"ssd": 1}."""
    if cpus is not None and (not isinstance(cpus, int) or cpus < 1):
        raise UsageError(f"cpus={cpus!r}: expected a whole number of at least 1")
    if accelerator is not None and not (isinstance(accelerator, str) and _ACCELERATORS.fullmatch(accelerator)):
        raise UsageError(
            f'accelerator={accelerator!r}: expected "gpu", "tpu", a device such as "cuda:1", or what Beam takes, "type:..."'
        )
    ram = None if min_ram is None else parse_bytes(min_ram, "min_ram")
    return ResourceHints(min_ram=ram, cpus=cpus, accelerator=accelerator, resources=_checked_resources(resources))


def _checked_resources(given: object) -> tuple[tuple[str, float], ...] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and _is_share(given[name]) for name in given):
        raise UsageError(f'resources={given!r}: expected names and how much a worker needs of each, as {{"ssd": 1}}')
    return tuple(sorted(given.items())) or None


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def parse_bytes(text: str | int, name: str) -> int:
    """Bytes from 8_000_000, "8MB" or "8 MiB"; `name` is the argument, for the error."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text) if isinstance(text, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f'{name}={text!r}: expected bytes, or a size such as "8GB" or "512MiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])
