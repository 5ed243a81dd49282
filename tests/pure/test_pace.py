"""How fast a service is asked: decisions, with a clock and chance of our own."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest

from penstock.errors import UsageError
from penstock.remote.pace import BACKOFF, LEAST, PaceRules, RequestPace, backoff
from penstock.remote.rules import AskingRules, retry_after

START = 1000.0  # of the clock: that of a system does not begin at 0 either


class Service:
    """A service with a limit: a bucket that holds `burst` requests and fills at `rate` a second."""

    def __init__(self, rate, burst):
        self.rate, self.burst, self.level, self.at = rate, burst, burst, 0.0

    def allows(self, now):
        self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1:
            return False
        self.level -= 1
        return True


def simulate(rules, service, seconds, *, askers=4, in_flight=64, latency=0.02, retry_after=1.0, down=()):
    """Askers, each with so many rows in flight, that share one pace: when requests were answered, refused, unreachable."""
    pace, chance, order = RequestPace(), random.Random(3), itertools.count()
    seen = {"answered": [], "refused": [], "unreachable": []}
    events = [(START, next(order), "ask", asker) for asker in range(askers)]
    waiting, asleep = [in_flight] * askers, [False] * askers
    heapq.heapify(events)
    while events:
        now, _, what, told = heapq.heappop(events)
        if now > START + seconds:
            break
        if what == "ask":
            asleep[told] = False
            while waiting[told]:
                wait = rules.ask(pace, now, 0)
                if wait:
                    asleep[told] = True
                    heapq.heappush(events, (now + wait + 0.002 * chance.random(), next(order), "ask", told))
                    break
                waiting[told] -= 1
                is_down = any(begin <= now - START < end for begin, end in down)
                answer = "unreachable" if is_down else "answered" if service.allows(now - START) else "refused"
                seen[answer].append(now - START)
                heapq.heappush(events, (now + (0.001 if is_down else latency), next(order), answer, (told, now)))
            continue
        if what == "back":
            asker = told
        else:
            asker, sent = told
            if what == "answered":
                rules.answered(pace, now)
            elif what == "refused":
                wait = rules.refused(pace, now, sent, retry_after, chance.random())
                heapq.heappush(events, (now + wait, next(order), "back", asker))
                continue
            else:
                rules.unreachable(pace, now, sent, chance.random())
        waiting[asker] += 1
        if not asleep[asker]:
            asleep[asker] = True
            heapq.heappush(events, (now, next(order), "ask", asker))
    return seen, pace


def share(times, all_times, after):
    return sum(at > after for at in times) / max(1, sum(at > after for each in all_times for at in each))


@pytest.mark.parametrize("burst", [5, 10, 50])
@pytest.mark.parametrize("told", [True, False])
def test_the_limit_of_a_service_is_used_and_seldom_exceeded(told, burst):
    rules = PaceRules(requests_per_minute=3000 if told else None)
    seen, _ = simulate(rules, Service(50, burst), 60)
    assert sum(at > 5 for at in seen["answered"]) / 55 > 0.9 * 50
    assert share(seen["refused"], seen.values(), 5) < 0.02


def test_without_a_limit_nothing_waits():
    seen, pace = simulate(PaceRules(), Service(math.inf, math.inf), 5)
    assert len(seen["answered"]) > 0.9 * 5 / 0.02 * 4 * 64
    assert pace.rate == math.inf


def test_a_limit_that_is_lifted_is_found_again():
    service = Service(20, 5)
    pace, rules, now = RequestPace(), PaceRules(), 0.0
    while now < 120:
        now += rules.ask(pace, now)
        if now > 60:
            service.rate = 200.0
        if service.allows(now):
            rules.answered(pace, now)
        else:
            rules.refused(pace, now, now, 0.1, 0.5)
        now += 1e-4
    assert pace.delivered > 100


def test_a_service_that_refuses_everything_is_asked_less_and_less_and_at_full_speed_soon_after():
    class Busy:
        def allows(self, now):
            return not 10 <= now < 70

    seen, _ = simulate(PaceRules(requests_per_minute=6000), Busy(), 90, retry_after=None)
    assert len([at for at in seen["refused"] if at > 15]) < 120
    assert len([at for at in seen["answered"] if 80 < at < 90]) > 800


def test_a_service_that_is_down_is_looked_for_by_one_request_at_a_time():
    seen, pace = simulate(PaceRules(requests_per_minute=6000), Service(math.inf, math.inf), 90, down=[(10, 70)])
    looks = [at for at in seen["unreachable"] if at > 10.5]
    assert 60 / BACKOFF[1] * 0.9 <= len(looks) < 20
    assert len([at for at in seen["answered"] if 70 < at < 90]) > 0.9 * 100 * (20 - BACKOFF[1])
    assert pace.down_at == 0


def test_a_refusal_of_one_request_holds_up_that_one_and_refusals_of_many_hold_up_all():
    rules, pace = PaceRules(), RequestPace()
    for at in range(100):
        rules.answered(pace, at / 100)
    assert rules.refused(pace, 1.0, 0.9, 7.0, 0.5) == 7.0
    assert pace.paused_until == 0
    for _ in range(5):
        rules.refused(pace, 1.0, 0.9, 7.0, 0.5)
    assert pace.paused_until == 8.0
    assert rules.ask(pace, 2.0) == 6.0


def test_refusals_of_requests_that_were_sent_before_a_cut_do_not_cut_again():
    rules, pace = PaceRules(requests_per_minute=600), RequestPace()
    rules.answered(pace, 0.5)
    rules.refused(pace, 1.0, 0.9, None, 0.5)
    cut = pace.rate
    for _ in range(20):
        rules.refused(pace, 1.1, 0.95, None, 0.5)
    assert pace.rate == cut < 10
    for at in range(2, 200):
        rules.refused(pace, float(at), at - 0.5, None, 0.5)
    assert pace.rate == LEAST


def test_a_few_refusals_that_do_not_speak_of_limits_change_no_rate():
    rules, pace = PaceRules(requests_per_minute=600), RequestPace()
    for at in range(200):
        rules.answered(pace, 1.0 + at / 10)
        if at % 10 == 0:
            rules.refused(pace, 1.0 + at / 10, at / 10, None, 0.5, limits=False)
    assert pace.rate == math.inf
    for _ in range(5):
        rules.refused(pace, 30.0, 29.9, None, 0.5, limits=False)
    assert pace.rate < 10


def test_tokens_are_paced_and_put_right_by_what_was_used():
    rules, pace = PaceRules(tokens_per_minute=6000), RequestPace()
    assert rules.ask(pace, 10.0, 200) == 0
    assert rules.ask(pace, 10.0, 200) == pytest.approx(2.0, abs=0.1)  # 100 tokens a second
    rules.used(pace, 10.0, -100)
    assert rules.ask(pace, 10.0, 200) == pytest.approx(1.0, abs=0.1)


def test_backoff_is_any_wait_up_to_a_bound_that_doubles():
    assert [backoff(tried, 1.0) for tried in (1, 2, 3, 4)] == [0.5, 1, 2, 4]
    assert backoff(50, 1.0) == 30
    assert backoff(3, 0.0) == 0


def test_how_long_a_service_says_to_wait():
    now = lambda: 1_700_000_000.0  # noqa: E731
    assert retry_after({}) is None
    assert retry_after({"retry-after": "7"}) == 7
    assert retry_after({"retry-after": "0.25"}) == 0.25
    assert retry_after({"retry-after-ms": "250", "retry-after": "9"}) == 0.25
    assert retry_after({"retry-after": "Tue, 14 Nov 2023 22:13:50 GMT"}, now) == 30
    assert retry_after({"retry-after": "soon"}) is None


def test_wrong_limits_are_refused():
    for name in ("requests_per_minute", "tokens_per_minute", "throttle_delay_secs", "max_outage_secs"):
        with pytest.raises(UsageError, match=f"{name}=-1: expected"):
            AskingRules(**{name: -1})
