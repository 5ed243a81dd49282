"""Retry: which errors of a step's own code are transient, how often a call is tried, and how long to wait in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How often a step calls its code for a row (RunInference: its model for a batch), if that raises a transient error.

    Before the second try it waits about `backoff` seconds, then about twice as long each time, up to `max_backoff`. Waits
    are shortened by chance, by up to a half, so that callers that failed together do not come back together.
    """

    attempts: int = 4  # the first one included
    on: type[Exception] | tuple[type[Exception], ...] = (ConnectionError, TimeoutError)
    backoff: float = 0.5  # seconds
    max_backoff: float = 30.0  # seconds

    def __post_init__(self) -> None:
        if not isinstance(self.attempts, int) or isinstance(self.attempts, bool) or self.attempts < 1:
            raise UsageError(f"Retry(attempts={self.attempts!r}): expected a whole number of at least 1")
        classes = self.on if isinstance(self.on, tuple) else (self.on,)
        if not classes or not all(isinstance(each, type) and issubclass(each, Exception) for each in classes):
            raise UsageError(
                f"Retry(on={self.on!r}): expected a class of errors such as ConnectionError, or a tuple of them; each must "
                "be an Exception"
            )
        for name in ("backoff", "max_backoff"):
            seconds: object = getattr(self, name)
            if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
                raise UsageError(f"Retry({name}={seconds!r}): expected seconds, 0 or more")

    def may_pass(self, exc: BaseException) -> bool:
        """Whether this error is one of `on`, and is tried again."""
        return isinstance(exc, self.on)

    def wait(self, tried: int, chance: float) -> float:
        """Seconds to wait after so many tries; `chance` is a number from 0 to 1."""
        grown = self.backoff * 2.0 ** min(tried - 1, 100)
        return min(grown, self.max_backoff) * (1.0 - chance / 2.0)


def _any_number() -> float:
    import random

    return random.random()


class Tries:
    """What is left of the tries that a Retry allows. For one row, or for all calls that one batch leads to."""

    def __init__(
        self,
        retry: Retry | None,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] | None = None,
    ) -> None:
        self.made = 1  # the try that runs counts
        self._retry = retry
        self._sleep = sleep
        self._chance = chance or _any_number

    def again(self, exc: BaseException) -> bool:
        """Whether to call once more after this error; if so, the wait is over."""
        retry = self._retry
        if retry is None or self.made >= retry.attempts or not retry.may_pass(exc):
            return False
        self._sleep(retry.wait(self.made, self._chance()))
        self.made += 1
        return True


class Tried:
    """A function of one row that is tried again as its Retry says. Used by one thread."""

    def __init__(self, function: Callable[[Any], T], retry: Retry, new_tries: Callable[[Retry], Tries] = Tries) -> None:
        self.made = 1  # how often it was called for the last row
        self._function = function
        self._retry = retry
        self._new_tries = new_tries

    def __call__(self, row: Any) -> Any:
        try:
            self.made = 1
            return self._function(row)
        except self._retry.on as exc:
            tries = self._new_tries(self._retry)
            error: BaseException = exc
        try:
            while tries.again(error):
                self.made = tries.made
                try:
                    return self._function(row)
                except Exception as exc:
                    error = exc
            raise error
        finally:
            del error  # see forget_variables()
