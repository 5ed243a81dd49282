"""Where requests of a process wait until the pace of its machine lets them go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from penstock.errors import EngineError, ServiceUnavailableError, UsageError
from penstock.remote.counts import Counts
from penstock.remote.ending import Ending
from penstock.remote.shared_pace import SharedPace

logger = logging.getLogger(__name__)

WORRYING, WARN_EVERY = 5.0, 60.0  # seconds without an answer to anybody: a warning, and the next one
LONGEST_TOLD = 60.0  # seconds of Retry-After: who is told more asks again then
LONGEST_SLEEP = 1.0  # seconds: a pause may be over earlier than was said


class Gate:
    """Of the requests that wait in a process, one asks for all, in order. The time that it waits is what the metric
    throttled_milli_secs adds up."""

    def __init__(
        self, step: str, pace: SharedPace, counts: Counts, max_outage: float, limits: SharedPace | None = None
    ) -> None:
        """max_outage: seconds without an answer to anybody, after which the run ends. limits: to be kept besides, together
        with others that ask other services."""
        self.pace = pace
        self._paces = [pace] if limits is None else [limits, pace]
        self._lock = threading.Lock()  # guards the two below
        self._ending = Ending()
        self._begun = 0  # requests that have it, and are not over
        self._step = step
        self._counts = counts
        self._max_outage = max_outage
        self._turn: asyncio.Lock | None = None  # made on the loop's thread
        self._thread_turn = threading.Lock()  # the same for threads; held while one waits: they keep their order
        self._warned = self._told = -WARN_EVERY  # when; by whichever thread comes first

    @contextlib.contextmanager
    def request(self) -> Iterator[Ending]:
        """Around a request, which may be sent several times: what it waits with. What ends the run ends all that wait."""
        with self._lock:
            if self._ending.is_told and not self._begun:  # all have raised it: on Beam, a bundle is tried again here
                self._ending = Ending()
            ending = self._ending
            self._begun += 1
        try:
            yield ending
        except (UsageError, EngineError) as exc:
            ending.tell(exc)
            raise
        finally:
            with self._lock:
                self._begun -= 1

    def end(self, error: BaseException) -> None:
        """All requests that have begun and wait raise this."""
        self._ending.tell(error)

    async def enter(self, ending: Ending, tokens: float = 0.0) -> None:
        """Wait until a request of about so many tokens may be sent."""
        ending.check()
        if self._turn is None:
            self._turn = asyncio.Lock()
        one = len(self._paces) == 1
        if one and not self._turn.locked() and not self.pace.ask(tokens):  # nobody waits, and it may go: the common case
            return
        async with self._turn:  # one asks, the others queue here in order; asyncio's locks are fair
            for pace in self._paces:
                ending.check()
                while wait := pace.ask(tokens):
                    began = time.monotonic()
                    await ending.sleep(min(wait, LONGEST_SLEEP))
                    self._throttled(began)

    def enter_thread(self, ending: Ending, tokens: float = 0.0) -> None:
        """The same for a thread that may block."""
        with self._thread_turn:
            for pace in self._paces:
                ending.check()
                while wait := pace.ask(tokens):
                    began = time.monotonic()
                    ending.sleep_thread(min(wait, LONGEST_SLEEP))
                    self._throttled(began)

    def used(self, tokens: float) -> None:
        """So many more than was thought."""
        for pace in self._paces:
            pace.used(tokens)

    def close(self) -> None:
        for pace in self._paces:
            pace.close()

    # Of a request that is over; called on the loop's thread, and on threads that ask by themselves.

    def unreachable(self, sent: float, why: str) -> None:
        """A request did not reach the service: it may be sent again. ServiceUnavailableError after too long."""
        self.pace.unreachable(sent)
        self._counts.add("requests_unreachable")
        self._check(why)

    def refused(self, sent: float, retry_after: float | None, why: str, *, limits: bool = True) -> float:
        """The service has too much to do. Seconds after which this request may come again."""
        most = min(LONGEST_TOLD, self._max_outage)
        if retry_after is not None and retry_after > most:
            if time.monotonic() - self._told > WARN_EVERY:
                self._told = time.monotonic()
                told = "step %r: the service asks to wait for %.0f s (Retry-After); it is asked again after %.3g s"
                logger.warning(told, self._step, retry_after, most)
            retry_after = most
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
