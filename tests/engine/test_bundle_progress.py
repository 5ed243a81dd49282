"""How far a bundle has come: rows that are through its steps, not rows that were read."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.blocks import row_count
from penstock.inference.sessions import ProcessSessions
from penstock.io.source import Source
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics
from penstock.run.plan import make_plan
from penstock.steps.bundle import Assignment, StageRunner
from penstock.steps.bundle_progress import RowsLine


class Rows(Source):
    """Blocks as they are given; one split."""

    def __init__(self, *blocks):
        self.blocks = blocks

    def splits(self, goal):
        return [0]

    def read(self, split):
        yield from self.blocks


class Model(ps.ModelHandler):
    """Asks, at every call, how many rows are done."""

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        SEEN.append(ASK())
        return list(batch)


class ColumnModel(Model):
    def takes_columns(self):
        return True

    def run_inference_columns(self, batch, model, inference_args=None):
        SEEN.append(ASK())
        return [0] * row_count(batch)


SEEN: list[int] = []
ASK = int  # replaced by the runner's own


@pytest.fixture
def seen(monkeypatch):
    """Run a pipeline as one bundle; what was done at each call of Model or of ask()."""
    monkeypatch.setattr("penstock.models.front.QUICK", 0.0)  # batches of a millisecond are counted together otherwise

    def run(build, *blocks, **around):
        p = ps.Pipeline()
        build(p | ps.Read(Rows(*blocks)))
        plan = make_plan(p.graph())
        runner = StageRunner(plan.stages[0], {}, ProcessSessions(Metrics(), Surroundings(**around)))
        SEEN.clear()
        monkeypatch.setattr(f"{__name__}.ASK", lambda: runner.rows_done)
        result = runner.run(Assignment("run", (0,), 1, 0, 0), lambda outlet: None)
        assert runner.rows_done == 0, "the next bundle has done nothing yet"
        return list(SEEN), result.rows_read

    return run


BIG = list(range(10_000))  # one block of the input
BATCH = 100


def model(kind=Model, **options):
    return ps.RunInference(kind(max_batch_size=BATCH, **options))


def test_rows_that_were_read_are_not_done(seen):
    asked, read = seen(lambda rows: rows | model(), BIG, BIG)
    assert read == 20_000
    assert asked[0] == 0, "the block was read, and none of it answered"
    assert asked == sorted(asked)
    assert all(done <= BATCH * calls for calls, done in enumerate(asked)), "never more than was answered"
    assert asked[-1] >= read - 2 * BATCH


def test_columns_that_go_to_the_model_whole(seen):
    table = pa.table({"a": BIG})
    asked, _ = seen(lambda rows: rows | model(ColumnModel), table, table)
    assert asked == list(range(0, 20_000, BATCH)), "one ticket of 10,000 rows is answered batch by batch"


@pytest.mark.parametrize(
    ("before", "rows_for_each"),
    [
        (ps.Map(lambda x: x), 1),
        (ps.Map(lambda x: x).with_exception_handling(), 1),
        (ps.Filter(lambda x: x % 10 == 0), 0.1),
        (ps.FlatMap(lambda x: [x] * 5), 5),
        (ps.MapBatches(lambda rows: rows, batch_size=3000), 1),
    ],
)
def test_steps_in_front_of_the_model_do_not_run_ahead(seen, before, rows_for_each):
    def build(rows):
        made = rows | before
        (made[0] if isinstance(made, tuple) else made) | model()

    asked, read = seen(build, BIG, BIG, BIG)
    assert read == 30_000
    assert asked[0] == 0
    for calls, done in enumerate(asked):
        assert abs(done - calls * BATCH / rows_for_each) <= 3000, "held back by MapBatches, or by the last batch of a block"
    assert len(asked) >= 30


def test_a_row_is_done_when_the_last_model_has_answered_it(seen):
    asked, read = seen(lambda rows: rows | "one" >> model() | "two" >> model(), BIG)
    assert asked[0] == 0
    assert max(asked) <= read
    assert sum(done < 5000 for done in asked) >= len(asked) // 3, "the first model does not count for both"


def test_a_fork_follows_the_way_with_a_model(seen):
    def build(rows):
        rows | model()
        rows | ps.Map(lambda x: x)

    asked, _ = seen(build, BIG)
    assert asked[0] == 0
    assert asked[50] in range(4000, 5001)


def test_a_slow_step_that_is_no_model(seen):
    asked, _ = seen(lambda rows: rows | ps.Map(lambda x: SEEN.append(ASK())), BIG)
    assert asked == sorted(asked)
    assert asked[16] == 16
    assert asked[-1] in range(5000, 10_000)


def test_batches_that_come_as_rows(seen):
    batches = [list(range(size)) for size in (10, 30, 60)] * 10
    asked, read = seen(lambda rows: rows | ps.RunInference(Model().with_no_batching()), batches)
    assert read == 30
    assert asked[:4] == [0, 0, 1, 3], "by their rows: of 30 batches with 1,000 rows, those with 10, 40 and 100"
    assert asked == sorted(asked)
    assert asked[-1] < 30


def test_fixed_batches(seen):
    asked, _ = seen(lambda rows: rows | model(), BIG, BIG, seed=1)
    assert asked == sorted(asked)
    assert all(done <= BATCH * calls for calls, done in enumerate(asked))


class Step:
    """Gives every row on in pieces, and does what a script says in between."""

    def __init__(self, onward=None, piece=3):
        self.taken = 0
        self.onward = onward
        self.piece = piece

    def push(self, block):
        for at in range(0, len(block), self.piece):
            self.taken += len(block[at : at + self.piece])
            if self.onward is not None:
                self.onward(block[at : at + self.piece])

    def rows_in_block(self, block):
        return len(block)

    def rows_given(self):
        return self.taken

    rows_through = rows_given


@given(st.lists(st.integers(1, 20), max_size=10), st.integers(1, 7), st.integers(1, 7))
def test_a_line_only_grows_and_ends_with_all_rows(sizes, first, second):
    line, seen, ended = RowsLine(), [], []
    one, two, three = Step(piece=first), Step(piece=second), Step(lambda _: seen.append(line.rows_done()), piece=1)
    entry = line.gauged(one)
    one.onward, two.onward = line.gauged(two), line.gauged(three)
    for size in sizes:
        line.push([0] * size, entry)
        ended.append(line.rows_done())
    assert ended == [sum(sizes[: n + 1]) for n in range(len(sizes))]
    assert all(done <= rows for rows, done in enumerate(seen, 1)), "each row of the last step is one of the input"
    assert line.rows_read == sum(sizes)
    line.start()
    assert line.rows_done() == line.rows_read == 0
