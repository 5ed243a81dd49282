"""Steps whose rows may fail: with_exception_handling() and with_retry() of Map, FlatMap, Filter and ParDo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

from penstock.errors import UsageError
from penstock.failures import ErrorClass, Failure, Handling
from penstock.pipeline.graph import FAILURES, MAIN, Node, PCollection, PTransform, add_step
from penstock.pipeline.traits import Traits
from penstock.retry import Retry

InT = TypeVar("InT", contravariant=True)
OutT = TypeVar("OutT", covariant=True)
RetryableT = TypeVar("RetryableT", bound="Retryable[Any, Any]")


class Retryable(PTransform[InT, OutT]):
    """A step whose code may be called again after an error."""

    retry: Retry | None = None

    def with_retry(self: RetryableT, retry: Retry) -> RetryableT:
        """The same step, with errors of the kinds that `retry` names tried again before they count."""
        if not isinstance(retry, Retry):
            raise UsageError(f"with_retry({retry!r}): expected a ps.Retry, such as ps.Retry(attempts=4, on=ConnectionError)")
        retried = copy.copy(self)
        retried.retry = retry
        return retried


class Handleable(Retryable[InT, OutT]):
    """A step of rows, each of which may fail by itself."""

    rows_for_one: ClassVar[Literal["one", "at most one", "any"]] = "any"
    handling: Handling | None = None

    def traits(self) -> Traits:
        return Traits(rows=self.rows_for_one, failures=frozenset({FAILURES}), handling=self.handling, retry=self.retry)

    def row_function(self) -> Callable[[Any], list[tuple[str, Any]]]:
        """What a single row becomes, as (output, row), for a process that calls the step row by row."""
        raise NotImplementedError

    def with_exception_handling(
        self,
        *,
        exc_class: ErrorClass = Exception,
        use_subprocess: bool = False,
        threshold: float = 1.0,
        timeout: float | None = None,
    ) -> HandledStep[InT, OutT]:
        """This step for rows that may fail: it gives `(good, failures)`. `good` is what it gives without; `failures` are
        the rows that it failed for, as they came into it, as (row, Failure).

        Errors of `exc_class` cost their row and not the run; others end it as before. A row that fails leaves nothing in
        `good`, also if it had yielded rows before it raised. If more than the share `threshold` of the rows fails, the run
        stops. With `timeout`, seconds for one row, or `use_subprocess` the function runs in a process of its own, whose
        hangs and crashes cost a row too.
        """
        handled = copy.copy(self)
        handled.handling = Handling(exc_class=exc_class, use_subprocess=use_subprocess, threshold=threshold, timeout=timeout)
        if handled.handling.isolated:
            self.check_isolated()
        return HandledStep(handled)

    # What a step with several outputs of its own overrides.

    def primitive(self) -> PTransform[Any, Any]:
        """The step as engines see it."""
        return self

    def check_isolated(self) -> None:
        """UsageError if the step cannot run in a process of its own."""

    def good_tags(self) -> tuple[str, ...]:
        return (MAIN,)

    def good(self, node: Node) -> Any:
        """What the step gives, of the outputs of its node."""
        return node.outputs[MAIN]


class HandledStep(PTransform[InT, tuple[OutT, PCollection[tuple[Any, Failure]]]], Generic[InT, OutT]):
    """A step with exception handling: what with_exception_handling() returns."""

    def __init__(self, step: Handleable[InT, OutT]) -> None:
        if FAILURES in step.good_tags():
            raise UsageError(f"with_outputs({FAILURES!r}): the name is taken by with_exception_handling(); choose another")
        self.step = step
        self.label, self.hints = step.label, step.hints

    def with_retry(self, retry: Retry) -> HandledStep[InT, OutT]:
        """The same step, with errors of the kinds that `retry` names tried again before they count."""
        retried = copy.copy(self)
        retried.step = self.step.with_retry(retry)
        return retried

    def with_outputs(self, *tags: str, main: str | None = None) -> Any:
        raise UsageError("with_exception_handling() comes last: ParDo(...).with_outputs(...).with_exception_handling()")

    def expand(self, pcoll: InT) -> tuple[OutT, PCollection[tuple[Any, Failure]]]:
        node = add_step(self.step.primitive(), cast(PCollection[Any], pcoll), (*self.step.good_tags(), FAILURES))
        return self.step.good(node), node.outputs[FAILURES]

    def default_label(self) -> str:
        return self.step.default_label()
