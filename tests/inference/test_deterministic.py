"""Deterministic runs: which rows share a batch depends on the rows of the split and the user's settings, on nothing else.

Every handler here answers with its whole batch, so that any other batch gives other answers.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import threading
from fractions import Fraction

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock as ps
from penstock.batching.entry import Entry
from penstock.batching.fixed import FixedBatches
from penstock.batching.limits import FIXED_COST, FIXED_ROWS, BatchLimits
from penstock.errors import StepError, UsageError
from penstock.failures import NOT_PICKLABLE
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream
from penstock.observe.metrics import Metrics

SPLITS = 4
ROWS = 300  # of a split

WAYS = {
    "in-process": {"workers": 0},
    "threads": {"workers": 0, "threads_per_worker": 3},
    "worker": {"workers": 1},
    "workers": {"workers": 3},
    "worker-threads": {"workers": 1, "threads_per_worker": 3},
    "timeout": {"workers": 2, "element_timeout": 60.0},
}


def digest(rows):
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


def answers_to(batch):
    return [(len(batch), at, digest(batch)) for at in range(len(batch))]


class Whole(ps.ModelHandler):
    """Answers with the size of the batch, the row's place in it, and a digest of all of its rows."""

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return answers_to(list(batch))


class Poisoned(Whole):
    def run_inference(self, batch, model, inference_args=None):
        if any(row % 97 == 13 for row in batch):
            raise ValueError("poison")
        return answers_to(list(batch))


class Ahead(Whole):
    """For a device behind which the next batch is prepared."""

    def prepares_ahead(self):
        return True


class Columns(Whole):
    """Also tells of how many pieces a column of the batch is."""

    def takes_columns(self):
        return True

    def run_inference_columns(self, table, model, inference_args=None):
        seen = digest((table.column("x").num_chunks, table.column("x").to_pylist()))
        return pa.array([f"{table.num_rows} {at} {seen}" for at in range(table.num_rows)])


class Splits(ps.Source):
    """Splits that do not depend on who reads them, in blocks of any size."""

    def __init__(self, block=100, table=False, splits=SPLITS, rows=ROWS):
        self.block, self.table, self.number, self.rows = block, table, splits, rows

    def splits(self, goal):
        return range(self.number)

    def read(self, split):
        rows = split_rows(split, self.rows)
        for at in range(0, len(rows), self.block):
            block = rows[at : at + self.block]
            yield pa.table({"x": block}) if self.table else block


def split_rows(split, rows=ROWS):
    return [1000 * split + (at * 7919) % 503 for at in range(rows)]


def run(transform, source=None, before=(), **options):
    """The rows that a deterministic pipeline gives."""
    pipeline = ps.Pipeline(**{"deterministic": True, "workers": 0, **options})
    rows = pipeline | ps.Read(source or Splits())
    for step in before:
        rows = rows | step
    return (rows | transform).collect()


def answers(batches_of):
    """What every way of running must give: `batches_of(rows)` are the batches of a split, as lists of places in it."""
    found = []
    for split in range(SPLITS):
        rows = split_rows(split)
        by_place = {}
        for batch in batches_of(rows):
            by_place |= dict(zip(batch, answers_to([rows[at] for at in batch]), strict=True))
        found += [by_place[at] for at in range(len(rows))]
    return found


def of_size(size):
    return lambda rows: [range(at, min(at + size, len(rows))) for at in range(0, len(rows), size)]


