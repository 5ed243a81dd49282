"""A session whose model lives in a host: the same lanes and tickets, with the batcher and the model in other processes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import cloudpickle

from penstock.answers import Together
from penstock.blocks import byte_size, row_at
from penstock.errors import EngineError, PenstockError, StepError
from penstock.failures import LOADING, Handling
from penstock.inference.broken_rows import BrokenRows
from penstock.inference.calls import How
from penstock.inference.lane import Caller
from penstock.inference.models_by_key import FileSizes, ModelsByKey
from penstock.inference.served import at_place, host_spec, place_key
from penstock.inference.shared import SessionState
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket, hand_out
from penstock.models.client import HostClient
from penstock.models.host_address import Address, name_of
from penstock.models.measures import Report, hand_in
from penstock.models.messages import Answers, Broken, Submit
from penstock.models.outcome import Outcome
from penstock.models.place import Place
from penstock.observe.metrics import MetricKey
from penstock.retry import Retry
from penstock.rows import safe_str
from penstock.transport.packing import IMPORTING, pack
from penstock.transport.tensors import received

logger = logging.getLogger(__name__)


class _Open(NamedTuple):
    """A ticket that is not answered yet."""

    ticket: Ticket
    handling: Handling | None


class HostedSession:
    """This process's way to a model that is elsewhere. Callers' threads submit and wait; the connection's thread, which the
    client owns, hands out answers. `_changed` is the lock of all sessions of the process."""

    def __init__(self, owner: SessionState, key: str, step: str, spec: InferenceSpec, place: Place) -> None:
        self.step = step
        self._handler = spec.handler
        self._changes = spec.refresh is not None
        self._owner = owner
        self.turn = owner.turn
        self._changed = owner.changed
        self._namespace = spec.metrics_namespace
        self._open: dict[int, _Open] = {}  # by number; guarded by _changed
        self._numbers = itertools.count(1)  # of lanes and tickets; next() is atomic: no lock
        self._closed = False  # guarded by _changed
        around = owner.around
        self._model = at_place(key) if place.shared else None
        self._files = FileSizes(self._handler)
        address = Address(spec.folder(around), name_of(place_key(key, spec, place)))
        self.client = HostClient(address, host_spec(key, step, spec, place, around), self, self._model)

    def join(
        self, caller: Caller, step: str | None = None, handling: Handling | None = None, retry: Retry | None = None
    ) -> HostedLane:
        return HostedLane(self, caller, step or self.step, handling, retry, next(self._numbers))

    def hand_in_metrics(self) -> None: ...

    def close(self, *, wait: bool = True) -> None:
        self.client.close(wait)  # without the sessions' lock: the connection's thread may need it to end
        with self._changed:
            self._closed = True
            self._changed.notify_all()  # nobody answers those who still wait: see wait()

    # For lanes. The client's lock is never taken inside the sessions' one, only the other way round.

    def close_lane(self, number: int, tickets: list[int]) -> None:
        self.client.leave(number, tickets)
        with self._changed:  # answers that come until then fill tickets that nobody reads
            for ticket in tickets:
                self._open.pop(ticket, None)

    def submit(self, lane: int, submitted: _Open, how: bytes) -> int:
        number, ticket = next(self._numbers), submitted.ticket
        block = ticket.block
        parts = ticket.parts if self._model is None else [(self._model, 0, ticket.missing)]
        message = Submit(
            lane=lane,
            ticket=number,
            rows=ticket.missing,
            payload=b"",
            how=how,
            group=None if isinstance(block, list) else str(block.schema),
            weights=ticket.weights,
            lengths=ticket.lengths,
            alone=ticket.alone,
            size=0 if ticket.lengths is None else byte_size(block),
            parts=parts,
            files={model: self._files[model] for model, _, _ in parts or ()},
        )
        buffers = pack(block, ticket.step)
        with self._changed:  # before it is sent: its answer may be here before submit() returns
            self._open[number] = submitted
        self.client.submit(message, buffers)
        return number

    def wait(self, lane: int, ticket: Ticket, number: int, caller: Caller) -> None:
        self.client.waits(lane, number)  # so that the host does not keep a batch back for more rows of this lane
        with self._changed:
            self._owner.waits(caller, ticket)
            try:
                while not ticket.settled:
                    if self._closed:
                        raise EngineError(f"step {self.step!r}: the run has ended")
                    self._changed.wait()  # until _settle() on the connection's thread, or close()
            finally:
                self._owner.goes(caller)

    # What the host says, on the connection's thread. again() is called with the client's lock held, the others without.

    def answered(self, message: Answers, answers: list[Any]) -> None:
        together = answers[0].answers if len(answers) == 1 and type(answers[0]) is Together else answers
        if self._gives_rows(message):
            with IMPORTING:  # not with the lock of all sessions: this may import PyTorch
                together = received(together, as_tensors=True)
        with self._changed:
            pieces = [(self._ticket(number), start, stop) for number, start, stop in message.pieces]
            failures, model_id, wrapped, stale = message.failures, message.model_id, message.wrapped, message.stale
            hand_out(Outcome(together, failures, model_id=model_id, wrapped=wrapped, stale=stale), pieces)
            self._settle({number for number, _, _ in message.pieces})

    def _gives_rows(self, message: Answers) -> bool:
        """Whether some of its answers are for rows, and not for columns."""
        with self._changed:
            tickets = [self._ticket(number) for number, _, _ in message.pieces]
        return not all(ticket is None or ticket.as_columns for ticket in tickets)

    def _ticket(self, number: int) -> Ticket | None:
        """None: its bundle has ended. The lock is held."""
        submitted = self._open.get(number)
        return None if submitted is None else submitted.ticket

    def broken(self, message: Broken) -> None:
        """Rows whose process was killed or died, or that have no model: a failure of each where that is handled, else an
        error."""
        broken = BrokenRows(message, self._model_id(message.model))
        with self._changed:
            for number, start, stop in message.pieces:
                submitted = self._open.get(number)
                if submitted is None:
                    continue
                ticket = submitted.ticket
                is_for_all = message.kind == LOADING and self._model is not None  # as where it has a host for itself
                if is_for_all or not broken.is_handled(submitted.handling):
                    ticket.error = ticket.error or broken.error(ticket.step, row_at(ticket.block, start))
                else:
                    failures = dict.fromkeys(range(stop - start), broken.failure(ticket.step))
                    hand_out(Outcome([None] * len(failures), failures), [(ticket, start, stop)])
            self._settle({number for number, _, _ in message.pieces})

    def _model_id(self, model: str | None) -> str | None:
        """Of rows for which no outcome says it; where the model may change, nobody knows."""
        handler = self._handler
        if self._changes:
            return None
        try:
            if model is not None and isinstance(handler, ModelsByKey):
                handler = handler.handler_of(model)
            return handler.model_id()
        except Exception:  # its handler cannot be made: the error of its load says why
            return None

    def refused(self, tickets: Iterable[int], error: PenstockError) -> None:
        with self._changed:
            for number in tickets:
                if number in self._open:
                    self._open[number].ticket.error = self._open[number].ticket.error or error
            self._settle(tickets)

    def again(self, tickets: Iterable[int]) -> None:
        with self._changed:
            for number in tickets:
                if number in self._open:
                    self._open[number].ticket.reset()
            self._owner.metrics.count(self._key("model_restarts"))
        self.happened("its model host died, and is started again")

    def happened(self, what: str) -> None:
        logger.warning("step %r: %s", self.step, what)

    def reported(self, report: Report) -> None:
        with self._changed:
            hand_in(report, self._owner.metrics, self.step, self._namespace)

    def _settle(self, numbers: Iterable[int]) -> None:
        """Called with the lock held, at the end of what needs it: it is released in between."""
        settled = [number for number in numbers if number in self._open and self._open[number].ticket.settled]
        for number in settled:
            del self._open[number]
        self._owner.settled()
        self._changed.release()  # the client's lock comes before this one
        try:
            self.client.forget(settled)
        finally:
            self._changed.acquire()

    def _key(self, name: str) -> MetricKey:
        return MetricKey(self.step, self._namespace, name)


class HostedLane:
    """One bundle's way to the host, used by one thread."""

    def __init__(
        self,
        session: HostedSession,
        caller: Caller,
        step: str,
        handling: Handling | None,
        retry: Retry | None,
        number: int,
    ) -> None:
        self.caller = caller
        self.step = step
        self.handling = handling
        self._retry = retry
        self._session = session
        self._number = number
        self._open: dict[int, int] = {}  # id of a ticket, which the caller holds meanwhile -> its number
        self._args: Any = None
        self._prepared: str | None = None
        self._how: bytes | None = None
        session.client.join(number)  # may raise: a lane that is not open is not the caller's to pause
        caller.hosted.append(self)

    def submit(self, ticket: Ticket, args: Any = None) -> None:
        if self._how is None or args is not self._args or ticket.prepared != self._prepared:
            self._args, self._prepared = args, ticket.prepared
            self._how = self._pickled(args)
        if not ticket.missing:
            return
        ticket.step = self.step
        submitted = _Open(ticket, self.handling)
        self._open[id(ticket)] = self._session.submit(self._number, submitted, self._how)

    def wait(self, ticket: Ticket) -> Any:
        if not ticket.settled:
            # While it waits, another thread of the process may prepare rows: whoever holds the turn computes.
            with self.caller.paused(self), self._session.turn.given_up():
                self._session.wait(self._number, ticket, self._open[id(ticket)], self.caller)
        self._open.pop(id(ticket), None)
        return ticket.answers()

    def pause(self) -> None:
        """The bundle waits at another model."""
        self._session.client.waits(self._number, None)

    def resume(self) -> None:
        """After pause(): rows come again."""
        self._session.client.goes(self._number)

    def close(self) -> None:
        self.caller.hosted.remove(self)
        self._session.close_lane(self._number, list(self._open.values()))

    def _pickled(self, args: Any) -> bytes:
        try:
            data: bytes = cloudpickle.dumps(How(args, self.step, self.handling, self._retry, self._prepared), protocol=5)
        except Exception as exc:
            what = f"inference_args cannot be sent to the model's process: {type(exc).__name__}: {safe_str(exc)}"
            raise StepError(f"step {self.step!r}: {what}") from exc
        return data
