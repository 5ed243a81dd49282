"""One bundle's rows through a model: blocks in, blocks of answers out, in the order of the rows.

push(block) -> Intake: to examples, prepared -> a lane to the model, with its window -> answers beside their rows
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.answers import as_rows, bare, leave_out, pick
from penstock.batching.entry import LOOKAHEAD
from penstock.blocks import MAX_ROWS, Block, Pacer, byte_size, drop_rows, is_table, pick_rows, row_count, rows_of, slice_rows
from penstock.errors import NotShippableError, StepError, UsageError
from penstock.failures import Failure
from penstock.inference.columns import model_ids_column
from penstock.inference.fixed_batch_lane import FormingLane
from penstock.inference.guard import Guard
from penstock.inference.handler import concurrent_batches
from penstock.inference.in_flight import Beside, Made, Pending, in_order_of_rows
from penstock.inference.intake import Intake, Passage, examples_in
from penstock.inference.lane import Lane
from penstock.inference.model_ways import ModelWays, OwnFunctions
from penstock.inference.models_by_key import WINDOW
from penstock.inference.path import FAILED_INFERENCES, failed_postprocessing, failed_preprocessing, join_keys
from penstock.inference.preparing import Preparers
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import not_packed
from penstock.observe.metrics import MetricKey, Metrics
from penstock.rows import PredictionResult, let_through, safe_str, without
from penstock.tables import table_of

# Of a piece of a table: the most bytes of its answers, about, and the fewest rows.
ANSWER_BYTES, FEWEST_ROWS = 32 << 20, 4096


MOST_CHANGES = 20  # of how rows are prepared, while they are on their way
LONGEST_WAIT = 0.5  # seconds between two of them, where nothing has changed
PIECES_OF_WINDOW = 8  # at least: how many rows are in flight is looked at between two


class InferenceStream:
    """The caller's side of a model. Rows in flight are bounded: push() waits when too many are. Where errors are handled,
    what fails leaves by the outputs of failures; answers and failures keep the order of the rows. Used by one thread;
    open_stream() makes it."""

    def __init__(
        self,
        spec: InferenceSpec,
        lane: Lane,
        guard: Guard,
        preparers: Preparers,
        copies: int = 1,
        window: int = 0,
    ) -> None:
        """`copies`: of the model that this process has to keep busy. `window`: rows in flight, of many models."""
        self.rows_in = 0  # that came to the model, or failed before it
        self.metrics = Metrics()  # of these rows: they count when the bundle does
        self.by_model: Counter[tuple[str, str | None]] = Counter()  # rows by name and id of the model, if asked for
        self._spec = spec
        self._step = lane.step
        self._path = spec.path
        self._lane = lane
        self._forming = lane if spec.by_key is not None and isinstance(lane, FormingLane) else None
        self._guard = guard
        self._preparers = preparers
        by_model = None
        if spec.by_key is not None:
            by_model = ModelWays(spec, spec.by_key, guard, preparers.of_model, self._note_preprocessing)
        self._intake = Intake(spec, guard, preparers.of_step, self._note_preprocessing, by_model)
        limits = spec.limits
        at_once = copies * (1 + concurrent_batches(spec.handler))
        by_length = spec.handler.measures_length()
        self._window = at_once * (limits.lookahead_rows or LOOKAHEAD[1] if by_length else limits.max_size or MAX_ROWS)
        self._most_rows = window // PIECES_OF_WINDOW if window else sys.maxsize  # in a piece
        self._window = window - self._most_rows if window else self._window
        self._window_bytes = 2 * limits.lookahead_bytes
        if spec.fixed_batches:
            self._window = max(self._window, at_once * MAX_ROWS)  # many batches: each goes by itself
        self._columns = spec.takes_columns()
        self._pushed = 0  # rows, as they came: the position of the next one
        # The stream's thread writes these; progress reads them from another one, without a lock: see answered().
        self._pending: deque[Pending] = deque()  # the oldest first
        self._sending: Pending | None = None  # is being submitted, which may run the model
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._answered = 0  # by the model, without those that it failed for
        self._pacer = Pacer()
        self._table_rows = sys.maxsize  # in a piece of a table whose columns go to the model
        self._failed: dict[str, list[tuple[int, Any, Failure]]] = {}  # by output: position, row, why
        self._last: tuple[Passage, Sequence[int]] | None = None  # and where the rows stood with answers
        self._before_last = 0  # of the failed inferences, how many are of earlier passages

    def push(self, block: Block) -> Iterator[Made]:
        """Submit a block; yield what is there of its rows and of those before."""
        first, self._pushed = self._pushed, self._pushed + row_count(block)
        if self._columns and self._spec.handler.input_columns() is not None and isinstance(block, list):
            block = table_of(block) or block  # of readers that give records; where a table holds just the same
        if is_table(block):
            self._check_columns(block)
        if self._path.prebatched:
            self._submit_batches(rows_of(block), range(first, self._pushed))
        else:
            whole = is_table(block) and self._columns
            way_in: Callable[[Any, Sequence[int]], Passage] = self._intake.table if whole else self._intake.rows
            for piece in self._pieces(block if whole else rows_of(block), first):
                positions = range(first, first + row_count(piece))
                first = positions.stop
                self._submit(way_in(piece, positions))
                if self._forming is not None and first % WINDOW == 0:
                    self._forming.flush()
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
        if self._guard.handling is None or not isinstance(answers.block, list) or self._last is None:
            return None
        failed = self._not_packed(answers.block)
        if not failed:
            return None
        passage, kept = self._last
        passage.failed |= {kept[at]: failure for at, failure in failed.items()}
        del self._failed.setdefault(FAILED_INFERENCES, [])[self._before_last :]
        self._hand_out_failed(passage)
        return Made(without(answers.block, failed), without(answers.positions, failed))

    def close(self) -> None:
        """Whatever happened; what is in flight, nobody wants."""
        self._last = None  # this object has cycles: what it holds would wait for a garbage collection
        self._pending.clear()
        self._failed.clear()
        self._lane.close()
        self._preparers.close()  # they have lanes of their own, where preparing has a process

    # For progress: read from other threads. What changes meanwhile makes the numbers too small, never too large.

    def answered(self) -> int:
        """How many rows the model has answered, or has failed for."""
        rows_in, sending = self.rows_in, self._sending  # before the deque, whose rows are taken from it
        try:
            answered = rows_in - sum(pending.ticket.missing for pending in self._pending)
        except RuntimeError:  # it changed just now
            return 0
        return answered + (0 if sending is None else sending.rows - sending.ticket.missing)

    def handed_out(self) -> int:
        """How many rows have left with their answers, or have failed."""
        rows_in = self.rows_in  # first: _send() adds to what is in flight before it adds to this
        return rows_in - self._in_flight

    # Towards the model.

    def _check_columns(self, table: Any) -> None:
        """What a whole table lacks is no row's fault."""
        if not self._path.plain or not self._spec.sees_columns(table):
            return
        try:
            self._spec.handler.check_columns(table.schema)
            if self._columns:
                self._spec.output.check_schema(table.column_names)
        except UsageError as exc:
            raise UsageError(f"step {self._step!r}: {exc}") from exc

    def _pieces(self, block: Block, first: int) -> Iterator[Block]:
        """Rows in pieces, so that what is made of them stays about one block. Columns that go to the model go whole, unless
        their answers are wide. `first`: the position of the first row."""
        columns, at = is_table(block) and not self._spec.handler.prepares(), 0
        while at < row_count(block):
            rows = min(self._most_rows, self._table_rows if columns else self._pacer.rows)
            if self._forming is not None:
                rows = min(rows, WINDOW - (first + at) % WINDOW)
            piece = slice_rows(block, at, min(at + rows, row_count(block)))
            at += row_count(piece)
            yield piece

    def _submit_batches(self, batches: list[Any], positions: Sequence[int]) -> None:
        """Of a row that is a batch, each example may fail by itself; its row is then a batch of one."""
        passage = Passage(batches, positions, batches, range(len(batches)))
        self._intake.preprocess(passage)
        for at, batch in zip(passage.at, rows_of(passage.rows), strict=True):
            position, handling = positions[at], self._guard.handling
            try:
                examples = examples_in(batch, self._step)
            except BaseException as exc:
                let_through(exc)
                if handling is None or not handling.handles(exc):
                    raise
                self._submit(Passage([batches[at]], [position], [], [], failed={0: self._guard.failure(exc)}))
            else:
                ones = [[example] for example in examples]
                way = Passage(ones, [position] * len(ones), examples, range(len(ones)), alone=True)
                self._submit(self._intake.unkeyed(way))

    def _submit(self, passage: Passage) -> None:
        made = passage.rows if passage.values is None else passage.values
        if isinstance(made, list) and made:
            self._pacer.saw(made)
        if not row_count(made) and not passage.failed:
            return
        try:
            self._send(passage)
        except NotShippableError:  # the model lives in another process
            failed = self._not_packed(rows_of(made)) if self._guard.handling is not None else {}
            if not failed:
                raise
            passage.fail(failed)
            self._send(passage)
        self.rows_in += len(passage.failed)

    def _send(self, passage: Passage) -> None:
        """The order of these lines is for answered() and handed_out(), which another thread may call between any two."""
        ticket = self._intake.ticket(passage)
        size = byte_size(ticket.block) + (0 if passage.values is None else byte_size(passage.rows))
        pending = Pending(ticket, passage, row_count(ticket.block), size)
        if pending.rows:
            self._sending = pending
            self._lane.submit(ticket, self._spec.inference_args)
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
        """What the oldest rows in flight came to, when that is there."""
        pending = self._pending[0]
        answers = self._lane.wait(pending.ticket)
        while pending.ticket.stale is not None:
            self._prepare_again(pending.ticket.stale)
            answers = self._lane.wait(pending.ticket)
        ticket, passage = pending.ticket, pending.passage
        if passage.is_sorted:
            answers = in_order_of_rows(passage, ticket, answers)
        self._pending.popleft()
        self._answered += pending.rows - len(ticket.failures)
        self._in_flight -= pending.rows
        self._in_flight_bytes -= pending.bytes
        if self._spec.refresh is not None:
            answered = ticket.model_ids(without(range(pending.rows), ticket.failures))
            self.metrics.answered_by(self._step, self._spec.metrics_namespace, answered)
        if self._spec.counts_models:
            self.by_model += ticket.by_model(without(range(pending.rows), ticket.failures), passage.models)
        if passage.failed or ticket.failures:
            passage.failed |= {passage.at[at]: failure for at, failure in ticket.failures.items()}
        self._hand_out_failed(passage)
        if is_table(passage.piece):
            positions = without(passage.positions, passage.failed)
            return Made(self._table_out(pending, answers) if positions else [], positions)
        good: Sequence[int] = without(range(pending.rows), ticket.failures)
        kept = good if passage.at == range(pending.rows) else [passage.at[at] for at in good]
        self._last = passage, kept if ticket.failures else passage.at
        if not self._last[1]:
            return Made([], [])
        block = self._rows_out(pending, answers, good)
        kept = self._last[1]
        if kept is good:  # nothing failed before the model, or behind it
            return Made(block, without(passage.positions, ticket.failures))
        whole = len(kept) == len(passage.positions)
        return Made(block, passage.positions if whole else [passage.positions[at] for at in kept])

    def _prepare_again(self, version: int) -> None:
        """Rows came back because their model was replaced by one that takes them prepared otherwise: they are, and all that
        came back are submitted once more."""
        if not self._preparers.change(version):  # its files are others by now, and so will be the model, soon
            time.sleep(min(LONGEST_WAIT, 0.01 * 2 ** self._pending[0].changes))
        for pending in self._pending:
            if pending.ticket.stale is None or not pending.ticket.settled:
                continue
            pending.changes += 1
            if pending.changes > MOST_CHANGES:
                what = f"rows were prepared {pending.changes} times, and never for the model that is there"
                why = "prepare_key() must give the same text in every process for the same files"
                hint = "where files are replaced while they are used, put each version in a folder of its own"
                raise StepError(f"step {self._step!r}: {what}: {why}; {hint}")
            passage = pending.passage
            self._intake.prepare_again(passage)
            ticket = pending.ticket = self._intake.ticket(passage)
            self._in_flight += row_count(ticket.block) - pending.rows
            pending.rows = row_count(ticket.block)
            if pending.rows:
                self._lane.submit(ticket, self._spec.inference_args)

    def _table_out(self, pending: Pending, answers: Any) -> Block:
        ticket, passage = pending.ticket, pending.passage
        table = drop_rows(passage.piece, passage.failed)
        rows, others = row_count(table), {}
        if ticket.other_ids:
            good = without(range(pending.rows), ticket.failures)
            others = {n: ticket.other_ids[at] for n, at in enumerate(good) if at in ticket.other_ids}
        try:
            ids = model_ids_column(rows, ticket.model_id, others)
            made = self._spec.output.add_to_table(table, leave_out(answers, ticket.failures), ids)
            if not self._spec.fixed_batches:
                self._table_rows = max(FEWEST_ROWS, ANSWER_BYTES * rows // max(1, byte_size(made) - byte_size(table)))
            return made
        except UsageError as exc:
            raise UsageError(f"step {self._step!r}: {exc}") from exc
        except Exception as exc:
            what = f"the answers cannot be made a column: {type(exc).__name__}: {safe_str(exc)}"
            raise StepError(f"step {self._step!r}: {what}") from exc

    def _rows_out(self, pending: Pending, answers: Any, good: Sequence[int]) -> list[Any]:
        """The answers as rows, after the functions behind the model."""
        ticket, passage, path = pending.ticket, pending.passage, self._path
        made: list[Any] = pick(as_rows(answers), good)
        if self._spec.wraps:
            rows, ids = passage.kept or (), [ticket.other_ids.get(at, ticket.model_id) for at in good]
            rows = pick(rows, good) if isinstance(rows, list) else rows
            if self._spec.makes_records:
                made = self._spec.output.add_to_rows(rows, bare(made), ids)
            else:
                made = list(map(PredictionResult, rows, made, ids))
        if path.plain:
            return made
        beside = Beside(*(each and pick(each, good) for each in (passage.keys, passage.models)))
        for number in range(path.of_models[1]):
            made, beside = self._postprocess(OwnFunctions(self._spec.by_key, number), made, beside, number, by_model=True)
        for number, function in enumerate(path.after_model, path.of_models[1]):
            made, beside = self._postprocess(function, made, beside, number)
        made = join_keys(beside.keys, made)
        for number, function in enumerate(path.after, path.functions_after - len(path.after)):
            made, _ = self._postprocess(function, made, Beside(), number)
        return made

    def _postprocess(
        self, function: Callable[[Any], Any], answers: list[Any], beside: Beside, number: int, by_model: bool = False
    ) -> tuple[list[Any], Beside]:
        """The answers after a function, and their keys and models. `by_model`: it is given the model beside the answer."""
        given = list(zip(beside.models, answers, strict=True)) if by_model and beside.models is not None else answers
        made, failed = self._guard.each(function, given, "postprocess")
        if not failed:
            return made, beside
        assert self._last is not None
        passage, kept = self._last
        self._last = passage, without(kept, failed)
        seen = join_keys(beside.keys, answers)
        rows = [(passage.positions[kept[at]], seen[at], failure) for at, failure in failed.items()]
        self._failed.setdefault(failed_postprocessing(number), []).extend(rows)
        return list(without(made, failed)), Beside(*(each and list(without(each, failed)) for each in beside))

    # What failed.

    def _take_failed(self) -> Iterator[Made]:
        """The rows that failed since the last time."""
        failed, self._failed = self._failed, {}
        for tag, rows in failed.items():
            if self._spec.by_key is not None:
                rows.sort(key=lambda each: each[0])  # they came model by model
            if rows:
                yield Made([(row, failure) for _, row, failure in rows], [position for position, _, _ in rows], tag)

    def _not_packed(self, rows: list[Any]) -> dict[int, Failure]:
        assert self._guard.handling is not None
        return not_packed(rows, self._guard.handling, self._step, self._guard.model_id)

    def _note_preprocessing(self, number: int, passage: Passage, failed: dict[int, Failure]) -> None:
        self.rows_in += len(failed)
        self._note(failed_preprocessing(number), passage, failed)

    def _hand_out_failed(self, passage: Passage) -> None:
        """The rows that failed in front of the model, in it and right behind it, in the order in which they came."""
        self._before_last = len(self._failed.get(FAILED_INFERENCES, ()))
        if passage.failed:
            self._note(FAILED_INFERENCES, passage, {at: passage.failed[at] for at in sorted(passage.failed)})

    def _note(self, tag: str, passage: Passage, failed: Mapping[int, Failure]) -> None:
        """Rows that failed, by their place in the piece, for an output."""
        rows = rows_of(pick_rows(passage.piece, list(failed)))
        noted = [(passage.positions[at], row, why) for (at, why), row in zip(failed.items(), rows, strict=True)]
        self._failed.setdefault(tag, []).extend(noted)
