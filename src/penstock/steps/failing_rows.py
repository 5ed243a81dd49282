"""Steps whose rows may fail by themselves, or are tried again: all that a row becomes is handed on, or its failure.

What a row becomes is put together before any of it leaves. Plain steps, in operators.py, need not do that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

from penstock.blocks import Block, Pacer, rows_of
from penstock.errors import RefusedError
from penstock.failures import Failure
from penstock.inference.ticket import not_packed
from penstock.pipeline.graph import FAILURES
from penstock.pipeline.handled import Handleable
from penstock.retry import Retry, Tried, Tries
from penstock.row_copies import own_rows, told_once
from penstock.rows import many, map_rows, row_error, without
from penstock.steps.operator import Operator


class RowGuard:
    """A function of one row with its retries, and what becomes of its errors. Used by one thread.

    The function may change its row: each try sees it as it came, and as it came it leaves with its failure. One that cannot
    be copied is tried once."""

    def __init__(self, label: str, function: Callable[[Any], Any], step: Handleable[Any, Any]) -> None:
        self._label = label
        self._handling = step.handling
        self._uncopied: dict[int, Exception] = {}  # of the row that is tried
        self._tried = None if step.retry is None else Tried(self._try, step.retry, self._tries)
        self._of_row = function
        self._function = self._tried or function

    def each(self, rows: list[Any]) -> tuple[list[Any], dict[int, Failure]]:
        """function(row) for every row, None where it failed, and the failures by position."""
        failed: dict[int, Failure] = {}

        def forgive(at: int, exc: BaseException) -> bool:
            attempts, why = 1 if self._tried is None else self._tried.made, told_once([rows[at]])
            if self._handling is None or not self._handling.handles(exc):
                error = row_error(self._label, rows[at], exc, attempts)
                if why and self._tried is not None:
                    error.add_note(why)
                raise error from exc
            failed[at] = Failure.of(exc, self._label, attempts=attempts).because(why)
            return True

        given = rows if self._tried else own_rows(rows)
        return map_rows(self._function, given, self._label, forgive), failed

    def _try(self, row: Any) -> Any:
        self._uncopied = {}
        (own,) = own_rows([row], self._uncopied)
        return self._of_row(own)

    def _tries(self, retry: Retry) -> Tries:
        return Tries(None if self._uncopied else retry)

    def not_packed(self, made: list[Any], failed: Collection[int]) -> dict[int, Failure]:
        """The failures of rows of which something was made that cannot be sent to another process, where handled."""
        rest = [None if at in failed else each for at, each in enumerate(made)]
        return {} if self._handling is None else not_packed(rest, self._handling, self._label)


class GuardedOperator(Operator):
    """What Map, Filter and FlatMap have in common when their rows are guarded."""

    def __init__(self, label: str, step: Any) -> None:
        super().__init__(label)
        self._guard = RowGuard(label, self.whole(step.fn), step)
        self._pacer = Pacer()

    def start(self) -> None:
        self._pacer = Pacer()

    def whole(self, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The step's function, made to give all that a row becomes."""
        return fn

    def given_for(self, made: list[Any]) -> list[Any]:
        """The rows that go on, from what was made of rows none of which failed."""
        raise NotImplementedError

    def push(self, block: Block) -> None:
        for rows in self._pacer.pieces(rows_of(block)):
            made, failed = self._guard.each(rows)
            self.count.rows_in += len(rows)
            given = self.given_for(without(made, failed))
            saw_made(self._pacer, len(rows), given)
            try:
                self.emit(given)
            except RefusedError as exc:
                refused = self._guard.not_packed(made, failed) if exc.block is given else {}
                if not refused:
                    raise
                failed |= refused
                self.emit(self.given_for(without(made, failed)))
            self.fail([(rows[at], failed[at]) for at in sorted(failed)], FAILURES)


class GuardedMap(GuardedOperator):
    def given_for(self, made: list[Any]) -> list[Any]:
        return made


class GuardedFlatMap(GuardedOperator):
    def whole(self, fn: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
        return lambda row: list(many(fn(row), "the function"))

    def given_for(self, made: list[Any]) -> list[Any]:
        return list(chain.from_iterable(made))


class GuardedFilter(GuardedFlatMap):
    def whole(self, fn: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
        return lambda row: [row] if fn(row) else []


def saw_made(pacer: Pacer, rows: int, made: list[Any]) -> None:
    """Learn how many rows become about one block, where a row may become many."""
    pacer.saw(made)
    if len(made) > rows:
        pacer.rows = max(1, pacer.rows * rows // len(made))
