"""Functions over rows, rows in messages, blocks and their sizes, metrics, lines of progress."""

from __future__ import annotations

import io
import math
import pickle
import traceback

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import blocks
from penstock.blocks import Pacer, byte_size, fitting_rows, is_table, join, row_count, rows_of, size_of, slice_rows
from penstock.errors import StepError
from penstock.observe.metrics import Distribution, MetricKey, Metrics
from penstock.observe.pace import Pace, share_done
from penstock.observe.progress import PlainProgress, Progress, StageProgress, render
from penstock.rows import map_rows, original_traceback, row_error, safe_str, shorten, user_traceback

# One function over many rows.


@given(st.lists(st.integers()))
def test_map_rows_is_map(rows):
    calls = []

    def double(row):
        calls.append(row)
        return 2 * row

    assert map_rows(double, rows, "step") == [2 * row for row in rows]
    assert calls == rows


@pytest.mark.parametrize("at", [0, 3, 9])
@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("k"), StopIteration("s"), RecursionError("deep")])
def test_the_row_that_raises_is_named_and_no_later_one_is_tried(at, error):
    seen = []

    def function(row):
        seen.append(row)
        if row == f"row {at}":
            raise error
        return row

    with pytest.raises(StepError) as caught:
        map_rows(function, [f"row {n}" for n in range(10)], "my step")
    message = str(caught.value)
    assert message.startswith(f"step 'my step': {type(error).__name__}: ")
    assert f"row: 'row {at}'" in message
    assert seen == [f"row {n}" for n in range(at + 1)]
    if not isinstance(error, StopIteration):
        assert caught.value.__cause__ is error


def test_next_on_an_empty_iterator_does_not_end_the_rows_early():
    with pytest.raises(StepError, match="StopIteration.*\n  row: 2"):
        map_rows(lambda row: next(iter([row] if row != 2 else [])), [1, 2, 3], "step")


@pytest.mark.parametrize(("raised", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (SystemExit, StepError)])
def test_ctrl_c_is_not_an_error_of_a_row_but_sys_exit_is(raised, seen):
    def function(row):
        raise raised

    with pytest.raises(seen):
        map_rows(function, [1], "step")


# Rows and errors in messages.


class Mute:
    def __repr__(self):
        raise RuntimeError("no")


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("no")


def test_shorten():
    assert shorten({"a": 1}) == "{'a': 1}"
    assert shorten("x" * 198) == repr("x" * 198)
    long = shorten("x" * 1000)
    assert len(long) == 200
    assert long.endswith("xxx...")
    assert shorten("x" * 50, limit=10) == "'xxxxxx..."
    assert shorten(Mute()) == "<Mute whose repr raises RuntimeError>"
    assert shorten([Mute()]) == "<list whose repr raises RuntimeError>"


def test_safe_str():
    assert safe_str(ValueError("what")) == "what"
    assert safe_str(MuteError()) == "(its message cannot be shown)"
    assert "(its message cannot be shown)" in str(row_error("step", Mute(), MuteError()))


@pytest.mark.parametrize("error", [ValueError("a\nb"), NameError("n"), ExceptionGroup("g", [KeyError(1)]), SystemExit(3)])
def test_a_traceback_is_told_as_python_tells_it_each_time(error):
    def fail(number):
        if number:
            fail(number - 1)
        raise error

    for depth in (0, 2, 2, 0):
        with pytest.raises(type(error)) as caught:
            fail(depth)
        error.add_note(f"depth {depth}")
        expected = "".join(traceback.format_exception(caught.value)).rstrip()
        assert user_traceback(caught.value) == expected
        error.__traceback__ = None


def test_the_original_traceback_starts_at_the_users_code():
    def users_code(row):
        raise ZeroDivisionError("here")

    with pytest.raises(StepError) as caught:
        map_rows(users_code, [1], "step")
    text = original_traceback(caught.value)
    assert "users_code" in text
    assert "map_rows" not in text
    assert text.endswith("ZeroDivisionError: here")


# Blocks.


def test_a_table_and_a_list_are_read_alike():
    rows = [{"x": n, "y": str(n)} for n in range(5)]
    table = pa.Table.from_pylist(rows)
    assert (is_table(table), is_table(rows)) == (True, False)
    for block in (rows, table):
        assert rows_of(block) == rows
        assert row_count(block) == 5
        assert rows_of(slice_rows(block, 1, 3)) == rows[1:3]
        assert slice_rows(block, 0, 5) is block
        assert rows_of(join([slice_rows(block, 0, 2), slice_rows(block, 2, 5)])) == rows
        assert join([block]) is block


