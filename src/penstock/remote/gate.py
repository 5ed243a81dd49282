"""Where requests of a process wait until the pace of its machine lets them go."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from penstock.errors import ServiceUnavailableError
from penstock.remote.counts import Counts
from penstock.remote.shared_pace import SharedPace

logger = logging.getLogger(__name__)

WORRYING, WARN_EVERY = 5.0, 60.0  # seconds without an answer to anybody: a warning, and the next one
LONGEST_SLEEP = 1.0  # seconds: a pause may be over earlier than was said


class Gate:
    """Of the requests that wait in a process, one asks for all, in order. The time that it waits is what the metric
    throttled_milli_secs adds up."""

    def __init__(self, step: str, pace: SharedPace, counts: Counts, max_outage: float) -> None:
        """max_outage: seconds without an answer to anybody, after which the run ends."""
        self.pace = pace
        self._step = step
        self._counts = counts
        self._max_outage = max_outage
        self._turn: asyncio.Lock | None = None  # made on the loop's thread
        self._thread_turn = threading.Lock()  # the same for threads; held while one waits: they keep their order
        self._warned = -WARN_EVERY  # when; by whichever thread comes first

    async def enter(self, tokens: float = 0.0) -> None:
        """Wait until a request of about so many tokens may be sent."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        if not self._turn.locked() and not self.pace.ask(tokens):  # nobody waits, and it may go: the common case
            return
        async with self._turn:  # one asks, the others queue here in order; asyncio's locks are fair
            while wait := self.pace.ask(tokens):
                began = time.monotonic()
                await asyncio.sleep(min(wait, LONGEST_SLEEP))
                self._throttled(began)

    def enter_thread(self, tokens: float = 0.0) -> None:
        """The same for a thread that may block."""
        with self._thread_turn:
            while wait := self.pace.ask(tokens):
                began = time.monotonic()
                time.sleep(min(wait, LONGEST_SLEEP))
                self._throttled(began)

    # Of a request that is over; called on the loop's thread, and on threads that ask by themselves.

    def unreachable(self, sent: float, why: str) -> None:
        """A request did not reach the service: it may be sent again. ServiceUnavailableError after too long."""
        self.pace.unreachable(sent)
        self._counts.add("requests_unreachable")
        self._check(why)

    def refused(self, sent: float, retry_after: float | None, why: str, *, limits: bool = True) -> float:
        """The service has too much to do. Seconds after which this request may come again."""
        wait = self.pace.refused(sent, retry_after, limits)
        self._counts.add("requests_refused")
        self._check(why)
        return wait

    def _check(self, why: str) -> None:
        silent = self.pace.silent_for()
        if silent > WORRYING and time.monotonic() - self._warned > WARN_EVERY:
            self._warned = time.monotonic()
            most = f"the run ends if that lasts for {self._max_outage:g} s"
            logger.warning("step %r: the service has answered no request for %.0f s (%s); %s", self._step, silent, why, most)
        if silent > self._max_outage:
            raise ServiceUnavailableError(
                f"step {self._step!r}: the service has answered no request for {silent:.0f} s ({why}), and max_outage_secs "
                f"is {self._max_outage:g}; check that it works and that the quota is not used up, then run the same command "
                "again: with run_dir= the run is resumed"
            )

    def _throttled(self, began: float) -> None:
        self._counts.add("throttled_milli_secs", round((time.monotonic() - began) * 1000))
