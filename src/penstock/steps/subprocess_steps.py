"""Steps whose rows may hang or crash: their function runs in a model host, as a model that is called row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.blocks import rows_of
from penstock.forks import end_if_forked, this_process
from penstock.inference.bundle_stream import InferenceStream
from penstock.inference.handler import AnnouncingHandler
from penstock.inference.in_flight import Made
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.pipeline.graph import FAILURES
from penstock.pipeline.handled import Handleable
from penstock.steps.inference_operator import InferenceOperator

BATCH = 64  # rows that travel together; each is timed by itself

_Made: TypeAlias = list[tuple[str, Any]]  # what a row becomes: for which output, and what


class IsolatedOperator(InferenceOperator):
    """A Map, FlatMap, Filter or ParDo with a timeout, or in a subprocess."""

    def __init__(self, label: str, transform: Handleable[Any, Any], sessions: ProcessSessions, caller: Caller) -> None:
        spec = InferenceSpec.of(StepHandler(transform, label), handling=transform.handling, retry=transform.retry)
        super().__init__(label, spec, sessions, caller)
        self._tags = transform.good_tags()

    def _give(self, made: Made, stream: InferenceStream) -> None:
        if made.failed is not None:
            self.fail(rows_of(made.block), FAILURES)
            return
        by_tag: dict[str, list[Any]] = {tag: [] for tag in self._tags}
        for outputs in rows_of(made.block):
            for tag, row in outputs:
                by_tag[tag].append(row)
        for tag, rows in by_tag.items():
            self.emit(rows, tag)


class StepHandler(AnnouncingHandler[Any, _Made, Callable[[Any], _Made]]):
    """A step as a model: its answer to a row is what the step makes of it."""

    def __init__(self, step: Handleable[Any, Any], label: str) -> None:
        super().__init__(max_batch_size=BATCH)
        self._step = step
        self._label = label

    def load_model(self) -> Callable[[Any], _Made]:
        return self._step.row_function()

    def run_inference(
        self, batch: Sequence[Any], model: Callable[[Any], _Made], inference_args: Mapping[str, Any] | None = None
    ) -> list[_Made]:
        made = []
        began = this_process()
        for row in batch:
            if self.calling is not None:
                self.calling()
            made.append(model(row))
            end_if_forked(began, self._label)
        return made