@pytest.mark.parametrize("text", ["plain", "b\u00e4ume", "\u6797\u6728"])
def test_equal_rows_have_equal_sizes_whatever_became_of_them(text):
    """Python keeps room for lists to grow, and the bytes of a text that was pickled."""
    grown, told = [], "".join(text)
    for _ in range(5):
        grown.append(told)
    pickle.dumps(told, protocol=5)
    shrunk = {name: name for name in "abcdefghijklmnop"}
    for name in "bcdefghijklmnop":
        del shrunk[name]
    assert size_of(grown) == size_of([text] * 5)
    assert size_of(shrunk) == size_of({"a": "a"})
    assert size_of(bytearray().join([b"xyz"] * 9)) == size_of(bytearray(27))


def test_the_size_of_arrays_is_exact_and_that_of_containers_close():
    assert size_of(np.zeros(1000)) == 8000
    assert byte_size(pa.table({"x": np.zeros(1000)}).slice(0, 10)) == 80
    assert size_of("x" * 1000) >= 1000
    assert 8000 <= size_of({"image": np.zeros(1000)}) <= 9000
    assert 16000 <= size_of((1, [np.zeros(1000), np.zeros(1000)])) <= 17000
    assert byte_size([]) == 0
    assert 800_000 <= byte_size([np.zeros(100) for _ in range(1000)]) <= 900_000