def by_length(cost, window):
    """The slow way: each window sorted, the longest and of equals the oldest first; a batch has its shortest row first."""

    def batches(rows):
        for start in range(0, len(rows), window):
            places = sorted(range(start, min(start + window, len(rows))), key=lambda at: (-length(rows[at]), at))
            while places:
                size = max(1, cost // length(rows[places[0]]))
                yield places[:size][::-1]
                del places[:size]

    return batches


def length(row):
    return 1 + row % 90


def by_weight(most, most_rows):
    def batches(rows):
        batch, weight = [], 0
        for at, row in enumerate(rows):
            if batch and (weight >= most or weight + weigh(row) > most or len(batch) == most_rows):
                yield batch
                batch, weight = [], 0
            batch, weight = [*batch, at], weight + weigh(row)
        yield batch

    return batches


def weigh(row):
    return row % 5


# The same answers, whatever runs them.


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_formed_inside_a_split(way):
    assert run(ps.RunInference(Whole()), **WAYS[way]) == answers(of_size(FIXED_ROWS))


@pytest.mark.parametrize("way", ["in-process", "workers"])
def test_a_model_in_a_host_is_given_the_same_batches(way):
    assert run(ps.RunInference(Whole(large_model=True)), **WAYS[way]) == answers(of_size(FIXED_ROWS))
    assert run(ps.RunInference(Whole(model_copies=2)), **WAYS[way]) == answers(of_size(FIXED_ROWS))


@pytest.mark.parametrize("way", ["in-process", "threads", "workers", "timeout"])
def test_rows_of_like_length(way):
    handler = Whole(batch_length_fn=length, max_padded_cost=400, lookahead_rows=128)
    assert run(ps.RunInference(handler), **WAYS[way]) == answers(by_length(400, 128))


def test_rows_of_like_length_without_any_setting():
    assert run(ps.RunInference(Whole(batch_length_fn=length))) == answers(by_length(FIXED_COST, 1 << 20))


@pytest.mark.parametrize("way", ["in-process", "threads", "workers"])
def test_batches_by_weight(way):
    handler = Whole(max_batch_weight=50, element_size_fn=weigh)
    assert run(ps.RunInference(handler), **WAYS[way]) == answers(by_weight(50, FIXED_ROWS))


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_the_sizes_of_blocks_do_not_matter(block):
    source = Splits(block)
    assert run(ps.RunInference(Whole()), source) == answers(of_size(FIXED_ROWS))
    by_weights = Whole(max_batch_weight=50, element_size_fn=weigh)
    assert run(ps.RunInference(by_weights), source) == answers(by_weight(50, FIXED_ROWS))
    by_lengths = Whole(batch_length_fn=length, max_padded_cost=400, lookahead_rows=128)
    assert run(ps.RunInference(by_lengths), source) == answers(by_length(400, 128))


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}])
def test_the_sizes_of_tables_do_not_matter(options):
    results = [run(ps.RunInference(Columns(max_batch_size=50)), Splits(size, True), **options) for size in (7, 50, 1000)]
    assert [row.inference.split()[:2] for row in results[0][:51]] == [["50", str(at)] for at in range(50)] + [["50", "0"]]
    assert results[0] == results[1] == results[2]
    assert run(ps.RunInference(Columns(max_batch_size=50, large_model=True)), Splits(7, True), **options) == results[0]


class TwoSchemas(Splits):
    def read(self, split):
        for at in range(10):
            yield pa.table({"x": [at] * 7}) if at % 5 < 3 else pa.table({"x": [at] * 7, "y": ["new"] * 7})


def test_a_batch_ends_where_other_columns_begin():
    got = run(ps.RunInference(Columns(max_batch_size=16)), TwoSchemas(splits=1))
    assert [row.inference.split()[0] for row in got] == ["16"] * 16 + ["5"] * 5 + ["14"] * 14 + ["16"] * 16 + ["5"] * 5 + [
        "14"
    ] * 14


def test_the_users_limits_hold():
    assert run(ps.RunInference(Whole(max_batch_size=9))) == answers(of_size(9))
    assert run(ps.RunInference(Whole(max_batch_size=200))) == answers(of_size(200))
    assert run(ps.RunInference(Whole(min_batch_size=100))) == answers(of_size(100))


def test_time_cuts_no_batch():
    assert run(ps.RunInference(Whole(max_batch_duration_secs=0.0))) == answers(of_size(FIXED_ROWS))


def test_a_handler_that_prepares_ahead():
    assert run(ps.RunInference(Ahead()), threads_per_worker=2) == answers(of_size(FIXED_ROWS))


