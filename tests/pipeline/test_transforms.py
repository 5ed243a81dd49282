"""Every transform, on every way of running: the in-process way is the specification."""

from __future__ import annotations

import os
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import GraphError, StepError

ROWS = 5000


def test_rows_come_back_in_order(pipeline):
    assert (pipeline() | ps.Create(range(ROWS))).collect() == list(range(ROWS))


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_few_rows(pipeline, rows):
    assert (pipeline() | ps.Create(list(range(rows))) | ps.Map(str)).collect() == [str(i) for i in range(rows)]


def test_map_filter_flatmap(pipeline):
    made = (
        pipeline()
        | ps.Create(range(ROWS))
        | ps.Map(lambda x, by: x * by, 3)
        | ps.Filter(lambda x: x % 2 == 0)
        | ps.FlatMap(lambda x: [x] * (x % 3 + 1))
    )
    expected = [y for x in range(ROWS) if (x * 3) % 2 == 0 for y in [x * 3] * ((x * 3) % 3 + 1)]
    assert made.collect() == expected


def test_flatmap_takes_a_generator_as_it_comes(pipeline):
    made = pipeline() | ps.Create([200_000]) | ps.FlatMap(range) | ps.Filter(lambda x: x % 1000 == 0)
    assert made.collect() == list(range(0, 200_000, 1000))


def test_map_batches_of_rows(pipeline):
    made = pipeline() | ps.Create(range(1000)) | ps.MapBatches(lambda rows: [(len(rows), sum(rows))], batch_size=50)
    batches = made.collect()
    assert sum(total for _, total in batches) == sum(range(1000))
    assert max(size for size, _ in batches) == 50


def test_map_batches_of_columns(pipeline):
    def double(table):
        assert isinstance(table, pa.Table)
        return table.append_column("y", pa.array([2 * x for x in table["x"].to_pylist()]))

    rows = [{"x": i} for i in range(300)]
    made = pipeline() | ps.Create(rows) | ps.MapBatches(double, batch_size=64, format="arrow")
    assert made.collect() == [{"x": i, "y": 2 * i} for i in range(300)]


@pytest.mark.parametrize(
    "columns",
    [
        lambda rows: pd.DataFrame({"n": rows, "text": list(map(str, rows))}, index=[7] * len(rows)),
        lambda rows: pd.DataFrame({"text": list(map(str, rows))}, index=pd.Index(rows, name="n")),
        lambda rows: pa.table({"n": rows, "text": list(map(str, rows))}),
        lambda rows: pa.record_batch({"n": rows, "text": list(map(str, rows))}),
        lambda rows: {"n": rows, "text": list(map(str, rows))},
        lambda rows: {"n": np.array(rows), "text": pa.array(map(str, rows))},
        lambda rows: {"n": np.array(rows), "text": pd.Series(map(str, rows))},
    ],
)
def test_map_batches_takes_columns_of_every_kind_as_columns(pipeline, columns):
    made = (pipeline() | ps.Create(range(50)) | ps.MapBatches(columns, batch_size=20)).collect()
    assert made == [{"n": row, "text": str(row)} for row in range(50)]
    assert type(made[0]["n"]) is int


def test_a_dict_of_columns_keeps_values_that_arrow_would_change():
    values = [1, 2.5, None, {"a": 1}, {"b": (1, 2)}]
    made = (ps.Pipeline() | ps.Create([0]) | ps.MapBatches(lambda rows: {"v": values, "a": np.ones((5, 2))})).collect()
    assert [row["v"] for row in made] == values
    assert type(made[0]["v"]) is int
    assert made[0]["a"].tolist() == [1.0, 1.0]


class Lives(ps.DoFn):
    """Counts its own bundles, so that the order of its life can be seen from outside."""

    def setup(self):
        self.life = ["setup"]

    def start_bundle(self):
        self.life.append("start")

    def process(self, element, add=0):
        self.life.append("process")
        yield element + add

    def finish_bundle(self):
        seen, self.life = self.life, ["setup"]
        yield tuple(dict.fromkeys(seen))


