"""The inference session with real threads and small handlers: who runs a batch, what is in it, and who hears of trouble."""

from __future__ import annotations

import math
import os
import random
import sys
import threading
from collections import Counter
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.answers import as_rows
from penstock.errors import ModelLoadError, PenstockError, PredictionCountError, StepError, TransientError, UsageError
from penstock.failures import Handling
from penstock.inference import first_copy
from penstock.inference.device_turns import DeviceTurns
from penstock.inference.hosted import HostedSession
from penstock.inference.lane import Caller
from penstock.inference.session import BYTES_SAMPLED_EVERY, Ticket
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream
from penstock.models import front
from penstock.models.front import LINGER
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

PATIENCE = 10  # seconds until a thread counts as hanging
KNOWN_TO_HANG = 2  # seconds, in tests of what is known to hang


class Echo(ps.ModelHandler):
    """Answers ("answer", row) and keeps a record of its calls."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.batches = []
        self.args = []
        self.threads = []
        self.loads = 0

    def load_model(self):
        self.loads += 1
        return "model"

    def run_inference(self, batch, model, inference_args=None):
        assert model == "model"
        self.batches.append(list(batch))
        self.args.append(inference_args)
        self.threads.append(threading.get_ident())
        return [("answer", row) for row in batch]

    @property
    def sizes(self):
        return [len(batch) for batch in self.batches]


@pytest.fixture
def sessions(monkeypatch):
    """Rows wait as long as somebody can add to them: time plays no part, but where a test asks for `lingering`."""
    monkeypatch.setattr(front, "LINGER", (600, 600))
    made = ProcessSessions(Metrics())
    yield made
    made.close()


@pytest.fixture
def lingering(sessions, monkeypatch):
    """Sessions in which rows wait no longer than those of users do."""
    monkeypatch.setattr(front, "LINGER", LINGER)
    return sessions


def open_session(sessions, handler, **options):
    return sessions.open("step", InferenceSpec.of(handler, **options))


def stream_of(sessions, handler, caller=None, step="step", **options):
    return open_stream(InferenceSpec.of(handler, **options), step, sessions, caller)


def answers(rows):
    return [("answer", row) for row in rows]


def submit(lane, rows, args=None, **options):
    ticket = Ticket(rows, **options)
    lane.submit(ticket, args)
    return ticket


def ask(lane, rows, **options):
    return lane.wait(submit(lane, rows, **options))


def ask_and_leave(lane, *blocks, **options):
    """The answers to several blocks, one after the other; then nobody need count on this caller."""
    try:
        return [row for block in blocks for row in as_rows(ask(lane, block, **options))]
    finally:
        lane.close()


def everything(stream, *blocks):
    """All answers of a stream to these blocks, as rows."""
    try:
        got = [row for block in blocks for made in stream.push(block) for row in rows_of(made.block)]
        return got + [row for made in stream.finish() for row in rows_of(made.block)]
    finally:
        stream.close()


def rows_of(block):
    return block if isinstance(block, list) else block.to_pylist()


class Threads:
    """Functions at work on threads of their own. join() gives their results, and fails if one hangs."""

    def __init__(self, *functions):
        self.results = [None] * len(functions)
        self.errors = [None] * len(functions)
        self._threads = [
            threading.Thread(target=self._run, args=(number, function), daemon=True)
            for number, function in enumerate(functions)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number, function):
        try:
            self.results[number] = function()
        except BaseException as exc:
            self.errors[number] = exc

    def join(self, patience=PATIENCE):
        for thread in self._threads:
            thread.join(patience)
        hanging = [number for number, thread in enumerate(self._threads) if thread.is_alive()]
        assert not hanging, f"threads {hanging} hang"
        return self

    def all_well(self, patience=PATIENCE):
        self.join(patience)
        for error in self.errors:
            if error is not None:
                raise error
        return self.results


def until_waiting(sessions, *callers):
    """Come back when all of these callers wait for answers."""
    with sessions.changed:
        assert sessions.changed.wait_for(lambda: all(caller.waiting for caller in callers), PATIENCE)


# Loading.


class Heavy(Echo):
    """Its load waits until `everyone` is there: a second load, or a thread that does not wait for the first, is seen."""

    def __init__(self, everyone, **settings):
        super().__init__(**settings)
        self.everyone = everyone

    def load_model(self):
        assert self.everyone.wait(PATIENCE)
        return super().load_model()


def test_one_load_for_many_threads(sessions):
    everyone = threading.Event()
    handler = Heavy(everyone, max_batch_size=1)
    session = open_session(sessions, handler)
    barrier = threading.Barrier(8, action=everyone.set)

    def work():
        lane = session.join(Caller())
        barrier.wait(PATIENCE)
        try:
            return ask(lane, [1])
        finally:
            lane.close()

    assert Threads(*[work] * 8).all_well() == [answers([1])] * 8
    assert handler.loads == 1


def test_a_load_that_fails_is_told_to_everyone(sessions):
    class Broken(Echo):
        def load_model(self):
            raise OSError("no such file")

    session = open_session(sessions, Broken())
    for _ in range(2):
        lane = session.join(Caller())
        with pytest.raises(
            ModelLoadError, match=r"step 'step': Broken.load_model\(\) raised OSError: no such file"
        ) as caught:
            submit(lane, [1])
        assert isinstance(caught.value.__cause__, OSError)
        lane.close()


@pytest.mark.parametrize("model", [None, 0, {}, {"weights": [1]}, (1, 2), [], "", np.zeros(3)], ids=repr)
def test_any_object_is_a_model(sessions, model):
    seen = []

    class Anything(Echo):
        def load_model(self):
            self.loads += 1
            return model

        def run_inference(self, batch, model, inference_args=None):
            seen.append(model)
            return batch

    handler = Anything(max_batch_size=1)
    lane = open_session(sessions, handler).join(Caller())
    assert ask(lane, [1, 2]) == [1, 2]
    assert len(seen) == 2
    assert all(each is model for each in seen)
    assert handler.loads == 1


def test_a_handler_without_super_init(sessions):
    class Bare(ps.ModelHandler):
        def __init__(self, factor):
            self.factor = factor

        def load_model(self):
            return self.factor

        def run_inference(self, batch, model, inference_args=None):
            return [model * row for row in batch]

    handler = Bare(3).with_preprocess_fn(int).with_postprocess_fn(str)
    assert everything(stream_of(sessions, handler), ["1", "2"]) == ["3", "6"]


def test_steps_with_one_model_identifier_share_a_session(sessions):
    one, two, other = (InferenceSpec.of(Echo(), model_identifier=name) for name in ("m", "m", None))
    assert sessions.open("a", one) is sessions.open("b", two)
    assert sessions.open("a", other) is not sessions.open("a", one)
    assert sessions.open("b", other) is not sessions.open("a", other)


# One caller.


def test_a_single_caller_uses_no_other_thread(sessions):
    handler = Echo(max_batch_size=4)
    before = threading.active_count()
    assert everything(stream_of(sessions, handler), list(range(30)), list(range(30, 33))) == answers(range(33))
    assert set(handler.threads) == {threading.get_ident()}
    assert threading.active_count() == before


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8, 100])
def test_full_batches_and_a_rest(sessions, rows):
    handler = Echo(max_batch_size=4)
    lane = open_session(sessions, handler).join(Caller())
    assert ask(lane, list(range(rows))) == answers(range(rows))
    assert handler.sizes == [4] * (rows // 4) + ([rows % 4] if rows % 4 else [])


def test_batches_fill_up_across_blocks(sessions):
    handler = Echo(max_batch_size=8)
    assert everything(stream_of(sessions, handler), *([n] for n in range(20))) == answers(range(20))
    assert handler.sizes == [8, 8, 4]


def test_tickets_may_be_waited_for_in_any_order(sessions):
    lane = open_session(sessions, Echo(max_batch_size=3)).join(Caller())
    tickets = [submit(lane, [n, -n]) for n in range(5)]
    for n in (3, 0, 4, 1, 2):
        assert lane.wait(tickets[n]) == answers([n, -n])
    assert lane.wait(tickets[0]) == answers([0, 0]), "asked twice"


# Several callers.


def joined(session, count):
    """Callers that have all joined before any of them does anything."""
    callers = [Caller() for _ in range(count)]
    return callers, [session.join(caller) for caller in callers]


@pytest.mark.parametrize(("callers", "rows", "sizes"), [(4, 2, [8]), (3, 2, [6]), (8, 3, [8, 8, 8]), (5, 5, [8, 8, 8, 1])])
@pytest.mark.parametrize("duration", [None, 600], ids=["", "with a duration"])
def test_batches_fill_up_across_callers(sessions, callers, rows, sizes, duration):
    handler = Echo(max_batch_size=8, max_batch_duration_secs=duration)
    _, lanes = joined(open_session(sessions, handler), callers)
    work = [lambda n=n: ask_and_leave(lanes[n], [(n, row) for row in range(rows)]) for n in range(callers)]
    got = Threads(*work).all_well()
    assert got == [answers([(n, row) for row in range(rows)]) for n in range(callers)]
    assert handler.sizes == sizes


@pytest.mark.parametrize("duration", [None, 600], ids=["", "with a duration"])
@pytest.mark.parametrize("end", ["waits", "leaves"])
def test_rows_wait_only_as_long_as_another_caller_can_add(sessions, duration, end):
    handler = Echo(max_batch_size=8, max_batch_duration_secs=duration)
    (first, _), (lane, other) = joined(open_session(sessions, handler), 2)
    threads = Threads(lambda: ask(lane, [1, 2]))
    until_waiting(sessions, first)
    assert handler.batches == [], "the other caller could still add rows"
    if end == "waits":
        assert ask(other, [3]) == answers([3])
    else:
        other.close()
    assert threads.all_well() == [answers([1, 2])]
    assert handler.sizes == ([3] if end == "waits" else [2])


class SeveralAtOnce(Echo):
    def max_concurrent_batches(self):
        return 2


@pytest.mark.parametrize("kind", [Echo, SeveralAtOnce])
def test_an_open_bundle_that_adds_nothing_holds_up_nobody(lingering, kind):
    handler = kind(max_batch_size=8)
    (_, idle), (lane, other) = joined(open_session(lingering, handler), 2)
    assert Threads(lambda: ask(lane, [1, 2])).all_well() == [answers([1, 2])]
    assert not idle.waiting
    assert ask(other, [3]) == answers([3])
    assert handler.sizes == [2, 1]


def test_bundles_of_a_worker_do_not_wait_for_one_that_is_far_from_its_model():
    """The first bundle comes to its model when the second has its last answer."""
    FAR["started"], FAR["answered"] = threading.Event(), threading.Event()
    p = ps.Pipeline(workers=0, threads_per_worker=2)
    rows = p | ps.Read(TwoSplits()) | ps.Map(slowly) | ps.RunInference(Same(max_batch_size=8)) | ps.Map(tell)
    assert Threads(rows.collect).all_well() == [["far", "near"]]


FAR: dict[str, threading.Event] = {}  # of the test above: its functions are pickled, and find them here


def slowly(row):
    if row == "far":
        FAR["started"].set()
        assert FAR["answered"].wait(PATIENCE / 2), "the other bundle has no answer"
    else:
        assert FAR["started"].wait(PATIENCE / 2)
    return row


def tell(row):
    if row == "near":
        FAR["answered"].set()
    return row


class TwoSplits(ps.Source):
    def splits(self, goal):
        return ["far", "near"]

    def read(self, split):
        yield [split]


def test_a_caller_that_has_its_answers_can_add_again(sessions):
    handler = Echo(max_batch_size=2)
    _, lanes = joined(open_session(sessions, handler), 2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)  # a caller that was told goes on late: the other one must still count on it
    try:
        Threads(*[lambda lane=lane: ask_and_leave(lane, *([n] for n in range(50))) for lane in lanes]).all_well()
    finally:
        sys.setswitchinterval(interval)
    assert set(handler.sizes) == {2}


def test_a_lonely_row_leaves_by_its_deadline(sessions):
    handled = threading.Event()

    class Tells(Echo):
        def run_inference(self, batch, model, inference_args=None):
            handled.set()
            return super().run_inference(batch, model, inference_args)

    handler = Tells(max_batch_size=8, max_batch_duration_secs=0.05)
    session = open_session(sessions, handler)
    (_, idle), (lane, other) = joined(session, 2)
    threads = Threads(lambda: ask(lane, [1]))
    assert handled.wait(PATIENCE), "the other caller never waits, and the row waits for ever"
    assert not idle.waiting
    assert threads.all_well() == [answers([1])]
    assert handler.threads[0] in {thread.ident for thread in session.threads}
    other.close()


def test_many_callers_of_one_row_make_full_batches_with_a_duration(sessions):
    handler = Echo(max_batch_size=4, max_batch_duration_secs=600)
    _, lanes = joined(open_session(sessions, handler), 12)
    got = Threads(*[lambda n=n: ask_and_leave(lanes[n], [n]) for n in range(12)]).all_well()
    assert got == [answers([n]) for n in range(12)]
    assert handler.sizes == [4, 4, 4]
    assert threading.get_ident() not in handler.threads


def test_the_sessions_threads_end_with_it():
    sessions = ProcessSessions(Metrics())
    session = open_session(sessions, Echo(max_batch_duration_secs=600))
    (thread,) = session.threads
    assert thread.is_alive()
    Threads(sessions.close).all_well()
    assert not thread.is_alive()


def test_answers_come_back_to_their_callers_in_order_under_load(sessions):
    handler = Echo(max_batch_size=7)
    spec = InferenceSpec.of(handler)

    def work(n):
        draw = random.Random(n)
        blocks = [[(n, number, row) for row in range(draw.randint(1, 20))] for number in range(30)]
        got = everything(open_stream(spec, "step", sessions), *blocks)
        return got == answers(row for block in blocks for row in block)

    assert all(Threads(*[lambda n=n: work(n) for n in range(6)]).all_well())
    assert max(handler.sizes) == 7


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("durations", [(None, None), (0.01, None), (None, 0.01), (600, 600)], ids=str)
def test_two_models_in_a_row_never_wait_for_each_other(sessions, seed, durations):
    """Each thread feeds the answers of one model to another: one may wait here for rows of one that waits there."""
    specs = [
        InferenceSpec.of(Echo(max_batch_size=size, max_batch_duration_secs=duration))
        for size, duration in zip((5, 3), durations, strict=True)
    ]
    barrier = threading.Barrier(4)

    def work(n):
        draw, caller, got = random.Random(100 * seed + n), Caller(), []
        first, second = (open_stream(spec, f"step {at}", sessions, caller) for at, spec in enumerate(specs))
        blocks = [[(n, number, row) for row in range(draw.randint(1, 9))] for number in range(draw.randint(0, 9))]
        barrier.wait(PATIENCE)
        try:
            for block in blocks:
                for made in first.push(block):
                    for out in second.push(made.block):
                        got += out.block
            for made in first.finish():
                for out in second.push(made.block):
                    got += out.block
            first.close()
            for out in second.finish():
                got += out.block
        finally:
            first.close()
            second.close()
        assert got == answers(answers(row for block in blocks for row in block))
        return len(got)

    assert all(n >= 0 for n in Threads(*[lambda n=n: work(n) for n in range(4)]).all_well())


def test_a_caller_that_waits_elsewhere_cannot_add_here(sessions):
    held, seen = threading.Event(), threading.Event()

    class Slow(Echo):
        def run_inference(self, batch, model, inference_args=None):
            seen.set()
            assert held.wait(PATIENCE)
            return super().run_inference(batch, model, inference_args)

    here = sessions.open("here", InferenceSpec.of(Echo(max_batch_size=8)))
    there = sessions.open("there", InferenceSpec.of(Slow(max_batch_size=8)))
    one, two = Caller(), Caller()
    lanes = {caller: (here.join(caller), there.join(caller)) for caller in (one, two)}
    lanes[two][1].close()
    waits_there = Threads(lambda: ask(lanes[one][1], [1]))
    assert seen.wait(PATIENCE)
    assert Threads(lambda: ask(lanes[two][0], [2])).all_well() == [answers([2])]
    held.set()
    assert waits_there.all_well() == [answers([1])]


@pytest.mark.parametrize("duration", [None, 600], ids=["", "with a duration"])
def test_a_caller_with_two_lanes_keeps_one_when_it_closes_the_other(sessions, duration):
    handler = Echo(max_batch_size=8, max_batch_duration_secs=duration)
    session, caller = open_session(sessions, handler), Caller()
    guard = session.join(Caller())  # so that nothing leaves before its time
    one, two = session.join(caller), session.join(caller)
    two_ticket = submit(two, [1, 2])
    one.close()
    guard.close()
    assert Threads(lambda: two.wait(two_ticket)).all_well(KNOWN_TO_HANG) == [answers([1, 2])]


@pytest.mark.parametrize("shape", ["chain", "flatten"])
def test_one_model_twice_in_a_pipeline(shape):
    p = ps.Pipeline(workers=0)
    rows = p | ps.Create([25]) | ps.FlatMap(range)
    if shape == "chain":
        made = rows | "a" >> infer_m() | "b" >> infer_m()
    else:
        made = (rows | "a" >> ps.Map(abs), rows | "b" >> ps.Map(abs)) | ps.Flatten() | infer_m()
    (got,) = Threads(made.collect).all_well(KNOWN_TO_HANG)
    assert len(got) == (25 if shape == "chain" else 50)


class Same(ps.ModelHandler):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return list(batch)


def infer_m():
    return ps.RunInference(Same(max_batch_size=8), model_identifier="m")


# Callers that give up.


def test_rows_of_a_caller_that_leaves_are_not_run(sessions):
    handler = Echo(max_batch_size=8)
    _, (gone, kept) = joined(open_session(sessions, handler), 2)
    submit(gone, ["a", "b"])
    ticket = submit(kept, [1])
    gone.close()
    assert Threads(lambda: kept.wait(ticket)).all_well() == [answers([1])]
    assert handler.batches == [[1]]


def test_a_caller_may_leave_while_its_rows_are_run(sessions):
    running, go_on = threading.Event(), threading.Event()

    class Slow(Echo):
        def run_inference(self, batch, model, inference_args=None):
            running.set()
            assert go_on.wait(PATIENCE)
            return super().run_inference(batch, model, inference_args)

    handler = Slow(max_batch_size=2)
    _, (gone, kept) = joined(open_session(sessions, handler), 2)
    submit(gone, ["a"])
    threads = Threads(lambda: ask(kept, [1]))
    assert running.wait(PATIENCE)
    gone.close()
    go_on.set()
    assert threads.all_well() == [answers([1])]
    assert Threads(lambda: ask(kept, [2])).all_well() == [answers([2])]


def test_streams_that_abort_midway_do_not_disturb_others(sessions):
    handler = Echo(max_batch_size=5)
    spec = InferenceSpec.of(handler)
    session = sessions.open("step", spec)
    barrier = threading.Barrier(6)

    def work(n):
        stream = open_stream(spec, "step", sessions)
        barrier.wait(PATIENCE)
        got = []
        try:
            for number in range(40):
                if n % 2 and number == 10 + n:
                    return None
                got += [row for made in stream.push([(n, number)]) for row in made.block]
            got += [row for made in stream.finish() for row in made.block]
        finally:
            stream.close()
        return got

    results = Threads(*[lambda n=n: work(n) for n in range(6)]).all_well()
    for n in (0, 2, 4):
        assert results[n] == answers((n, number) for number in range(40))
    assert session.front.rows == 0
    assert Threads(lambda: ask_and_leave(session.join(Caller()), ["last"])).all_well() == [answers(["last"])]


def test_rows_in_flight_are_bounded(sessions):
    running, go_on = threading.Event(), threading.Event()

    class Slow(Echo):
        def run_inference(self, batch, model, inference_args=None):
            running.set()
            assert go_on.wait(PATIENCE)
            return super().run_inference(batch, model, inference_args)

    handler = Slow(max_batch_size=4)
    spec = InferenceSpec.of(handler)
    session = sessions.open("step", spec)
    blocker = session.join(Caller())
    busy = Threads(lambda: ask(blocker, [0, 0, 0, 0]))
    assert running.wait(PATIENCE)
    caller = Caller()
    pushing = Threads(lambda: everything(open_stream(spec, "step", sessions, caller), *([n] for n in range(200))))
    until_waiting(sessions, caller)
    with sessions.changed:
        assert session.front.rows == 9, "two batches, and the row that was one too many"
    go_on.set()
    busy.all_well()
    blocker.close()
    assert pushing.all_well() == [answers(range(200))]


# How many at once.


class Crowd(Echo):
    """Its calls wait until `size` of them run at once, and it knows the most that ever did."""

    def __init__(self, limit, size, **settings):
        super().__init__(**settings)
        self.limit = limit
        self.barrier = threading.Barrier(size)
        self.lock = threading.Lock()
        self.inside = self.most = 0

    def max_concurrent_batches(self):
        return self.limit

    def run_inference(self, batch, model, inference_args=None):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            self.barrier.wait(PATIENCE)
            return list(batch)
        finally:
            with self.lock:
                self.inside -= 1


@pytest.mark.parametrize("duration", [None, 600], ids=["", "with a duration"])
def test_as_many_batches_run_at_once_as_the_handler_allows(sessions, duration):
    handler = Crowd(3, 3, max_batch_size=1, max_batch_duration_secs=duration)
    _, lanes = joined(open_session(sessions, handler), 3)
    Threads(*[lambda lane=lane: ask_and_leave(lane, [1]) for lane in lanes]).all_well()
    assert handler.most == 3


def test_one_caller_is_enough_for_several_batches_at_once(sessions):
    handler = Crowd(3, 3, max_batch_size=1)
    _, (lane,) = joined(open_session(sessions, handler), 1)
    assert ask_and_leave(lane, [1, 2, 3], [4, 5, 6]) == [1, 2, 3, 4, 5, 6]
    assert handler.most == 3


def test_the_next_batch_is_prepared_while_one_is_on_the_device(sessions):
    handler = Crowd(1, 2, max_batch_size=1)
    handler.prepares_ahead = lambda: True
    _, (lane,) = joined(open_session(sessions, handler), 1)
    assert ask_and_leave(lane, [1, 2], [3, 4]) == [1, 2, 3, 4]
    assert handler.most == 2


@pytest.mark.parametrize("duration", [None, 600], ids=["", "with a duration"])
def test_one_batch_runs_at_a_time_unless_the_handler_says_otherwise(sessions, duration):
    handler = Crowd(1, 1, max_batch_size=2, max_batch_duration_secs=duration)
    _, lanes = joined(open_session(sessions, handler), 6)
    blocks = [[n, n, n] for n in range(20)]
    got = Threads(*[lambda lane=lane: ask_and_leave(lane, *blocks) for lane in lanes]).all_well()
    assert got == [[row for block in blocks for row in block]] * 6
    assert handler.most == 1


def test_no_batch_at_all_is_refused():
    with pytest.raises(UsageError, match="max_concurrent_batches"):
        ProcessSessions(Metrics()).open("step", InferenceSpec.of(Crowd(0, 1)))


# What is in a batch.


def test_weights(sessions):
    handler = Echo(max_batch_size=10, max_batch_weight=6, element_size_fn=len)
    texts = ["xx", "xxx", "xx", "x", "xxxxxxxxx", "x", "xxxxx", "x"]
    assert everything(stream_of(sessions, handler), texts) == answers(texts)
    assert [list(map(len, batch)) for batch in handler.batches] == [[2, 3], [2, 1], [9], [1, 5], [1]]


def test_weights_across_callers(sessions):
    handler = Echo(max_batch_size=10, max_batch_weight=4, element_size_fn=len)
    _, lanes = joined(open_session(sessions, handler), 3)
    got = Threads(*[lambda lane=lane: ask_and_leave(lane, ["x", "xx"], weights=[1, 2]) for lane in lanes]).all_well()
    assert got == [answers(["x", "xx"])] * 3
    assert all(sum(map(len, batch)) <= 4 for batch in handler.batches)


def test_an_element_size_fn_that_raises_names_the_row(sessions):
    handler = Echo(max_batch_weight=4, element_size_fn=len)
    with pytest.raises(StepError, match=r"element_size_fn.*TypeError.*\n  row: 7"):
        everything(stream_of(sessions, handler), ["x", 7])


@pytest.mark.parametrize("weight", [None, "1"])
def test_an_element_size_fn_that_returns_no_number_is_an_error_of_the_step(sessions, weight):
    handler = Echo(max_batch_weight=4, element_size_fn=lambda row: weight)
    with pytest.raises(StepError, match="element_size_fn"):
        everything(stream_of(sessions, handler), ["x"])


def test_only_rows_with_equal_arguments_share_a_batch(sessions):
    handler = Echo(max_batch_size=8)
    _, lanes = joined(open_session(sessions, handler), 5)
    args = [None, {"top": 1}, {"top": 2}, {"top": 1}, None]
    got = Threads(*[lambda n=n: ask_and_leave(lanes[n], [n], args=args[n]) for n in range(5)]).all_well()
    assert got == [answers([n]) for n in range(5)]
    assert sorted((str(args), sorted(batch)) for args, batch in zip(handler.args, handler.batches, strict=True)) == [
        ("None", [0, 4]),
        ("{'top': 1}", [1, 3]),
        ("{'top': 2}", [2]),
    ]


def test_arguments_that_only_look_alike_do_not_share_a_batch(sessions):
    class Adds(Echo):
        def run_inference(self, batch, model, inference_args=None):
            return [row + float(inference_args["bias"][2500]) for row in batch]

    zeros, ones = np.zeros(5000), np.zeros(5000)
    ones[2500] = 1
    assert repr(zeros) == repr(ones)
    _, (one, two) = joined(open_session(sessions, Adds(max_batch_size=8)), 2)
    work = [
        lambda lane=lane, bias=bias: ask_and_leave(lane, [0.0], args={"bias": bias})
        for lane, bias in ((one, zeros), (two, ones))
    ]
    got = Threads(*work).all_well()
    assert got == [[0.0], [1.0]]


def test_arguments_that_cannot_be_pickled(sessions):
    handler = Echo()
    stream = stream_of(sessions, handler, inference_args={"stop": lambda row: False})
    assert everything(stream, [1, 2]) == answers([1, 2])
    assert handler.args[0]["stop"](1) is False


def test_rows_that_are_batches_already(sessions):
    handler = Echo(max_batch_size=2).with_no_batching()
    rows = [[1, 2, 3], (4,), [], [5, 6, 7, 8, 9]]
    assert everything(stream_of(sessions, handler), rows) == answers(range(1, 10))
    assert handler.batches == [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    with pytest.raises(StepError, match="with_no_batching.*got int"):
        everything(stream_of(sessions, handler), [5])


def test_functions_around_a_handler_of_whole_batches(sessions):
    handler = Echo().with_no_batching().with_preprocess_fn(lambda batch: [x + 1 for x in batch]).with_postprocess_fn(repr)
    assert everything(stream_of(sessions, handler), [[1, 2]]) == ["('answer', 2)", "('answer', 3)"]


def test_functions_and_keys_around_the_model(sessions):
    inner = Echo().with_preprocess_fn(lambda x: x + 1).with_preprocess_fn(int).with_postprocess_fn(lambda a: a[1])
    handler = ps.KeyedModelHandler(inner).with_preprocess_fn(lambda row: (row[0].upper(), row[1])).with_postprocess_fn(list)
    assert everything(stream_of(sessions, handler), [("a", "1"), ("b", "2")]) == [["A", 2], ["B", 3]]


def test_keys_where_they_are(sessions):
    handler = ps.MaybeKeyedModelHandler(Echo())
    rows = [("k", 1), 2, (1, 2, 3), [4, 5]]
    expected = [("k", ("answer", 1)), *answers([2, (1, 2, 3), [4, 5]])]
    assert everything(stream_of(sessions, handler), rows) == expected


@pytest.mark.parametrize("where", ["preprocess", "postprocess"])
def test_a_stop_iteration_of_a_users_function_loses_no_rows(sessions, where):
    def function(row):
        row = row[1] if where == "postprocess" else row
        return next(iter([row] if row != 3 else []))

    handler = getattr(Echo(), f"with_{where}_fn")(function)
    with pytest.raises(StepError, match=f"{where} function function.*StopIteration.*\n  row: .*3"):
        everything(stream_of(sessions, handler), [1, 2, 3, 4])


# What comes back.


class Returns(Echo):
    """Returns what a function makes of the batch."""

    def __init__(self, function, **settings):
        super().__init__(**settings)
        self.function = function

    def run_inference(self, batch, model, inference_args=None):
        self.batches.append(list(batch))
        return self.function(batch)


@pytest.mark.parametrize(
    "function",
    [
        lambda b: (2 * x for x in b),
        lambda b: tuple(2 * x for x in b),
        lambda b: 2 * np.array(b),
        lambda b: map((2).__mul__, b),
    ],
    ids=["generator", "tuple", "array", "map"],
)
def test_any_iterable_of_answers(sessions, function):
    lane = open_session(sessions, Returns(function, max_batch_size=3)).join(Caller())
    assert list(ask(lane, [1, 2, 3, 4])) == [2, 4, 6, 8]


@pytest.mark.parametrize(("function", "count"), [(lambda b: b[1:], 3), (lambda b: [*b, 1], 5), (lambda b: [], 0), (iter, 4)])
def test_the_number_of_answers_is_checked(sessions, function, count):
    handler = Returns(function, max_batch_size=4)
    lane = open_session(sessions, handler).join(Caller())
    if count == 4:
        assert ask(lane, [1, 2, 3, 4]) == [1, 2, 3, 4]
        return
    with pytest.raises(PredictionCountError, match=rf"returned {count} predictions for 4 examples"):
        ask(lane, [1, 2, 3, 4])
    assert len(handler.batches) == 1, "no single row is to blame, so none is looked for"


@pytest.mark.parametrize("callers", [1, 2])
def test_a_handler_may_use_up_its_batch(sessions, callers):
    handler = Returns(lambda batch: [2 * batch.pop(0) for _ in range(len(batch))], max_batch_size=4)
    _, lanes = joined(open_session(sessions, handler), callers)
    rows = list(range(4 // callers))
    got = Threads(*[lambda lane=lane: ask_and_leave(lane, list(rows)) for lane in lanes]).all_well()
    assert got == [[2 * row for row in rows]] * callers


# Errors.


class Picky(Echo):
    """Raises for a batch that `refuses` says so of."""

    def __init__(self, refuses, error=ValueError, **settings):
        super().__init__(**settings)
        self.refuses = refuses
        self.error = error

    def run_inference(self, batch, model, inference_args=None):
        self.batches.append(list(batch))
        if self.refuses(batch):
            raise self.error(f"batch of {len(batch)}")
        return answers(batch)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 33, 100])
@pytest.mark.parametrize("where", [0.0, 0.4, 1.0])
def test_the_guilty_row_is_found_by_halving(sessions, rows, where):
    guilty = int(where * (rows - 1))
    handler = Picky(lambda batch: guilty in batch, max_batch_size=rows)
    lane = open_session(sessions, handler).join(Caller())
    with pytest.raises(StepError, match=rf"^step 'step': ValueError: batch of 1\n  row: {guilty}$") as caught:
        ask(lane, list(range(rows)))
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(handler.batches) - 1 <= math.log2(rows) + 2


def test_one_of_several_guilty_rows_is_found(sessions):
    handler = Picky(lambda batch: {5, 6, 20} & set(batch), max_batch_size=32)
    with pytest.raises(StepError, match=r"row: (5|6|20)$"):
        ask(open_session(sessions, handler).join(Caller()), list(range(32)))


def test_rows_that_fail_only_together(sessions):
    handler = Picky(lambda batch: len(batch) > 1, max_batch_size=8)
    with pytest.raises(StepError, match="batch of 2\n  raised for a batch of 2 rows, none of which fails alone") as caught:
        ask(open_session(sessions, handler).join(Caller()), list(range(8)))
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_is_told_to_those_in_the_batch_and_no_others(sessions):
    handler = Picky(lambda batch: "bad" in batch, max_batch_size=2)
    _, lanes = joined(open_session(sessions, handler), 4)
    submit(lanes[0], ["good"])
    tickets = [submit(lanes[1], ["bad"]), submit(lanes[2], ["fine"]), submit(lanes[3], ["well"])]
    with pytest.raises(StepError, match="row: 'bad'"):
        lanes[1].wait(tickets[0])
    assert lanes[2].wait(tickets[1]) == answers(["fine"])
    assert lanes[3].wait(tickets[2]) == answers(["well"])
    for lane in lanes[1:]:
        lane.close()
    assert ask(lanes[0], ["again"]) == answers(["again"])


def test_other_rows_of_a_caller_that_failed_go_with_it(sessions):
    handler = Picky(lambda batch: "bad" in batch, max_batch_size=2)
    session = open_session(sessions, handler)
    lane = session.join(Caller())
    ticket = submit(lane, ["bad", 1, 2])
    with pytest.raises(StepError):
        lane.wait(ticket)
    lane.close()
    assert session.front.rows == 0


@pytest.mark.parametrize("error", [UsageError, TransientError])
def test_a_penstock_error_of_a_handler_is_passed_on(sessions, error):
    handler = Picky(lambda batch: True, error=error, max_batch_size=4)
    with pytest.raises(error, match="batch of 4"):
        ask(open_session(sessions, handler).join(Caller()), [1, 2, 3, 4])
    assert len(handler.batches) == 1


@pytest.mark.parametrize("duration", [None, 600], ids=["", "with a duration"])
def test_system_exit_of_a_handler_is_an_error_of_the_step(sessions, duration):
    handler = Picky(lambda batch: "bad" in batch, error=SystemExit, max_batch_size=2, max_batch_duration_secs=duration)
    _, (one, two) = joined(open_session(sessions, handler), 2)
    got = Threads(lambda: ask(one, ["bad"]), lambda: ask(two, ["good"])).join()
    assert [type(error) for error in got.errors] == [StepError, StepError]
    assert "step 'step': SystemExit: " in str(got.errors[0])
    assert "row: 'bad'" in str(got.errors[0])
    two.close()
    assert Threads(lambda: ask(one, ["good"])).all_well() == [answers(["good"])], "the session goes on"


def test_keyboard_interrupt_ends_its_own_thread_and_nobody_waits_for_it(sessions):
    handler = Picky(lambda batch: "bad" in batch, error=KeyboardInterrupt, max_batch_size=2)
    (first, _), (one, two) = joined(open_session(sessions, handler), 2)
    waits = Threads(lambda: ask(one, ["good"]))
    until_waiting(sessions, first)
    with pytest.raises(KeyboardInterrupt):
        submit(two, ["bad"])
    assert isinstance(waits.join().errors[0], PenstockError)
    two.close()
    assert Threads(lambda: ask(one, ["good"])).all_well() == [answers(["good"])]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("trouble", ["KeyboardInterrupt", "get_num_bytes"])
def test_nothing_ends_the_sessions_own_thread(sessions, trouble):
    class Fails(Picky):
        def get_num_bytes(self, batch):
            if trouble == "get_num_bytes":
                raise TypeError("cannot measure this")
            return 1

    def refuses(batch):
        return trouble == "KeyboardInterrupt" and "bad" in batch

    handler = Fails(refuses, error=KeyboardInterrupt, max_batch_size=1, max_batch_duration_secs=600)
    lane = open_session(sessions, handler).join(Caller())
    Threads(lambda: ask(lane, ["bad"])).join()
    assert Threads(lambda: ask(lane, ["good"])).all_well(KNOWN_TO_HANG) == [answers(["good"])]


def test_rows_that_cannot_be_pickled_are_answered(sessions):
    rows = [threading.Lock(), (x for x in [1])]
    lane = open_session(sessions, Echo(max_batch_size=2)).join(Caller())
    assert ask(lane, rows) == answers(rows)


# Metrics.


def test_metrics(sessions):
    class Sized(Picky):
        def get_num_bytes(self, batch):
            return 100 * len(batch)

        def get_metrics_namespace(self):
            return "mine"

    handler = Sized(lambda batch: "bad" in batch, max_batch_size=4)
    session = open_session(sessions, handler)
    lane = session.join(Caller())
    assert len(ask(lane, list(range(10)))) == 10
    with pytest.raises(StepError):
        ask(lane, [1, 2, "bad", 3])
    metrics = sessions.drain_metrics()
    assert {(key.step, key.namespace) for key in [*metrics.counters, *metrics.distributions]} == {("step", "mine")}
    assert metrics.counter("failed_batches_counter") == 1
    sizes = metrics.distribution("inference_request_batch_size")
    assert (sizes.count, sizes.sum, sizes.min, sizes.max) == (3, 10, 2, 4)
    latency = metrics.distribution("inference_batch_latency_micro_secs")
    assert latency.count == 3
    assert latency.min > 0
    assert metrics.distribution("load_model_latency_milli_secs").count == 1
    assert metrics.distribution("model_byte_size").count == 1
    assert metrics.distribution("model_byte_size").min >= 0
    assert metrics.distribution("inference_request_batch_byte_size").max == 400
    again = sessions.drain_metrics()
    assert again == Metrics(), "what was handed out is not counted again"
    ask(lane, [1])
    assert sessions.drain_metrics().distribution("inference_request_batch_size").sum == 1


class Poisoned(Echo):
    """Fails for batches with a bad row."""

    def run_inference(self, batch, model, inference_args=None):
        made = super().run_inference(batch, model, inference_args)
        if "bad" in batch:
            raise ValueError("a bad row")
        return made


def test_batches_in_a_row_have_their_size_and_a_bad_row_among_them_costs_itself_alone(sessions):
    handler = Poisoned(max_batch_size=4)
    lane = open_session(sessions, handler).join(Caller(), handling=Handling())
    ask(lane, list(range(8)))  # quick ones: those that follow run in a row
    rows = [*range(401), "bad", *range(398)]
    ticket = submit(lane, rows)
    made = lane.wait(ticket)
    assert ticket.failures.keys() == {401}
    assert [answer for at, answer in enumerate(made) if at != 401] == answers(row for row in rows if row != "bad")
    assert max(handler.sizes) == 4
    assert sum(size == 4 for size in handler.sizes) >= 200


def test_the_size_of_batches_is_sampled(sessions):
    handler = Echo(max_batch_size=1)
    lane = open_session(sessions, handler).join(Caller())
    ask(lane, list(range(2 * BYTES_SAMPLED_EVERY)))
    metrics = sessions.drain_metrics()
    assert metrics.distribution("inference_request_batch_byte_size").count == 2
    assert metrics.distribution("inference_request_batch_byte_size").min > 0
    assert metrics.distribution("inference_request_batch_size").count == 2 * BYTES_SAMPLED_EVERY


def test_the_first_batch_after_a_load_is_told_apart(sessions):
    lane = open_session(sessions, Echo(max_batch_size=1)).join(Caller())
    ask(lane, [1, 2, 3])
    metrics = sessions.drain_metrics()
    assert metrics.distribution("first_batch_latency_milli_secs").count == 1
    assert metrics.distribution("inference_request_batch_size").count == 3


def test_metrics_of_many_threads_add_up(sessions):
    handler = Echo(max_batch_size=7)
    session = open_session(sessions, handler, metrics_namespace="given")
    total, lock = Metrics(), threading.Lock()

    def work(n):
        lane = session.join(Caller())
        try:
            for _ in range(30):
                ask(lane, [n] * (n + 1))
                drained = sessions.drain_metrics()
                with lock:
                    total.merge(drained)
        finally:
            lane.close()

    Threads(*[lambda n=n: work(n) for n in range(5)]).all_well()
    total.merge(sessions.drain_metrics())
    assert total.distribution("inference_request_batch_size").sum == 30 * (1 + 2 + 3 + 4 + 5)
    assert total.distribution("inference_request_batch_size").count == len(handler.batches)
    assert {key.namespace for key in total.distributions} == {"given"}


# Columns.


class Columns(ps.ModelHandler):
    """x + 1 of every row of a table."""

    def __init__(self, make=None, **settings):
        super().__init__(**settings)
        self.tables = []
        self.make = make or (lambda table: pa.array([None if x is None else x + 1 for x in table["x"].to_pylist()]))

    def load_model(self):
        return None

    def model_id(self):
        return "plus one"

    def takes_columns(self):
        return True

    def run_inference_columns(self, table, model, inference_args=None):
        self.tables.append(table)
        return self.make(table)

    def run_inference(self, batch, model, inference_args=None):
        raise AssertionError("a table was turned into rows")


def table_of(start, stop, **more):
    return pa.table({"x": range(start, stop), **{name: [value] * (stop - start) for name, value in more.items()}})


def test_a_table_stays_a_table(sessions):
    handler = Columns(max_batch_size=4)
    table = table_of(0, 10, text="t")
    (got,) = InferenceRun(sessions, handler).tables(table)
    assert got.column_names == ["x", "text", "inference", "model_id"]
    assert got.select(["x", "text"]).equals(table)
    assert got["inference"].to_pylist() == list(range(1, 11))
    assert set(got["model_id"].to_pylist()) == {"plus one"}
    assert [each.num_rows for each in handler.tables] == [4, 4, 2]


class InferenceRun:
    def __init__(self, sessions, handler):
        self.stream = stream_of(sessions, handler)

    def tables(self, *tables):
        try:
            got = [made.block for table in tables for made in self.stream.push(table)]
            got += [made.block for made in self.stream.finish()]
        finally:
            self.stream.close()
        assert all(isinstance(made, pa.Table) for made in got)
        return got


def test_tables_of_several_callers_are_joined_to_batches(sessions):
    handler = Columns(max_batch_size=6)
    _, lanes = joined(open_session(sessions, handler), 3)
    got = Threads(*[lambda n=n: ask_and_leave(lanes[n], table_of(10 * n, 10 * n + 4)) for n in range(3)]).all_well()
    assert got == [list(range(10 * n + 1, 10 * n + 5)) for n in range(3)]
    assert [each.num_rows for each in handler.tables] == [6, 6]


def test_tables_with_other_columns_do_not_share_a_batch(sessions):
    handler = Columns(max_batch_size=8)
    tables = [
        table_of(0, 2, text="t"),
        table_of(2, 4),
        table_of(4, 6).cast(pa.schema([("x", pa.float64())])),
        pa.table({"text": ["t", "t"], "x": [6, 7]}),
        table_of(8, 10, text="u"),
    ]
    _, lanes = joined(open_session(sessions, handler), len(tables))
    got = Threads(*[lambda n=n: ask_and_leave(lanes[n], tables[n]) for n in range(len(tables))]).all_well()
    for made, table in zip(got, tables, strict=True):
        assert made == [x + 1 for x in table["x"].to_pylist()]
    assert Counter(each.num_rows for each in handler.tables) == {2: 3, 4: 1}


def test_columns_of_an_earlier_model_are_not_replaced(sessions):
    table = pa.table({"inference": ["old"] * 2, "x": [1, 2], "model_id": ["older"] * 2})
    with pytest.raises(UsageError, match=r"step 'step': the rows have a column 'inference' already.*output_column="):
        InferenceRun(sessions, Columns()).tables(table)
    (got,) = InferenceRun(sessions, Columns(output_column="next")).tables(table)
    assert got.column_names == ["inference", "x", "model_id", "next", "next_model_id"]
    assert got["next"].to_pylist() == [2, 3]
    assert got["next_model_id"].to_pylist() == ["plus one"] * 2
    assert got["model_id"].to_pylist() == ["older"] * 2


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda table: [str(x) for x in table["x"].to_pylist()], ["0", "1", "2", "3", "4"]),
        (lambda table: table["x"].to_numpy() * 0.5, [0.0, 0.5, 1.0, 1.5, 2.0]),
        (lambda table: table["x"], [0, 1, 2, 3, 4]),
        (lambda table: np.stack([table["x"].to_numpy()] * 2, axis=1), [[x, x] for x in range(5)]),
        (lambda table: [{"score": x} for x in table["x"].to_pylist()], [{"score": x} for x in range(5)]),
    ],
    ids=["list", "array", "column", "matrix", "dicts"],
)
def test_any_kind_of_column_is_an_answer(sessions, make, expected):
    (got,) = InferenceRun(sessions, Columns(make, max_batch_size=2)).tables(table_of(0, 5))
    assert got["inference"].to_pylist() == expected


def test_the_number_of_answers_for_a_table_is_checked(sessions):
    with pytest.raises(PredictionCountError, match="returned 3 predictions for 4 examples"):
        InferenceRun(sessions, Columns(lambda table: [1, 2, 3], max_batch_size=4)).tables(table_of(0, 4))


def test_the_guilty_row_of_a_table_is_found(sessions):
    def make(table):
        if 5 in table["x"].to_pylist():
            raise ValueError("no fives")
        return table["x"]

    with pytest.raises(StepError, match=r"no fives\n  row: \{'x': 5, 'text': 't'\}"):
        InferenceRun(sessions, Columns(make, max_batch_size=8)).tables(table_of(0, 8, text="t"))


def test_a_batch_whose_answers_are_all_missing(sessions):
    def make(table):
        return [None if x < 2 else x / 2 for x in table["x"].to_pylist()]

    (got,) = InferenceRun(sessions, Columns(make, max_batch_size=2)).tables(table_of(0, 4))
    assert got["inference"].to_pylist() == [None, None, 1.0, 1.5]


def test_answers_that_make_no_column_are_an_error_of_the_step(sessions):
    def make(table):
        return ["text"] * 2 if 0 in table["x"].to_pylist() else [1, 2]

    with pytest.raises(StepError, match="step 'step'"):
        InferenceRun(sessions, Columns(make, max_batch_size=2)).tables(table_of(0, 4))


def test_rows_stay_rows_for_a_handler_of_columns_with_functions_around_it(sessions):
    handler = Columns(max_batch_size=4).with_preprocess_fn(dict)
    with pytest.raises(StepError, match="a table was turned into rows"):
        everything(stream_of(sessions, handler), table_of(0, 2))


class OpensMeanwhile(Echo):
    """Another thread opens the same session while it loads. Both are the class's: a copy of the handler is loaded."""

    other: threading.Thread
    loaded: ClassVar[list[int]] = []

    def load_model(self):
        self.loaded.append(os.getpid())
        self.other.start()
        self.other.join(0.2)  # it finds no session that is placed, and waits for this
        return super().load_model()


