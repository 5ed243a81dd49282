"""RunInference: a model over every row, as one step of a pipeline."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.batching.limits import BatchLimits
from penstock.errors import UsageError
from penstock.failures import ErrorClass, Failure, Handling
from penstock.inference.handler import ModelHandler, check_copies, check_run_inference
from penstock.inference.path import RowPath
from penstock.pipeline.graph import MAIN, Outputs, PCollection, PTransform, add_step, single
from penstock.pipeline.handled import Retryable
from penstock.pipeline.hints import resource_hints
from penstock.pipeline.traits import Traits
from penstock.pipeline.transforms import Flatten
from penstock.retry import Retry

T = TypeVar("T")
U = TypeVar("U")

FAILED_INFERENCES = "failed_inferences"  # the output of a step


class RunInference(Retryable[PCollection[T], PCollection[U]]):
    """One answer for each row, in order, from the model that the handler describes.

    The model lives where the handler's settings say: by default one copy in each worker process. Rows are batched in front
    of it, from all callers together. Steps with the same `model_identifier` share one model.
    """

    handling: Handling | None = None
    fixed_batches: bool = False  # batches are formed inside a split, in one fixed way

    def __init__(
        self,
        model_handler: ModelHandler[Any, Any, Any],
        inference_args: Mapping[str, Any] | None = None,
        metrics_namespace: str | None = None,
        *,
        model_identifier: str | None = None,
    ) -> None:
        if not isinstance(model_handler, ModelHandler):
            hint = (
                f"call it: {model_handler.__name__}(...)" if isinstance(model_handler, type) else "subclass ps.ModelHandler"
            )
            raise UsageError(f"RunInference({model_handler!r}): expected a ModelHandler; {hint}")
        self.path = RowPath.of(model_handler)
        inner = self.path.model_handler
        check_copies(inner.model_copies())
        check_run_inference(inner)
        inner.validate_inference_args(inference_args)
        self.limits = BatchLimits.of(inner.batch_elements_kwargs(), inner.new_shapes_cost())
        if self.limits.max_padded_cost is not None and not inner.measures_length():
            raise UsageError("max_padded_cost needs batch_length_fn: a function that gives the length of one row")
        self.id = secrets.token_hex(8)  # tells this step's model host from all others, where no engine of ours runs it
        self.inference_args = inference_args
        self.metrics_namespace = metrics_namespace or inner.get_metrics_namespace()
        self.model_identifier = model_identifier
        self.hints = resource_hints(**inner.get_resource_hints())

    def with_exception_handling(
        self,
        *,
        exc_class: ErrorClass = Exception,
        use_subprocess: bool = False,
        threshold: float = 1.0,
        timeout: float | None = None,
    ) -> HandledInference[T, U]:
        """This step for rows that may fail: it gives `(good, failures)`, the answers and the rows that have none.

        Errors of `exc_class` cost their row and not the run; others end it as before. If more than the share `threshold` of
        the rows fails, the run stops. With `timeout`, seconds for one run_inference() call, or `use_subprocess` the model
        has a process of its own, whose hangs and crashes cost a row too, whatever `exc_class` says.
        """
        handled = copy.copy(self)
        handled.handling = Handling(exc_class=exc_class, use_subprocess=use_subprocess, threshold=threshold, timeout=timeout)
        return HandledInference(handled)

    def with_retry(self, retry: Retry) -> RunInference[T, U]:
        """The same step, with a call of the model that raises what `retry` names made again, before the rows of its batch
        are told apart. Where the model lives in a process of its own, it is called again there."""
        if not self.path.model_handler.retry_safe:
            raise UsageError(
                f"with_retry(): {type(self.path.model_handler).__name__} says that a second call with the same rows does "
                "harm (retry_safe = False); leave one of both out"
            )
        return super().with_retry(retry)

    def with_fixed_batches(self) -> RunInference[T, U]:
        """The same step as a deterministic run carries it out."""
        fixed = copy.copy(self)
        fixed.fixed_batches = True
        fixed.limits = self.limits.fixed(self.path.model_handler.measures_length())
        return fixed

    def traits(self) -> Traits:
        return Traits(
            rows="one",
            batch=self.limits.max_size,
            by_length=self.path.model_handler.measures_length(),
            takes_batches=self.path.prebatched,
            failures=frozenset(failure_tags(self.path)),
            handling=self.handling,
            retry=self.retry,
            model=self,
        )

    def expand(self, pcoll: PCollection[T]) -> PCollection[U]:
        return single(self, pcoll)

    def default_label(self) -> str:
        return f"RunInference({type(self.path.model_handler).__name__})"


class InferenceFailures(Outputs[tuple[Any, Failure]]):
    """The rows that RunInference has no answer for, as collections of (row, Failure).

    The row is as it came into RunInference, with its key; for postprocessing it is the answer that the function was given.
    `failures | transform` is for all of them together, in this order.
    """

    failed_preprocessing: tuple[PCollection[tuple[Any, Failure]], ...]  # one for each function, in the order they run
    failed_inferences: PCollection[tuple[Any, Failure]]
    failed_postprocessing: tuple[PCollection[tuple[Any, Failure]], ...]

    def __init__(self, by_tag: Mapping[str, PCollection[Any]], path: RowPath) -> None:
        super().__init__(by_tag, failure_tags(path))
        before, after = len(path.before + path.before_model), len(path.after_model + path.after)
        self.failed_preprocessing = tuple(by_tag[failed_preprocessing(number)] for number in range(before))
        self.failed_inferences = by_tag[FAILED_INFERENCES]
        self.failed_postprocessing = tuple(by_tag[failed_postprocessing(number)] for number in range(after))

    def __or__(self, transform: PTransform[Any, Any]) -> Any:
        if isinstance(transform, Flatten):
            return transform.__ror__(self)
        together: PCollection[tuple[Any, Failure]] = tuple(self) | Flatten()
        return together | transform


class HandledInference(PTransform[PCollection[T], tuple[PCollection[U], InferenceFailures]]):
    """RunInference with exception handling: what with_exception_handling() returns."""

    def __init__(self, inference: RunInference[T, U]) -> None:
        self.inference = inference
        self.handling = inference.handling
        self.label, self.hints = inference.label, inference.hints

    def with_retry(self, retry: Retry) -> HandledInference[T, U]:
        """The same step, with errors of the kinds that `retry` names tried again before they count."""
        retried = copy.copy(self)
        retried.inference = self.inference.with_retry(retry)
        return retried

    def expand(self, pcoll: PCollection[T]) -> tuple[PCollection[U], InferenceFailures]:
        made = add_step(self.inference, pcoll, (MAIN, *failure_tags(self.inference.path))).outputs
        return made[MAIN], InferenceFailures(made, self.inference.path)

    def default_label(self) -> str:
        return self.inference.default_label()


def failure_tags(path: RowPath) -> list[str]:
    """The outputs for rows that failed, in the order in which a row could."""
    before, after = len(path.before + path.before_model), len(path.after_model + path.after)
    return [*map(failed_preprocessing, range(before)), FAILED_INFERENCES, *map(failed_postprocessing, range(after))]


def failed_preprocessing(number: int) -> str:
    return f"failed_preprocessing[{number}]"


def failed_postprocessing(number: int) -> str:
    return f"failed_postprocessing[{number}]"


def check_shared_models(steps: Mapping[str, RunInference[Any, Any]]) -> None:
    """Steps with one model_identifier share one model, so they must describe the same one."""
    first: dict[str, str] = {}
    for label, step in steps.items():
        if step.model_identifier is None:
            continue
        other = first.setdefault(step.model_identifier, label)
        if not _same_model(steps[other].path.model_handler, step.path.model_handler):
            raise UsageError(
                f"steps {other!r} and {label!r} have the model_identifier {step.model_identifier!r}, but their handlers "
                "differ; give both the same handler, or each an identifier of its own"
            )
        if _guards(steps[other]) != _guards(step):
            raise UsageError(
                f"steps {other!r} and {label!r} share the model {step.model_identifier!r}, but not their timeout= and "
                "use_subprocess= in with_exception_handling(); give both the same, or each a model of its own"
            )


def _guards(step: RunInference[Any, Any]) -> tuple[float | None, bool]:
    return (None, False) if step.handling is None else (step.handling.timeout, step.handling.use_subprocess)


def _same_model(one: ModelHandler[Any, Any, Any], other: ModelHandler[Any, Any, Any]) -> bool:
    around = {"_preprocess_fns", "_postprocess_fns", "_no_batching"}  # these are each step's own
    settings = [{k: v for k, v in vars(handler).items() if k not in around} for handler in (one, other)]
    try:
        return type(one) is type(other) and bool(settings[0] == settings[1])
    except ValueError:  # arrays do not compare to a single truth
        return False
