"""A batch whose call has raised: it runs again, as a whole or in parts, until each row has an answer or a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.answers import make_room, put_together
from penstock.batching.isolation import Blame, blamed, isolate
from penstock.blocks import drop_rows, row_at, row_count
from penstock.errors import BadRowsError, EngineError, PenstockError, PredictionCountError, StepError, UsageError
from penstock.failures import OUT_OF_MEMORY, RAISED, WRONG_COUNT, Failure, Handling
from penstock.inference.calls import How, checked_answers, own_unless_native
from penstock.inference.submitted_rows import SubmittedRows
from penstock.models.outcome import Outcome
from penstock.retry import Tries
from penstock.row_copies import as_text
from penstock.rows import after, forget_variables, let_through, row_error, safe_str, shorten, without

if TYPE_CHECKING:
    from penstock.inference.model import ModelCopy

MEMORY_IS_FULL = 8  # rows of a batch, none of which fits alone


def row_failed(
    copy: ModelCopy, row: Any, error: BaseException, step: str, handling: Handling | None
) -> Outcome | PenstockError:
    """What comes of an error of one row, which was called for alone: its failure, or what ends the run."""
    failed = FailedBatch(copy, SubmittedRows([row], may_change=False, read_again=None), How(None, step, handling))
    try:
        let_through(error)
        exc = failed.of_rows(error, 1)
    except PenstockError as raised:
        return raised
    if handling is None or not handling.handles(exc):
        ending = failed.error(0, 1, exc, 1)
        ending.__cause__ = exc
        return ending
    return Outcome([None], {0: failed.failure(exc, 1, 1)}, model_id=copy.model_id())


class FailedBatch:
    """Used by the thread that has called for the batch: no lock. The arguments are those of ModelCopy.outcomes()."""

    def __init__(self, copy: ModelCopy, rows: SubmittedRows, how: How, holds_back: bool = False) -> None:
        self._copy = copy
        self._handler = copy.handler
        self._rows = rows
        self._how = how
        self._step = how.step
        self._handling = how.handling
        self._tries = Tries(how.retry)
        self._holds_back = holds_back and self._handler.retry_safe
        self._too_large: int | None = None  # rows that did not fit, the last time that some did not
        self._raised: list[BaseException] = []  # by the first call and those of the search, until the outcome is known

    def outcome(self, exc: BaseException) -> Outcome:
        """What the batch comes to whose first call has raised this."""
        self._raised.append(exc)
        del exc  # see forget_variables()
        made = self._outcome(self._raised[0])
        while self._raised:
            forget_variables(self._raised.pop())
        return made

    def _outcome(self, exc: BaseException) -> Outcome:
        if isinstance(exc, BadRowsError) and (bad := _bad_rows(exc, self._rows.count)):
            known = self._known_bad(bad, exc.values)
            if known is not None:
                return known
            if self._handler.retry_safe:
                return self._given_once(exc, bad) if self._rows.given_once else self._without(bad)
        if self._rows.given_once and self._handler.retry_safe:
            return self._given_once(exc, {})
        answers: Any = None
        raised = self._blamable(exc, self._rows.count)
        if raised is None:
            answers, raised = self._tried(0, self._rows.count)
        made = Outcome(answers, calls=self._tries.made) if raised is None else self._isolated(raised)
        return made._replace(model_id=self._copy.model_id(), out_of_memory=self._too_large)

    def of_rows(self, exc: BaseException, rows: int) -> BaseException:
        """The error, if rows can be to blame for it; any other is raised."""
        if rows == 1 and isinstance(exc, BadRowsError) and (bad := _bad_rows(exc, 1)):
            exc = bad[0]
        handled = self._handling is not None and self._handling.handles(exc)
        if isinstance(exc, (UsageError, EngineError)) or (isinstance(exc, PredictionCountError) and not handled):
            raise exc
        if self._is_out_of_memory(exc):
            if rows > 1:
                self._too_large = rows
            self._handler.after_out_of_memory()
        return exc

    def failure(self, error: BaseException, group: int, attempts: int) -> Failure:
        kind = WRONG_COUNT if isinstance(error, PredictionCountError) else RAISED
        if self._is_out_of_memory(error):
            kind = OUT_OF_MEMORY
        return Failure.of(error, self._step, kind=kind, attempts=attempts, model_id=self._copy.model_id(), group=group)

    def error(self, start: int, stop: int, error: BaseException, attempts: int) -> StepError:
        """What ends the run: the row that is to blame, or the rows of which none could be."""
        batch = self._rows.part(start, stop)
        if row_count(batch) == 1:
            return row_error(self._step, row_at(batch, 0), error, attempts, model=self._file())
        why = "none of which fails alone" if self._handler.retry_safe else "which are not safe to call again (retry_safe)"
        return StepError(
            f"step {self._step!r}: {type(error).__name__}: {safe_str(error)}{after(attempts)}\n  raised for a batch of "
            f"{row_count(batch)} rows, {why}; its first row: {shorten(row_at(batch, 0))}"
        )

    def _tried(self, start: int, stop: int) -> tuple[Any, BaseException | None]:
        """The answers, or what the call raised: the last one, if it may be made again."""
        while True:
            try:
                return self._rows.call(start, stop, self._copy.call, self._how.args), None
            except BaseException as exc:
                error = self._blamable(exc, stop - start)
            if error is not None:
                self._raised.append(error)
                if self._handling is not None:
                    forget_variables(error)  # every call has rows of its own; an error that ends the run keeps all it has
                return None, error

    def _blamable(self, exc: BaseException, rows: int) -> BaseException | None:
        """What a call raised, if rows can be to blame for it; None: it may be made again, and the wait is over."""
        let_through(exc)
        error = self.of_rows(exc, rows)
        return error if self._is_out_of_memory(error) or not self._tries.again(error) else None

    def _isolated(self, raised: BaseException) -> Outcome:
        """Find the rows that are to blame; the calls for that answer the others."""
        pieces: list[tuple[Sequence[int], Any]] = []  # the places of some rows, and their answers
        rows, handling, tries = self._rows, self._handling, self._tries
        calls = 1

        def call(start: int, stop: int) -> BaseException | None:
            nonlocal calls
            calls += 1
            answers, raised = self._tried(start, stop)
            if raised is None:
                pieces.append((range(start, stop), answers))
            return raised

        failures: dict[int, Failure] = {}
        too_large: list[int] = []
        for start, stop, error in self._blamed(raised, call):
            if self._holds_back and stop - start == 1 and self._is_out_of_memory(error):
                too_large.append(start)
                if len(too_large) == MEMORY_IS_FULL:
                    break
                continue
            if handling is not None and stop - start > 1 and self._handler.retry_safe:
                calls += 1
                _, again = self._tried(start, stop)
                if again is None or self._is_out_of_memory(again):
                    continue  # the trouble has passed, and its rows have the answers of their halves
                error = again
            if handling is None or not handling.handles(error):
                raise self.error(start, stop, error, tries.made) from error
            failure = self.failure(error, stop - start, tries.made)
            failures |= dict.fromkeys(range(start, stop), failure)
        calls += tries.made - 1
        answers = put_together(rows.count, pieces)
        for at in failures if isinstance(answers, list) else ():  # rows that fail together were answered in halves
            answers[at] = None
        if not too_large:
            return Outcome(answers, failures, calls)
        known = {at for places, _ in pieces for at in places} | failures.keys()
        return Outcome(answers, failures, calls, [at for at in range(rows.count) if at not in known])

    def _blamed(
        self, raised: BaseException, call: Callable[[int, int], BaseException | None]
    ) -> Iterable[Blame[BaseException]]:
        if not self._handler.retry_safe:
            return [Blame(0, self._rows.count, raised)]
        return blamed(isolate(self._rows.count, raised, self._is_out_of_memory), call)

    def _known_bad(self, bad: dict[int, Exception], values: Any) -> Outcome | None:
        """What a batch comes to of which the handler says which rows are bad, if it has the answers of the others."""
        for at, error in bad.items():
            if self._handling is None or not self._handling.handles(error):
                raise self.error(at, at + 1, error, 1) from error
        count = self._rows.count
        if values is None and len(bad) < count:
            return None
        answers: Any = [None] * count
        if values is not None:
            answers = own_unless_native(self._handler, checked_answers(values, count, self._copy.step))
        return Outcome(answers, self._failures(bad), model_id=self._copy.model_id())

    def _without(self, bad: Mapping[int, BaseException]) -> Outcome:
        """The batch once more, without the rows that are known to be bad."""
        count = self._rows.count
        rest = without(range(count), bad)
        good = drop_rows(self._rows.part(0, count), bad)
        made = self._copy.outcomes(good, self._how, holds_back=self._holds_back)
        failures = self._failures(bad)
        return made._replace(
            answers=make_room(made.answers, count, bad),
            failures={**failures, **{rest[at]: failure for at, failure in made.failures.items()}},
            again=[rest[at] for at in made.again],
            calls=made.calls + 1,
        )

    def _given_once(self, exc: BaseException, bad: Mapping[int, Exception]) -> Outcome:
        """Rows that cannot be copied fail with their batch; the others run again without them, and without those that are
        known to be bad."""
        let_through(exc)
        once, count = self._rows.given_once, self._rows.count
        error = self.of_rows(exc, count)
        rest = {**dict.fromkeys(once, error), **bad}
        made = self._without(rest) if len(rest) < count else Outcome([None] * count)
        first, why = next(iter(once.items()))
        told = as_text(why) if count == 1 else f"raised for a batch of {count} rows; {as_text(why)}"
        if self._handling is None or not self._handling.handles(error):
            ending = self.error(first, first + 1, error, 1)
            ending.add_note(told)
            raise ending from error
        failure = self.failure(error, len(once), 1).because(told)
        failures = {**made.failures, **dict.fromkeys(once, failure), **self._failures(bad)}
        return made._replace(failures=failures, out_of_memory=self._too_large, model_id=self._copy.model_id())

    def _failures(self, errors: Mapping[int, BaseException]) -> dict[int, Failure]:
        """Of rows that are known to be bad: one for each error, which may be that of many."""
        distinct = {id(error): error for error in errors.values()}
        made = {key: self.failure(error, 1, 1) for key, error in distinct.items()}
        return {at: made[id(error)] for at, error in errors.items()}

    def _file(self) -> str | None:
        """What the model was loaded from, if that is a file: a row may be one for another model."""
        return self._copy.model_id() if self._copy.file_bytes() else None

    def _is_out_of_memory(self, error: BaseException) -> bool:
        try:
            return self._handler.is_out_of_memory(error)
        except Exception:  # an error whose message cannot be read
            return False


def _bad_rows(exc: BadRowsError, rows: int) -> dict[int, Exception]:
    """The errors of rows that are in the batch; copies that fill it up are not."""
    return {at: error for at, error in sorted(exc.errors.items()) if 0 <= at < rows}
