"""A service that is asked over HTTP: one request for a row, sent at the pace of the machine until it is answered.

kept answer? -> gate (pace, budget) -> httpx -> answered: kept, counted
                    ^                      |-> refused (429, 503), no connection: waits, and is sent again
                    '----------------------'-> failed (5xx, broken off, timeout): sent again, so many times
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import RemoteRequestError, UsageError
from penstock.remote.answers import digest_of
from penstock.remote.budget import Prices, Spending
from penstock.remote.ending import Ending
from penstock.remote.meter import Meter
from penstock.remote.openai_format import usage_of
from penstock.remote.pace import backoff
from penstock.remote.rules import PASSING, REFUSED, UNAVAILABLE, Retries, retry_after

SHOWN = 500  # characters of a body, or of an error that it led to


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class Unreachable(Exception):  # noqa: N818
    """There was no connection: the service has not seen the request."""


class BrokenOff(Exception):  # noqa: N818
    """The service may have seen the request, and has not answered it."""


Transport = Callable[[bytes], Awaitable[Reply]]  # sends one request; raises Unreachable or BrokenOff
Read = Callable[[bytes], tuple[Any, Spending]]  # a body -> the answer, and the tokens that it took; ValueError: a bad one


class Service:
    """Of one step in one process. answer() is called on the loop's thread."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        meter: Meter,
        retries: Retries,
        prices: Prices,
        redact: Callable[[str], str] = lambda text: text,
    ) -> None:
        """name: what tells its answers from those of other services: an address, nothing secret. redact: takes secrets out
        of texts that come from elsewhere."""
        self._name = name
        self._transport = transport
        self._meter = meter
        self._gate = meter.gate
        self._account = meter.account
        self._answers = meter.answers
        self._counts = meter.counts
        self._retries = retries
        self._prices = prices
        self._redact = redact

    async def answer(self, content: bytes, read: Read, tokens: float = 0.0) -> Any:
        """The answer to a request. tokens: that it takes, about. RemoteRequestError: this row's."""
        digest = digest_of(self._name.encode(), content) if self._answers.keeps else b""
        if digest and (kept := self._answers.find(digest)) is not None:
            try:
                answer, use = self._read(kept, read)
            except RemoteRequestError:
                if self._meter.keeps_bad:
                    self._meter.reused(1, _use_of(kept), self._prices)
                    raise
            else:
                self._meter.reused(1, use, self._prices)
                return answer
        with self._gate.request() as ending:
            reply = await self._reply(content, tokens, ending)
            try:
                answer, use = self._read(reply.body, read)
            except RemoteRequestError:
                self._used(_use_of(reply.body), tokens)  # it is paid for
                if digest and self._meter.keeps_bad:
                    self._keep(digest, reply.body)
                raise
            self._used(use, tokens)
            if digest:
                self._keep(digest, reply.body)  # before anybody is given it
        return answer

    def _keep(self, digest: bytes, body: bytes) -> None:
        """Not if the service tells a key back: a resumed run asks once more."""
        text = body.decode(errors="replace")
        if self._redact(text) == text:
            self._answers.keep(digest, body)

    def give_up(self, error: BaseException) -> None:
        """The run ends with an error: requests that wait raise it, and are not sent. Called on the loop's thread."""
        self._gate.end(error)

    async def _reply(self, content: bytes, tokens: float, ending: Ending) -> Reply:
        """Sent until there is one that counts."""
        tried = 0
        while True:
            await self._gate.enter(ending, tokens)
            self._account.begin_request()  # after the wait: others may have spent the budget meanwhile
            sent = self._gate.pace.now()
            try:
                reply = await self._transport(content)
            except Unreachable as exc:
                self._account.take_back()
                self._gate.unreachable(sent, self._shown(str(exc)))
                continue
            except BrokenOff as exc:
                error = RemoteRequestError(f"{self._name}: {self._shown(str(exc))}")
            else:
                self._counts.add("requests")
                if reply.status in REFUSED:
                    why = f"status {reply.status}: {self._beginning(reply.body)}"
                    told = retry_after(reply.headers)
                    limits = told is not None or reply.status != UNAVAILABLE
                    await ending.sleep(self._gate.refused(sent, told, why, limits=limits))
                    continue
                self._gate.pace.answered()
                if 200 <= reply.status < 300:
                    return reply
                error = self._error(reply)
                if reply.status not in PASSING:
                    raise error
            tried += 1
            if tried > self._retries.num_retries or not self._retries.retry_filter(error):
                raise error
            self._counts.add("requests_retried")
            await ending.sleep(backoff(tried, random.random()))

    def _error(self, reply: Reply) -> RemoteRequestError:
        what = f"{self._name} answered with status {reply.status}: {self._beginning(reply.body)}"
        if reply.status in (401, 407):
            raise UsageError(f"{what}; the key that was sent is not accepted: see api_key_env=, api_key= or headers=")
        return RemoteRequestError(what)

    def _read(self, body: bytes, read: Read) -> tuple[Any, Spending]:
        try:
            return read(body)
        except RemoteRequestError as exc:
            raise RemoteRequestError(f"{self._name}: {self._shown(str(exc))}") from None
        except Exception as exc:
            what = f"the answer is not as expected: {type(exc).__name__}: {self._shown(str(exc))}"
            raise RemoteRequestError(f"{self._name}: {what}; it begins: {self._beginning(body)}") from None

    def _used(self, use: Spending, thought: float) -> None:
        self._meter.used(use, self._prices)
        if taken := use.input_tokens + use.output_tokens:
            self._gate.used(taken - thought)

    def _beginning(self, body: bytes) -> str:
        return self._shown(body.decode(errors="replace")) or "(nothing)"

    def _shown(self, text: str) -> str:
        """The beginning of a text from elsewhere, for errors. Cut last: a secret that is cut is not found any more."""
        return self._redact(text)[:SHOWN]


def _use_of(body: bytes) -> Spending:
    """What a bad answer says that it took."""
    try:
        return usage_of(json.loads(body))
    except Exception:
        return Spending(1)