def test_no_thread_loads_a_model_that_is_about_to_have_a_host(monkeypatch, tmp_path):
    handler, found = OpensMeanwhile(), []
    sessions = ProcessSessions(Metrics(), Surroundings(folder=str(tmp_path / "hosts"), workers=4))
    other = threading.Thread(target=lambda: found.append(open_session(sessions, handler)), daemon=True)
    monkeypatch.setattr(OpensMeanwhile, "other", other, raising=False)
    monkeypatch.setattr(first_copy, "available_bytes", lambda: 0)
    found.append(open_session(sessions, handler))
    other.join(PATIENCE)
    assert [type(each) for each in found] == [HostedSession, HostedSession]
    assert found[0] is found[1]
    assert handler.loaded == [os.getpid()]  # the first, which was measured


class SlowToLoad(Echo):
    loading, go_on = threading.Event(), threading.Event()

    def load_model(self):
        self.loading.set()
        assert self.go_on.wait(PATIENCE)
        return super().load_model()


class Small(Echo):
    def model_files(self):
        return [__file__]


def test_a_model_that_is_measured_holds_up_no_other(tmp_path):
    sessions = ProcessSessions(Metrics(), Surroundings(folder=str(tmp_path / "hosts"), workers=4))
    slow = threading.Thread(target=lambda: sessions.open("slow", InferenceSpec.of(SlowToLoad())), daemon=True)
    slow.start()
    assert SlowToLoad.loading.wait(PATIENCE)
    small = threading.Thread(target=lambda: sessions.open("small", InferenceSpec.of(Small())), daemon=True)
    small.start()
    small.join(PATIENCE)
    assert not small.is_alive()
    SlowToLoad.go_on.set()
    slow.join(PATIENCE)
    sessions.close()


def test_no_model_joins_those_of_a_device_while_a_thread_looks_at_them():
    changed = threading.Condition()
    joining = threading.Thread(target=DeviceTurns(changed).join, args=[Echo()], daemon=True)
    with changed:
        joining.start()
        joining.join(0.2)
        assert joining.is_alive()
    joining.join(PATIENCE)
    assert not joining.is_alive()
