"""Threads take quick turns while one of them feeds a device."""

from __future__ import annotations

import sys
import threading

import pytest

import penstock as ps
from penstock.inference.thread_turns import INTERVAL, QuickTurns, Turn


def test_turns_are_quick_while_anybody_needs_it():
    usual = sys.getswitchinterval()
    turns = QuickTurns()
    turns.begin()
    turns.begin()
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(INTERVAL)
    turns.end()
    assert sys.getswitchinterval() == usual


def test_turns_that_are_quicker_still_are_left_alone():
    usual = sys.getswitchinterval()
    turns = QuickTurns()
    try:
        sys.setswitchinterval(INTERVAL / 10)
        turns.begin()
        assert sys.getswitchinterval() == pytest.approx(INTERVAL / 10)
        turns.end()
    finally:
        sys.setswitchinterval(usual)


class Interval(ps.ModelHandler):
    """Answers with how long the turns are."""

    def __init__(self, on_device, **settings):
        super().__init__(**settings)
        self.on_device = on_device

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return [sys.getswitchinterval()] * len(batch)

    def prepares_ahead(self):
        return self.on_device


@pytest.mark.parametrize("settings", [{}, {"large_model": True}], ids=["here", "in a host"])
@pytest.mark.parametrize("on_device", [True, False])
def test_turns_are_quick_where_a_model_is_on_a_device(on_device, settings):
    usual = sys.getswitchinterval()
    rows = ps.Pipeline(workers=0) | ps.Create(range(10)) | ps.RunInference(Interval(on_device, **settings))
    assert {interval < 2 * INTERVAL for interval in rows.collect()} == {on_device}
    assert sys.getswitchinterval() == usual


def test_one_thread_runs_at_a_time_and_another_while_it_waits():
    turn, seen = Turn(wanted=True), []
    inside, waiting = threading.Event(), threading.Event()

    def first():
        with turn:
            inside.set()
            seen.append("first runs")
            with turn.given_up():
                assert waiting.wait(10)
            seen.append("first goes on")

    def second():
        assert inside.wait(10)
        with turn:
            seen.append("second runs")
            waiting.set()
            seen.append("second has run")

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == ["first runs", "second runs", "second has run", "first goes on"]


def test_where_no_turn_is_wanted_threads_run_together():
    turn, both = Turn(), threading.Barrier(2)

    def run():
        with turn, turn.given_up():
            both.wait(10)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not both.broken
