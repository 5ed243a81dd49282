"""One bundle's rows through RunInference: blocks in, blocks of answers out, in the order of the rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.batching.entry import LOOKAHEAD
from penstock.blocks import MAX_ROWS, Block, Pacer, byte_size, holds_answers, is_table, row_count, rows_of
from penstock.errors import StepError, UsageError
from penstock.failures import Failure
from penstock.inference.forming import FormingLane
from penstock.inference.handler import concurrent_batches
from penstock.inference.hosted import HostedLane, HostedSession
from penstock.inference.lane import Lane
from penstock.inference.path import join_keys, through
from penstock.inference.session import InferenceSession
from penstock.inference.ticket import Caller, Ticket
from penstock.inference.transform import RunInference
from penstock.rows import many, measured, weigh_rows

AnySession: TypeAlias = InferenceSession | HostedSession


@dataclass(slots=True)
class Pending:
    """Rows in flight."""

    ticket: Ticket
    keys: list[Any] | None
    rows: int
    bytes: int


class InferenceStream:
    """Pre- and postprocessing and keys on the caller's thread, around a session. Any engine drives it like this:

        for block in blocks: yield from stream.push(block)
        yield from stream.finish()

    and calls close() whatever happened. Rows in flight are bounded: push() waits when too many are.
    """

    def __init__(self, step: str, transform: RunInference[Any, Any], session: AnySession, caller: Caller) -> None:
        self.rows_in = 0
        self.rows_answered = 0  # by the model, without those that it failed for
        self._step = step
        self._path = transform.path
        self._args = transform.inference_args
        self._weigh = transform.limits.weigh if transform.limits.max_weight is not None else None
        self._handler = transform.path.model_handler
        self._measure = self._handler.measures_length()
        whole_rows = self._weigh is not None or self._measure
        whole_rows = whole_rows or transform.handling is not None
        self._columns = transform.path.plain and self._handler.takes_columns() and not whole_rows
        self._lane: Lane | HostedLane | FormingLane = session.join(caller, step, transform.handling, transform.retry)
        limits = transform.limits
        at_once = 1 + concurrent_batches(self._handler)
        self._window = at_once * (limits.lookahead_rows or LOOKAHEAD[1] if self._measure else limits.max_size or MAX_ROWS)
        self._window_bytes = 2 * limits.lookahead_bytes
        if transform.fixed_batches:
            self._lane = FormingLane(self._lane, transform)
            self._window = max(self._window, at_once * MAX_ROWS)  # many batches: each goes by itself
        self._pending: deque[Pending] = deque()
        self._sending: Pending | None = None  # is being submitted, which may run the model
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._pacer = Pacer()

    def push(self, block: Block) -> Iterator[Block]:
        """Submit a block; yield the answers that are there."""
        if is_table(block) and self._path.plain:
            self._check_columns(block)
        if is_table(block) and self._columns:
            self._submit(block, None)
        elif self._path.prebatched:
            self._submit_batches(rows_of(block))
        else:
            for piece in self._pacer.pieces(rows_of(block)):
                self._push_rows(piece)
                yield from self._ready()
        yield from self._ready()

    def _check_columns(self, table: Any) -> None:
        """What a whole table lacks is no row's fault."""
        if self._columns or not holds_answers(table):
            try:
                self._handler.check_columns(table.schema)
            except UsageError as exc:
                raise UsageError(f"step {self._step!r}: {exc}") from exc

    def _ready(self) -> Iterator[Block]:
        while self._pending and (self._pending[0].ticket.settled or self._too_many()):
            yield self._take()

    def _too_many(self) -> bool:
        over = self._in_flight > self._window or self._in_flight_bytes > self._window_bytes
        return over and not self._pending[0].ticket.gathering  # to wait for it now would cut its batch short

    def finish(self) -> Iterator[Block]:
        """Yield the rest of the answers, waiting for them."""
        while self._pending:
            yield self._take()

    def take_failed(self) -> dict[str, list[tuple[Any, Failure]]]:
        """The rows that failed since the last time, with their failures, by the step's output that they go to."""
        return {}

    def refuse(self, answers: Block) -> Block | None:
        """The answers that were yielded last, without those that cannot be sent to another process, which are failures
        now; None if there are none, or such errors are not handled."""
        return None

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

    def close(self) -> None:
        self._lane.close()

    def _push_rows(self, rows: list[Any]) -> None:
        self._submit_rows(self._before(rows))

    def _before(self, rows: list[Any]) -> list[Any]:
        return through(self._path.before, rows, self._step, "preprocess")

    def _submit_batches(self, batches: list[Any]) -> None:
        for batch in self._before(batches):
            self._submit_rows(self._examples_in(batch), alone=True)

    def _examples_in(self, batch: Any) -> list[Any]:
        try:
            return list(many(batch, "", ""))
        except TypeError as exc:
            expected = "with_no_batching() expects rows that are lists of examples"
            raise StepError(f"step {self._step!r}: {expected}, got {type(batch).__name__}") from exc

    def _submit_rows(self, rows: list[Any], alone: bool = False) -> None:
        examples, keys = self._path.split_keys(rows, self._step)
        examples = through(self._path.before_model, examples, self._step, "preprocess")
        if examples:
            self._pacer.saw(examples)
            self._submit(examples, keys, alone)

    def _submit(self, block: Block, keys: list[Any] | None, alone: bool = False) -> None:
        weights, lengths = None, None
        if self._weigh is not None and not alone:
            weights = self._weights_of(rows_of(block))
        if self._measure and not alone:
            lengths = self._lengths_of(rows_of(block))
        self._send(Pending(Ticket(block), keys, row_count(block), byte_size(block)), weights, lengths, alone)

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
        if pending.rows:
            self._sending = pending
            self._lane.submit(pending.ticket, self._args, weights=weights, lengths=lengths, alone=alone)
        self._pending.append(pending)
        self._sending = None
        self._in_flight += pending.rows
        self._in_flight_bytes += pending.bytes
        self.rows_in += pending.rows

    def _take(self) -> Block:
        pending, answers = self._next()
        if not isinstance(answers, list) or self._path.plain:
            return answers
        answers = through(self._path.after_model, answers, self._step, "postprocess")
        return through(self._path.after, join_keys(pending.keys, answers), self._step, "postprocess")

    def _next(self) -> tuple[Pending, Block]:
        """The oldest rows in flight, when their answers are there."""
        pending = self._pending[0]
        answers = self._lane.wait(pending.ticket)
        self._pending.popleft()
        self.rows_answered += pending.rows - len(pending.ticket.failures)
        self._in_flight -= pending.rows
        self._in_flight_bytes -= pending.bytes
        return pending, answers
