"""One pace for all that ask a service: the processes of a machine, and the nodes of a cluster."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import StoppedError
from penstock.inference.service_handler import RunPlace
from penstock.remote.nodes import Nodes, tell
from penstock.remote.pace import PaceRules
from penstock.remote.rules import AskingRules
from penstock.remote.shared_pace import SharedPace

START = 1000.0  # of the clock: that of a system does not begin at 0 either


def _ask_many(path, times, results):
    pace = SharedPace(PaceRules(requests_per_minute=60_000), path, clock=lambda: 5.0)
    results.put(sum(pace.ask() == 0 for _ in range(times)))


def test_processes_share_one_pace(tmp_path):
    """At a clock that stands still, all of them together are let through as often as one would be."""
    path = str(tmp_path / "pace")
    alone = SharedPace(PaceRules(requests_per_minute=60_000), clock=lambda: 5.0)
    allowed = sum(alone.ask() == 0 for _ in range(2000))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_ask_many, args=[path, 500, results]) for _ in range(3)]
    for process in processes:
        process.start()
    granted = sum(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert granted == allowed > 1


def test_nodes_of_a_cluster_share_the_limits(tmp_path):
    """As they come and go: each sends its part of what may be sent in all."""
    now = [START]
    path = str(tmp_path / "nodes")
    tell(path, 4)
    nodes = Nodes(path, lambda: now[0])
    rules = PaceRules(requests_per_minute=6000, tokens_per_minute=1000)
    pace = SharedPace(rules, clock=lambda: now[0], nodes=nodes)

    def sent(seconds):
        before, end = 0, now[0] + seconds
        while now[0] < end:
            if wait := pace.ask():
                now[0] += wait
            else:
                before += 1
        return before

    assert sent(10.0) == pytest.approx(250, abs=5)
    assert pace.rules == PaceRules(requests_per_minute=1500, tokens_per_minute=250)
    tell(path, 2)
    assert sent(10.0) == pytest.approx(500, abs=30)  # it is seen after a second
    assert SharedPace(rules).rules is rules


def meters(folder, *addresses, **settings):
    place = RunPlace("ask", str(folder / "shared"))
    return [place.meter(AskingRules(requests_per_minute=1), address, **settings) for address in addresses]


def test_servers_of_a_step_share_its_limits_and_not_that_one_is_away(tmp_path):
    first, second = meters(tmp_path, "", "", own_service=True)
    with first.gate.request() as ending:
        first.gate.enter_thread(ending)
    first.gate.pace.unreachable(first.gate.pace.now())

    def ask():
        with second.gate.request() as ending:
            second.gate.enter_thread(ending)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        while not second.counts.take().get("throttled_milli_secs"):  # it waits for its part of the minute
            assert not asking.done()
        second.gate.end(StoppedError("enough"))
        with pytest.raises(StoppedError):
            asking.result()
    assert second.gate.pace.ask() == 0


def test_services_of_one_step_have_a_pace_each_and_processes_that_ask_one_share_it(tmp_path):
    one, same, other = meters(tmp_path, "http://a", "http://a", "http://b")
    one.gate.pace.unreachable(one.gate.pace.now())
    assert same.gate.pace.ask() > 0
    assert other.gate.pace.ask() == 0
