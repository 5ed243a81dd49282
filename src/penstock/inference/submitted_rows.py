"""The rows of a batch, as they were submitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.blocks import Block, row_count, slice_rows
from penstock.row_copies import own_rows
from penstock.rows import PredictionResult


class SubmittedRows:
    """The rows of one batch as they were submitted: a handler may change what it is given, and rows may run again. Used by
    the thread that runs the batch: no lock."""

    __slots__ = ("_batch", "_is_given", "_may_change", "_read_again", "count", "given_once")

    def __init__(self, batch: Block, may_change: bool, read_again: Callable[[], Block] | None) -> None:
        self.count = row_count(batch)
        self.given_once: dict[int, Exception] = {}  # rows that cannot be copied and were given: they may be changed by now
        self._batch = batch
        self._may_change = may_change
        self._read_again = read_again
        self._is_given = False  # the batch itself, which then is no longer what was submitted

    def part(self, start: int, stop: int) -> Block:
        """Some of the rows, as they were submitted."""
        if self._is_given and self._read_again is not None:
            self._batch, self._read_again = self._read_again(), None
        return self._batch if stop - start == self.count else slice_rows(self._batch, start, stop)

    def call(self, start: int, stop: int, function: Callable[[Block, Any], Any], args: Any) -> Any:
        """function(rows, args), with rows that it may change; an answer whose example is one of them gets the row itself."""
        part = self.part(start, stop)
        if not self._may_change:
            return function(part, args)
        if self._read_again is not None:
            self._is_given = True  # before the call: it may raise when it has changed some rows
            return function(part, args)
        uncopied: dict[int, Exception] = {}
        given = own_rows(part, uncopied)
        self.given_once |= {start + at: why for at, why in uncopied.items()}
        answers = function(given, args)
        return answers if given is part else _with_examples(answers, given, part)


def _with_examples(answers: Any, given: list[Any], rows: list[Any]) -> Any:
    """Answers with the rows as they were submitted for examples, where those are what the handler was given of them."""
    if not isinstance(answers, list) or PredictionResult not in map(type, answers):
        return answers
    return [
        PredictionResult(row, *answer[1:]) if type(answer) is PredictionResult and answer.example is own else answer
        for answer, own, row in zip(answers, given, rows, strict=True)
    ]
