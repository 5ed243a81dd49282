"""Failures: what became of a row that has no answer, as text that travels and can be written anywhere."""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

from penstock.display import Displayed, Look, one_line
from penstock.errors import UsageError
from penstock.rows import SIGNALS, forget_variables, safe_str, user_traceback

# The kinds.
RAISED = "raised"
OUT_OF_MEMORY = "out of memory"
TIMED_OUT = "timed out"
CRASHED = "crashed"
WRONG_COUNT = "wrong count"
NOT_PICKLABLE = "not picklable"
PREPARING = "preparing"
LOADING = "loading"  # the model of its key could not be loaded

MOST_TEXT = 20_000  # characters of a message or a traceback that are kept

ErrorClass: TypeAlias = "type[BaseException] | tuple[type[BaseException], ...]"


@dataclass(frozen=True, slots=True, repr=False)
class Failure(Displayed):
    """Why a row failed. It holds text and numbers only, so it survives whatever the error itself would not."""

    step: str
    kind: str  # "raised", "out of memory", "timed out", "crashed", "wrong count", "not picklable", "preparing" or "loading"
    error_type: str
    message: str
    traceback: str
    attempts: int = 1
    model_id: str | None = None
    group: int = 1  # how many rows failed together, because the guilty one could not be told apart; 1: this row alone

    @classmethod
    def of(
        cls,
        exc: BaseException,
        step: str,
        *,
        kind: str = RAISED,
        attempts: int = 1,
        model_id: str | None = None,
        group: int = 1,
    ) -> Failure:
        """The failure that an error is. The error is not kept, nor the variables of the calls that it came through."""
        message, trace = safe_str(exc)[:MOST_TEXT], user_traceback(exc)[-MOST_TEXT:]
        forget_variables(exc)
        model_id = None if model_id is None else str(model_id)  # text, whatever the handler says
        return cls(step, kind, type(exc).__name__, message, trace, attempts, model_id, group)

    def because(self, why: str) -> Failure:
        """The same with more to say, if there is."""
        return dataclasses.replace(self, message=f"{self.message} ({why})") if why else self

    def _look(self) -> Look:
        shown = [(name, str(value)) for name, value in self.as_dict().items() if name != "traceback"]
        line = f"<Failure in step {self.step!r}, {self.kind}: {self.error_type}: {one_line(self.message)}>"
        return Look(line, ("field", "value"), shown, self.traceback)

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, for sinks."""
        return dict(zip(_NAMES, _values_of(self), strict=True))  # all are plain values


_NAMES = tuple(field.name for field in dataclasses.fields(Failure))
_values_of = attrgetter(*_NAMES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Handling:
    """Which errors cost a row instead of the run, how many may, and how a call of the model is guarded."""

    exc_class: ErrorClass = Exception
    use_subprocess: bool = False
    threshold: float = 1.0  # the share of rows above which the run stops
    timeout: float | None = None  # seconds, for one run_inference() call

    def __post_init__(self) -> None:
        _check_error_class(self.exc_class)
        if not isinstance(self.use_subprocess, bool):
            raise UsageError(f"use_subprocess={self.use_subprocess!r}: expected True or False")
        share = self.threshold
        if not isinstance(share, numbers.Real) or isinstance(share, bool) or not 0 <= share <= 1:
            raise UsageError(f"threshold={share!r}: expected the share of rows that may fail, from 0 to 1")
        seconds = self.timeout
        if seconds is not None and (not isinstance(seconds, numbers.Real) or isinstance(seconds, bool) or not seconds > 0):
            raise UsageError(f"timeout={seconds!r}: expected seconds, more than 0, or None for no limit")

    @property
    def isolated(self) -> bool:
        """Whether the code runs in a process of its own, that may be killed or die."""
        return self.use_subprocess or self.timeout is not None

    def handles(self, exc: BaseException) -> bool:
        """Whether the error costs its row alone. What is no Exception counts like one: see let_through()."""
        return isinstance(exc, self.exc_class) or (
            issubclass(Exception, self.exc_class) and not isinstance(exc, (Exception, *SIGNALS))
        )


def _check_error_class(exc_class: object) -> None:
    classes = exc_class if isinstance(exc_class, tuple) else (exc_class,)
    if not classes or not all(isinstance(each, type) and _is_an_error(each) for each in classes):
        raise UsageError(
            f"exc_class={exc_class!r}: expected a class of errors such as ValueError, or a tuple of them; each must be an "
            "Exception, because Ctrl-C and the end of a run pass through every step"
        )


def _is_an_error(cls: type) -> bool:
    """Not a signal, nor a class that signals are of."""
    return issubclass(cls, BaseException) and not issubclass(cls, SIGNALS) and not issubclass(KeyboardInterrupt, cls)
