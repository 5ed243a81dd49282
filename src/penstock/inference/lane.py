"""A bundle's way into a session."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from penstock.batching.entry import Entry
from penstock.blocks import Block, byte_size
from penstock.failures import Handling
from penstock.inference.hosted import HostedLane
from penstock.inference.ticket import Caller, Request, Ticket, answers_of, identity_of
from penstock.retry import Retry

if TYPE_CHECKING:
    from penstock.inference.session import InferenceSession


class Lane:
    """One bundle's way into a session, used by one thread."""

    def __init__(
        self,
        session: InferenceSession,
        caller: Caller,
        step: str,
        handling: Handling | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.caller = caller
        self.step = step
        self.handling = handling
        self.retry = retry
        self._session = session
        self._moved: HostedLane | None = None
        self._args: Any = None
        self._args_identity: Hashable = None

    def submit(
        self,
        ticket: Ticket,
        args: Any = None,
        *,
        weights: list[int] | None = None,
        lengths: list[int] | None = None,
        alone: bool = False,
    ) -> None:
        """Rows for the model; `alone`: they are one batch as they are. May run the model on this thread."""
        if self._moved is None and (host := self._session.load()) is not None:
            self._moved = host.join(self.caller, self.step, self.handling, self.retry)
        if self._moved is not None:
            self._moved.submit(ticket, args, weights=weights, lengths=lengths, alone=alone)
            return
        if args is not self._args:
            self._args, self._args_identity = args, identity_of(args)
        columns = None if alone or isinstance(ticket.block, list) else str(ticket.block.schema)
        group = (columns, self._args_identity, self.handling, self.retry)
        entry = Entry(
            Request(ticket, args, self),
            ticket.missing,
            weights=weights,
            lengths=lengths,
            group=group,
            alone=alone,
            bytes=0 if lengths is None else byte_size(ticket.block),
        )
        self._session.submit(entry)

    def wait(self, ticket: Ticket) -> Block:
        """The answers, in the order of the rows; a table comes back with the columns `inference` and `model_id`. Rows that
        failed, where that is handled, are in ticket.failures."""
        if self._moved is not None:
            return self._moved.wait(ticket)
        if not ticket.settled:
            with self.caller.paused(self) if self.caller.hosted else contextlib.nullcontext():
                self._session.wait(ticket, self.caller)
        return answers_of(ticket, self._session.handler.model_id(), self._session.step)

    def close(self) -> None:
        """No more rows come from this bundle."""
        if self._moved is not None:
            self._moved.close()
        self._session.leave(self)