def test_fitting_rows():
    assert fitting_rows([]) == fitting_rows([1, 2, 3]) == blocks.MAX_ROWS
    assert fitting_rows([np.zeros(blocks.MAX_BYTES // 8)]) == 1
    assert fitting_rows([np.zeros(blocks.MAX_BYTES)]) == 1
    assert fitting_rows([b""] * 3) == blocks.MAX_ROWS
    assert fitting_rows([np.zeros(blocks.MAX_BYTES // 80)]) == 10


@given(st.lists(st.integers(), max_size=300), st.lists(st.integers(1, 50), min_size=1))
def test_a_pacer_cuts_without_losing_a_row(rows, learned):
    pacer, pieces = Pacer(), []
    for number, piece in enumerate(pacer.pieces(rows)):
        assert 0 < len(piece) <= pacer.rows
        pieces.append(piece)
        pacer.rows = learned[number % len(learned)]
    assert [row for piece in pieces for row in piece] == rows


def test_a_pacer_starts_small_and_learns():
    pacer = Pacer()
    sizes = []
    for piece in pacer.pieces(list(range(10_000))):
        sizes.append(len(piece))
        pacer.saw(piece)
    assert sizes == [16, blocks.MAX_ROWS, blocks.MAX_ROWS, 10_000 - 16 - 2 * blocks.MAX_ROWS]
    pacer.saw([np.zeros(blocks.MAX_BYTES // 16)])
    assert pacer.rows == 2
    whole = [1, 2]
    assert next(pacer.pieces(whole)) is whole


# Metrics.

numbers = st.lists(st.integers(-1000, 1000))


def distribution_of(values):
    made = Distribution()
    for value in values:
        made.record(value)
    return made


@given(numbers, numbers)
def test_merged_distributions_are_those_of_all_values(one, other):
    merged = distribution_of(one)
    merged.merge(distribution_of(other))
    assert merged == distribution_of([*one, *other])
    assert merged.count == len(one) + len(other)
    if merged.count:
        assert (merged.min, merged.max) == (min(one + other), max(one + other))
        assert merged.mean == pytest.approx(sum(one + other) / merged.count)
    else:
        assert math.isnan(merged.mean)


KEYS = [MetricKey(step, "ns", name) for step in ("a", "b") for name in ("rows", "sizes")]
events = st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS), st.integers(0, 9)))


def metrics_of(happened):
    made = Metrics()
    for counted, key, value in happened:
        if counted:
            made.count(key, value)
        else:
            made.record(key, value)
    return made


@given(events, events)
def test_merged_metrics_are_those_of_all_events(one, other):
    merged = metrics_of(one)
    merged.merge(metrics_of(other))
    assert merged == metrics_of([*one, *other])


@given(events, events)
def test_what_is_drained_is_drained_once(one, other):
    metrics = metrics_of(one)
    total = metrics.drain()
    assert metrics == Metrics()
    assert total == metrics_of(one)
    metrics.merge(metrics_of(other))
    kept = metrics.drain()
    assert total == metrics_of(one), "a later event changed what was handed out"
    total.merge(kept)
    assert total == metrics_of([*one, *other])


def test_merging_does_not_tie_two_metrics_together():
    one, other = Metrics(), Metrics()
    other.record(KEYS[0], 1)
    one.merge(other)
    other.record(KEYS[0], 2)
    assert one.distribution("rows").count == 1


def test_metrics_by_name_and_step():
    metrics = Metrics()
    for step, n in (("a", 2), ("b", 3)):
        metrics.count(MetricKey(step, "ns", "rows"), n)
        metrics.record(MetricKey(step, "ns", "sizes"), 10 * n)
    assert metrics.counter("rows") == 5
    assert metrics.counter("rows", step="b") == 3
    assert metrics.counter("other") == 0
    assert metrics.distribution("sizes").sum == 50
    assert metrics.distribution("sizes", step="a") == distribution_of([20])
    metrics.distribution("sizes").record(99)
    assert metrics.distribution("sizes").count == 2, "asking hands out a copy"


# Progress.

stages = st.builds(
    StageProgress,
    name=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80),
    rows=st.integers(0, 10**12),
    known=st.none() | st.integers(0, 10**12),
    batch_size=st.none() | st.floats(1, 1e5),
    failures=st.integers(0, 10**6),
    before=st.integers(0, 10**12),
    share=st.none() | st.floats(0, 1),
)


@given(stages, st.none() | st.floats(0, 1e9), st.floats(0, 1e7), st.integers(2, 300))
def test_a_line_always_fits_the_terminal(stage, rate, seconds, width):
    line = render(stage, rate, seconds, width)
    assert len(line) < width
    assert "\n" not in line


def test_lines():
    stage = StageProgress("stage 0: read > model", 1_500, 10_000, 31.96, 2)
    assert render(stage, 150.0, 10.0, 120) == (
        "stage 0: read > model | 1,500 of 10,000 rows | 150 rows/s | batch 32 | 2 failed | 0:57 left"
    )
    assert render(StageProgress("s", 1_500, None, None), 150.0, 10.0, 120) == "s | 1,500 rows | 150 rows/s | 0 failed"
    assert render(StageProgress("s", 1_500, None, None, 0, 500, 0.25), 100.0, 10.0, 120) == (
        "s | 1,500 rows | 100 rows/s | 0 failed | 25% done | 0:30 left"
    )
    assert render(StageProgress("s", 1_500, None, None, share=1.0), 1.0, 10.0, 120).endswith("| 0 failed")
    assert render(StageProgress("s", 9, None, None, share=5e-324), 1.0, 10.0, 120).endswith("| 0 failed"), "too early"
    assert render(StageProgress("s", 0, 100, None), None, 0.0, 120) == "s | 0 of 100 rows | 0 failed"
    assert render(StageProgress("s", 100, 100, None), 1.0, 1.0, 120).endswith("| 0 failed")
    assert render(StageProgress("s", 1, 10_001, None), 1.0, 1.0, 120).endswith("| 2:46:40 left")
    assert render(StageProgress("s", 10, 70, None), 1.0, 10.0, 120).endswith("| 1:00 left")


@pytest.mark.parametrize(
    ("mean", "shown"), [(8192.0, "8192"), (8.19e5, "819000"), (99.96, "100"), (99.9, "99.9"), (32.0, "32"), (1.25, "1.2")]
)
def test_batch_sizes_can_be_read(mean, shown):
    assert f" | batch {shown} | " in render(StageProgress("s", 1, None, mean), None, 0.0, 120)


def test_what_matters_least_gives_way_first():
    name = "stage 0: RunInference(SklearnModelHandlerNumpy)"
    stage = StageProgress(name, 125_000, 1_000_000, 8191.7, 0)
    assert render(stage, 3_164.0, 40.0, 100) == (
        "stage 0: ...erNumpy) | 125,000 of 1,000,000 rows | 3,164 rows/s | batch 8192 | 0 failed | 4:37 left"
    )
    assert render(stage, 3_164.0, 40.0, 80) == (
        "stage...umpy) | 125,000 of 1,000,000 rows | 3,164 rows/s | 0 failed | 4:37 left"
    )
    assert render(stage, 3_164.0, 40.0, 60) == "stage 0:...erNumpy) | 125,000 of 1,000,000 rows | 4:37 left"
    failed = StageProgress(name, 125_000, 1_000_000, 8191.7, 40)
    assert " | 40 failed | 4:37 left" in render(failed, 3_164.0, 40.0, 70)
    assert "rows/s" not in render(failed, 3_164.0, 40.0, 70)


def test_a_long_name_gives_way_to_the_numbers():
    line = render(StageProgress("a" * 100 + "b" * 100, 5, 10, None), 5.0, 1.0, 80)
    assert line.startswith("aaa")
    assert line.endswith("a...bbbbbbbbbbbbb | 5 of 10 rows | 5 rows/s | 0 failed | 0:01 left")
    assert len(line) == 79


# Pace.


def test_a_rate_is_counted_from_the_first_row_that_was_done():
    pace = Pace()
    for second in range(100):  # workers start and models load
        pace.saw(0, second)
    assert pace.rate(99) is None
    assert pace.seconds(99) == 0
    pace.saw(50, 100)
    assert pace.rate(100) is None, "too early to tell"
    pace.saw(250, 102)
    assert pace.rate(102) == 100
    assert pace.seconds(102) == 2


def test_a_rate_is_of_the_recent_past():
    pace = Pace()
    for second in range(200):
        pace.saw(1 + 100 * second, second)
    for second in range(200, 300):
        pace.saw(1 + 20_000 + 10 * (second - 200), second)
    assert pace.rate(299) == 10
    assert pace.rate(359) == 5, "a stage that stands still becomes slower"


def test_rows_of_earlier_processes_took_no_time_of_this_one():
    pace = Pace(before=500)
    pace.saw(500, 1)
    assert pace.rate(1) is None
    pace.saw(600, 2)
    pace.saw(700, 4)
    assert pace.rate(4) == 50


@given(st.integers(0, 100), st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 100))))
def test_rows_never_become_fewer_and_a_rate_is_never_negative(before, steps):
    pace, now, seen = Pace(before), 0.0, [before]
    for rows, seconds in steps:
        now += seconds
        pace.saw(rows, now)
        seen.append(pace.rows)
        assert (pace.rate(now) or 0) >= 0
    assert seen == sorted(seen)
    assert seen[-1] == max([before, *(rows for rows, _ in steps)])


def test_a_split_that_runs_again_takes_no_rows_back(monkeypatch):
    monkeypatch.setattr("penstock.observe.progress.REPAINT_EVERY", 0.0)
    out = io.StringIO()
    progress = Progress(out)
    for rows in (10, 400, 7):
        progress.show([StageProgress("s", rows, 1000, None)])
    assert [line.split(" | ")[1] for line in out.getvalue().split("\n")[:-1]] == [
        f"{n} of 1,000 rows" for n in (10, 400, 400)
    ]


def test_pictures_are_painted_over_and_the_last_one_stays(monkeypatch):
    out = io.StringIO()
    progress = Progress(out)
    stages = [StageProgress("one", 1, None, None), StageProgress("two", 2, None, None)]
    progress.show(stages)
    painted = out.getvalue()
    monkeypatch.setattr("penstock.observe.progress.REPAINT_EVERY", math.inf)
    progress.show(stages)
    assert out.getvalue() == painted, "not twice within a blink"
    progress.finish(stages[:1])
    first, last = painted, out.getvalue()[len(painted) :]
    assert first.count("\n") == 2
    assert "\x1b[2A" not in first
    assert last.startswith("\x1b[2A\rone | ")
    assert last.endswith("\x1b[K\n")


def test_what_a_stage_does_before_its_first_row():
    stage = StageProgress("stage 0: model", 0, 500, None, state="loading the model")
    assert render(stage, None, 0.0, 100) == "stage 0: model | 0 of 500 rows | loading the model | 0 failed"


def test_plain_lines_come_now_and_then_and_less_often_later():
    out, now = io.StringIO(), [0.0]
    progress = PlainProgress(out, clock=lambda: now[0])
    at = []
    for second in range(300):
        now[0] = second
        before = out.tell()
        progress.show([StageProgress("stage 0: s", 10 * second, 5000, None)])
        at += [second] if out.tell() > before else []
    assert at == [10, 30, 70, 130, 190, 250]
    progress.finish([StageProgress("stage 0: s", 3000, 5000, None)])
    lines = out.getvalue().splitlines()
    assert lines[0] == "penstock: stage 0: s | 100 of 5,000 rows | 10 rows/s | 0 failed | 8:10 left"
    assert lines[-1].startswith("penstock: stage 0: s | 3,000 of 5,000 rows | 10 rows/s")
    assert not {"\r", "\x1b"} & set(out.getvalue())


def test_a_run_of_seconds_has_no_plain_lines():
    out, now = io.StringIO(), [0.0]
    progress = PlainProgress(out, clock=lambda: now[0])
    for second in range(10):
        now[0] = second
        progress.show([StageProgress("s", second, 10, None)])
    progress.finish([StageProgress("s", 10, 10, None)])
    assert out.getvalue() == ""


def test_the_share_that_is_done_moves_with_the_rows_of_splits_at_work():
    assert share_done(0, 0, 0, []) is None
    assert share_done(8, 0, 0, [50]) == 0, "how long a split is, is not known yet"
    assert share_done(8, 2, 200, [50, 25]) == (2 + 0.5 + 0.25) / 8
    assert share_done(8, 7, 700, [5000]) == (7 + 0.95) / 8, "a split that is longer than others"
    assert share_done(8, 8, 800, []) == 1


@given(st.integers(1, 50), st.data())
def test_the_share_that_is_done_is_a_share_and_grows(splits, data):
    done = data.draw(st.integers(0, splits))
    rows = done * data.draw(st.integers(1, 100))
    at_work = data.draw(st.lists(st.integers(0, 300), max_size=splits - done))
    share = share_done(splits, done, rows, at_work)
    assert done / splits <= share <= 1
    assert share <= share_done(splits, done, rows, [each + 1 for each in at_work]) <= 1