def test_dofn_lives(pipeline):
    made = (pipeline() | ps.Create(range(100)) | ps.ParDo(Lives(), add=1000)).collect()
    assert [row for row in made if not isinstance(row, tuple)] == list(range(1000, 1100))
    assert {row for row in made if isinstance(row, tuple)} == {("setup", "start", "process")}


def test_teardown_is_called_for_every_setup(pipeline, tmp_path):
    class Marks(ps.DoFn):
        def setup(self):
            self.name = f"{os.getpid()}-{threading.get_ident()}"
            (tmp_path / f"setup-{self.name}").touch()

        def process(self, element):
            return None

        def teardown(self):
            (tmp_path / f"teardown-{self.name}").touch()

    assert (pipeline() | ps.Create(range(2000)) | ps.ParDo(Marks())).collect() == []
    names = [path.name for path in tmp_path.iterdir()]
    ups = {name.removeprefix("setup-") for name in names if name.startswith("setup-")}
    assert ups == {name.removeprefix("teardown-") for name in names if name.startswith("teardown-")}
    assert ups


def test_tagged_outputs(pipeline):
    def by_sign(x):
        if x == 0:
            return None
        return [x] if x > 0 else [ps.TaggedOutput("negative", x)]

    p = pipeline()
    outputs = p | ps.Create(range(-50, 51)) | ps.ParDo(by_sign).with_outputs("negative", main="positive")
    assert outputs.positive.collect() == list(range(1, 51))
    assert outputs["negative"].collect() == list(range(-50, 0))
    positive, negative = outputs
    assert (positive, negative) == (outputs.positive, outputs.negative)


def test_a_tag_that_is_not_named_is_an_error(pipeline):
    made = pipeline() | ps.Create([1]) | ps.ParDo(lambda x: [ps.TaggedOutput("other", x)]).with_outputs("known", main="rest")
    with pytest.raises(StepError, match="'other'.*with_outputs"):
        made.rest.collect()


def test_partition(pipeline):
    parts = pipeline() | ps.Create(range(1000)) | ps.Partition(lambda x, n: x % n, 3)
    assert len(parts) == 3
    assert [part.collect() for part in parts] == [list(range(k, 1000, 3)) for k in range(3)]


def test_partitions_by_number():
    parts = ps.Pipeline(workers=0) | ps.Create(range(9)) | ps.Partition(lambda x, n: x % n, 3)
    assert parts[0].collect() == parts["0"].collect() == [0, 3, 6]
    assert parts[2].collect() == [2, 5, 8]
    with pytest.raises(GraphError, match="there is no output 3; the outputs are '0', '1', '2'$"):
        parts[3]
    with pytest.raises(GraphError, match=r"'0', '1', '2': take one of them, as in \['0'\].collect\(\)$"):
        parts.collect()


def test_partition_out_of_range(pipeline):
    parts = pipeline() | ps.Create([7]) | ps.Partition(lambda x, n: x, 3)
    with pytest.raises(StepError, match="returned 7; expected 0 to 2"):
        parts["0"].collect()


@pytest.mark.parametrize("chosen", [0.5, 1.0, np.float64(1), "1", None])
def test_a_partition_is_chosen_by_a_whole_number(pipeline, chosen):
    parts = pipeline() | ps.Create([7]) | ps.Partition(lambda x, n: chosen, 3)
    with pytest.raises(StepError, match="expected 0 to 2, as a whole number"):
        parts["0"].collect()


def test_numbers_of_numpy_and_truth_values_choose_a_partition():
    for one in (1, np.int8(1), np.uint64(1), True, np.True_):
        parts = ps.Pipeline() | ps.Create([7]) | ps.Partition(lambda x, n, one=one: one, 2)
        assert parts[1].collect() == [7]


def test_flatten_orders_by_input_then_by_row(pipeline):
    p = pipeline()
    a = p | "a" >> ps.Create(range(1000))
    b = p | "b" >> ps.Create(range(5000, 6000))
    evens = a | ps.Filter(lambda x: x % 2 == 0)
    made = (b, evens, a) | ps.Flatten() | ps.Map(lambda x: x)
    assert made.collect() == [*range(5000, 6000), *range(0, 1000, 2), *range(1000)]


