"""Building a pipeline: names, wrong graphs, what runs when."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import threading

import pytest

import penstock as ps
from penstock.errors import GraphError, NotShippableError, UsageError
from penstock.pipeline.hints import ResourceHints, parse_bytes


def test_labels_are_made_unique():
    p = ps.Pipeline()
    rows = p | ps.Create([1]) | ps.Map(str) | ps.Map(str) | "named" >> ps.Map(str) | "named" >> ps.Map(str)
    labels = [node.label for node in p.graph().nodes]
    assert labels == ["Create", "Map(str)", "Map(str)#2", "named", "named#2"]
    assert repr(rows) == "<PCollection named#2>"


def test_a_lambda_is_named_by_its_place():
    label = (ps.Pipeline() | ps.Create([1]) | ps.Map(lambda x: x)).producer.label
    assert label.startswith("Map(lambda at test_pipeline.py:")


def test_a_transform_can_be_applied_twice():
    p = ps.Pipeline()
    step = ps.Map(lambda x: x + 1)
    assert (p | ps.Create([1]) | step | step).collect() == [3]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: p | ps.Create([1]) | len, "wrap it in ps.Map"),
        (lambda p: p | ps.Create([1]) | 3, "is not a transform: expected a transform such as"),
        (lambda p: p | ps.Create([1]) | ps.ModelHandler(), r"wrap it in ps.RunInference\(...\)"),
        (lambda p: p | ps.Create([1]) | ps.Reshuffle, r"call it: Reshuffle\(...\)"),
        (lambda p: [1, 2] | ps.Map(str), "expected a Pipeline or a PCollection; rows in memory become one with"),
        (lambda p: p | ps.Map(str), "needs one PCollection on its left, not Pipeline"),
        (lambda p: p | ps.Create([1]) | ps.Create([2]), "starts a pipeline"),
        (lambda p: p | ps.Create([1]) | ps.Flatten(), "needs a tuple or list of collections"),
        (lambda p: ps.Map(str) | ps.Map(str), "a pipeline starts with a Pipeline or a PCollection"),
        (lambda p: (p | ps.Create([1]), ps.Pipeline() | ps.Create([2])) | ps.Flatten(), "belong to different pipelines"),
        (lambda p: list(p | ps.Create([1])), "has no rows until it has run: use .collect()"),
        (lambda p: p | ps.Create("text"), "for one row: Create"),
        (lambda p: p | ps.Create(5), "expected an iterable of rows"),
        (lambda p: p | ps.Create({"a": 1}), "for one row: Create"),
        (lambda p: p | ps.Create(ps.PredictionResult(1, 2)), "for one row: Create"),
        (lambda p: p | ps.Create([1]) | ps.Map("x"), "expected a function of one row"),
        (lambda p: p | ps.Create([1]) | ps.ParDo(ps.DoFn), "call it: ParDo"),
        (lambda p: p | ps.Create([1]) | ps.MapBatches(len, batch_size=0), "batch_size=0"),
        (lambda p: p | ps.Create([1]) | ps.MapBatches(len, format="csv"), "format='csv'"),
        (lambda p: p | ps.Create([1]) | ps.Partition(max, 0), "n of at least 1"),
        (lambda p: p | ps.Create([1]) | ps.Partition(lambda row: 0, 2), r"a function of \(row, n\)"),
        (lambda p: p | ps.Create([1]) | ps.ParDo(len).with_outputs("a", "a"), "different, non-empty names"),
        (lambda p: p | ps.Create([1]) | ps.BatchElements(max_batch_size=0), "max_batch_size=0"),
        (lambda p: p | ps.Create([1]) | "" >> ps.Map(str), "must be a non-empty string"),
        (lambda p: p | ps.Create([1]) | ps.Map(str).with_resource_hints(min_ram="lots"), "min_ram='lots'"),
        (lambda p: p | ps.Create([1]) | ps.Map(str).with_resource_hints(cpus=0), "cpus=0"),
        (lambda p: p | ps.Read(3), "expected a ps.Source"),
        (lambda p: p | ps.Create([1]) | ps.Write(3), "expected a ps.Sink"),
    ],
)
def test_wrong_graphs_are_refused_while_they_are_built(build, message):
    with pytest.raises(UsageError, match=message):
        build(ps.Pipeline())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrokers": 2}, "has no option wrokers; did you mean workers?"),
        ({"colour": 2}, "has no option colour; its options are workers"),
        ({"workers": -1}, "workers=-1"),
        ({"threads_per_worker": 0}, "threads_per_worker=0"),
        ({"workers": (3, 2)}, r"workers=\(3, 2\): .* a minimum of at least 1 and a maximum, such as \(2, 8\)"),
        ({"workers": [2, 8]}, r"workers=\[2, 8\]: .* such as \(2, 8\)"),
        ({"workers": "2-8"}, r"workers='2-8': .* such as \(2, 8\)"),
        ({"workers": (2, None)}, r"workers=\(2, None\): .* a minimum of at least 1"),
        ({"workers": (0, 2)}, r"workers=\(0, 2\)"),
        ({"workers": (1, 2, 3)}, r"workers=\(1, 2, 3\)"),
        ({"workers": (True, 2)}, r"workers=\(True, 2\)"),
        ({"bundle_attempts": True}, "bundle_attempts=True"),
        ({"engine": "spark"}, "engine='spark': expected 'local'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        ps.Pipeline(**options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_cannot_be_copied_is_found_before_anything_runs(workers, tmp_path):
    lock = threading.Lock()
    p = ps.Pipeline(workers=workers)
    rows = p | ps.Create([1]) | ps.Map(lambda x: (tmp_path / "ran").touch())
    rows = rows | "locked" >> ps.Map(lambda x: lock and x)
    with pytest.raises(NotShippableError, match="step 'locked' cannot be copied to a worker .TypeError"):
        rows.collect()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_cannot_be_copied_are_named(workers):
    rows = ps.Pipeline(workers=workers) | "locks" >> ps.Create([threading.Lock()])
    with pytest.raises(NotShippableError, match="step 'locks': rows cannot be sent to a worker"):
        rows.collect()


def test_an_empty_pipeline_says_so():
    with pytest.raises(GraphError, match="the pipeline has no steps"):
        ps.Pipeline().run()


def test_leaving_a_with_block_runs_the_pipeline(tmp_path):
    with ps.Pipeline() as p:
        p | ps.Create([1, 2]) | ps.Map(str) | ps.WriteToText(str(tmp_path))
    assert (tmp_path / "part-00000.txt").read_text() == "1\n2\n"
    assert p.result.rows_out("Map(str)") == 2


def test_an_error_in_a_with_block_runs_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), ps.Pipeline() as p:
        p | ps.Create([1]) | ps.Map(lambda x: (tmp_path / "ran").touch())
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())


def test_what_was_collected_does_not_run_again_at_the_end_of_the_block(tmp_path):
    def count(x):
        with open(tmp_path / "count", "a") as file:
            file.write("x")
        return x

    with ps.Pipeline() as p:
        assert (p | ps.Create([1, 2]) | ps.Map(count)).collect() == [1, 2]
    assert (tmp_path / "count").read_text() == "xx"


def test_collect_runs_only_what_it_needs(tmp_path):
    p = ps.Pipeline()
    rows = p | ps.Create([1, 2])
    rows | ps.Map(lambda x: (tmp_path / "ran").touch())
    assert (rows | ps.Map(lambda x: -x)).collect() == [-1, -2]
    assert not (tmp_path / "ran").exists()


def test_closures_are_copied_in_process_too():
    seen = []
    assert (ps.Pipeline() | ps.Create([1, 2]) | ps.Map(seen.append)).collect() == [None, None]
    assert seen == []


def test_hints_of_a_composite_reach_its_steps_and_the_inner_ones_win():
    class Both(ps.PTransform):
        def expand(self, pcoll):
            return pcoll | ps.Map(str).with_resource_hints(cpus=2) | ps.Map(str)

    p = ps.Pipeline()
    p | ps.Create([1]) | Both().with_resource_hints(cpus=1, min_ram="2GB")
    hints = [node.hints for node in p.graph().nodes]
    assert hints == [ResourceHints(), ResourceHints(cpus=2, min_ram=2 * 10**9), ResourceHints(cpus=1, min_ram=2 * 10**9)]


@pytest.mark.parametrize(("text", "size"), [("8GB", 8 * 10**9), ("1.5 MiB", 3 << 19), (512, 512), ("10", 10)])
def test_sizes(text, size):
    assert parse_bytes(text, "min_ram") == size


def test_another_engine_gets_the_graph():
    class Note:
        def __init__(self, rows):
            self.rows = rows

        def wait(self):
            return ps.RunResult(run="x", seconds=0, counts={})

    class Notes:
        def start(self, graph, options):
            return Note({pcoll: [options.workers] for pcoll in graph.collect})

        def explain(self, graph, options):
            return f"{len(graph.nodes)} nodes"

    p = ps.Pipeline(engine=Notes(), workers=7)
    rows = p | ps.Create([1])
    assert (rows.collect(), p.explain()) == ([7], "1 nodes")


class ReadsOwn(ps.DoFn):
    def __init__(self, file):
        self.file = file

    def process(self, element):
        yield self.file.readline()


@pytest.mark.parametrize("mode", ["r", "rb", "r+"])
@pytest.mark.parametrize(
    "step",
    [
        lambda file: ps.Map(lambda row: file.readline()),
        lambda file: ps.Filter(lambda row, lines=file: lines.readline()),
        lambda file: ps.FlatMap(lambda row, lines: lines, file),
        lambda file: ps.ParDo(ReadsOwn(file)),
    ],
    ids=["closure", "default", "argument", "dofn"],
)
def test_a_file_that_is_open_for_reading_is_found_before_anything_starts(pipeline, tmp_path, step, mode):
    """Every copy of the step would read it from the same place on, so that rows would get the same lines."""
    (tmp_path / "lines").write_text("one\ntwo\n")
    with open(tmp_path / "lines", mode) as file:
        rows = pipeline() | ps.Create(range(2)) | "reads" >> step(file)
        with pytest.raises(NotShippableError, match=r"(?s)step 'reads' cannot be copied.*(open|pickle).*DoFn.setup\(\)"):
            rows.collect()


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (lambda numbers: ps.Map(lambda row: next(numbers)), "the variable 'numbers' is or holds a {}"),
        (lambda numbers: ps.Filter(lambda row, of=numbers: next(of)), "the variable 'of' is or holds a {}"),
        (lambda numbers: ps.FlatMap(lambda row, of: of, numbers), "the variable 'args' is or holds a {}"),
        (lambda numbers: ps.ParDo(ReadsOwn(numbers)), "the variable 'file' is or holds a {}"),
        (lambda numbers: ps.Map(functools.partial(min, numbers)), "it refers to a {}"),
    ],
    ids=["closure", "default", "argument", "dofn", "partial"],
)
@pytest.mark.parametrize("make", [lambda: iter([1, 2]), itertools.count, lambda: enumerate("a"), lambda: (x for x in "ab")])
def test_an_iterator_is_found_before_anything_starts(step, told, make):
    """Every copy of the step would begin it anew, so that rows would get the same items."""
    numbers = make()
    rows = ps.Pipeline(workers=0) | ps.Create(range(2)) | "counts" >> step(numbers)
    with pytest.raises(NotShippableError) as raised:
        rows.collect()
    assert "step 'counts' cannot be copied to a worker" in str(raised.value)
    assert f"{told.format(type(numbers).__name__)}, which is used up as it is read" in str(raised.value)
    assert "make a list of it first" in str(raised.value)


def test_an_open_file_of_a_module_that_workers_import_is_found_too(pipeline, tmp_path, monkeypatch):
    (tmp_path / "careless.py").write_text("LINES = open(__file__)\ndef read(row):\n    return LINES.readline()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import careless

    with careless.LINES, pytest.raises(NotShippableError, match=r"careless.py' is open for reading.*\n.*DoFn.setup\(\)"):
        (pipeline() | ps.Create([1]) | ps.Map(careless.read)).collect()
    del sys.modules["careless"]


UNUSED = """
import penstock as ps