def test_buckets():
    got = run(ps.RunInference(Whole(batch_size_buckets=[16, 48, 128])))
    expected = []
    for split in range(SPLITS):
        rows = split_rows(split)
        for at in range(0, ROWS, 48):
            batch = rows[at : at + 48]
            expected += answers_to(batch + batch[-1:] * (-len(batch) % 16 if len(batch) <= 16 else 48 - len(batch)))[
                : len(batch)
            ]
    assert got == expected


def test_keys_stay_with_their_rows():
    handler = ps.KeyedModelHandler(Whole().with_preprocess_fn(lambda row: row)).with_postprocess_fn(lambda pair: pair)
    got = run(ps.RunInference(handler), before=[ps.Map(lambda row: (str(row), row))], workers=2)
    rows = [str(row) for split in range(SPLITS) for row in split_rows(split)]
    assert got == list(zip(rows, answers(of_size(FIXED_ROWS)), strict=True))


def test_steps_that_share_a_model():
    def pipeline(**options):
        pipeline = ps.Pipeline(deterministic=True, **options)
        rows = pipeline | ps.Read(Splits())
        one = rows | "one" >> ps.RunInference(Whole(), model_identifier="shared")
        two = rows | ps.Map(lambda row: row) | "two" >> ps.RunInference(Whole(), model_identifier="shared")
        return ((one, two) | ps.Flatten()).collect()

    expected = answers(of_size(FIXED_ROWS)) * 2
    assert pipeline(workers=0, threads_per_worker=3) == expected
    assert pipeline(workers=2) == expected


@pytest.mark.parametrize("way", ["in-process", "workers", "timeout"])
def test_rows_that_fail_are_told_from_the_others_in_the_same_parts(way):
    def both(handler, **options):
        pipeline = ps.Pipeline(deterministic=True, **options)
        good, bad = pipeline | ps.Read(Splits()) | ps.RunInference(handler).with_exception_handling()
        failed = bad.failed_inferences | ps.Map(lambda pair: ("failed", pair[0]))
        return ((good, failed) | ps.Flatten()).collect()

    expected = both(Poisoned(), workers=0)
    poison = [row for split in range(SPLITS) for row in split_rows(split) if row % 97 == 13]
    assert [row for tag, row, *_ in expected if tag == "failed"] == poison
    assert len(expected) == SPLITS * ROWS
    assert both(Poisoned(), **WAYS[way]) == expected


def test_rows_that_cannot_be_sent_fail_alone():
    pipeline = ps.Pipeline(deterministic=True, workers=0)
    rows = pipeline | ps.Create([list(range(200))]) | ps.FlatMap(lambda rows: rows)
    rows = rows | ps.Map(lambda row: threading.Lock() if row in (5, 70, 199) else row)
    good, bad = rows | ps.RunInference(Whole(large_model=True)).with_exception_handling()
    kinds = bad.failed_inferences | ps.Map(lambda pair: pair[1].kind)
    got = ((good, kinds) | ps.Flatten()).collect()
    batches = [range(start, min(start + 64, 200)) for start in range(0, 200, 64)]
    kept = [[row for row in batch if row not in (5, 70, 199)] for batch in batches]
    assert got == [answer for batch in kept for answer in answers_to(batch)] + [NOT_PICKLABLE] * 3


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 0, "threads_per_worker": 3}, {"workers": 2}])
@pytest.mark.parametrize("block", [7, 1000])
def test_batch_elements_and_rows_that_are_batches(options, block):
    lists = ps.BatchElements(max_batch_size=40, max_batch_weight=50, element_size_fn=weigh)
    got = run(ps.RunInference(Whole().with_no_batching()), Splits(block), before=[lists], **options)
    assert got == answers(by_weight(50, 40))


