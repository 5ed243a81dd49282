"""RunInference for pipelines of Apache Beam."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner

from penstock.beam.handlers import check_can_change, from_beam
from penstock.beam.inference_dofn import InferenceDoFn, RefreshedInferenceDoFn
from penstock.beam.model_handler import OfKeyedModelHandler
from penstock.beam.siblings import workers_of
from penstock.beam.thresholds import check_threshold
from penstock.beam.versions import TimedVersions, check_windows
from penstock.beam.watching import WatchFilePattern
from penstock.errors import UsageError
from penstock.failures import ErrorClass, Handling
from penstock.inference.guard import warn_of_functions
from penstock.inference.handler import ExampleT, PredictionT
from penstock.inference.refresh import Refresh
from penstock.inference.spec import InferenceSpec, check_shared_models
from penstock.models.folder_use import remove_if_unused
from penstock.models.host_address import run_folder

MAIN = "main"
OF_CANARIES = ("canary", "canary_rows", "max_error_rate", "compare")
ERROR = beam.typehints.Tuple[type, str, beam.typehints.List[str]]  # its class, its repr, its traceback
KEPT = 1.0  # seconds for which a model waits for the next bundle, on a runner that sets up and tears down for each
_pipelines: weakref.WeakKeyDictionary[Any, _PipelineSteps] = weakref.WeakKeyDictionary()


@dataclass
class _PipelineSteps:
    """What the steps of one pipeline share."""

    run: str = field(default_factory=lambda: secrets.token_hex(8))  # its id
    specs: dict[str, InferenceSpec] = field(default_factory=dict)  # by step


class RunInferenceDLQ(NamedTuple):
    """The elements that have no answer, as collections of (element, (class of the error, its repr, its traceback))."""

    failed_inferences: Any
    failed_preprocessing: list[Any]  # one for each function, in the order in which they run
    failed_postprocessing: list[Any]


class RunInference(
    beam.PTransform[beam.PCollection[ExampleT | Iterable[ExampleT]], beam.PCollection[PredictionT]]  # type: ignore[misc]
):
    """One answer for each element, from the model that the handler describes: one of Penstock's, or one that was written
    against Beam's ModelHandler. Elements of all bundles and threads of a process meet in front of the model, and those of
    all processes of the machine where they share it."""

    def __init__(
        self,
        model_handler: Any,
        clock: Any = time,
        inference_args: Mapping[str, Any] | None = None,
        metrics_namespace: str | None = None,
        *,
        model_metadata_pcoll: Any = None,
        watch_model_pattern: str | None = None,
        model_identifier: str | None = None,
        use_model_manager: bool = False,
        model_manager_args: Mapping[str, Any] | None = None,
        monitoring_transform: Any = None,
        validate: Any = None,
        golden_rows: Any = None,
        interval: float | None = None,
        stop_timestamp: Any = None,
        **others: Any,
    ) -> None:
        """As of Beam's RunInference; interval= and stop_timestamp= are for watch_model_pattern=. clock, use_model_manager
        and model_manager_args are accepted and have nothing to do: sizes of batches are found otherwise, and many models
        always have a budget (KeyedModelHandler). validate(model, golden_rows) checks a new model before it is used. Raises
        UsageError for arguments that mean nothing here."""
        super().__init__()
        _refuse(others)
        if model_metadata_pcoll is not None and watch_model_pattern is not None:
            raise UsageError("give watch_model_pattern= or model_metadata_pcoll=, not both: each says where new models are")
        if model_metadata_pcoll is not None:
            check_windows(model_metadata_pcoll)
        self._metadata = model_metadata_pcoll
        self._pattern = watch_model_pattern
        timing = {"interval": interval, "stop_timestamp": stop_timestamp}
        self._timing = {name: value for name, value in timing.items() if value is not None}
        changes = model_metadata_pcoll is not None or watch_model_pattern is not None
        if self._timing and watch_model_pattern is None:
            raise UsageError(f"{next(iter(self._timing))}= is for watch_model_pattern=; WatchFilePattern has one of its own")
        checks = {"validate": validate, "golden_rows": golden_rows}
        if not changes and (names := [name for name, value in checks.items() if value is not None]):
            hint = "give watch_model_pattern= or model_metadata_pcoll="
            raise UsageError(f"RunInference({names[0]}=...) is for a model that changes: {hint}")
        refresh = Refresh.of(**checks) if changes else None
        handler = from_beam(model_handler)
        if changes:
            check_can_change(handler)
        spec = InferenceSpec.of(
            handler, inference_args, metrics_namespace, model_identifier=model_identifier, refresh=refresh
        )
        self._handler = handler if isinstance(handler, OfKeyedModelHandler) else spec.handler  # says what the step is like
        namespace = metrics_namespace or self._handler.get_metrics_namespace()
        spec = replace(spec.batched_as(self._handler.batch_elements_kwargs()), metrics_namespace=namespace)
        each = spec.by_key is not None and spec.by_key.is_listed
        self._spec = replace(spec, counts_models=each if spec.by_key is not None else changes)
        self._given = model_handler
        self._monitoring = monitoring_transform
        self._hints = _hints_of(self._handler)

    @classmethod
    def from_callable(cls, model_handler_provider: Any, **kwargs: Any) -> RunInference[ExampleT, PredictionT]:
        """A step whose handler is model_handler_provider(**kwargs), called once, here."""
        return cls(model_handler_provider(**kwargs))

    def with_monitoring_transform(self, monitoring_transform: Any) -> RunInference[ExampleT, PredictionT]:
        """This step, with a transform that gets a copy of the answers as the model gave them, before functions behind it."""
        self._monitoring = monitoring_transform
        return self

    def with_exception_handling(
        self,
        *,
        exc_class: ErrorClass = Exception,
        use_subprocess: bool = False,
        threshold: float = 1.0,
        timeout: float | None = None,
    ) -> RunInference[ExampleT, PredictionT]:
        """This step for elements that may fail: it gives `(main, other)`, with what failed in `other` (RunInferenceDLQ),
        element by element. `threshold` counts elements."""
        handling = Handling(exc_class=exc_class, use_subprocess=use_subprocess, threshold=threshold, timeout=timeout)
        self._spec = replace(self._spec, handling=handling)
        return self

    def annotations(self) -> dict[str, Any]:
        """As of Beam's: what is known of the model, for whoever looks at the pipeline."""
        given, spec = self._given, self._spec
        known = {
            "model_handler": str(given),
            "model_handler_type": f"{type(given).__module__}.{type(given).__qualname__}",
            "model_identifier": spec.model_identifier or spec.id,
        }
        if self._monitoring is not None:
            known["monitoring_transform"] = str(self._monitoring)
        return {**known, **super().annotations()}

    def expand(self, pcoll: Any) -> Any:
        """Called by Beam when the pipeline is built. The answers; with exception handling also a RunInferenceDLQ."""
        spec, path = self._spec, self._spec.path
        apart = spec.handling is not None and spec.handling.isolated  # functions then hang or crash in steps of their own
        before = path.before if apart else ()
        after = path.after if apart or self._monitoring is not None else ()
        inner = replace(path, before=path.before[len(before) :], after=path.after[len(after) :])
        if spec.handling is not None:
            warn_of_functions(inner, spec.handling)  # of handlers inside a keyed one
        rows, failed = self._mapped(pcoll, before, "Preprocess")
        made, failed_inside = self._inferred(rows, replace(spec, path=inner))
        if self._monitoring is not None:  # it sees answers before the functions behind the model
            with pcoll.pipeline.transform_annotations(model_identifier=""):
                made | "BeamML_RunInference_MonitoringOutlet" >> self._monitoring
        made, failed_behind = self._mapped(made, after, "Postprocess")
        if spec.handling is None:
            return made
        failed += failed_inside + failed_behind
        check_threshold(made, failed, spec.handling.threshold)
        return made, RunInferenceDLQ(failed[at := path.functions_before], failed[:at], failed[at + 1 :])

    def _mapped(self, rows: Any, functions: Sequence[Any], kind: str) -> tuple[Any, list[Any]]:
        """The rows after functions that are steps of Beam's, and what failed in each."""
        failed: list[Any] = []
        for number, function in enumerate(functions):
            mapped, label = beam.Map(function), f"BeamML_RunInference_{kind}-{number}"
            if (handling := self._spec.handling) is None:
                rows = rows | label >> mapped
            else:
                guard = {"use_subprocess": handling.use_subprocess, "timeout": handling.timeout}
                rows, bad = rows | label >> mapped.with_exception_handling(exc_class=_handled(handling), **guard)
                failed.append(bad)
        return rows, failed

    def _inferred(self, pcoll: Any, spec: InferenceSpec) -> tuple[Any, list[Any]]:
        """The answers, and what failed, by where it did: in the order in which a row could."""
        step = self.label or type(self).__name__
        versions = self._versions(pcoll.pipeline)
        kind = InferenceDoFn if versions is None else RefreshedInferenceDoFn
        steps = _steps_of(pcoll.pipeline)
        steps.specs[f"{step} {spec.id}"] = spec
        check_shared_models(steps.specs)
        kept = KEPT if isinstance(pcoll.pipeline.runner, BundleBasedDirectRunner) else 0.0
        workers = workers_of(pcoll.pipeline.options)
        do_fn = kind(spec, f"{step} {spec.id}", steps.run, workers, kept, self._handler)
        inference = beam.ParDo(do_fn, *([] if versions is None else [versions])).with_resource_hints(**self._hints)
        if spec.handling is None:
            return pcoll | "BeamML_RunInference" >> inference, []
        tags = spec.path.failure_tags()
        made = pcoll | "BeamML_RunInference" >> inference.with_outputs(*tags, main=MAIN)
        typed = (
            self.get_type_hints().simple_output_type(step) != beam.typehints.Any
        )  # by with_output_types(): of all outputs
        for tag in () if typed else tags:
            row = Any if tag.startswith("failed_postprocessing") else pcoll.element_type
            made[tag].element_type = beam.typehints.Tuple[row, ERROR]
        return made[MAIN], [made[tag] for tag in tags]

    def _versions(self, pipeline: Any) -> Any:
        """The side input that new versions of the model come by, if it changes."""
        metadata = self._metadata
        if self._pattern is not None:
            metadata = pipeline | WatchFilePattern(self._pattern, **self._timing)
        if metadata is None:
            return None
        return beam.pvalue.AsList(metadata | "BeamML_RunInference_TimedVersions" >> beam.Map(TimedVersions.of))


