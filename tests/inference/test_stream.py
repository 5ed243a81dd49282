"""A stream of rows through a model, as any engine drives it: what comes back, and for which rows; shared sessions."""

from __future__ import annotations

import contextlib
import threading

import pyarrow as pa
import pytest

import penstock as ps
from penstock.failures import Handling
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream
from penstock.models.host_address import end_hosts
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

PATIENCE = 30  # seconds until a thread counts as hanging


class Tenfold(ps.ModelHandler):
    """Ten times each row; 7, 17, 27 ... are too much for it."""

    loads = 0

    def load_model(self):
        Tenfold.loads += 1
        return 10

    def run_inference(self, batch, model, inference_args=None):
        if any(row % 10 == 7 for row in batch):
            raise ValueError("a seven")
        return [model * row for row in batch]


class Columns(Tenfold):
    def takes_columns(self):
        return True

    def model_id(self):
        return "columns"

    def run_inference_columns(self, table, model, inference_args=None):
        return [model * row for row in table["x"].to_pylist()]


WAYS = {
    "here": ({}, {}),
    "a host": ({"large_model": True}, {}),
    "deterministic": ({}, {"seed": 1}),
    "deterministic, a host": ({"large_model": True}, {"seed": 1}),
    "like lengths": ({"batch_length_fn": lambda row: row % 5, "max_padded_cost": 40}, {}),
}


@pytest.fixture(params=WAYS)
def way(request, tmp_path):
    """Settings for a handler, and the sessions that it is used in."""
    settings, around = WAYS[request.param]
    folder = str(tmp_path / "run")
    sessions = ProcessSessions(Metrics(), Surroundings(folder=folder, **around))
    yield {"max_batch_size": 8, **settings}, sessions
    sessions.close()
    end_hosts(folder)


def through(sessions, spec, *blocks):
    """All that a stream makes of these blocks, and the stream."""
    stream = open_stream(spec, "step", sessions)
    with contextlib.closing(stream):
        made = [made for block in blocks for made in stream.push(block)]
        return [*made, *stream.finish()], stream


def answers_in(made):
    """(position, answer) of every answer, in the order in which they came."""
    return [pair for each in made if each.failed is None for pair in zip(each.positions, rows_of(each.block), strict=True)]


def failures_in(made, output):
    """(position, row) of every failure that goes to one of the outputs."""
    found = [each for each in made if each.failed == output]
    return [(at, row) for each in found for at, (row, _) in zip(each.positions, each.block, strict=True)]


def rows_of(block):
    return block if isinstance(block, list) else block["inference"].to_pylist()


def blocks_of(rows, *sizes):
    """Blocks of these sizes, and of the last one over and over."""
    rows, sizes = list(rows), list(sizes)
    while rows:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        yield rows[:size]
        rows = rows[size:]


def test_answers_come_with_the_positions_of_their_rows(way):
    settings, sessions = way
    rows = [row for row in range(300) if row % 10 != 7]
    made, stream = through(sessions, InferenceSpec.of(Tenfold(**settings)), *blocks_of(rows, 1, 30, 7))
    assert answers_in(made) == [(at, 10 * row) for at, row in enumerate(rows)]
    assert {type(each.positions) for each in made} == {range}, "no row costs anything for it"
    assert stream.metrics.counter("num_inferences") == len(rows)


def refuses(digit, take=lambda row: row):
    def function(row):
        if take(row) % 10 == digit:
            raise KeyError(digit)
        return row

    return function


