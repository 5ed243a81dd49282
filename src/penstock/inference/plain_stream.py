"""One bundle's rows through a model: blocks in, blocks of answers out, in the order of the rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.batching.entry import LOOKAHEAD
from penstock.blocks import MAX_ROWS, Block, Pacer, byte_size, holds_answers, is_table, row_count, rows_of
from penstock.errors import StepError, UsageError
from penstock.inference.handler import concurrent_batches
from penstock.inference.lane import Lane
from penstock.inference.path import join_keys, through
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.observe.metrics import MetricKey, Metrics
from penstock.rows import many, measured, weigh_rows


class Made(NamedTuple):
    """What came of some rows that were pushed: their answers, or their failures."""

    block: Block  # one answer for each row; or of rows that failed a list of (row, Failure)
    positions: Sequence[int]  # of the rows, among all that were pushed: a range, or a list where others stand between them
    failed: str | None = None  # the name of the output that failures go to; None: answers


@dataclass(slots=True)
class Pending:
    """Rows in flight."""

    ticket: Ticket
    keys: list[Any] | None
    positions: Sequence[int]
    rows: int
    bytes: int


class InferenceStream:
    """Pre- and postprocessing and keys on the caller's thread, around a lane to the model. Rows in flight are bounded:
    push() waits when too many are. Used by one thread; open_stream() makes it."""

    def __init__(self, spec: InferenceSpec, lane: Lane) -> None:
        self.rows_in = 0  # that came to the model, or failed before it
        self.metrics = Metrics()  # of these rows: they count when the bundle does
        self._spec = spec
        self._step = lane.step
        self._path = spec.path
        self._handler = spec.handler
        self._weigh = spec.limits.weigh if spec.limits.max_weight is not None else None
        self._measure = spec.handler.measures_length()
        self._columns = spec.takes_columns()
        self._lane = lane
        limits = spec.limits
        at_once = 1 + concurrent_batches(spec.handler)
        self._window = at_once * (limits.lookahead_rows or LOOKAHEAD[1] if self._measure else limits.max_size or MAX_ROWS)
        self._window_bytes = 2 * limits.lookahead_bytes
        if spec.fixed_batches:
            self._window = max(self._window, at_once * MAX_ROWS)  # many batches: each goes by itself
        self._pushed = 0  # rows, as they came: the position of the next one
        self._pending: deque[Pending] = deque()
        self._sending: Pending | None = None  # is being submitted, which may run the model
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._answered = 0  # by the model, without those that it failed for
        self._pacer = Pacer()

    def push(self, block: Block) -> Iterator[Made]:
        """Submit a block; yield what is there of its rows and of those before."""
        first, self._pushed = self._pushed, self._pushed + row_count(block)
        if is_table(block) and self._path.plain:
            self._check_columns(block)
        if is_table(block) and self._columns:
            self._submit(block, None, range(first, self._pushed))
        elif self._path.prebatched:
            self._submit_batches(rows_of(block), range(first, self._pushed))
        else:
            for piece in self._pacer.pieces(rows_of(block)):
                positions = range(first, first + len(piece))
                first = positions.stop
                self._push_rows(piece, positions)
                yield from self._ready()
        yield from self._ready()
        yield from self._take_failed()

    def finish(self) -> Iterator[Made]:
        """Yield the rest, waiting for it."""
        yield from self._ready(wait=True)
        yield from self._take_failed()
        self.metrics.count(MetricKey(self._step, self._spec.metrics_namespace, "num_inferences"), self._answered)

    def refuse(self, answers: Made) -> Made | None:
        """The answers that were yielded last, without those that cannot be sent to another process, which are failures
        now; None if there are none, or such errors are not handled."""
        return None

    def close(self) -> None:
        """Whatever happened; what is in flight, nobody wants."""
        self._lane.close()

    # For progress: read from other threads. What changes meanwhile makes the numbers too small, never too large.

    def answered(self) -> int:
        """How many rows the model has answered, or has failed for."""
        rows_in, sending = self.rows_in, self._sending
        try:
            answered = rows_in - sum(pending.ticket.missing for pending in self._pending)
        except RuntimeError:  # it changed just now
            return 0
        return answered + (0 if sending is None else sending.rows - sending.ticket.missing)

    def handed_out(self) -> int:
        """How many rows have left with their answers, or have failed."""
        rows_in = self.rows_in
        return rows_in - self._in_flight

    # Towards the model.

    def _check_columns(self, table: Any) -> None:
        """What a whole table lacks is no row's fault."""
        if self._columns or not holds_answers(table):
            try:
                self._handler.check_columns(table.schema)
            except UsageError as exc:
                raise UsageError(f"step {self._step!r}: {exc}") from exc

    def _push_rows(self, rows: list[Any], positions: Sequence[int]) -> None:
        self._submit_rows(self._before(rows), positions)

    def _before(self, rows: list[Any]) -> list[Any]:
        return through(self._path.before, rows, self._step, "preprocess")

    def _submit_batches(self, batches: list[Any], positions: Sequence[int]) -> None:
        for position, batch in zip(positions, self._before(batches), strict=True):
            examples = self._examples_in(batch)
            self._submit_rows(examples, [position] * len(examples), alone=True)

    def _examples_in(self, batch: Any) -> list[Any]:
        try:
            return list(many(batch, "", ""))
        except TypeError as exc:
            expected = "with_no_batching() expects rows that are lists of examples"
            raise StepError(f"step {self._step!r}: {expected}, got {type(batch).__name__}") from exc

    def _submit_rows(self, rows: list[Any], positions: Sequence[int], alone: bool = False) -> None:
        examples, keys = self._path.split_keys(rows, self._step)
        examples = through(self._path.before_model, examples, self._step, "preprocess")
        if examples:
            self._pacer.saw(examples)
            self._submit(examples, keys, positions, alone)

    def _submit(self, block: Block, keys: list[Any] | None, positions: Sequence[int], alone: bool = False) -> None:
        weights, lengths = None, None
        if self._weigh is not None and not alone:
            weights = self._weights_of(rows_of(block))
        if self._measure and not alone:
            lengths = self._lengths_of(rows_of(block))
        self._send(Pending(Ticket(block), keys, positions, row_count(block), byte_size(block)), weights, lengths, alone)

    def _weights_of(self, rows: list[Any]) -> list[int]:
        assert self._weigh is not None
        return weigh_rows(self._weigh, rows, self._step)

    def _lengths_of(self, rows: list[Any]) -> list[int]:
        try:
            return measured(self._handler.get_lengths, rows, self._step)
        except StepError as exc:
            if isinstance(exc.__cause__, UsageError):  # a tokenizer that is not there: no row is to blame
                raise exc.__cause__ from exc.__cause__.__cause__
            raise

    def _send(self, pending: Pending, weights: list[int] | None, lengths: list[int] | None, alone: bool) -> None:
        """The order of these lines is for answered() and handed_out(), which another thread may call between any two."""
        if pending.rows:
            self._sending = pending
            self._lane.submit(pending.ticket, self._spec.inference_args, weights=weights, lengths=lengths, alone=alone)
        self._pending.append(pending)
        self._sending = None
        self._in_flight += pending.rows
        self._in_flight_bytes += pending.bytes
        self.rows_in += pending.rows

    # Back from it.

    def _ready(self, wait: bool = False) -> Iterator[Made]:
        while self._pending and (wait or self._pending[0].ticket.settled or self._too_many()):
            made = self._take()
            if made.positions:
                yield made

    def _too_many(self) -> bool:
        over = self._in_flight > self._window or self._in_flight_bytes > self._window_bytes
        return over and not self._pending[0].ticket.gathering  # to wait for it now would cut its batch short

    def _take(self) -> Made:
        pending, answers = self._next()
        if isinstance(answers, list) and not self._path.plain:
            answers = through(self._path.after_model, answers, self._step, "postprocess")
            answers = through(self._path.after, join_keys(pending.keys, answers), self._step, "postprocess")
        return Made(answers, pending.positions)

    def _take_failed(self) -> Iterator[Made]:
        """The rows that failed since the last time."""
        return iter(())

    def _next(self) -> tuple[Pending, Block]:
        """The oldest rows in flight, when their answers are there."""
        pending = self._pending[0]
        answers = self._lane.wait(pending.ticket)
        self._pending.popleft()
        self._answered += pending.rows - len(pending.ticket.failures)
        self._in_flight -= pending.rows
        self._in_flight_bytes -= pending.bytes
        return pending, answers
