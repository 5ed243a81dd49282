"""One bundle's rows through RunInference with exception handling: what fails leaves by the outputs of failures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.blocks import Block, byte_size
from penstock.errors import NotShippableError, UsageError
from penstock.failures import Failure
from penstock.inference.path import join_keys, name_of
from penstock.inference.stream import AnySession, InferenceStream, Pending
from penstock.inference.ticket import Caller, Ticket, not_packed
from penstock.inference.transform import FAILED_INFERENCES, RunInference, failed_postprocessing, failed_preprocessing
from penstock.row_copies import own_rows
from penstock.rows import let_through, map_rows, without


@dataclass(slots=True)
class _Passage:
    """Rows on their way to the model, and those of their piece that failed before it."""

    piece: list[Any]  # the rows as they came in
    rows: list[Any]  # what became of those that are still on their way
    at: Sequence[int]  # where in the piece they stood
    keys: list[Any] | None = None
    failed: dict[int, Failure] = field(default_factory=dict)  # by place in the piece

    def drop(self, failed: Collection[int]) -> None:
        """Go on without the rows at these positions."""
        if not failed:
            return
        self.rows = without(self.rows, failed)
        self.at = without(self.at, failed)
        self.keys = None if self.keys is None else without(self.keys, failed)


@dataclass(slots=True)
class _InFlight(Pending):
    passage: _Passage


class HandlingStream(InferenceStream):
    """An InferenceStream that goes on past rows that fail. Good rows and failures keep the order of the rows."""

    def __init__(self, step: str, transform: RunInference[Any, Any], session: AnySession, caller: Caller) -> None:
        super().__init__(step, transform, session, caller)
        assert transform.handling is not None
        self._handling = transform.handling
        self._model_id = self._handler.model_id()
        self._failed: dict[str, list[tuple[Any, Failure]]] = {}
        self._last: tuple[_Passage, Sequence[int]] = _Passage([], [], []), []  # and where the rows stood that have answers
        self._before_last = 0  # of the failed inferences, how many are of earlier passages

    def take_failed(self) -> dict[str, list[tuple[Any, Failure]]]:
        failed, self._failed = self._failed, {}
        return failed

    # Towards the model.

    def _push_rows(self, rows: list[Any]) -> None:
        passage = _Passage(rows, rows, range(len(rows)))
        self._preprocess(passage, self._path.before, 0)
        self._submit_passage(passage)

    def _submit_batches(self, batches: list[Any]) -> None:
        """Of a row that is a batch, each example may fail by itself; its row is then a batch of one."""
        passage = _Passage(batches, batches, range(len(batches)))
        self._preprocess(passage, self._path.before, 0)
        for at, batch in zip(passage.at, passage.rows, strict=True):
            try:
                examples = self._examples_in(batch)
            except BaseException as exc:
                let_through(exc)
                if not self._handling.handles(exc):
                    raise
                self._submit_passage(_Passage([batches[at]], [], [], failed={0: self._failure(exc)}), alone=True)
            else:
                ones = [[example] for example in examples]
                self._submit_passage(_Passage(ones, examples, range(len(ones))), alone=True)

    def _submit_passage(self, passage: _Passage, alone: bool = False) -> None:
        self._split_keys(passage)
        self._preprocess(passage, self._path.before_model, len(self._path.before))
        weights, lengths = None, None
        if passage.rows:
            self._pacer.saw(passage.rows)
            if not alone:
                weights, lengths = self._measure_rows(passage)
        if passage.rows or passage.failed:
            try:
                self._send(_in_flight(passage), weights, lengths, alone)
            except NotShippableError:  # the model lives in another process
                failed = self._not_packed(passage.rows)
                if not failed:
                    raise
                self._fail_before_model(passage, failed)
                weights = None if weights is None else without(weights, failed)
                lengths = None if lengths is None else without(lengths, failed)
                self._send(_in_flight(passage), weights, lengths, alone)
            self.rows_in += len(passage.failed)

    def _preprocess(self, passage: _Passage, functions: Sequence[Callable[[Any], Any]], first: int) -> None:
        for number, function in enumerate(functions, first):
            made, failed = self._each(function, passage.rows, "preprocess")
            passage.rows = made
            if failed:
                self.rows_in += len(failed)
                rows = [(passage.piece[passage.at[at]], failure) for at, failure in failed.items()]
                self._failed.setdefault(failed_preprocessing(number), []).extend(rows)
                passage.drop(failed)

    def _split_keys(self, passage: _Passage) -> None:
        def split(rows: list[Any]) -> list[tuple[Any, Any]]:
            examples, keys = self._path.split_keys(rows, self._step)
            return list(zip(examples, keys or (), strict=True))

        if self._path.keys is not None:
            pairs, failed = self._all_or_each(split, passage.rows)
            self._fail_before_model(passage, failed)
            pairs = without(pairs, failed)
            passage.rows, passage.keys = [example for example, _ in pairs], [key for _, key in pairs]

    def _measure_rows(self, passage: _Passage) -> tuple[list[int] | None, list[int] | None]:
        """The weights and the lengths, where they are needed, of the rows that have both."""
        weights, lengths = None, None
        if self._weigh is not None:
            weights, failed = self._all_or_each(self._weights_of, passage.rows)
            self._fail_before_model(passage, failed)
            weights = without(weights, failed)
        if self._measure:
            lengths, failed = self._all_or_each(self._lengths_of, passage.rows)
            self._fail_before_model(passage, failed)
            lengths = without(lengths, failed)
            weights = None if weights is None else without(weights, failed)
        return weights, lengths

    def _fail_before_model(self, passage: _Passage, failed: dict[int, Failure]) -> None:
        passage.failed |= {passage.at[at]: failure for at, failure in failed.items()}
        passage.drop(failed)

    # Back from it.

    def _take(self) -> Block:
        pending, answers = self._next()
        assert isinstance(pending, _InFlight)
        assert isinstance(answers, list)
        passage, failed = pending.passage, pending.ticket.failures
        passage.failed |= {passage.at[at]: failure for at, failure in failed.items()}
        self._hand_out(passage)
        answers = without(answers, failed)
        keys = None if pending.keys is None else without(pending.keys, failed)
        self._last = passage, without(passage.at, failed)
        for number, function in enumerate(self._path.after_model):
            answers, keys = self._postprocess(function, answers, keys, number)
        answers = join_keys(keys, answers)
        for number, function in enumerate(self._path.after, len(self._path.after_model)):
            answers, _ = self._postprocess(function, answers, None, number)
        return answers

    def refuse(self, answers: Block) -> Block | None:
        assert isinstance(answers, list)
        failed = self._not_packed(answers)
        if not failed:
            return None
        passage, kept = self._last
        passage.failed |= {kept[at]: failure for at, failure in failed.items()}
        del self._failed.setdefault(FAILED_INFERENCES, [])[self._before_last :]
        self._hand_out(passage)
        return without(answers, failed)

    def _not_packed(self, rows: list[Any]) -> dict[int, Failure]:
        return not_packed(rows, self._handling, self._step, self._model_id)

    def _hand_out(self, passage: _Passage) -> None:
        """The rows that failed in front of the model, in it and right behind it, in the order in which they came."""
        failed = self._failed.setdefault(FAILED_INFERENCES, [])
        self._before_last = len(failed)
        failed.extend((passage.piece[at], passage.failed[at]) for at in sorted(passage.failed))

    def _postprocess(
        self, function: Callable[[Any], Any], answers: list[Any], keys: list[Any] | None, number: int
    ) -> tuple[list[Any], list[Any] | None]:
        made, failed = self._each(function, answers, "postprocess")
        if not failed:
            return made, keys
        self._last = self._last[0], without(self._last[1], failed)
        given = join_keys(keys, answers)
        self._failed.setdefault(failed_postprocessing(number), []).extend((given[at], failed[at]) for at in failed)
        return without(made, failed), None if keys is None else without(keys, failed)

    # Row by row.

    def _each(self, function: Callable[[Any], Any], rows: list[Any], what: str) -> tuple[list[Any], dict[int, Failure]]:
        """function(row) for every row, None where it failed, and the failures by position. The rows stay as they are."""
        failed: dict[int, Failure] = {}

        def forgive(at: int, exc: BaseException) -> bool:
            if self._handling.handles(exc):
                failed[at] = self._failure(exc)
            return at in failed

        return map_rows(function, own_rows(rows), name_of(function, self._step, what), forgive), failed

    def _all_or_each(
        self, function: Callable[[list[Any]], list[Any]], rows: list[Any]
    ) -> tuple[list[Any], dict[int, Failure]]:
        """function(rows); if that fails, of each row alone, None where it failed, and the failures by position."""
        try:
            return function(rows), {}
        except BaseException as exc:
            let_through(exc)
            made: list[Any] = []
        failed: dict[int, Failure] = {}
        for at, row in enumerate(rows):
            try:
                made += function([row])
            except BaseException as exc:
                let_through(exc)
                origin = exc.__cause__ or exc
                if isinstance(exc, UsageError) or not self._handling.handles(origin):
                    raise
                failed[at] = self._failure(origin)
                made.append(None)
        return made, failed

    def _failure(self, exc: BaseException) -> Failure:
        return Failure.of(exc, self._step, model_id=self._model_id)


def _in_flight(passage: _Passage) -> _InFlight:
    return _InFlight(Ticket(passage.rows), passage.keys, len(passage.rows), byte_size(passage.rows), passage)