def _refuse(unknown: Mapping[str, Any]) -> None:
    """UsageError for arguments of Penstock's own RunInference that mean nothing on Beam, and for those that nobody knows."""
    for name in unknown:
        if name in OF_CANARIES:
            raise UsageError(
                f"RunInference({name}=...): on Apache Beam nobody tries a new model on a share of the rows, as there is "
                "no coordinator to decide; leave it out, or check new models with validate= and golden_rows="
            )
        raise UsageError(f"RunInference({name}=...): there is no such argument on Apache Beam; leave it out")


def _steps_of(pipeline: Any) -> _PipelineSteps:
    if pipeline not in _pipelines:
        steps = _pipelines[pipeline] = _PipelineSteps()
        # Worker processes that the runner kills leave files behind: these go with the pipeline, or with this process.
        weakref.finalize(pipeline, remove_if_unused, run_folder(steps.run))
    return _pipelines[pipeline]


def _handled(handling: Handling) -> tuple[type[BaseException], ...]:
    """The classes of errors that cost a row of a function: also of one that took too long, or has crashed."""
    given = handling.exc_class if isinstance(handling.exc_class, tuple) else (handling.exc_class,)
    return (*given, futures.TimeoutError, TimeoutError, BrokenProcessPool) if handling.isolated else given


def _hints_of(handler: Any) -> dict[str, Any]:
    """Resource hints as Beam knows them."""
    given = dict(handler.get_resource_hints())
    if isinstance(given.get("accelerator"), str) and ":" not in given["accelerator"]:
        given.pop("accelerator")  # "gpu": which one is Beam's to know, type:...;count:...
    cpus = given.pop("cpus", None)
    return given if cpus is None else {**given, "cpu_count": str(cpus)}