def test_nested_flattens(pipeline):
    p = pipeline()
    a, b, c = (p | ps.Create([name] * 40) for name in "abc")
    ab = (a, b) | ps.Flatten()
    assert ((c, ab, a) | ps.Flatten()).collect() == ["c"] * 40 + ["a"] * 40 + ["b"] * 40 + ["a"] * 40


def test_reshuffle_keeps_rows_and_order(pipeline):
    made = pipeline() | ps.Create(range(ROWS)) | ps.Map(lambda x: x + 1) | ps.Reshuffle() | ps.Map(lambda x: x * 2)
    assert made.collect() == [(x + 1) * 2 for x in range(ROWS)]


def test_several_reshuffles_and_hints(pipeline):
    made = (
        pipeline()
        | ps.Create([3000])
        | ps.FlatMap(range)
        | ps.Reshuffle()
        | "large" >> ps.Map(lambda x: x + 1).with_resource_hints(min_ram="1GB")
        | ps.Reshuffle()
        | ps.Map(str)
    )
    assert made.collect() == [str(x + 1) for x in range(3000)]


def test_reshuffle_behind_a_flatten_keeps_the_inputs_apart(pipeline):
    p = pipeline()
    a, b = p | ps.Create(range(100)), p | ps.Create(range(100, 200))
    assert ((b, a) | ps.Flatten() | ps.Reshuffle() | ps.Map(lambda x: x)).collect() == [*range(100, 200), *range(100)]


def test_batch_elements(pipeline):
    made = pipeline() | ps.Create(range(1000)) | ps.BatchElements(max_batch_size=7)
    batches = made.collect()
    assert [x for batch in batches for x in batch] == list(range(1000))
    assert {len(batch) for batch in batches} <= set(range(1, 8))


def test_batch_elements_by_weight(pipeline):
    texts = ["x" * (i % 9 + 1) for i in range(500)]
    made = pipeline() | ps.Create(texts) | ps.BatchElements(max_batch_size=100, max_batch_weight=20, element_size_fn=len)
    batches = made.collect()
    assert [text for batch in batches for text in batch] == texts
    assert all(sum(map(len, batch)) <= 20 for batch in batches)


class Twice(ps.PTransform):
    def expand(self, pcoll):
        return pcoll | ps.Map(lambda x: x + 1) | ps.Map(lambda x: x * 2)


def test_composites(pipeline):
    made = pipeline() | ps.Create([1, 2]) | "first" >> Twice() | Twice()
    assert made.collect() == [10, 14]
    assert made.producer.label.startswith("Twice/Map(")


def test_objects_of_the_main_module_travel(pipeline):
    made = pipeline() | ps.Create(range(3)) | ps.Map(lambda x: Point(x, -x)) | ps.Reshuffle() | ps.Map(lambda p: p)
    assert made.collect() == [Point(0, 0), Point(1, -1), Point(2, -2)]


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __eq__(self, other):
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    __hash__ = None


def test_a_step_s_error_names_step_row_and_origin(pipeline):
    def fail(x):
        raise ValueError(f"no {x}") if x == 1234 else KeyError

    made = pipeline() | ps.Create([1234]) | "strict" >> ps.Map(fail)
    with pytest.raises(StepError, match=r"step 'strict': ValueError: no 1234\n  row: 1234") as caught:
        made.collect()
    assert isinstance(caught.value.__cause__, ValueError)


