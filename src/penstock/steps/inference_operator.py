"""RunInference at work."""

from __future__ import annotations

from penstock.blocks import Block, row_count, rows_of
from penstock.errors import RefusedError
from penstock.inference.bundle_stream import InferenceStream
from penstock.inference.in_flight import Made
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream
from penstock.observe.metrics import MetricKey
from penstock.steps.operator import Operator


class InferenceOperator(Operator):
    def __init__(self, label: str, spec: InferenceSpec, sessions: ProcessSessions, caller: Caller) -> None:
        super().__init__(label)
        self._spec = spec
        self._sessions = sessions
        self._caller = caller
        self._stream: InferenceStream | None = None
        self.has_model_behind = False  # on the bundle's line

    def start(self) -> None:
        if self._sessions.is_placed(self.label, self._spec):  # else no model is loaded before there are rows
            self._open()

    def push(self, block: Block) -> None:
        stream = self._stream or self._open()
        for made in stream.push(block):
            self._give(made, stream)

    def finish(self) -> None:
        if self._stream is None:  # no rows have come
            self.metrics.count(MetricKey(self.label, self._spec.metrics_namespace, "num_inferences"), 0)
            return
        for made in self._stream.finish():
            self._give(made, self._stream)
        self.count.rows_in += self._stream.rows_in
        self.metrics.merge(self._stream.metrics)
        self._close()

    def rows_in_block(self, block: Block) -> int:
        if not self._spec.path.prebatched:
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

    def _give(self, made: Made, stream: InferenceStream) -> None:
        if made.failed is not None:
            self.fail(rows_of(made.block), made.failed)
            return
        try:
            self.emit(made.block)
        except RefusedError as exc:
            rest = stream.refuse(made) if exc.block is made.block else None
            if rest is None:
                raise
            self.emit(rest.block)

    def _open(self) -> InferenceStream:
        self._stream = open_stream(self._spec, self.label, self._sessions, self._caller)
        return self._stream

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
