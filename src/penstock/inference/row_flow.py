"""Rows to a model that answers each by itself: as many at once as it takes, each settled when its answer is there.

    front: rows of all lanes -> as many as may be in flight -> answer(row) on the process's event loop
                                                                  |-> the row's ticket; the next row goes

One row that takes long holds up no other: there are no batches here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from penstock.batching.entry import Span
from penstock.blocks import row_at
from penstock.errors import PenstockError
from penstock.inference.failed_batch import row_failed
from penstock.inference.lane import Request, settle
from penstock.inference.model import ModelCopy
from penstock.inference.service_handler import AsyncModelHandler, rows_at_once
from penstock.inference.shared import SessionState
from penstock.models.front import Front
from penstock.models.measures import Measures
from penstock.models.outcome import Outcome
from penstock.remote.event_loop import event_loop


class _Answered(NamedTuple):
    span: Span[Request]
    answer: Any
    error: BaseException | None
    seconds: float


class RowFlow:
    """Of one session. The sessions' lock guards `_in_flight` and `_ending`; the loop's thread owns the rest."""

    def __init__(self, owner: SessionState, copy: ModelCopy, front: Front[Request], measures: Measures) -> None:
        assert isinstance(copy.handler, AsyncModelHandler)
        self._owner = owner
        self._copy = copy
        self._handler: AsyncModelHandler[Any, Any, Any] = copy.handler
        self._front = front
        self._measures = measures
        self._most = rows_at_once(copy.handler)
        self._in_flight = 0  # rows that were taken from the front and are not settled
        self._ending: PenstockError | None = None  # what ends a bundle: no more rows go, those in flight come home first
        self._ended: list[Span[Request]] = []  # of rows whose errors end a bundle
        self._loop = event_loop()  # the process's, which outlives this session
        self._answered: list[_Answered] = []  # and not settled yet
        self._is_over = False  # after close() a row that is cancelled is nobody's error
        self._tasks: set[asyncio.Task[None]] = set()  # else nobody holds them

    def go_on(self) -> None:
        """Let rows go that wait, as many as may. The lock is held."""
        if going := self._taken():  # counted as in flight here, so that no other thread takes as many again
            self._loop.call_soon_threadsafe(self._start, going)

    def _taken(self) -> list[Span[Request]]:
        going: list[Span[Request]] = []
        while self._in_flight < self._most and self._ending is None:
            spans = self._front.take_any(time.monotonic())
            if spans is None:
                break
            going += [Span(entry, at, at + 1) for entry, start, stop in spans for at in range(start, stop)]
            self._in_flight += sum(stop - start for _, start, stop in spans)
        return going

    def close(self) -> None:
        """Nobody wants what is in flight. It is cancelled on the loop's thread, which is not waited for."""
        self._loop.call_soon_threadsafe(self._cancel)

    # On the loop's thread.

    def _start(self, spans: list[Span[Request]]) -> None:
        for span in spans:
            task = self._loop.create_task(self._answer(span))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _cancel(self) -> None:
        self._is_over = True  # first: a row that is cancelled looks at it
        for task in self._tasks:
            task.cancel()

    async def _answer(self, span: Span[Request]) -> None:
        request, model = span.entry.item, self._loaded_model()
        began = time.perf_counter()
        answer, error = None, None
        try:
            if self._ending is not None:  # set on this thread alone: since the row was taken
                raise self._ending.with_traceback(None)
            answer = await self._handler.answer(row_at(request.ticket.block, span.start), model, request.args)
        except BaseException as exc:
            if self._is_over:
                raise
            error = exc
        self._answered.append(_Answered(span, answer, error, time.perf_counter() - began))
        if len(self._answered) == 1:  # what else is answered in this round of the loop is settled with it
            self._loop.call_soon(self._settle)

    def _loaded_model(self) -> Any:
        loaded = self._copy.loaded
        assert loaded is not None
        return loaded.model

    def _settle(self) -> None:
        answered, self._answered = self._answered, []
        with self._owner.changed:  # the loop waits for this lock, which nobody holds while a model runs
            self._in_flight -= len(answered)
            for each in answered:
                self._settle_one(each)
            going = self._taken()
            is_over = any(each.span.entry.item.ticket.settled for each in answered)
            if self._ending is not None and not self._in_flight:
                settle(self._ended, self._ending)
                self._ending, self._ended, is_over = None, [], True  # others go on when the bundle has left
            if is_over:  # else nobody can go on, and to wake them costs more than a request
                self._owner.settled()
        self._start(going)  # without the lock: this is the loop's thread already

    def _settle_one(self, each: _Answered) -> None:
        outcome: Outcome | PenstockError
        if self._ending is not None and each.error is self._ending:  # the row was given up
            outcome = self._ending
        elif each.error is None:
            outcome = Outcome([each.answer], model_id=self._copy.model_id())
        else:
            lane = each.span.entry.item.lane
            row = row_at(each.span.entry.item.ticket.block, each.span.start)
            outcome = row_failed(self._copy, row, each.error, lane.step, lane.handling)
        if isinstance(outcome, PenstockError):
            if self._ending is None:
                self._ending = outcome
                self._handler.give_up(self._loaded_model(), outcome)
            self._ended.append(each.span)
            return
        settle([each.span], outcome)
        failed = each.error is not None
        self._measures.ran([each.span], each.seconds, size=None, failed=failed, out_of_memory=None)