def test_a_step_in_a_process_of_its_own():
    pipeline = ps.Pipeline(deterministic=True, workers=0)
    good, bad = (
        pipeline | ps.Read(Splits()) | ps.Map(lambda row: 1 // (row % 97)).with_exception_handling(use_subprocess=True)
    )
    got = ((good, bad | ps.Map(lambda pair: pair[0])) | ps.Flatten()).collect()
    rows = [row for split in range(SPLITS) for row in split_rows(split)]
    assert got == [1 // (row % 97) for row in rows if row % 97] + [row for row in rows if not row % 97]


# Again after a death.


class DiesOnce(Whole):
    def __init__(self, flag, **settings):
        super().__init__(**settings)
        self.flag = flag

    def run_inference(self, batch, model, inference_args=None):
        if 2000 in batch and not os.path.exists(self.flag):
            open(self.flag, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return answers_to(list(batch))


@pytest.mark.parametrize("settings", [{}, {"large_model": True}], ids=["worker", "host"])
def test_a_split_that_runs_again_gives_the_same_answers(tmp_path, settings):
    pipeline = ps.Pipeline(deterministic=True, workers=2, threads_per_worker=2)
    got = (pipeline | ps.Read(Splits()) | ps.RunInference(DiesOnce(str(tmp_path / "died"), **settings))).collect()
    assert (tmp_path / "died").exists()
    assert pipeline.result.worker_deaths == (0 if settings else 1)
    assert got == answers(of_size(FIXED_ROWS))


def test_what_a_stage_makes_for_the_next_is_cut_alike_for_any_number_of_workers():
    steps = [ps.FlatMap(lambda row: [row] * 3), ps.Reshuffle()]
    first = run(ps.RunInference(Whole()), before=steps, workers=0)
    assert run(ps.RunInference(Whole()), before=steps, workers=3) == first
    assert run(ps.RunInference(Whole()), before=steps, workers=1, threads_per_worker=2) == first


# The pure part.


class Cuts:
    """Rows, and two ways to cut them into pushes."""

    def __init__(self, rows, cuts):
        self.rows = rows  # (weight, length, bytes)
        self.cuts = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})

    def batches(self, limits, by_length, cuts):
        fixed = FixedBatches(limits, by_length)
        found = []
        for start, stop in itertools.pairwise(cuts):
            weights, lengths, sizes = zip(*self.rows[start:stop], strict=True)
            entry = Entry(start, stop - start, weights=weights, lengths=lengths if by_length else None)
            found += fixed.add(entry, sizes if by_length else ())
        found += fixed.flush()
        return [[item + at for item, start, stop in pieces for at in range(start, stop)] for pieces in found]


cases = st.builds(
    Cuts,
    st.lists(
        st.tuples(st.integers(0, 6) | st.sampled_from([0.1, 0.7]), st.integers(0, 9), st.integers(0, 40)),
        min_size=1,
        max_size=60,
    ),
    st.lists(st.integers(0, 60), max_size=12),
)
some_limits = st.builds(
    BatchLimits,
    max_size=st.none() | st.integers(1, 9),
    max_weight=st.none() | st.integers(1, 12),
    weigh=st.just(len),
    max_wait=st.none() | st.just(0.0),
    max_padded_cost=st.none() | st.integers(1, 40),
    lookahead_rows=st.none() | st.integers(1, 20),
    lookahead_bytes=st.integers(1, 300),
    length_buckets=st.sampled_from([(), (4, 8)]),
    size_buckets=st.sampled_from([(), (2, 5)]),
)


@given(cases, some_limits, st.booleans())
@example(Cuts([(5, 0, 0), (5, 0, 0), (0, 0, 0)], [2]), BatchLimits(max_weight=10, weigh=len), False)
@example(Cuts([(0.1, 0, 0)] * 11, [3]), BatchLimits(max_weight=1, weigh=len), False)
@example(Cuts([(float("inf"), 0, 0), (1, 0, 0)], []), BatchLimits(max_weight=1, weigh=len), False)
def test_how_rows_are_cut_into_pushes_does_not_matter(case, limits, by_length):
    fixed = limits.fixed(by_length)
    whole = case.batches(fixed, by_length, [0, len(case.rows)])
    assert case.batches(fixed, by_length, case.cuts) == whole
    assert case.batches(fixed, by_length, list(range(len(case.rows) + 1))) == whole
    assert sorted(at for batch in whole for at in batch) == list(range(len(case.rows)))
    for batch in whole:
        rows = [case.rows[at] for at in batch]
        assert limits.max_size is None or limits.size_buckets or len(batch) <= limits.max_size
        assert (
            limits.max_weight is None
            or len(batch) == 1
            or sum(Fraction(weight) for weight, _, _ in rows) <= limits.max_weight
        )
        if by_length and limits.max_padded_cost is not None and len(batch) > 1:
            longest = max(1, fixed.padded_length(max(size for _, size, _ in rows)))
            assert len(batch) * longest <= limits.max_padded_cost


# In front of a session.


class Counting(Whole):
    def __init__(self, poison=None, **settings):
        super().__init__(**settings)
        self.calls, self.poison = 0, poison

    def run_inference(self, batch, model, inference_args=None):
        self.calls += 1
        if self.poison in batch:
            raise ValueError("poison")
        return answers_to([0] * len(batch))


@pytest.fixture
def sessions():
    made = ProcessSessions(Metrics())
    yield made
    made.close()


def stream_of(sessions, handler):
    return open_stream(InferenceSpec.of(handler).fixed(), "step", sessions)


@pytest.mark.parametrize("settings", [{}, {"batch_length_fn": len, "lookahead_bytes": 1 << 20}], ids=["plain", "lengths"])
def test_rows_in_flight_are_bounded(sessions, settings):
    """In bytes, too: here are rows of 64 KB, and windows of 1 MB, or of 64 MB where batches are not of like length."""
    stream = stream_of(sessions, Counting(**settings))
    most, given = 0, 0
    for number in range(400):
        given += sum(len(made.block) for made in stream.push([bytes(65536)] * 8))
        most = max(most, 8 * (number + 1) - given)
    given += sum(len(made.block) for made in stream.finish())
    stream.close()
    assert given == 3200
    assert most <= (64 if settings else 2048 + 128)


def test_an_error_is_seen_before_many_more_batches_run(sessions):
    handler = Counting(poison=3)
    stream = stream_of(sessions, handler)
    with pytest.raises(StepError, match="row: 3"):
        for number in range(100):
            list(stream.push(list(range(64 * number, 64 * number + 64))))
    stream.close()
    assert handler.calls < 20


# Said and set.


def test_explain_says_it():
    def explained(handler, **options):
        pipeline = ps.Pipeline(**options)
        pipeline | ps.Create(range(5)) | ps.RunInference(handler)
        return pipeline.explain()

    assert "deterministic: batches of 64 rows inside a split" in explained(Whole(), deterministic=True)
    assert "deterministic: batches of 9 rows inside a split" in explained(Whole(max_batch_size=9), deterministic=True)
    assert "no row waits" not in explained(Whole(max_batch_duration_secs=1), deterministic=True)
    told = "deterministic: batches of rows of like length out of 16384, padded cost at most 16384, inside a split"
    assert told in explained(Whole(batch_length_fn=len), deterministic=True)
    assert "deterministic" not in explained(Whole())


def test_wrong_options():
    with pytest.raises(UsageError, match="deterministic='yes': expected True or False"):
        ps.Pipeline(deterministic="yes")
    with pytest.raises(UsageError, match="seed=1.5: expected a whole number"):
        ps.Pipeline(deterministic=True, seed=1.5)


def test_without_it_sizes_are_found_while_running():
    pipeline = ps.Pipeline(workers=0, seed=3)
    got = (pipeline | ps.Read(Splits()) | ps.RunInference(Whole())).collect()
    assert [note.name for note in pipeline.result.metrics.notes] == ["batch_size_found"]
    assert got[0][0] == 8, "where the search begins"
    fixed = ps.Pipeline(workers=0, deterministic=True)
    (fixed | ps.Read(Splits()) | ps.RunInference(Whole())).collect()
    assert not fixed.result.metrics.notes
