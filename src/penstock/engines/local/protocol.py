"""The messages between the coordinator and its workers, and how an error travels."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from penstock.engines.bundle import BundleResult, Key
from penstock.engines.local.parcel import Chunk
from penstock.engines.plan import Outlet
from penstock.errors import EngineError, PenstockError, StepError, TransientError
from penstock.observe.metrics import Metrics
from penstock.rows import original_traceback, safe_str


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


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as it crosses processes: itself where it can be pickled, and its story as text in any case."""

    pickled: bytes | None
    message: str
    traceback: str
    may_pass: bool

    @classmethod
    def of(cls, exc: BaseException) -> ErrorReport:
        error = as_penstock_error(exc)
        text = original_traceback(error)[-20_000:]
        return cls(_pickled(error, error.__cause__), safe_str(error), text, isinstance(error, TransientError))

    def error(self) -> PenstockError:
        """The error in the user's process, with the original one as its cause or at least as text."""
        error: PenstockError
        cause: BaseException | None = None
        if self.pickled is None:
            error = EngineError(self.message)
        else:
            error, cause = pickle.loads(self.pickled)
        error.__cause__ = cause
        error.add_note(f"in a worker process:\n{self.traceback}")
        return error


def as_penstock_error(exc: BaseException) -> PenstockError:
    """The error itself if it is one of ours; else, such as for SystemExit, an error of the step with that cause."""
    if isinstance(exc, PenstockError):
        return exc
    error = StepError(f"{type(exc).__name__}: {safe_str(exc)}")
    error.__cause__ = exc
    return error


def _pickled(error: PenstockError, cause: BaseException | None) -> bytes | None:
    """The error and its cause if both survive the journey; the error alone; or nothing."""
    attempts: list[Any] = [(error, cause), (error, None)]
    for attempt in attempts:
        try:
            data: bytes = cloudpickle.dumps(attempt, protocol=5)
            pickle.loads(data)
        except Exception:
            continue
        return data
    return None
