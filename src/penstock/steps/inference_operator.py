"""RunInference at work."""

from __future__ import annotations

from typing import Any

from penstock.blocks import Block, row_count, rows_of
from penstock.errors import RefusedError
from penstock.inference.handling import HandlingStream
from penstock.inference.session import Sessions
from penstock.inference.stream import InferenceStream
from penstock.inference.ticket import Caller
from penstock.inference.transform import RunInference
from penstock.observe.metrics import MetricKey
from penstock.steps.operator import Operator


class InferenceOperator(Operator):
    def __init__(self, label: str, transform: RunInference[Any, Any], sessions: Sessions, caller: Caller) -> None:
        super().__init__(label)
        self._transform = transform.with_fixed_batches() if sessions.around.deterministic else transform
        self._sessions = sessions
        self._caller = caller
        self._stream: InferenceStream | None = None
        self.has_model_behind = False  # on the bundle's line
        self._inferences = MetricKey(label, transform.metrics_namespace, "num_inferences")

    def start(self) -> None:
        session = self._sessions.open(self.label, self._transform)
        kind = InferenceStream if self._transform.handling is None else HandlingStream
        self._stream = kind(self.label, self._transform, session, self._caller)

    def push(self, block: Block) -> None:
        assert self._stream is not None
        for answers in self._stream.push(block):
            self._give(answers, self._stream)
        self._emit_failures(self._stream)

    def finish(self) -> None:
        assert self._stream is not None
        for answers in self._stream.finish():
            self._give(answers, self._stream)
        self._emit_failures(self._stream)
        self.count.rows_in += self._stream.rows_in
        self.metrics.count(self._inferences, self._stream.rows_answered)
        self._close()

    def rows_in_block(self, block: Block) -> int:
        if not self._transform.path.prebatched:
            return row_count(block)
        return sum(len(batch) if hasattr(batch, "__len__") else 1 for batch in rows_of(block))

    def rows_given(self) -> int:
        stream = self._stream
        return self.count.rows_in if stream is None else stream.handed_out()

    def rows_through(self) -> int:
        """Those that are answered; where another model waits for the answers, only those that it has."""
        stream = self._stream
        return self.rows_given() if stream is None or self.has_model_behind else stream.answered()

    def abort(self) -> None:
        self._close()

    def _give(self, answers: Block, stream: InferenceStream) -> None:
        try:
            self.emit(answers)
        except RefusedError as exc:
            rest = stream.refuse(answers) if exc.block is answers else None
            if rest is None:
                raise
            self.emit(rest)

    def _emit_failures(self, stream: InferenceStream) -> None:
        for tag, failed in stream.take_failed().items():
            self.fail(failed, tag)

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
