"""Steps whose rows may hang or crash: their function runs in a model host, as a model that is called row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.blocks import Block, rows_of
from penstock.forks import end_if_forked, this_process
from penstock.inference.handler import ModelHandler
from penstock.inference.session import Sessions
from penstock.inference.stream import InferenceStream
from penstock.inference.ticket import Caller
from penstock.inference.transform import RunInference
from penstock.pipeline.handled import FAILURES, Handleable
from penstock.steps.inference_operator import InferenceOperator

BATCH = 64  # rows that travel together; each is timed by itself

_Made: TypeAlias = list[tuple[str, Any]]  # what a row becomes: for which output, and what


class IsolatedOperator(InferenceOperator):
    """A Map, FlatMap, Filter or ParDo with a timeout, or in a subprocess."""

    def __init__(self, label: str, transform: Handleable[Any, Any], sessions: Sessions, caller: Caller) -> None:
        inference: RunInference[Any, Any] = RunInference(StepHandler(transform, label))
        inference.handling, inference.retry = transform.handling, transform.retry
        super().__init__(label, inference, sessions, caller)
        self._tags = transform.good_tags()

    def _give(self, answers: Block, stream: InferenceStream) -> None:
        made: dict[str, list[Any]] = {tag: [] for tag in self._tags}
        for outputs in rows_of(answers):
            for tag, row in outputs:
                made[tag].append(row)
        for tag, rows in made.items():
            self.emit(rows, tag)

    def _emit_failures(self, stream: InferenceStream) -> None:
        for failed in stream.take_failed().values():
            self.fail(failed, FAILURES)


class StepHandler(ModelHandler[Any, _Made, Callable[[Any], _Made]]):
    """A step as a model: its answer to a row is what the step makes of it."""

    def __init__(self, step: Handleable[Any, Any], label: str) -> None:
        super().__init__(max_batch_size=BATCH)
        self._step = step
        self._label = label
        self._calling: Callable[[], None] | None = None

    def load_model(self) -> Callable[[Any], _Made]:
        return self._step.row_function()

    def announce(self, calling: Callable[[], None]) -> None:
        """From now on, tell this before each row: a timeout is for one of them."""
        self._calling = calling

    def run_inference(
        self, batch: Sequence[Any], model: Callable[[Any], _Made], inference_args: Mapping[str, Any] | None = None
    ) -> list[_Made]:
        made = []
        began = this_process()
        for row in batch:
            if self._calling is not None:
                self._calling()
            made.append(model(row))
            end_if_forked(began, self._label)
        return made
