"""RunInference: a model over every row, as one step of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from penstock.errors import UsageError
from penstock.failures import ErrorClass, Failure, Handling
from penstock.inference.guard import warn_of_functions
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import handler_for
from penstock.inference.keyed import KeyedModelHandler
from penstock.inference.models_by_key import WINDOW
from penstock.inference.path import FAILED_INFERENCES, RowPath, failed_postprocessing, failed_preprocessing
from penstock.inference.refresh import Refresh, check_reads
from penstock.inference.service_handler import check_takes_retry
from penstock.inference.spec import InferenceSpec
from penstock.io.model_versions import INTERVAL, checked_interval
from penstock.pipeline.graph import MAIN, Node, Outputs, PCollection, PTransform, add_step
from penstock.pipeline.handled import Retryable
from penstock.pipeline.hints import resource_hints
from penstock.pipeline.traits import Traits
from penstock.pipeline.transforms import Flatten
from penstock.retry import Retry

T = TypeVar("T")
U = TypeVar("U")


class RunInference(Retryable[PCollection[T], PCollection[U]]):
    """One answer for each row, in order, from the model that the handler describes.

    The model lives where the handler's settings say: by default one copy in each worker process. Rows are batched in front
    of it, from all callers together. Steps with the same `model_identifier` share one model.
    """

    spec: InferenceSpec  # all of it, for whoever runs it

    def __init__(
        self,
        model_handler: ModelHandler[Any, Any, Any],
        inference_args: Mapping[str, Any] | None = None,
        metrics_namespace: str | None = None,
        *,
        model_metadata_pcoll: PCollection[Any] | None = None,
        watch_model_pattern: str | None = None,
        interval: float | None = None,
        model_identifier: str | None = None,
        validate: Callable[[Any, Any], Any] | None = None,
        golden_rows: Any = None,
        canary: float | None = None,
        canary_rows: int | None = None,
        max_error_rate: float | None = None,
        compare: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """A model that changes while the pipeline runs: watch_model_pattern names its files, of which the newest is used,
        looked for every `interval` (10) seconds; or model_metadata_pcoll gives its versions, as ModelMetadata. Before a new
        version is in service, validate(model, golden_rows) must not return False or raise; and with canary=0.05 it gets
        that share of the rows first, until it has had `canary_rows` (1,000) of them. It is rolled back if it fails for more
        than the share `max_error_rate` (0) of them, or if compare(old_answer, new_answer) says that they are not alike."""
        if not isinstance(model_handler, ModelHandler):
            raise UsageError(f"RunInference({model_handler!r}): expected a ModelHandler; {handler_for(model_handler)}")
        self._metadata = _versions_in(model_metadata_pcoll, watch_model_pattern)
        self._interval = INTERVAL if interval is None else checked_interval(interval)
        if interval is not None and watch_model_pattern is None:
            raise UsageError("interval= is for watch_model_pattern=; p | ps.WatchFilePattern(...) has one of its own")
        settings: dict[str, Any] = {"validate": validate, "golden_rows": golden_rows, "compare": compare}
        settings |= {"canary": canary, "canary_rows": canary_rows, "max_error_rate": max_error_rate}
        refresh = None
        if self._metadata is not None:
            refresh = Refresh.of(**settings)
        elif names := [name for name, value in settings.items() if value is not None]:
            hint = "give watch_model_pattern= or model_metadata_pcoll="
            raise UsageError(f"RunInference({names[0]}=...) is for a model that changes: {hint}")
        self.spec = InferenceSpec.of(
            model_handler, inference_args, metrics_namespace, model_identifier=model_identifier, refresh=refresh
        )
        self.hints = resource_hints(**self.spec.handler.get_resource_hints())

    @property
    def handling(self) -> Handling | None:
        """What with_exception_handling() was given; None if any error ends the run."""
        return self.spec.handling

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
        handling = Handling(exc_class=exc_class, use_subprocess=use_subprocess, threshold=threshold, timeout=timeout)
        warn_of_functions(self.spec.path, handling)
        handled = copy.copy(self)
        handled.spec = replace(self.spec, handling=handling)
        return HandledInference(handled)

    def with_retry(self, retry: Retry) -> RunInference[T, U]:
        """The same step, with a call of the model that raises what `retry` names made again, before the rows of its batch
        are told apart. Where the model lives in a process of its own, it is called again there."""
        check_takes_retry(self.spec.handler)
        if not self.spec.handler.retry_safe:
            raise UsageError(
                f"with_retry(): {type(self.spec.handler).__name__} says that a second call with the same rows does "
                "harm (retry_safe = False); leave out one of the two"
            )
        retried = super().with_retry(retry)
        retried.spec = replace(self.spec, retry=retry)
        return retried

    def with_model(self, spec: InferenceSpec) -> RunInference[T, U]:
        """The same step with another spec."""
        step = copy.copy(self)
        step.spec = spec
        return step

    def traits(self) -> Traits:
        spec = self.spec
        return Traits(
            rows="one",
            batch=spec.limits.max_size,
            by_length=spec.handler.measures_length(),
            window=WINDOW if spec.by_key is not None else 0,
            takes_batches=spec.path.prebatched,
            columns=spec.is_native(),
            failures=frozenset(spec.path.failure_tags()),
            handling=spec.handling,
            retry=spec.retry,
            model=spec,
            with_model=self.with_model,
            takes="columns" if spec.takes_columns() else "rows",
        )

    def expand(self, pcoll: PCollection[T]) -> PCollection[U]:
        return self.add_to(pcoll).outputs[MAIN]

    def add_to(self, pcoll: PCollection[T], tags: Sequence[str] = (MAIN,)) -> Node:
        """Add this step behind a collection, with what gives its model's versions beside it."""
        metadata = self._metadata
        if isinstance(metadata, str) and isinstance(pcoll, PCollection):
            from penstock.io.file_pattern import WatchFilePattern  # few need it, and every worker would import it

            watch = WatchFilePattern(metadata, self._interval)
            check_reads(self.spec.handler, watch.source)  # first: a step that is refused leaves none of its own
            metadata = pcoll.pipeline | watch
        elif isinstance(metadata, PCollection):
            check_reads(self.spec.handler, getattr(metadata.producer.transform, "source", None))
        step = copy.copy(self)
        step._metadata = None  # it is the graph's: what is sent to workers has no part of it
        return add_step(step, pcoll, tags, None if isinstance(metadata, str) else metadata)

    def default_label(self) -> str:
        kind = KeyedModelHandler if self.spec.by_key is not None else type(self.spec.handler)
        return f"RunInference({kind.__name__})"


