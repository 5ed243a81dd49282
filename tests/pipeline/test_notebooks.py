"""Pipelines in notebooks: cells that run again, and how objects look there."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import OutputError
from penstock.observe.metrics import MetricKey, Metrics
from penstock.observe.result import StepCount

FIRST = "p = ps.Pipeline()\nrows = p | ps.Create([1, 2, 3])"
SECOND = """
def score(row):
    return {score}

rows | ps.Map(score) | ps.WriteToText(out, overwrite=True)
"""


class Notebook:
    def __init__(self, out):
        self.names = {"ps": ps, "out": str(out)}
        self.out = out

    def run(self, cell):
        exec(compile(cell, "<cell>", "exec"), self.names)

    def written(self):
        return "".join(path.read_text() for path in sorted(self.out.iterdir())).split()


@pytest.fixture
def notebook(tmp_path):
    return Notebook(tmp_path / "out")


def test_a_cell_that_runs_again_writes_in_the_place_of_the_first_time(notebook):
    notebook.run(FIRST)
    for times in (10, 100, 1000):
        notebook.run(SECOND.format(score=f"row * {times}") + "result = p.run()")
        assert notebook.written() == [str(times * row) for row in (1, 2, 3)]
        steps = notebook.names["result"].counts
        assert len(steps) == 3  # none of the branches before


def test_a_cell_that_failed_can_be_mended_and_run_again(notebook):
    notebook.run(FIRST)
    with pytest.raises(ps.RowError):
        notebook.run(SECOND.format(score="1 // 0") + "p.run()")
    notebook.run(SECOND.format(score="row") + "p.run()")
    assert notebook.written() == ["1", "2", "3"]


def test_two_steps_that_write_to_one_place_before_any_run_are_an_error_that_says_what_to_do(notebook):
    notebook.run(FIRST)
    notebook.run(SECOND.format(score="row"))
    notebook.run("rows.collect()")  # runs neither of them
    notebook.run(SECOND.format(score="row"))
    with pytest.raises(OutputError, match=r"two steps write \.txt files there.*run.* a notebook cell again.*make it in the"):
        notebook.run("p.run()")


def test_other_steps_of_an_earlier_run_run_again(notebook, tmp_path):
    notebook.run(FIRST)
    notebook.run(f"rows | ps.WriteToText({str(tmp_path / 'other')!r}, overwrite=True)")
    for _ in range(2):
        notebook.run(SECOND.format(score="row") + "p.run()")
    assert len(notebook.names["p"].result.outputs) == 2


# How objects look.


class Named(ps.ModelHandler):
    def model_id(self):
        return "models/v1.bin"

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return batch


class At(Named):
    def update_model_path(self, model_path):
        self.path = model_path


class Unnamed(Named):
    def model_id(self):
        raise RuntimeError("half made")


class Composite(ps.PTransform):
    def expand(self, pcoll):
        return pcoll | ps.Map(str)


def words_of(element):
    yield element


@pytest.mark.parametrize(
    ("thing", "line"),
    [
        (ps.Map(str), "Map(str)"),
        ("Texts" >> ps.Map(str), "'Texts' >> Map(str)"),
        (Composite(), "Composite"),
        (ps.RunInference(Named()), "RunInference(Named)"),
        (ps.Map(str).with_exception_handling(), "Map(str)"),
        (Named(), "Named(models/v1.bin)"),
        (Unnamed(), "<Unnamed that cannot be shown: RuntimeError>"),
        (ps.MaybeKeyedModelHandler(Named()), "MaybeKeyedModelHandler()"),
        (
            ps.KeyedModelHandler([ps.KeyModelMapping(["a", "b"], Named()), ps.KeyModelMapping(["c"], Named())]),
            "KeyedModelHandler(2 models for 3 keys)",
        ),
        (ps.KeyedModelHandler([ps.KeyModelMapping(["a"], Named())]), "KeyedModelHandler(1 model for 1 key)"),
        (ps.KeyedModelHandler.from_pattern("m/{key}.pt", At()), "KeyedModelHandler(a model for each key, m/{key}.pt)"),
    ],
)
def test_the_line_of_a_transform_and_of_a_handler(thing, line):
    assert repr(thing) == line
    assert line.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;") in thing._repr_html_()


def test_the_look_of_a_pipeline_its_collections_its_failures_and_its_result(tmp_path):
    p = ps.Pipeline(workers=0)
    assert repr(p) == "<Pipeline of 0 steps; not run yet>"
    good, failures = p | ps.Create(["1", "x<y>", "3"]) | "Parse" >> ps.Map(int).with_exception_handling()
    good | ps.WriteToText(tmp_path / "out")
    assert repr(good) == "<PCollection Parse>"
    assert "<td" in p._repr_html_()
    assert "Parse" in p._repr_html_()
    _, failure = failures.collect()[0]
    told = "<Failure in step 'Parse', raised: ValueError: invalid literal for int() with base 10: 'x<y>'>"
    assert repr(failure) == told
    assert "x&lt;y&gt;" in failure._repr_html_()
    assert "<y>" not in failure._repr_html_()
    assert "Traceback" in failure._repr_html_()
    result = p.run()
    first, *table = repr(result).splitlines()
    assert first.startswith("RunResult: 3 rows in 0.")
    assert first.endswith(f" s -> {tmp_path}/out")
    width = len("WriteToText(out)")
    assert table == [
        f"  {'step':{width}}  rows in  rows out  failed",
        f"  {'Create':{width}}        0         3       0",
        f"  {'Parse':{width}}        3         2       1",
        f"  {'WriteToText(out)':{width}}        2         0       0",
    ]
    assert result._repr_html_().count("<tr>") == 4
    assert repr(p).startswith("<Pipeline of 3 steps; last run: RunResult: 3 rows in 0.")


def test_the_look_of_metrics():
    metrics = Metrics()
    metrics.count(MetricKey("Score", "mine", "num_inferences"), 1000)
    metrics.record(MetricKey("Score", "mine", "inference_request_batch_size"), 400)
    metrics.record(MetricKey("Score", "mine", "inference_request_batch_size"), 600)
    first, _, *table = repr(metrics).splitlines()
    assert first == "Metrics of 1 step"
    assert [line.split(maxsplit=2) for line in table] == [
        ["Score", "num_inferences", "1,000"],
        ["Score", "inference_request_batch_size", "500 on average, 400 to 600, 2 times"],
    ]
    assert metrics._repr_html_().count("<tr>") == 3
    assert repr(Metrics()) == "Metrics of 0 steps"


def test_the_look_of_several_outputs():
    outputs = ps.Pipeline() | ps.Create([1]) | "Sort" >> ps.ParDo(words_of).with_outputs("odd", main="even")
    assert repr(outputs) == "<Outputs even, odd>"
    assert "Sort" in outputs._repr_html_()


def test_a_long_table_is_cut():
    counts = {f"step {n}": ps.Pipeline for n in range(60)}
    result = ps.RunResult(run="r", seconds=1.0, counts={name: StepCount(1, 1) for name in counts})
    assert len(repr(result).splitlines()) == 43
    assert repr(result).endswith("  ... and 20 more")
    assert "and 20 more" in result._repr_html_()


def broken(row):
    try:
        return 1 // row
    except ZeroDivisionError as exc:
        raise ValueError("no score") from exc


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("way", ["run", "collect", "with"])
def test_the_traceback_of_a_row_that_fails_is_of_the_users_code(way, workers):
    p = ps.Pipeline(workers=workers)
    rows = p | ps.Create([1, 0]) | ps.Map(broken)
    with pytest.raises(ps.RowError) as caught:
        if way == "run":
            p.run()
        elif way == "collect":
            rows.collect()
        else:
            with p:
                pass
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) <= 45
    assert lines.count("Traceback (most recent call last):") == 3
    assert sum(f'File "{Path(ps.__file__).parent}/' in line for line in lines) <= 3
    told = "\n".join(lines)
    assert "return 1 // row" in told
    assert 'raise ValueError("no score") from exc' in told
    assert "StepError: step 'Map(broken)': ValueError: no score\n  row: 0" in told
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_traceback_of_a_wrong_output_is_of_the_users_code(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(OutputError, match="is a file") as caught, ps.Pipeline() as p:
        p | ps.Create([{"n": 1}]) | ps.WriteToJsonl(tmp_path / "out")
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert sum(f'File "{Path(ps.__file__).parent}/' in line for line in lines) <= 3
