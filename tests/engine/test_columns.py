"""Columns in, columns out: prepared rows, answers that stay arrays, and rows that fail, on every way of running."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import StepError, UsageError

ROWS = 300
TEXTS = ["x" * (at % 17 + 1) for at in range(ROWS)]


class Lengths(ps.ModelHandler):
    """Prepares a text to its length, once; answers with vectors that begin with it, and with the process that prepared."""

    def __init__(self, **settings):
        super().__init__(**{"max_batch_size": 32, "columns": "text", "output_column": "vector", **settings})

    def load_prepare(self):
        return len

    def prepare(self, examples, tool, inference_args=None):
        bad = {at: ValueError("a text of 13") for at, example in enumerate(examples) if example == "x" * 13}
        if None in examples:
            raise TypeError("no text")
        values = [(tool(example), os.getpid()) for example in examples]
        if bad and self.refuses():
            raise ps.BadRowsError(bad, values)
        return values

    def refuses(self):
        return False

    def load_model(self):
        return np.arange(4, dtype=np.float32)

    def run_inference(self, batch, model, inference_args=None):
        lengths = np.array([length for length, _ in batch], dtype=np.float32)
        assert all(length > 0 for length in lengths)
        return lengths[:, None] + model

    def model_id(self):
        return "lengths"


class Refusing(Lengths):
    def refuses(self):
        return True


class ByLength(Lengths):
    """In batches of like length: every batch is put together from rows that stand apart."""

    def measures_length(self):
        return True

    def get_lengths(self, batch):
        return [length for length, _ in batch]


WAYS = {
    "in the process": ({}, {"workers": 0}),
    "threads": ({}, {"workers": 0, "threads_per_worker": 2}),
    "workers": ({}, {"workers": 2}),
    "one host": ({"large_model": True}, {"workers": 2}),
    "copies": ({"model_copies": 2}, {"workers": 0}),
    "deterministic": ({}, {"workers": 2, "deterministic": True}),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.fixture
def texts(tmp_path):
    table = pa.table({"id": range(ROWS), "text": TEXTS, "label": pa.array(["a", None, "b"] * (ROWS // 3))})
    pq.write_table(table, tmp_path / "texts.parquet", row_group_size=100)
    return tmp_path / "texts.parquet"


def vectors(texts=TEXTS):
    return [[len(text) + at for at in range(4)] for text in texts]


@pytest.mark.parametrize("kind", [Lengths, ByLength])
def test_a_table_comes_out_with_a_column_more(texts, tmp_path, way, kind):
    settings, options = way
    with ps.Pipeline(**options) as p:
        answered = p | ps.ReadFromParquet(str(texts)) | ps.RunInference(kind(**settings))
        answered | ps.WriteToParquet(str(tmp_path / "out"))
    got = pq.read_table(tmp_path / "out")
    assert got.column_names == ["id", "text", "label", "vector", "vector_model_id"]
    assert got.schema.field("vector").type == pa.list_(pa.float32(), 4)
    assert got.select(["id", "text", "label"]).to_pylist() == pq.read_table(texts).to_pylist()
    assert got["vector"].to_pylist() == vectors()
    assert set(got["vector_model_id"].to_pylist()) == {"lengths"}


def test_rows_that_are_dicts_give_the_same(texts, way):
    settings, options = way
    rows = pq.read_table(texts).to_pylist()
    named = ps.Pipeline(**options) | ps.Create(rows) | ps.RunInference(Lengths(**settings))
    got = named.collect()
    assert [{key: row[key] for key in ("id", "text", "label")} for row in got] == rows
    assert [list(row["vector"]) for row in got] == vectors()
    assert {row["vector_model_id"] for row in got} == {"lengths"}
    unnamed = ps.Pipeline(**options) | ps.Create(rows[:3]) | ps.RunInference(Lengths(**settings, output_column=None))
    assert [(each.example, list(each.inference), each.model_id) for each in unnamed.collect()] == [
        (row, vector, "lengths") for row, vector in zip(rows[:3], vectors()[:3], strict=True)
    ]


@pytest.mark.parametrize("guards", [{}, {"use_subprocess": True}, {"timeout": 60.0}])
@pytest.mark.parametrize("kind", [Refusing, ByLength])
def test_rows_that_cannot_be_prepared_are_cut_out(tmp_path, guards, kind):
    texts = [None if at == 20 else text for at, text in enumerate(TEXTS)]
    pq.write_table(pa.table({"id": range(ROWS), "text": texts}), tmp_path / "in.parquet")
    p = ps.Pipeline(workers=2)
    good, failures = (
        p | ps.ReadFromParquet(str(tmp_path / "in.parquet")) | ps.RunInference(kind()).with_exception_handling(**guards)
    )
    good | ps.WriteToParquet(str(tmp_path / "out"))
    failures.failed_inferences | ps.Map(_told) | ps.WriteToParquet(str(tmp_path / "failed"))
    p.run()
    bad = [at for at, text in enumerate(texts) if text is None or (kind is Refusing and len(text) == 13)]
    got, failed = pq.read_table(tmp_path / "out"), pq.read_table(tmp_path / "failed")
    assert got["id"].to_pylist() == [at for at in range(ROWS) if at not in bad]
    assert got["vector"].to_pylist() == vectors([text for at, text in enumerate(texts) if at not in bad])
    assert got.schema.field("id").type == pa.int64()
    assert [row["row"] for row in failed.to_pylist()] == [{"id": at, "text": texts[at]} for at in bad]
    assert set(failed["kind"].to_pylist()) == {"preparing"}
    assert set(failed["error_type"].to_pylist()) <= {"ValueError", "TypeError"}


def _told(pair):
    row, failure = pair
    return {"row": row, "kind": failure.kind, "error_type": failure.error_type}


def test_an_example_that_cannot_be_prepared_ends_the_run(tmp_path):
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "in.parquet")
    answered = ps.Pipeline(workers=0) | ps.ReadFromParquet(str(tmp_path / "in.parquet")) | ps.RunInference(Lengths())
    with pytest.raises(StepError, match=r"step 'RunInference\(Lengths\) \(preparing\)': TypeError: no text\n  row: None"):
        answered.collect()


class Crashing(Lengths):
    def prepare(self, examples, tool, inference_args=None):
        if "x" * 7 in examples:
            os._exit(3)
        return super().prepare(examples, tool, inference_args)


def test_preparing_may_crash_where_it_has_a_process(tmp_path):
    pq.write_table(pa.table({"text": TEXTS[:8]}), tmp_path / "in.parquet")
    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
    _, failures = rows | ps.RunInference(Crashing()).with_exception_handling(use_subprocess=True)
    ((row, failure),) = failures.failed_inferences.collect()
    assert (row, failure.kind) == ({"text": "x" * 7}, "crashed")


class Prepares(Lengths):
    def prepare(self, examples, tool, inference_args=None):
        return super().prepare(examples, tool, inference_args)[1:]


class LoadsNothing(Lengths):
    def load_prepare(self):
        raise OSError("no such tokenizer")


def test_what_prepare_gives_is_checked(texts):
    def run(handler):
        return (ps.Pipeline(workers=0) | ps.ReadFromParquet(str(texts)) | ps.RunInference(handler)).collect()

    with pytest.raises(StepError, match=r"prepare\(\) returned 15 values for 16 examples"):
        run(Prepares())
    with pytest.raises(ps.EngineError, match=r"LoadsNothing.load_prepare\(\) raised OSError: no such tokenizer"):
        run(LoadsNothing())


def test_rows_are_prepared_where_they_are_read(texts):
    class Told(Lengths):
        def run_inference(self, batch, model, inference_args=None):
            return np.array([pid for _, pid in batch])

    here = ps.Pipeline(workers=0) | ps.ReadFromParquet(str(texts)) | ps.RunInference(Told(large_model=True))
    assert {row["vector"] for row in here.collect()} == {os.getpid()}


class Outputs(ps.ModelHandler):
    """Several outputs of each row, as NumPy columns."""

    def takes_columns(self):
        return "numpy"

    def load_model(self):
        return None

    def run_inference_columns(self, table, model, inference_args=None):
        x = table["x"]
        return {"sum": x.sum(axis=1), "twice": 2 * x}

    def run_inference(self, batch, model, inference_args=None):
        raise AssertionError("a table was turned into rows")


@pytest.fixture
def points(tmp_path):
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(60, dtype=np.float32)), 3)
    pq.write_table(pa.table({"x": x, "y": range(20)}), tmp_path / "points.parquet")
    return tmp_path / "points.parquet"


def test_several_outputs_are_a_struct_or_columns(points, tmp_path, way):
    settings, options = way
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    with ps.Pipeline(**options) as p:
        read = p | ps.ReadFromParquet(str(points))
        one = read | "one" >> ps.RunInference(Outputs(columns="x", output_column="o", max_batch_size=7, **settings))
        two = one | "two" >> ps.RunInference(Outputs(columns="x", output_prefix="p_", max_batch_size=6, **settings))
        two | ps.WriteToParquet(str(tmp_path / "out"))
    got = pq.read_table(tmp_path / "out")
    assert got.column_names == ["x", "y", "o", "o_model_id", "p_sum", "p_twice", "p_model_id"]
    assert got["o"].to_pylist() == [{"sum": row.sum(), "twice": (2 * row).tolist()} for row in x]
    assert got["p_sum"].to_pylist() == x.sum(axis=1).tolist()
    assert got["p_twice"].to_pylist() == (2 * x).tolist()


def test_outputs_of_many_axes_and_of_none(points):
    class Axes(Outputs):
        def run_inference_columns(self, table, model, inference_args=None):
            return np.repeat(table["x"][:, :, None], 2, axis=2)

    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(str(points)) | ps.RunInference(Axes(columns="x", output_column="o"))
    assert rows.collect()[1]["o"] == [[3, 3], [4, 4], [5, 5]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: {"a": x[:, 0], "b": x[1:, 0]}, r"returned arrays of different lengths, \{'a': \d+, 'b': \d+\}"),
        (lambda x: {"a": "text"}, r"returned a dict; it must return one prediction per row"),
        (lambda x: x.sum(), "it must return one prediction per row"),
        (lambda x: x[1:], r"returned \d+ predictions for \d+ examples"),
    ],
)
def test_arrays_that_do_not_answer_every_row(points, answer, message):
    class Odd(Outputs):
        def run_inference_columns(self, table, model, inference_args=None):
            return answer(table["x"])

    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(str(points)) | ps.RunInference(Odd(columns="x"))
    with pytest.raises(ps.RowError, match=message):
        rows.collect()


def test_names_that_are_wrong(points, texts):
    def run(handler, path=points):
        return (ps.Pipeline(workers=0) | ps.ReadFromParquet(str(path)) | ps.RunInference(handler)).collect()

    with pytest.raises(UsageError, match=r"columns \['z'\] are missing: .*\['x', 'y'\]"):
        run(Outputs(columns=["z"]))
    with pytest.raises(UsageError, match=r"a column 'y' already.*output_column"):
        run(Outputs(columns="x", output_column="y"))
    with pytest.raises(UsageError, match=r"output_prefix='p_' is for several outputs"):
        run(Lengths(output_column=None, output_prefix="p_"), texts)
    for wrong in ({"columns": []}, {"columns": ["a", "a"]}, {"columns": 3}, {"output_column": ""}):
        with pytest.raises(UsageError, match="expected"):
            Outputs(**wrong)
    with pytest.raises(UsageError, match="give one of them"):
        Outputs(output_column="a", output_prefix="b")


@pytest.mark.parametrize("source", ["columns", "rows"])
@pytest.mark.parametrize("in_arrays", [True, False])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model_id", "a"], r"would be the columns \['p_model_id', 'p_a'\], and the model's id 'p_model_id', of which two"),
        ([1, "1"], r"outputs are called \[1, '1'\], and two|columns \['p_1', 'p_1'\], and the model's id 'p_model_id'"),
    ],
)
def test_outputs_that_would_have_one_name(points, source, in_arrays, names, message):
    class Several(Outputs):
        def takes_columns(self):
            return False

        def run_inference(self, batch, model, inference_args=None):
            if in_arrays:
                return {name: np.ones(len(batch)) for name in names}
            return [dict.fromkeys(names, np.float32(1)) for _ in batch]

    p = ps.Pipeline(workers=0)
    rows = p | (ps.ReadFromParquet(str(points)) if source == "columns" else ps.Create([{"x": [0.5]}, {"x": (2,)}]))
    with pytest.raises(UsageError, match=message):
        (rows | ps.RunInference(Several(columns="x", output_prefix="p_"))).collect()


def test_ragged_answers_become_lists(texts, tmp_path):
    class Ragged(ByLength):
        def run_inference(self, batch, model, inference_args=None):
            longest = max(length for length, _ in batch)
            return np.ones((len(batch), longest), dtype=np.float32)

    with ps.Pipeline(workers=0) as p:
        answered = p | ps.ReadFromParquet(str(texts)) | ps.RunInference(Ragged(max_padded_cost=64))
        answered | ps.WriteToParquet(str(tmp_path / "out"))
    got = pq.read_table(tmp_path / "out")
    assert got.schema.field("vector").type == pa.list_(pa.float32())
    assert all(len(vector) >= len(text) for vector, text in zip(got["vector"].to_pylist(), TEXTS, strict=True))


class Boxes(ps.ModelHandler):
    """As many boxes for a row as it says: arrays of unequal shapes, but in batches where all are alike."""

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        boxes = [np.full((count, 4), count, dtype=np.float32) for count in batch]
        marks = [np.full((count, 2), count, dtype=np.int8) for count in batch]
        if len(set(batch)) == 1:
            return {"boxes": np.stack(boxes), "marks": np.stack(marks)}
        return [dict(zip(("boxes", "marks"), pair, strict=True)) for pair in zip(boxes, marks, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_arrays_of_two_axes_keep_their_type(tmp_path, workers):
    counts = [at % 3 for at in range(300)] + [2] * 300
    pq.write_table(pa.table({"count": counts}), tmp_path / "in.parquet", row_group_size=50)
    with ps.Pipeline(workers=workers) as p:
        answered = (
            p | ps.ReadFromParquet(tmp_path / "in.parquet") | ps.RunInference(Boxes(columns="count", output_prefix="o_"))
        )
        answered | ps.WriteToParquet(tmp_path / "out")
    got = pq.read_table(tmp_path / "out")
    assert got.schema.field("o_boxes").type == pa.list_(pa.list_(pa.float32(), 4))
    assert got.schema.field("o_marks").type == pa.list_(pa.list_(pa.int8(), 2))
    assert got["o_boxes"].to_pylist() == [[[count] * 4] * count for count in counts]
    assert got["o_marks"].to_pylist() == [[[count] * 2] * count for count in counts]


VECTOR, THING = np.float32([1, 2]), np.float32(1.5)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (VECTOR, pa.list_(pa.float32(), 2)),
        ({"of": {"vector": VECTOR}, "score": THING}, None),
        (THING, pa.float32()),
        (np.array(True), pa.bool_()),
        (np.str_("a"), pa.string()),
        ([np.float32([[1, 2]])], pa.list_(pa.list_(pa.list_(pa.float64())))),
    ],
)
def test_a_list_of_answers_is_a_column_of_their_type(texts, answer, kind):
    class Same(Lengths):
        def run_inference(self, batch, model, inference_args=None):
            return [answer for _ in batch]

    read = ps.Pipeline(workers=0) | ps.ReadFromParquet(texts)
    out = read | ps.RunInference(Same()) | ps.MapBatches(_type_of_vector, format="arrow")
    inner = pa.struct({"of": pa.struct({"vector": pa.list_(pa.float32(), 2)}), "score": pa.float32()})
    assert {row["type"] for row in out.collect()} == {str(kind or inner)}


def _type_of_vector(table):
    return pa.table({"type": [str(table.schema.field("vector").type)] * table.num_rows})


def test_a_resumed_run_has_the_same_columns(texts, tmp_path):
    def run(**options):
        with ps.Pipeline(workers=2, run_dir=str(tmp_path / "run"), **options) as p:
            answered = p | ps.ReadFromParquet(str(texts)) | ps.RunInference(ByLength())
            answered | ps.WriteToParquet(str(tmp_path / "out"))

    run()
    first = pq.read_table(tmp_path / "out")
    run()
    assert pq.read_table(tmp_path / "out").equals(first)
    assert first["vector"].to_pylist() == vectors()


class KnowsBad(Outputs):
    """Says which rows it cannot take."""

    calls = 0

    def run_inference_columns(self, table, model, inference_args=None):
        KnowsBad.calls += 1
        bad = np.flatnonzero(table["y"] % 7 == 3)
        if len(bad):
            raise ps.BadRowsError({int(at): ValueError(f"a bad {table['y'][at]}") for at in bad})
        return table["y"]


@pytest.mark.parametrize("settings", [{}, {"large_model": True}, {"model_copies": 2}])
def test_rows_that_the_handler_names_need_no_search(points, settings):
    KnowsBad.calls = 0
    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(str(points))
    handler = KnowsBad(columns="y", output_column="o", max_batch_size=20, **settings)
    good, failures = rows | ps.RunInference(handler).with_exception_handling()
    assert [(row["y"], failure.message) for row, failure in failures.failed_inferences.collect()] == [
        (y, f"a bad {y}") for y in (3, 10, 17)
    ]
    assert KnowsBad.calls == (2 if not settings else 0)
    assert [row["o"] for row in good.collect()] == [y for y in range(20) if y % 7 != 3]
    with pytest.raises(StepError, match=r"ValueError: a bad 3\n  row: \{'y': 3\}"):
        (ps.Pipeline(workers=0) | ps.ReadFromParquet(str(points)) | ps.RunInference(handler)).collect()


def test_explain_says_where_columns_become_rows_and_rows_columns(texts, tmp_path):
    p = ps.Pipeline()
    answered = p | ps.ReadFromParquet(str(texts)) | "first" >> ps.RunInference(Lengths())
    answered | "each" >> ps.Map(str) | ps.WriteToText(str(tmp_path / "a"))
    answered | "values" >> ps.RunInference(Boxes(columns="id", output_prefix="o_")) | ps.WriteToParquet(tmp_path / "d")
    answered | "second" >> ps.RunInference(Lengths(columns=None, output_column=None)) | ps.WriteToText(str(tmp_path / "b"))
    (tmp_path / "in.csv").write_text("text\na\n")
    (
        p
        | ps.ReadFromCsv(str(tmp_path / "in.csv"))
        | "third" >> ps.RunInference(Lengths())
        | ps.WriteToParquet(str(tmp_path / "c"))
    )
    said = {line.strip().partition(":")[0]: line for line in p.explain().splitlines()}
    assert said["ReadFromParquet(texts.parquet)"].endswith("gives columns")
    assert said["first"].endswith("takes columns")
    assert said["values"].endswith(
        "takes columns, and makes a Python object of each row's input: takes_columns() on the handler would give it arrays"
    )
    assert said["each"].endswith(
        'turns columns into rows, and makes a Python object of each: ps.MapBatches(..., format="arrow") would keep them'
    )
    assert said["second"].endswith(
        "turns columns into rows, and makes a Python object of each: columns= on the handler would keep them"
    )
    assert said["third"].endswith("turns rows into columns")


def test_explain_of_sinks_of_rows_branches_that_meet_and_steps_that_cannot_keep_columns(texts, tmp_path):
    p = ps.Pipeline()
    answered = p | ps.ReadFromParquet(str(texts)) | "first" >> ps.RunInference(Lengths())
    answered | ps.WriteToJsonl(tmp_path / "lines")
    answered | ps.WriteToParquet(tmp_path / "columns")
    mapped = answered | "each" >> ps.Map(lambda row: row)
    mapped | "again" >> ps.Filter(bool)
    mapped | "rows" >> ps.WriteToCsv(tmp_path / "rows")
    for name, branches in (("a", (answered, mapped)), ("b", (mapped, answered))):
        met = branches | f"met {name}" >> ps.Flatten() | f"cut {name}" >> ps.Reshuffle()
        met | f"after {name}" >> ps.Map(lambda row: row) | f"end {name}" >> ps.WriteToParquet(tmp_path / name)
    answered | "parts" >> ps.Partition(lambda row, count: 0, 2)
    said = {
        line.strip().removeprefix("-> ").partition(":")[0].partition(" -> ")[0]: line for line in p.explain().splitlines()
    }
    assert said["WriteToJsonl(lines)"].endswith(
        "(turns columns into rows, and makes a Python object of each; ps.WriteToParquet and ps.WriteToSql take columns)"
    )
    assert said["WriteToParquet(columns)"].endswith("/columns")
    assert said["rows"].endswith("/rows")
    assert said["again"].endswith("again: takes rows")
    assert said["parts"].endswith(": turns columns into rows, and makes a Python object of each")
    for name in ("a", "b"):
        assert said[f"after {name}"].endswith(
            'turns columns into rows, and makes a Python object of each: ps.MapBatches(..., format="arrow") would keep them'
        )


def test_readers_of_records_give_columns_to_models_that_take_them(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "ab"}\n{"id": 2, "text": "abc"}\n')
    (tmp_path / "in.csv").write_text("id,text\n1,ab\n2,abc\n")
    for reader, name, ids in ((ps.ReadFromJsonl, "in.jsonl", [1, 2]), (ps.ReadFromCsv, "in.csv", ["1", "2"])):
        out = tmp_path / f"{name}.out"
        with ps.Pipeline(workers=0) as p:
            p | reader(str(tmp_path / name)) | ps.RunInference(Lengths()) | ps.WriteToParquet(str(out))
        got = pq.read_table(out)
        assert got["id"].to_pylist() == ids
        assert got.schema.field("vector").type == pa.list_(pa.float32(), 4)


def test_rows_that_make_no_example_are_cut_out(texts):
    class Choosy(Lengths):
        def examples_of(self, table):
            examples = super().examples_of(table)
            if "xxx" in examples:
                raise ValueError("three")
            return examples

    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(str(texts))
    good, failures = rows | ps.RunInference(Choosy()).with_exception_handling()
    assert [row["text"] for row, _ in failures.failed_inferences.collect()] == [text for text in TEXTS if text == "xxx"]
    assert [row["text"] for row in good.collect()] == [text for text in TEXTS if text != "xxx"]


def test_an_output_column_of_rows_that_are_no_records():
    class Same(ps.ModelHandler):
        def load_model(self):
            return None

        def run_inference(self, batch, model, inference_args=None):
            return list(map(str, batch))

    def answers(*rows):
        return (ps.Pipeline() | ps.Create(rows) | ps.RunInference(Same(output_column="text"))).collect()

    assert answers({"a": 1}) == [{"a": 1, "text": "{'a': 1}", "text_model_id": None}]
    with pytest.raises(UsageError, match="output_column= adds to dicts, or to a table; got a int"):
        answers(1)


class Half(ps.ModelHandler):
    """Has no value for odd numbers."""

    def __init__(self, axes=1, **settings):
        super().__init__(columns="id", max_batch_size=16, **settings)
        self.axes = axes

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        halves = np.ma.array(np.float32(batch) / 2, mask=[number % 2 == 1 and number < 50 for number in batch])
        return {"half": halves, "id": np.array(batch)} if self.axes == 1 else np.ma.stack([halves, halves], axis=1)


@pytest.mark.parametrize("source", [ps.ReadFromParquet, lambda path: ps.Create(pq.read_table(path).to_pylist())])
def test_masked_values_are_nulls(texts, tmp_path, source):
    with ps.Pipeline(workers=0) as p:
        p | source(texts) | ps.RunInference(Half(output_prefix="of_")) | ps.WriteToParquet(tmp_path / "out")
    got = pq.read_table(tmp_path / "out")
    assert got["of_half"].to_pylist() == [None if at % 2 and at < 50 else at / 2 for at in range(ROWS)]
    assert got["of_id"].to_pylist() == list(range(ROWS))
    failing = ps.RunInference(Half(axes=2, output_column="halves")).with_exception_handling()
    good, failures = ps.Pipeline(workers=0) | source(texts) | failing
    assert [row["id"] for row in good.collect()] == [at for at in range(ROWS) if at % 2 == 0 or at > 50]
    (message,) = {failure.message for _, failure in failures.failed_inferences.collect()}
    assert "an array of shape (1, 2) has masked values; nulls can stand for those of one axis alone" in message


def test_a_model_after_one_without_names_and_a_step_of_rows(texts):
    answered = ps.Pipeline(workers=0) | ps.ReadFromParquet(texts) | ps.RunInference(Lengths(output_column=None))
    rows = answered | ps.Filter(lambda result: True) | "again" >> ps.RunInference(Lengths())
    with pytest.raises(StepError, match=r"need dicts, or a table; got PredictionResult: give output_column= to the handler"):
        rows.collect()


def test_dead_letters_that_are_run_again_as_they_are():
    letter = [{"text": "ab"}, {"step": "lengths", "kind": "raised", "error_type": "ValueError"}]
    rows = ps.Pipeline(workers=0) | ps.Create([letter]) | ps.RunInference(Lengths())
    with pytest.raises(StepError, match=r"got list, a dead letter: take its row out, with ps\.Map\(lambda failed"):
        rows.collect()


def test_a_record_without_the_column_fails_alone():
    rows = ps.Pipeline() | ps.Create([{"text": "ab"}, {"id": 1}, {"text": "abc"}])
    good, failures = rows | ps.RunInference(Lengths()).with_exception_handling(exc_class=LookupError)
    ((row, failure),) = failures.failed_inferences.collect()
    assert (row, failure.error_type) == ({"id": 1}, "LookupError")
    assert [row["text"] for row in good.collect()] == ["ab", "abc"]


class Named(ps.ModelHandler):
    """Answers with texts. Of some rows it says that they are bad, with the answers of the others or without."""

    def __init__(self, gives_values, size):
        super().__init__(max_batch_size=size, columns="x", output_column="name")
        self.gives_values = gives_values

    def takes_columns(self):
        return "numpy"

    def load_model(self):
        return None

    def run_inference_columns(self, columns, model, inference_args=None):
        numbers = columns["x"]
        names = np.array([f"row {number}" * (number % 3 + 1) for number in numbers])
        bad = {int(at): ValueError(f"{numbers[at]} is bad") for at in np.flatnonzero(numbers % 7 == 5)}
        if bad:
            raise ps.BadRowsError(bad, names if self.gives_values else None)
        return names


@pytest.mark.parametrize("gives_values", [True, False])
@pytest.mark.parametrize("size", [1, 10, 64, 1000])
def test_texts_that_several_batches_gave_stand_beside_their_rows_when_some_fail(tmp_path, gives_values, size):
    numbers = list(range(200))
    pq.write_table(pa.table({"x": numbers, "id": [f"id {number}" for number in numbers]}), tmp_path / "in.parquet")
    rows = ps.Pipeline(workers=0) | ps.ReadFromParquet(tmp_path / "in.parquet")
    good, failures = rows | ps.RunInference(Named(gives_values, size)).with_exception_handling()
    made = good.collect()
    assert [(row["x"], row["id"], row["name"]) for row in made] == [
        (at, f"id {at}", f"row {at}" * (at % 3 + 1)) for at in numbers if at % 7 != 5
    ]
    failed = failures.failed_inferences.collect()
    assert [(row["x"], failure.message) for row, failure in failed] == [
        (at, f"{at} is bad") for at in numbers if at % 7 == 5
    ]
