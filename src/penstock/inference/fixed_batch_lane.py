"""A bundle's way to a model on which its batches are formed before they meet the rows of others.

    lane.submit(ticket) -> FixedBatches: whole batches of this bundle's rows
        -> the lane to the session, here or in a host: each batch as it is -> answers, back to the tickets

Of many models, the rows of each window are sorted: model by model, in the order in which they first came.

What is in a batch depends on the bundle's rows alone, and answers are handed out only when they are waited for: so neither
batches nor the order in which the steps of a bundle see its rows depend on threads, hosts, or time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.batching.entry import Entry
from penstock.batching.fixed import FixedBatches, Pieces
from penstock.blocks import Block, gather, row_count, rows_of
from penstock.errors import NotShippableError, PenstockError
from penstock.inference.lane import Lane
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket, hand_out, not_packed
from penstock.models.outcome import Outcome
from penstock.rows import without


class _Batches(NamedTuple):
    """Of one model."""

    forming: FixedBatches[Ticket]
    formed: list[Pieces[Ticket]]


class _Sent(NamedTuple):
    """A batch on its way, and whose rows are in it."""

    ticket: Ticket
    pieces: Pieces[Ticket]


class FormingLane:
    """A lane whose batches are fixed. Used by one thread; whoever waits for a ticket that still gathers submits no more."""

    def __init__(self, lane: Lane, spec: InferenceSpec) -> None:
        self.step = lane.step
        self.handling = lane.handling
        self._lane = lane
        self._model_id = spec.handler.model_id()  # of rows that never reach it
        self._spec = spec
        # All of it is the bundle's thread's own: no lock. Tickets of batches are filled by sessions, the callers' own here.
        self._batches: dict[str | None, _Batches] = {}  # by model, in the order in which they first came
        self._sent: deque[_Sent] = deque()  # the oldest first: answers are handed out in this order, whichever came first
        self._args: Any = None
        self._failed: PenstockError | None = None  # a batch did: none is sent after it

    def submit(self, ticket: Ticket, args: Any = None) -> None:
        """Like a lane's; the arguments are the same for all rows."""
        self._check()
        self._args = args
        ticket.step = self.step
        ticket.gathering = ticket.missing
        columns = None if isinstance(ticket.block, list) else str(ticket.block.schema)
        parts: Sequence[tuple[str | None, int, int]] = ticket.parts or [(None, 0, ticket.missing)]
        for model, start, stop in parts:
            if ticket.alone:
                self._send([(ticket, start, stop)], model)
                continue
            entry = Entry(ticket, stop, start=start, weights=ticket.weights, lengths=ticket.lengths, group=columns)
            batches = self._batches_of(model)
            for pieces in batches.forming.add(entry, ticket.sizes or ()):
                if model is None:
                    self._send(pieces, model)
                else:  # those of one model are sent together, at the end of the window
                    batches.formed.append(pieces)

    def flush(self) -> None:
        """The rows that gather leave now."""
        gathered, self._batches = self._batches, {}  # taken first: the next window begins anew, in its own order
        for model, batches in gathered.items():
            for pieces in [*batches.formed, *batches.forming.flush()]:
                self._send(pieces, model)

    def wait(self, ticket: Ticket) -> Any:
        """Like a lane's."""
        if ticket.gathering:
            self.flush()
        self._check()
        while not ticket.settled:
            self._hand_out()
        return ticket.answers()

    def close(self) -> None:
        self._lane.close()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _batches_of(self, model: str | None) -> _Batches:
        if model not in self._batches:
            limits, by_length = self._spec.limits, self._spec.handler.measures_length()
            if self._spec.by_key is not None and model is not None and model in (own := self._spec.by_key.own_limits()):
                limits, by_length = own[model][0].fixed(own[model][1]), own[model][1]
            self._batches[model] = _Batches(FixedBatches(limits, by_length), [])
        return self._batches[model]

    def _send(self, pieces: Pieces[Ticket], model: str | None) -> None:
        if self._failed is not None:
            return
        block = _batch_of(pieces)
        as_columns = all(ticket.as_columns for ticket, _, _ in pieces)
        parts = None if model is None else [(model, 0, row_count(block))]
        batch = Ticket(block, parts=parts, lengths=_lengths_of(pieces), alone=True, as_columns=as_columns)
        try:
            self._lane.submit(batch, self._args)
        except NotShippableError as exc:
            self._send_packable(batch, pieces, model, exc)
            return
        self._failed = batch.error
        self._sent.append(_Sent(batch, pieces))
        for ticket, start, stop in pieces:  # now that they are sent, to wait for them cuts no batch short
            ticket.gathering -= stop - start

    def _send_packable(self, batch: Ticket, pieces: Pieces[Ticket], model: str | None, error: NotShippableError) -> None:
        """Send a batch without the rows that cannot be sent, which have failed, if that is handled."""
        handling = self.handling
        found = {} if handling is None else not_packed(rows_of(batch.block), handling, self.step, self._model_id)
        if not found:
            self._failed = error
            return
        places = [(ticket, at) for ticket, start, stop in pieces for at in range(start, stop)]
        for at, failure in found.items():
            ticket, place = places[at]
            ticket.failures[place] = failure
            ticket.missing -= 1  # after the failure, as in ticket.py
            ticket.gathering -= 1
        if rest := without(places, found):
            self._send([(ticket, at, at + 1) for ticket, at in rest], model)

    def _hand_out(self) -> None:
        """Give the rows of the oldest batch on its way their answers, and their failures."""
        batch, pieces = self._sent.popleft()
        outcome = Outcome(self._lane.wait(batch), batch.failures, model_id=batch.model_id)
        hand_out(outcome, pieces)


def _batch_of(pieces: Pieces[Ticket]) -> Block:
    """The rows of a batch; of a table in one piece, as it would be had it come so."""
    block = gather([(ticket.block, start, stop) for ticket, start, stop in pieces])
    return block if isinstance(block, list) else block.combine_chunks()


def _lengths_of(pieces: Pieces[Ticket]) -> list[int] | None:
    if pieces[0][0].lengths is None:
        return None
    return [length for ticket, start, stop in pieces for length in (ticket.lengths or ())[start:stop]]