class InferenceFailures(Outputs[tuple[Any, Failure]]):
    """The rows that RunInference has no answer for, as collections of (row, Failure).

    The row is as it came into RunInference, with its key; for postprocessing it is the answer that the function was given.
    `failures | transform` is for all of them together, in this order.
    """

    failed_preprocessing: tuple[PCollection[tuple[Any, Failure]], ...]  # one for each function, in the order they run
    failed_inferences: PCollection[tuple[Any, Failure]]
    failed_postprocessing: tuple[PCollection[tuple[Any, Failure]], ...]

    def __init__(self, by_tag: Mapping[str, PCollection[Any]], path: RowPath) -> None:
        super().__init__(by_tag, path.failure_tags())
        self.failed_preprocessing = tuple(by_tag[failed_preprocessing(n)] for n in range(path.functions_before))
        self.failed_inferences = by_tag[FAILED_INFERENCES]
        self.failed_postprocessing = tuple(by_tag[failed_postprocessing(n)] for n in range(path.functions_after))

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
        path = self.inference.spec.path
        made = self.inference.add_to(pcoll, (MAIN, *path.failure_tags())).outputs
        return made[MAIN], InferenceFailures(made, path)

    def default_label(self) -> str:
        return self.inference.default_label()


def _versions_in(pcoll: PCollection[Any] | None, pattern: str | None) -> PCollection[Any] | str | None:
    """Where new versions of a model come from, as the user says it."""
    if pcoll is not None and pattern is not None:
        raise UsageError(
            "give watch_model_pattern= or model_metadata_pcoll=, not both: each says where new models come from"
        )
    if pcoll is not None and not isinstance(pcoll, PCollection):
        hint = "a PCollection of ModelMetadata, such as pipeline | ps.WatchFilePattern(...)"
        raise UsageError(f"model_metadata_pcoll={pcoll!r}: expected {hint}")
    if pattern is not None and (not isinstance(pattern, str) or not pattern):
        raise UsageError(f"watch_model_pattern={pattern!r}: expected the pattern of model files, such as 'models/*.pt'")
    return pcoll if pattern is None else pattern