class Composite(ps.PTransform):
    def __init__(self):
        self.spare = ps.WriteToText("spare")

    def expand(self, rows):
        return rows

p = ps.Pipeline()
rows = p | ps.Create([1]) | Composite()
kept = ps.WriteToText("kept")
{statement}
"""


@pytest.mark.parametrize(
    ("statement", "warning"),
    [
        ("ps.WriteToJsonl('out')", "WriteToJsonl(...) is applied to no rows, so nothing is written"),
        ("'named' >> ps.WriteToJsonl('out')", "script.py:14: UserWarning: WriteToJsonl(...) is applied to no rows"),
        (
            "rows | 'named' >> ps.WriteToJsonl('out')",
            "1 pipeline(s) were built and never run, so that 'named' wrote nothing",
        ),
        ("rows | ps.WriteToJsonl('out'); p.run()", None),
        ("rows | 'named' >> ps.WriteToJsonl('out'); p.explain()", None),
        ("with p: rows | ps.WriteToJsonl('out')", None),
        ("rows | ps.WriteToJsonl('out'); rows | len", None),
        ("import pickle; pickle.loads(pickle.dumps(kept)); rows.collect()", None),
        ("import unused_parts; unused_parts.rows.collect()", None),
    ],
)
def test_a_script_that_writes_nothing_by_mistake_is_warned(tmp_path, statement, warning):
    (tmp_path / "script.py").write_text(UNUSED.format(statement=statement))
    (tmp_path / "unused_parts.py").write_text(UNUSED.format(statement="rows | ps.WriteToJsonl('out')"))
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    if warning is None:
        assert "warning" not in done.stderr.lower()
    else:
        assert warning in done.stderr
        assert done.returncode == 0
