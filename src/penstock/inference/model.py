"""One model copy: loaded when it is first needed, called with whole batches, and the rows to blame when a call fails."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.answers import cut, make_room, put_together
from penstock.batching.isolation import Blame, blamed, isolate
from penstock.blocks import Block, drop_rows, row_at, row_count
from penstock.errors import (
    BadRowsError,
    EngineError,
    PenstockError,
    PredictionCountError,
    StepError,
    UsageError,
)
from penstock.failures import OUT_OF_MEMORY, RAISED, WRONG_COUNT, Failure, Handling
from penstock.forks import end_if_forked, this_process
from penstock.inference.calls import call_model, checked_answers, filled
from penstock.inference.handler import AnnouncingHandler, ModelHandler, variables_of
from penstock.inference.model_loading import load_model_of
from penstock.inference.slow import SlowCalls
from penstock.inference.submitted_rows import SubmittedRows
from penstock.models.activity import BATCHES
from penstock.models.loading import LoadedModel
from penstock.models.memory import file_bytes
from penstock.models.outcome import Outcome
from penstock.retry import Retry, Tries
from penstock.rows import after, let_through, row_error, safe_str, shorten, without

MEMORY_IS_FULL = 8  # rows of a batch, none of which fits alone
BYTES_SAMPLED_EVERY = 16  # batches: measuring the size of a batch can cost more than running it


class _Care(NamedTuple):
    """What becomes of the errors of one batch."""

    handling: Handling | None
    tries: Tries
    holds_back: bool = False  # no row is blamed for running out of memory: a fresh process may have enough


class ModelCopy:
    """A handler and the model that it loaded, in this process."""

    def __init__(
        self,
        step: str,
        handler: ModelHandler[Any, Any, Any],
        size_buckets: tuple[int, ...] = (),
        *,
        slow: SlowCalls | None = None,
        prepared: bool = False,
        one_of_many: bool = False,
        model_id: str | None = None,
    ) -> None:
        """slow: tells of a call that does not end. prepared: this process has the handler's variables in its environment,
        and maybe a device of its own: they are not set again. one_of_many: others are loaded while this one is called.
        model_id: what answers are marked with; None: what the handler says."""
        self.step = step
        self._slow = slow
        self.handler = handler
        self._variables = {} if prepared else variables_of(handler)
        self._one_of_many = one_of_many
        self._model_id = model_id
        self._size_buckets = size_buckets
        self._own = threading.local()  # of each thread: rows that did not fit, whom to tell of a call
        self._announces = False  # calls, to somebody who times them
        self._sees_device = type(handler).device_seconds is not ModelHandler.device_seconds
        self._loading = threading.Lock()  # held while the model loads: others wait for it
        self._loaded: LoadedModel | None = None  # written under _loading; read without: it is there whole, or not

    def load(self) -> LoadedModel | None:
        """Load the model, if nobody has; return what that cost. One thread loads, others wait for it."""
        if self._loaded is not None:
            return None
        with self._loading:
            if self._loaded is not None:  # by the thread that this one has waited for
                return None
            self._loaded = load_model_of(self.handler, self.step, self._variables, one_of_many=self._one_of_many)
            return self._loaded

    def outcomes(
        self,
        batch: Block,
        args: Any,
        step: str,
        handling: Handling | None = None,
        retry: Retry | None = None,
        *,
        holds_back: bool = False,
        read_again: Callable[[], Block] | None = None,
        prepared: str | None = None,
        raised: BaseException | None = None,
    ) -> Outcome:
        """One answer or one failure per row. A batch that raises runs again in parts until the rows that fail alone are
        found. Errors that are not handled are raised; they name the row that is to blame, and the step that it came from:
        several may share this model.

        What `retry` names is tried again first. Its attempts are for the batch and all that it leads to: a fault that has
        outlasted them is not waited for once more in every part.

        holds_back: a row that does not fit alone is not blamed but left `again`, for a caller that can start this process
        anew; where several are, memory is full, and what has no answer yet is left with them.

        read_again: gives the rows once more, to a caller that keeps them elsewhere. The handler is then given the batch
        itself; without it, copies of what it could change: every call sees the rows as they were submitted.

        prepared: asked for where a model has versions (inference/refreshed_model.py): all rows are prepared for this one.

        raised: what the first call of the batch has raised, if somebody else has made it."""
        rows = SubmittedRows(batch, self.handler.changes_rows(), read_again)
        try:
            if raised is not None:
                raise raised
            answers = rows.call(0, rows.count, self._call, args)
        except BaseException as exc:
            if isinstance(exc, BadRowsError) and (bad := _bad_rows(exc, rows.count)):
                known = self._known_bad(bad, exc.values, rows, step, handling)
                if known is not None:
                    return known
                if self.handler.retry_safe:
                    return self._without(bad, rows, args, step, handling, retry, holds_back)
            care = _Care(handling, Tries(retry), holds_back and self.handler.retry_safe)
            made = self._after(exc, rows, args, step, care)
            return made._replace(model_id=self.model_id(), out_of_memory=self._take_out_of_memory())
        on_device = self._own.device_seconds if self._sees_device else None
        return Outcome(answers, model_id=self.model_id(), device_seconds=on_device)

    @property
    def is_plain(self) -> bool:
        """Whether a call is just that, and nobody is told of it."""
        return not (self._announces or self._size_buckets or self._one_of_many or self._sees_device or self._slow)

    def row_failed(self, row: Any, error: BaseException, step: str, handling: Handling | None) -> Outcome | PenstockError:
        """What comes of an error of one row, which was called for alone: its failure, or what ends the run."""
        try:
            let_through(error)
            exc = self._of_rows(error, 1, handling)
        except PenstockError as raised:
            return raised
        if handling is None or not handling.handles(exc):
            ending = self._error([row], exc, step, 1)
            ending.__cause__ = exc
            return ending
        return Outcome([None], {0: self._failure(exc, step, 1, 1)}, model_id=self.model_id())

    def byte_size(self, batch: Block) -> int | None:
        """The bytes of a batch, if they can be told."""
        with contextlib.suppress(Exception):  # a size that cannot be told is no reason to fail
            return self.handler.get_num_bytes(batch) if isinstance(batch, list) else int(batch.nbytes)
        return None

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    @property
    def loaded(self) -> LoadedModel | None:
        return self._loaded

    def file_bytes(self) -> int | None:
        """How large the files of the model are, if that can be seen."""
        return file_bytes(self.handler.model_files)

    @property
    def bytes(self) -> int:
        """By how much this process grew when the model was loaded."""
        return 0 if self._loaded is None else self._loaded.grown or self._loaded.ram

    def is_thread_safe(self) -> bool:
        """Whether several threads may call the model that is loaded at once."""
        return self._loaded is not None and self.handler.is_thread_safe(self._loaded.model)

    def let_go(self) -> None:
        """Of the model: if nothing else refers to it, its memory is free."""
        with self._loading:
            self._loaded = None

    def unload(self) -> None:
        """Let go of the model, and give its memory back."""
        self.let_go()
        gc.collect()

    def _take_out_of_memory(self) -> int | None:
        """How many rows did not fit in the last batch of this thread, if any did not; the least number that did not."""
        rows: int | None = getattr(self._own, "rows", None)
        self._own.rows = None
        return rows

    def _after(self, exc: BaseException, rows: SubmittedRows, args: Any, step: str, care: _Care) -> Outcome:
        """What a batch comes to whose first call has raised."""
        answers: Any = None
        raised = self._blamable(exc, rows.count, care)
        if raised is None:
            answers, raised = self._tried(rows, 0, rows.count, args, care)
        return Outcome(answers, calls=care.tries.made) if raised is None else self._isolated(rows, args, step, care, raised)

    def _tried(self, rows: SubmittedRows, start: int, stop: int, args: Any, care: _Care) -> tuple[Any, BaseException | None]:
        """The answers, or what the call raised: the last one, if it may be made again."""
        while True:
            try:
                return rows.call(start, stop, self._call, args), None
            except BaseException as exc:
                error = self._blamable(exc, stop - start, care)
            if error is not None:
                return None, error

    def _blamable(self, exc: BaseException, rows: int, care: _Care) -> BaseException | None:
        """What a call raised, if rows can be to blame for it; None: it may be made again, and the wait is over."""
        let_through(exc)
        error = self._of_rows(exc, rows, care.handling)
        return error if self._is_out_of_memory(error) or not care.tries.again(error) else None

    def _of_rows(self, exc: BaseException, rows: int, handling: Handling | None) -> BaseException:
        """The error, if rows can be to blame for it; any other is raised."""
        if rows == 1 and isinstance(exc, BadRowsError) and (bad := _bad_rows(exc, 1)):
            exc = bad[0]
        handled = handling is not None and handling.handles(exc)
        if isinstance(exc, (UsageError, EngineError)) or (isinstance(exc, PredictionCountError) and not handled):
            raise exc
        if self._is_out_of_memory(exc):
            if rows > 1:
                self._own.rows = rows
            self.handler.after_out_of_memory()
        return exc

    def _isolated(self, rows: SubmittedRows, args: Any, step: str, care: _Care, raised: BaseException) -> Outcome:
        """Find the rows that are to blame; the calls for that answer the others."""
        pieces: list[tuple[Sequence[int], Any]] = []  # the places of some rows, and their answers
        handling = care.handling
        calls = 1

        def call(start: int, stop: int) -> BaseException | None:
            nonlocal calls
            calls += 1
            answers, raised = self._tried(rows, start, stop, args, care)
            if raised is None:
                pieces.append((range(start, stop), answers))
            return raised

        failures: dict[int, Failure] = {}
        too_large: list[int] = []
        for start, stop, error in self._blamed(rows.count, raised, call):
            if care.holds_back and stop - start == 1 and self._is_out_of_memory(error):
                too_large.append(start)
                if len(too_large) == MEMORY_IS_FULL:
                    break
                continue
            if handling is not None and stop - start > 1 and self.handler.retry_safe:
                calls += 1
                _, again = self._tried(rows, start, stop, args, care)
                if again is None or self._is_out_of_memory(again):
                    continue  # the trouble has passed, and its rows have the answers of their halves
                error = again
            if handling is None or not handling.handles(error):
                raise self._error(rows.part(start, stop), error, step, care.tries.made) from error
            failure = self._failure(error, step, stop - start, care.tries.made)
            failures |= dict.fromkeys(range(start, stop), failure)
        calls += care.tries.made - 1
        answers = put_together(rows.count, pieces)
        for at in failures if isinstance(answers, list) else ():  # rows that fail together were answered in halves
            answers[at] = None
        if not too_large:
            return Outcome(answers, failures, calls)
        known = {at for places, _ in pieces for at in places} | failures.keys()
        return Outcome(answers, failures, calls, [at for at in range(rows.count) if at not in known])

    def _known_bad(
        self, bad: dict[int, Exception], values: Any, rows: SubmittedRows, step: str, handling: Handling | None
    ) -> Outcome | None:
        """What a batch comes to of which the handler says which rows are bad, if it has the answers of the others."""
        for at, error in bad.items():
            if handling is None or not handling.handles(error):
                raise self._error(rows.part(at, at + 1), error, step, 1) from error
        if values is None and len(bad) < rows.count:
            return None
        answers = [None] * rows.count if values is None else checked_answers(values, rows.count, self.step)
        failures = self._failures(bad, step)
        return Outcome(answers, failures, model_id=self.model_id())

    def _without(
        self,
        bad: dict[int, Exception],
        rows: SubmittedRows,
        args: Any,
        step: str,
        handling: Handling | None,
        retry: Retry | None,
        holds_back: bool,
    ) -> Outcome:
        """The batch once more, without the rows that are known to be bad."""
        rest = without(range(rows.count), bad)
        made = self.outcomes(drop_rows(rows.part(0, rows.count), bad), args, step, handling, retry, holds_back=holds_back)
        failures = self._failures(bad, step)
        return made._replace(
            answers=make_room(made.answers, rows.count, bad),
            failures={**failures, **{rest[at]: failure for at, failure in made.failures.items()}},
            again=[rest[at] for at in made.again],
            calls=made.calls + 1,
        )

    def _blamed(
        self, rows: int, raised: BaseException, call: Callable[[int, int], BaseException | None]
    ) -> Iterable[Blame[BaseException]]:
        if not self.handler.retry_safe:
            return [Blame(0, rows, raised)]
        return blamed(isolate(rows, raised, self._is_out_of_memory), call)

    def _failures(self, errors: Mapping[int, BaseException], step: str) -> dict[int, Failure]:
        """Of rows that are known to be bad: one for each error, which may be that of many."""
        distinct = {id(error): error for error in errors.values()}
        made = {key: self._failure(error, step, 1, 1) for key, error in distinct.items()}
        return {at: made[id(error)] for at, error in errors.items()}

    def _failure(self, error: BaseException, step: str, group: int, attempts: int) -> Failure:
        kind = WRONG_COUNT if isinstance(error, PredictionCountError) else RAISED
        if self._is_out_of_memory(error):
            kind = OUT_OF_MEMORY
        return Failure.of(error, step, kind=kind, attempts=attempts, model_id=self.model_id(), group=group)

    def model_id(self) -> str | None:
        """Text, whatever the handler says: it travels."""
        model_id = self.handler.model_id() if self._model_id is None else self._model_id
        return None if model_id is None else str(model_id)

    def _error(self, batch: Block, error: BaseException, step: str, attempts: int) -> StepError:
        """What ends the run: the row that is to blame, or the rows of which none could be."""
        if row_count(batch) == 1:
            return row_error(step, row_at(batch, 0), error, attempts, model=self._file())
        why = "none of which fails alone" if self.handler.retry_safe else "which are not safe to call again (retry_safe)"
        return StepError(
            f"step {step!r}: {type(error).__name__}: {safe_str(error)}{after(attempts)}\n  raised for a batch of "
            f"{row_count(batch)} rows, {why}; its first row: {shorten(row_at(batch, 0))}"
        )

    def _file(self) -> str | None:
        """What the model was loaded from, if that is a file: a row may be one for another model."""
        return self.model_id() if self.file_bytes() else None

    def _is_out_of_memory(self, error: BaseException) -> bool:
        try:
            return self.handler.is_out_of_memory(error)
        except Exception:  # an error whose message cannot be read
            return False

    def announce(self, calling: Callable[[], None]) -> None:
        """From now on, tell this before each call that this thread makes."""
        self._own.calling, self._announces = calling, True
        if isinstance(self.handler, AnnouncingHandler):
            self.handler.calling = calling

    def _call(self, batch: Block, args: Any) -> Any:
        assert self._loaded is not None
        if self._announces and (calling := getattr(self._own, "calling", None)) is not None:
            calling()
        given = filled(batch, self._size_buckets) if self._size_buckets else batch
        if self._slow is not None:
            self._slow.begin()
        if self._one_of_many:
            BATCHES.begin()
        began = this_process()
        if self._sees_device:
            self.handler.device_seconds()  # what an earlier call has left
        try:
            answers = call_model(self.handler, self._loaded.model, given, args, self.step)
            if self._sees_device:
                self._own.device_seconds = self.handler.device_seconds()
        finally:
            end_if_forked(began, self.step)  # first: a child that was forked inside ends here
            if self._one_of_many:
                BATCHES.end()
            if self._slow is not None:
                self._slow.end()
        return answers if given is batch else cut(answers, 0, row_count(batch))


def _bad_rows(exc: BadRowsError, rows: int) -> dict[int, Exception]:
    """The errors of rows that are in the batch; copies that fill it up are not."""
    return {at: error for at, error in sorted(exc.errors.items()) if 0 <= at < rows}
