"""The whole configuration of one inference. It knows no pipeline and no engine."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.batching.limits import BatchLimits
from penstock.blocks import holds_answers
from penstock.errors import RemoteRequestError, UsageError
from penstock.failures import Handling
from penstock.inference.columns import Output
from penstock.inference.handler import (
    ModelHandler,
    describes_same_model,
    output_of,
    variables_of,
)
from penstock.inference.handler_checks import check_copies, columns_form
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.path import RowPath
from penstock.inference.refresh import Refresh, Refreshing, check_can_change
from penstock.inference.service_handler import RunPlace, ServiceHandler, check_takes_retry
from penstock.models.host_address import run_folder
from penstock.models.memory import named_gpus
from penstock.models.place import Place, Surroundings, Wishes
from penstock.retry import Retry


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InferenceSpec:
    """Which model, how rows reach it and in which batches, and what becomes of errors. It can be pickled."""

    path: RowPath  # the handler, and what happens to a row around it
    output: Output  # what the columns of answers are called
    limits: BatchLimits
    inference_args: Mapping[str, Any] | None = None
    metrics_namespace: str
    model_identifier: str | None = None  # those with the same one share a model
    handling: Handling | None = None  # None: an error ends the run
    retry: Retry | None = None
    refresh: Refresh | None = None  # the model may be replaced while it is used
    counts_models: bool = False  # streams say which model has answered how many rows
    fixed_batches: bool = False  # batches are formed inside a split, in one fixed way
    neighbours: Mapping[str, InferenceSpec] = field(default_factory=dict)  # of its place: all, by key (neighbours.py)
    id: str = field(default_factory=lambda: os.urandom(8).hex())  # names its model host, where no run has a folder for them

    @classmethod
    def of(
        cls,
        handler: ModelHandler[Any, Any, Any],
        inference_args: Mapping[str, Any] | None = None,
        metrics_namespace: str | None = None,
        *,
        model_identifier: str | None = None,
        handling: Handling | None = None,
        retry: Retry | None = None,
        refresh: Refresh | None = None,
    ) -> InferenceSpec:
        """What a handler says, checked, with the user's own settings."""
        path = RowPath.of(handler)
        inner = path.model_handler
        check_copies(inner.model_copies())
        columns_form(inner)
        _check_run_inference(inner)
        inner.validate_inference_args(inference_args)
        if retry is not None:
            check_takes_retry(inner)
        if refresh is not None:
            check_can_change(inner)
            refresh.check_handler(inner)
        limits = BatchLimits.of(inner.batch_elements_kwargs(), inner.new_shapes_cost())
        if limits.max_padded_cost is not None and not inner.measures_length():
            raise UsageError("max_padded_cost needs batch_length_fn: a function that gives the length of one row")
        return cls(
            path=path,
            output=output_of(inner),
            limits=limits,
            inference_args=inference_args,
            metrics_namespace=metrics_namespace or inner.get_metrics_namespace(),
            model_identifier=model_identifier,
            handling=handling,
            retry=retry,
            refresh=refresh,
        )

    def batched_as(self, kwargs: Mapping[str, Any]) -> InferenceSpec:
        """The same inference with these limits on batches, instead of its handler's."""
        return replace(self, limits=BatchLimits.of(kwargs, self.handler.new_shapes_cost()))

    def session_key(self, step: str) -> str:
        """Names the session of a step, or of all steps that share its model."""
        return f"model {self.model_identifier}" if self.model_identifier else f"step {step}"

    def refreshing(self, key: str, around: Surroundings, host: Place | None = None) -> Refreshing | None:
        """How the models of a session change, if they do. host: that has them; None: they are in the workers."""
        if self.refresh is None:
            return None
        holders = around.workers if host is None else host.copies
        return Refreshing(
            folder=self.folder(around),
            key=key,
            refresh=self.refresh,
            holders=holders,
            on_device=holders if host is None else -(-holders // max(1, len(host.devices))),
            prepares_alike=self.prepares_alike,
            load_timeout=around.load_timeout,
        )

    @property
    def prepares_alike(self) -> bool:
        """Whether how rows are prepared cannot change while the model does."""
        isolated = self.handling is not None and self.handling.isolated
        return self.handler.prepares() and (isolated or self.by_key is not None or not self.handler.retry_safe)

    def run_place(self, step: str, around: Surroundings, *, hosted: bool = False) -> RunPlace | None:
        """For handlers that keep something for the whole run. hosted: they are in processes of their own."""
        if not isinstance(self.handler, (ServiceHandler, ModelsByKey)):
            return None
        alone = around.in_process and not hosted and self.by_key is None  # one model in one process shares with nobody
        folder = "" if alone else around.folder
        forgives = self.handling is not None and self.handling.handles(RemoteRequestError(""))
        return RunPlace(step, folder, around.run_dir, around.run, forgives, around.nodes_file)

    def folder(self, around: Surroundings) -> str:
        """Where processes that hold the model meet."""
        return around.folder or run_folder(self.id)

    @property
    def handler(self) -> ModelHandler[Any, Any, Any]:
        return self.path.model_handler

    @property
    def by_key(self) -> ModelsByKey | None:
        """The models, where there is one for each key."""
        handler = self.handler
        return handler if isinstance(handler, ModelsByKey) else None

    def fixed(self) -> InferenceSpec:
        """The same inference as a deterministic run carries it out."""
        return replace(self, fixed_batches=True, limits=self.limits.fixed(self.handler.measures_length()))

    def takes_columns(self) -> bool:
        """Whether a table that comes in comes out as one, with the answers for columns."""
        handler = self.handler
        by_itself = handler.takes_columns() and not handler.prepares()
        return self.path.plain and (handler.input_columns() is not None or bool(by_itself))

    def is_native(self) -> bool:
        """Whether tables reach the model as they are, and no Python of the user's runs on the way."""
        handler = self.handler
        measured = self.limits.weigh is not None or handler.measures_length()
        return self.takes_columns() and handler.is_native() and not (measured or handler.prepares())

    def sees_columns(self, table: Any) -> bool:
        """Whether the handler can say what a table lacks; rows that are a model's answers are no records to it."""
        return self.takes_columns() or not holds_answers(table)

    @property
    def wraps(self) -> bool:
        """Whether rows that come out hold the rows that came in beside the answers."""
        return self.handler.wraps_answers or self.makes_records

    @property
    def makes_records(self) -> bool:
        """Whether rows that come out are the records that came in, with the answers in them or beside them."""
        return self.output.is_named or self.handler.input_columns() is not None

    def wishes(self) -> Wishes:
        """What the user's configuration says about where the model lives."""
        handler, handling = self.handler, self.handling
        shared = bool(handler.share_model_across_processes())
        gpus = variables_of(handler).get("CUDA_VISIBLE_DEVICES")
        return Wishes(
            shared=shared,
            copies=handler.model_copies() if shared else None,
            timeout=None if handling is None else handling.timeout,
            isolated=handling is not None and handling.use_subprocess,
            accelerator=handler.accelerator(),
            gpus=None if gpus is None else named_gpus(gpus),
            many=self.by_key is not None,
            neighbours=bool(self.neighbours),
        )


def check_shared_models(steps: Mapping[str, InferenceSpec]) -> None:
    """Steps with one model_identifier share one model, so they must describe the same one."""
    first: dict[str, str] = {}
    for label, step in steps.items():
        if step.model_identifier is None:
            continue
        other = first.setdefault(step.model_identifier, label)
        if not _same_model(steps[other], step):
            raise UsageError(
                f"steps {other!r} and {label!r} have the model_identifier {step.model_identifier!r}, but their handlers "
                "differ; give both the same handler, or each an identifier of its own"
            )
        if not _same_refresh(steps[other].refresh, step.refresh):
            raise UsageError(
                f"steps {other!r} and {label!r} share the model {step.model_identifier!r}, but not how it changes during "
                "the run; give both the same settings, or each a model of its own"
            )
        if _guards(steps[other]) != _guards(step):
            raise UsageError(
                f"steps {other!r} and {label!r} share the model {step.model_identifier!r}, but not their timeout= and "
                "use_subprocess= in with_exception_handling(); give both the same, or each a model of its own"
            )


def _same_model(one: InferenceSpec, other: InferenceSpec) -> bool:
    if one.by_key is not None and other.by_key is not None:
        return one.by_key.same_models(other.by_key)
    return describes_same_model(one.handler, other.handler)


def _same_refresh(one: Refresh | None, other: Refresh | None) -> bool:
    return one is other or (one is not None and one.same(other))


def _guards(step: InferenceSpec) -> tuple[float | None, bool]:
    return (None, False) if step.handling is None else (step.handling.timeout, step.handling.use_subprocess)


def _check_run_inference(handler: ModelHandler[Any, Any, Any]) -> None:
    """UsageError when run_inference() cannot be called as it will be: with a batch, the model and arguments."""
    try:
        signature = inspect.signature(handler.run_inference)
    except (TypeError, ValueError):  # of something that is not written in Python
        return
    try:
        signature.bind([], None, None)
    except TypeError as exc:
        raise UsageError(
            f"{type(handler).__name__}.run_inference{signature} cannot be called with (batch, model, inference_args): {exc}"
            "; define it as run_inference(self, batch, model, inference_args=None), as Beam does"
        ) from None
