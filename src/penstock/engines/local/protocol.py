"""The messages between the coordinator and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engines.bundle import BundleResult, Key
from penstock.engines.local.parcel import Chunk
from penstock.engines.plan import Outlet
from penstock.observe.metrics import Metrics
from penstock.transport.reports import ErrorReport


@dataclass(frozen=True, slots=True)
class Install:
    """To a worker: a stage that it will get work for, pickled."""

    stage: int
    program: bytes


@dataclass(frozen=True, slots=True)
class Work:
    """To a worker: one split. It is unpickled by the thread that runs it, so that what goes wrong is its own trouble."""

    task: int
    stage: int
    root: int
    run: str
    key: Key
    attempt: int
    split: bytes | None = None  # of a source, pickled
    chunk: Chunk | None = None  # or from the stage before
    spread: bool = False  # cut what it makes for other stages into small chunks: there are few splits
    journaled: bool = False  # the run can be resumed


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: finish and leave."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: it can be given work."""


@dataclass(frozen=True, slots=True)
class Done:
    """From a worker: a split is done, with all that it made."""

    task: int
    result: BundleResult
    shipped: list[tuple[Outlet, list[Chunk]]]
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker: a split failed and left nothing."""

    task: int
    error: ErrorReport
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True, slots=True)
class Progress:
    """From a worker, now and then: rows done of each split that runs."""

    rows: dict[int, int]
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True, slots=True)
class Died:
    """From whoever watches a worker: it is gone."""

    exit_code: int | None