class LastRow(ps.DoFn):
    def process(self, element):
        return None

    def finish_bundle(self):
        return ps.PredictionResult(1, 2)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: ps.Filter(lambda x: 1 / (x - 7)), "ZeroDivisionError"),
        (lambda: ps.FlatMap(lambda x: (1 / (x - 7) for _ in range(2))), "ZeroDivisionError"),
        (lambda: ps.FlatMap(lambda x: x), "the function returned int; expected an iterable of rows: for one row, return"),
        (lambda: ps.ParDo(lambda x: [1 / (x - 7)]), "ZeroDivisionError"),
        (lambda: ps.ParDo(lambda x: x), "returned int; expected an iterable"),
        (lambda: ps.MapBatches(lambda rows: [1 / (x - 7) for x in rows]), "ZeroDivisionError"),
        (lambda: ps.MapBatches(lambda rows: None), "returned None; expected a list"),
        (lambda: ps.FlatMap(lambda x: "text"), "'here'.*the function returned a str; .*for one row, return"),
        (lambda: ps.FlatMap(lambda x: {"a": 1}), "returned a dict; expected an iterable of rows"),
        (lambda: ps.FlatMap(lambda x: pd.DataFrame({"a": [1]})), r"a DataFrame; .*to_dict\('records'\)"),
        (lambda: ps.FlatMap(lambda x: pa.table({"a": [1]})), r"a Table; .*to_pylist\(\)"),
        (lambda: ps.FlatMap(lambda x: b"text").with_retry(ps.Retry(on=OSError)), "'here'.*returned a bytes"),
        (lambda: ps.ParDo(lambda x: {"a": 1}), r"'here'.*process\(\) returned a dict; .*yield each row"),
        (lambda: ps.ParDo(lambda x: "text"), "returned a str"),
        (lambda: ps.ParDo(lambda x: {"a": 1}).with_retry(ps.Retry(on=OSError)), "returned a dict"),
        (lambda: ps.ParDo(LastRow()), r"in finish_bundle\(\): finish_bundle\(\) returned a PredictionResult"),
        (lambda: ps.MapBatches(lambda rows: "text"), "'here'.*the function returned a str"),
        (lambda: ps.MapBatches(lambda rows: {"a": 1, "b": "xy"}), "not lists or arrays of one length.*return .row"),
        (lambda: ps.MapBatches(lambda rows: {"a": [1], "b": [1, 2]}), "not lists or arrays of one length.*1.*2"),
        (lambda: ps.MapBatches(lambda rows: {}), "not lists or arrays"),
        (lambda: ps.Filter(lambda x: np.array([1, x])), "'here': ValueError"),
        (lambda: ps.Map(lambda x: next(iter([])) if x == 7 else x), "StopIteration"),
    ],
)
def test_errors_of_every_kind_of_step(pipeline, step, message):
    with pytest.raises(StepError, match=message):
        (pipeline() | ps.Create(range(20)) | "here" >> step()).collect()


def test_counts(pipeline):
    p = pipeline()
    _ = p | ps.Create(range(100)) | "keep" >> ps.Filter(lambda x: x < 30) | "twice" >> ps.FlatMap(lambda x: [x, x])
    result = p.run()
    counts = {step: (count.rows_in, count.rows_out) for step, count in result.counts.items()}
    assert counts == {"Create": (0, 100), "keep": (100, 30), "twice": (30, 60)}
    assert result.rows_out("twice") == 60


def test_rows_of_one_block_are_not_shared_by_branches(pipeline):
    def spoil(rows):
        rows.clear()
        return []

    p = pipeline()
    rows = p | ps.Create(range(10))
    spoiled, kept = rows | ps.MapBatches(spoil), rows | ps.Map(lambda x: x)
    assert ((spoiled, kept) | ps.Flatten()).collect() == list(range(10))


def test_bundle_attempts_run_the_whole_split_again(pipeline, tmp_path):
    def fails_once(x, marks):
        mark = marks / str(x)
        if x % 500 == 0 and not mark.exists():
            mark.touch()
            raise RuntimeError("only once")
        return x

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with pytest.raises(StepError, match="only once"):
        (pipeline() | ps.Create(range(1000)) | ps.Map(fails_once, first)).collect()
    p = pipeline(bundle_attempts=4)
    assert (p | ps.Create(range(1000)) | ps.Map(fails_once, second)).collect() == list(range(1000))
    assert p.result.retries == 2
