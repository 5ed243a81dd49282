"""How an error travels from one process to another."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle

from penstock.errors import EngineError, PenstockError, StepError, TransientError
from penstock.rows import original_traceback, safe_str

IN_A_WORKER = "in a worker process:"  # begins the note that holds the traceback from there


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as it crosses processes: itself where it can be pickled, and its story as text in any case."""

    pickled: bytes | None
    message: str
    traceback: str
    may_pass: bool
    itself: PenstockError | None = None  # where it does not leave its process

    @classmethod
    def here(cls, exc: BaseException) -> ErrorReport:
        """Of an error in the user's own process."""
        error = as_penstock_error(exc)
        return cls(None, safe_str(error), "", isinstance(error, TransientError), error)

    @classmethod
    def of(cls, exc: BaseException) -> ErrorReport:
        error = as_penstock_error(exc)
        text = original_traceback(error)[-20_000:]
        return cls(_pickled(error, error.__cause__), safe_str(error), text, isinstance(error, TransientError))

    def error(self) -> PenstockError:
        """The error in the user's process, with the original one as its cause or at least as text."""
        if self.itself is not None:
            return self.itself
        error: PenstockError
        cause: BaseException | None = None
        if self.pickled is None:
            error = EngineError(self.message)
        else:
            error, cause = pickle.loads(self.pickled)
        error.__cause__ = cause
        error.add_note(f"{IN_A_WORKER}\n{self.traceback}")
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