def test_rows_that_fail_anywhere_come_with_their_positions(way):
    """By its last digit a row fails: 1 before the keys are off, 2 for want of a key, 3 before the model, 7 in it, 4 behind
    it, 5 behind the keys."""
    settings, sessions = way
    inner = Tenfold(**settings).with_preprocess_fn(refuses(3)).with_postprocess_fn(refuses(4, lambda answer: answer // 10))
    keyed = ps.KeyedModelHandler(inner).with_preprocess_fn(refuses(1, lambda row: row[-1]))
    keyed = keyed.with_postprocess_fn(refuses(5, lambda answer: answer[1] // 10))
    rows = [(row,) if row % 10 == 2 else (f"key {row}", row) for row in range(120)]
    made, stream = through(sessions, InferenceSpec.of(keyed, handling=Handling()), *blocks_of(rows, 1, 40, 9))

    def ending(*digits):
        return [at for at in range(120) if at % 10 in digits]

    assert answers_in(made) == [(at, (f"key {at}", 10 * at)) for at in ending(0, 6, 8, 9)]
    assert failures_in(made, "failed_preprocessing[0]") == [(at, rows[at]) for at in ending(1)]
    assert failures_in(made, "failed_preprocessing[1]") == [(at, rows[at]) for at in ending(3)]
    assert failures_in(made, "failed_inferences") == [(at, rows[at]) for at in ending(2, 7)]
    assert failures_in(made, "failed_postprocessing[0]") == [(at, (f"key {at}", 10 * at)) for at in ending(4)]
    assert failures_in(made, "failed_postprocessing[1]") == [(at, (f"key {at}", 10 * at)) for at in ending(5)]
    assert (stream.rows_in, stream.metrics.counter("num_inferences")) == (120, 72)


def test_a_stream_in_which_nothing_fails_has_ranges_although_it_could(way):
    settings, sessions = way
    rows = [0, 1, 2, 3] * 30
    made, _ = through(sessions, InferenceSpec.of(Tenfold(**settings), handling=Handling()), *blocks_of(rows, 50))
    assert answers_in(made) == [(at, 10 * row) for at, row in enumerate(rows)]
    assert {type(each.positions) for each in made} == {range}


@pytest.mark.parametrize("handling", [None, Handling()], ids=["errors end it", "errors are handled"])
def test_examples_of_a_list_have_the_position_of_the_list(way, handling):
    settings, sessions = way
    lists = [[1, 2, 3], [], [4], [5, 6], [8, 9]]
    if handling is not None:
        lists += [None, [10, 17], [17]]
    spec = InferenceSpec.of(Tenfold(**settings).with_no_batching(), handling=handling)
    made, _ = through(sessions, spec, lists[:2], lists[2:])
    good = [(at, 10 * row) for at, each in enumerate(lists) for row in each or () if row != 17]
    assert answers_in(made) == good
    if handling is not None:
        assert failures_in(made, "failed_inferences") == [(5, None), (6, [17]), (7, [17])]


@pytest.mark.parametrize("way", [name for name in WAYS if name != "like lengths"], indirect=True)
def test_tables_come_with_the_positions_of_their_rows(way):
    settings, sessions = way
    tables = [pa.table({"x": range(start, start + 25)}) for start in (0, 25, 50)]
    made, _ = through(sessions, InferenceSpec.of(Columns(**settings)), *tables)
    assert [each.positions for each in made] == [range(25), range(25, 50), range(50, 75)]
    assert answers_in(made) == [(at, 10 * at) for at in range(75)]
    assert {name for each in made for name in each.block["model_id"].to_pylist()} == {"columns"}


def test_answers_that_are_refused_are_failures_of_their_positions():
    sessions = ProcessSessions(Metrics())
    handler = Tenfold().with_postprocess_fn(lambda answer: threading.Lock() if answer % 20 else answer)
    stream = open_stream(InferenceSpec.of(handler, handling=Handling()), "step", sessions)
    assert list(stream.push([0, 1, 7, 2, 3])) == []
    rest = stream.finish()
    rest_of = stream.refuse(next(rest))
    assert rest_of.block == [0, 20]
    assert list(rest_of.positions) == [0, 3]
    assert failures_in(list(rest), "failed_inferences") == [(1, 1), (2, 7), (4, 3)]
    stream.close()
    sessions.close()


# The sessions of a process.


def threads_of_sessions(before):
    return {thread for thread in threading.enumerate() if thread not in before and thread.is_alive()}


def ask(sessions, handler, rows):
    return [answer for _, answer in answers_in(through(sessions, InferenceSpec.of(handler), rows)[0])]


@pytest.mark.parametrize("settings", [{"max_batch_duration_secs": 0.01}, {"large_model": True}], ids=["threads", "a host"])
def test_sessions_that_are_closed_leave_no_thread(tmp_path, settings):
    around = Surroundings(folder=str(tmp_path / "run"))
    before = set(threading.enumerate())
    sessions = ProcessSessions(Metrics(), around)
    assert ask(sessions, Tenfold(**settings), [1]) == [10]
    assert threads_of_sessions(before), "batches are run, or the host is listened to, by a thread"
    sessions.close()
    assert threads_of_sessions(before) == set()
    end_hosts(around.folder)


def test_many_threads_at_once_load_a_model_once():
    """Whoever is there when others come shares their model; rows of all of them are answered."""
    handler, barrier, got = Tenfold(max_batch_size=4), threading.Barrier(8), [None] * 8
    sessions, Tenfold.loads = ProcessSessions(Metrics()), 0

    def work(number):
        barrier.wait(PATIENCE)
        got[number] = ask(sessions, handler, [number * 10] * 5)

    threads = [threading.Thread(target=work, args=[number], daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    sessions.close()
    assert got == [[100 * number] * 5 for number in range(8)]
    assert Tenfold.loads == 1
