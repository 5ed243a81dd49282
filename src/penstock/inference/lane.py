"""A caller's way to a model: the protocol of all lanes, and the lane into a session of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cloudpickle

from penstock.batching.entry import Span
from penstock.blocks import byte_size
from penstock.errors import PenstockError
from penstock.failures import Handling
from penstock.inference.ticket import Ticket, hand_out
from penstock.models.front import Front, entries_of
from penstock.models.outcome import Outcome
from penstock.retry import Retry

if TYPE_CHECKING:
    from penstock.inference.hosted import HostedLane
    from penstock.inference.session import InferenceSession


class Lane(Protocol):
    """One bundle's way to a model, wherever that is. Used by one thread: whoever opens it closes it."""

    @property
    def step(self) -> str:
        """Whose rows come by it; several steps may share the model."""

    @property
    def handling(self) -> Handling | None:
        """Which errors cost a row."""

    def submit(self, ticket: Ticket, args: Any = None) -> None:
        """Rows for the model. May run it on this thread."""

    def wait(self, ticket: Ticket) -> Any:
        """The answers, when they are there (Ticket.answers()). Rows that failed, where that is handled, are in
        ticket.failures."""

    def close(self) -> None:
        """No more rows come; what is still there, nobody wants."""


class Caller:
    """One bundle that is running in this process, whichever sessions it submits to. `waits_for` and `fronts` are guarded by
    the lock of the sessions; `hosted` is used by the bundle's own thread alone."""

    __slots__ = ("fronts", "hosted", "waits_for")

    def __init__(self) -> None:
        self.waits_for: Ticket | None = None
        self.fronts: dict[LocalLane, Front[Request]] = {}  # of models in this process: its lanes, and where they lead
        self.hosted: list[HostedLane] = []  # its lanes to models in other processes, which cannot see that it waits

    @contextlib.contextmanager
    def paused(self, here: LocalLane | HostedLane) -> Iterator[None]:
        """Inside, hosts know that this bundle waits at another model, and adds no rows to theirs."""
        elsewhere = [lane for lane in self.hosted if lane is not here]
        for lane in elsewhere:
            lane.pause()
        try:
            yield
        finally:  # also after an error: a lane that stays paused would let its host think that no rows can come
            for lane in elsewhere:
                lane.resume()

    @property
    def waiting(self) -> bool:
        """Whether it waits for answers that are not there, so that it cannot submit rows anywhere."""
        return self.waits_for is not None and not self.waits_for.settled


class Request(NamedTuple):
    """What the batcher carries: rows, the arguments for them, and who wants the answers."""

    ticket: Ticket
    args: Any
    lane: LocalLane


class LocalLane:
    """The way into a session of this process. Its fields are its thread's own; the session has the lock."""

    def __init__(
        self, session: InferenceSession, caller: Caller, step: str, handling: Handling | None, retry: Retry | None
    ) -> None:
        self.caller = caller
        self.step = step
        self.handling = handling
        self.retry = retry
        self._session = session
        self._args: Any = None
        self._args_identity: Hashable = None

    def submit(self, ticket: Ticket, args: Any = None) -> None:
        self._session.load()
        if args is not self._args:
            self._args, self._args_identity = args, identity_of(args)
        ticket.step = self.step
        columns = None if ticket.alone or isinstance(ticket.block, list) else str(ticket.block.schema)
        # As in a host: an error names a step.
        group = (columns, self._args_identity, self.step, self.handling, self.retry, ticket.prepared)
        size = 0 if ticket.lengths is None else byte_size(ticket.block)
        self._session.submit(entries_of(Request(ticket, args, self), ticket, ticket.missing, size, group))

    def wait(self, ticket: Ticket) -> Any:
        if not ticket.settled:
            # Before the sessions' lock is taken: pause() takes the lock of a host's client, which comes first.
            with self.caller.paused(self) if self.caller.hosted else contextlib.nullcontext():
                self._session.wait(ticket, self.caller)
        return ticket.answers()

    def close(self) -> None:
        self._session.leave(self)


def settle(spans: list[Span[Request]], outcome: Outcome | PenstockError) -> None:
    """Hand what a batch came to, or its error, to the tickets whose rows were in it. The sessions' lock is held."""
    if isinstance(outcome, Outcome):
        hand_out(outcome, [(entry.item.ticket, start, stop) for entry, start, stop in spans])
        return
    for span in spans:
        span.entry.item.ticket.error = span.entry.item.ticket.error or outcome


def identity_of(args: Any) -> Hashable:
    """Equal for arguments that are equal: rows share a batch only if theirs are."""
    if args is None:
        return None
    try:
        identity: bytes = cloudpickle.dumps(args, protocol=5)
    except Exception:
        return id(args)
    return identity
