"""How fast a service is asked, learned from what it answers. Pure: the time and chance are passed in.

    ask(now) -> 0: send; else: ask again after so many seconds
    answered / refused / unreachable (now, sent) -> the pace changes

The rate grows by steps while requests are answered, and is cut when one is refused (429, 503): additive increase,
multiplicative decrease. All processes of a machine share one Pace (shared_pace.py).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

BURST = 0.05  # seconds' worth of requests that may be sent at once, to make up for a late timer
CUT = 0.85  # of the rate, when a request is refused
FIRST = 1.0  # requests a second that are tried at least, where nothing is known
LEAST = 0.2  # requests a second
NEAR = 0.92  # of the rate that was refused last: below it the rate doubles each second
PAST = 1.3  # of it: beyond, that was another limit, and the rate doubles again
PROBE = 0.01  # of that rate, by which it grows each second from there on
CALM = 10.0  # seconds without a refusal, after which it grows faster
MOSTLY = 0.25  # share of recent requests: if more are refused, all requests wait, else only those that were refused
RECENT = 0.1  # weight of the newest answer in that share
WINDOW = 2.0  # seconds over which answers are counted
BACKOFF = 0.5, 10.0  # seconds between two looks at a service that cannot be reached: the first, the most


@dataclass(slots=True)
class RequestPace:
    """What is known of one service. All fields are numbers: they are kept in a file as they are."""

    rate: float = math.inf  # requests a second that may be sent now
    next_at: float = 0.0  # when the next request is due at that rate
    tokens_at: float = 0.0  # when the next token is
    paused_until: float = 0.0
    cut_at: float = -math.inf  # when the rate was cut last
    refused_rate: float = math.inf  # the rate at which a request was refused last
    share: float = 0.0  # of recent requests that were refused
    answered_at: float = 0.0  # when a request was answered last; before the first: when it was sent
    down_at: float = 0.0  # since when the service cannot be reached; 0: it can
    looks: float = 0.0  # at it since then
    counted_from: float = 0.0  # answers are counted in windows: when this one began,
    counted: float = 0.0  # how many there are in it,
    delivered: float = 0.0  # and how many a second there were in the last one


NAMES = tuple(field.name for field in dataclasses.fields(RequestPace))


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceRules:
    """What the user sets."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    throttle_delay: float = 1.0  # seconds to wait after a refusal that does not say how long

    @property
    def has_limits(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    @property
    def most(self) -> float:
        """Requests a second."""
        return math.inf if self.requests_per_minute is None else self.requests_per_minute / 60

    def of_one(self, nodes: int) -> PaceRules:
        """Those of one of so many nodes that share the limits."""
        each = [None if most is None else most / nodes for most in (self.requests_per_minute, self.tokens_per_minute)]
        return dataclasses.replace(self, requests_per_minute=each[0], tokens_per_minute=each[1])

    def ask(self, pace: RequestPace, now: float, tokens: float = 0.0) -> float:
        """0: a request of about so many tokens may be sent, and is counted. Else how long to wait before the next ask()."""
        pace.answered_at = pace.answered_at or now
        if now < pace.paused_until:
            return pace.paused_until - now
        rate = min(pace.rate, self.most)
        if rate < math.inf and now < pace.next_at:
            return pace.next_at - now
        if self.tokens_per_minute is not None and now < pace.tokens_at:
            return pace.tokens_at - now
        if pace.down_at:  # one request looks whether it is back, for all
            pace.paused_until = now + BACKOFF[1]
        if rate < math.inf:
            pace.next_at = max(pace.next_at, now - BURST) + 1 / rate
        self.used(pace, now, tokens)
        return 0.0

    def used(self, pace: RequestPace, now: float, tokens: float) -> None:
        """So many tokens more than was thought (less, if negative)."""
        if self.tokens_per_minute is not None and tokens:
            pace.tokens_at = max(pace.tokens_at, now - BURST) + tokens * 60 / self.tokens_per_minute

    def answered(self, pace: RequestPace, now: float) -> None:
        """The service has answered a request, or refused it for its own sake."""
        if pace.down_at:
            pace.down_at = pace.looks = pace.paused_until = 0.0
        pace.answered_at = now
        pace.share *= 1 - RECENT
        _count(pace, now)
        if pace.rate < math.inf:
            pace.rate = min(self.most, pace.rate + _step(pace, now) / pace.rate)

    def refused(
        self, pace: RequestPace, now: float, sent: float, retry_after: float | None, chance: float, *, limits: bool = True
    ) -> float:
        """The service has too many requests, of this machine or at all. Seconds that this one has to wait at least. limits:
        it means the pace; else (a 503 that says nothing more) one refusal alone does not, and only many do."""
        wait = self.throttle_delay * (0.5 + chance) if retry_after is None else max(0.0, retry_after)
        pace.share += RECENT * (1 - pace.share)
        if pace.down_at:
            pace.down_at = pace.looks = pace.paused_until = 0.0  # it can be reached
        if sent > pace.cut_at and (limits or pace.share > MOSTLY):
            self._cut(pace, now)
        if pace.share > MOSTLY:
            pace.paused_until = max(pace.paused_until, now + wait)
        return wait

    def _cut(self, pace: RequestPace, now: float) -> None:
        """Requests that were sent before this was done say nothing new."""
        rate, seen = min(pace.rate, self.most), max(FIRST, _seen(pace, now))
        if pace.answered_at > pace.cut_at:  # else it refuses everything, at whatever rate
            pace.refused_rate = rate  # none, if there was none: how fast is too fast is not known yet
        pace.rate = max(LEAST, CUT * min(rate, seen if pace.share > MOSTLY else math.inf, pace.refused_rate))
        if math.isinf(pace.rate):
            pace.rate = seen
        pace.cut_at = now

    def unreachable(self, pace: RequestPace, now: float, sent: float, chance: float) -> None:
        """No connection: all requests wait, and after a while one looks whether the service is back."""
        if not pace.down_at:
            pace.down_at, pace.looks = now, 0.0
        elif sent <= pace.down_at and pace.looks:  # of those that were under way when it went
            return
        first, most = BACKOFF
        pace.paused_until = now + min(most, first * 2.0 ** min(pace.looks, 30)) * (0.5 + chance / 2)
        pace.looks += 1

    def silent_for(self, pace: RequestPace, now: float) -> float:
        """Seconds since the service has last answered a request."""
        return now - pace.answered_at if pace.answered_at else 0.0


def backoff(tried: int, chance: float, first: float = 0.5, most: float = 30.0) -> float:
    """Seconds to wait before a request is sent again that has failed so often: anything up to a bound that doubles."""
    return chance * min(most, first * 2.0 ** min(tried - 1, 30))


def _count(pace: RequestPace, now: float) -> None:
    if not pace.counted_from or now - pace.counted_from > WINDOW:
        pace.delivered = _seen(pace, now)
        pace.counted_from, pace.counted = now, 0.0
    pace.counted += 1


def _seen(pace: RequestPace, now: float) -> float:
    """Answers a second, lately."""
    seconds = now - pace.counted_from
    if not pace.counted_from:
        return 0.0
    return pace.counted / seconds if seconds > WINDOW / 2 else max(pace.delivered, pace.counted / (WINDOW / 2))


def _step(pace: RequestPace, now: float) -> float:
    """Requests a second by which the rate grows each second: to where it was refused last it doubles."""
    if not NEAR * pace.refused_rate < pace.rate < PAST * pace.refused_rate:
        return pace.rate
    return PROBE * pace.refused_rate * max(1.0, (now - pace.cut_at) / CALM)
