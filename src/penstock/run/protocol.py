"""The messages between the coordinator and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import TransientError
from penstock.observe.metrics import Metrics
from penstock.run.chunks import Chunk
from penstock.steps.bundle import BundleResult, Key
from penstock.steps.stage import Outlet
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


class FailedHere:
    """A split failed in this process: the error itself, not a report of it."""

    def __init__(self, task: int, error: BaseException) -> None:
        self.task = task
        self.exception = error
        self.may_pass = isinstance(error, TransientError)


@dataclass(frozen=True, slots=True)
class Progress:
    """From a worker, now and then: rows done of each split that runs."""

    rows: dict[int, int]
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True, slots=True)
class Died:
    """From whoever watches a worker: it is gone."""

    exit_code: int | None
