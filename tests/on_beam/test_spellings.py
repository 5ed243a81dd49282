"""Programs written for Apache Beam, with their imports changed."""

from __future__ import annotations

import json
import os
import time
import warnings

import pytest

import penstock as beam
import penstock as ps
from penstock import PipelineOptions, RunInference, WatchFilePattern
from penstock.errors import UsageError


def read(folder):
    return "".join(path.read_text() for path in sorted(folder.iterdir())).splitlines()


def add_one(element):
    return int(element) + 1


def test_the_first_pipeline_of_most_introductions(tmp_path):
    (tmp_path / "in.txt").write_text("1\n2\n39\n")
    with beam.Pipeline() as pipeline:
        (
            pipeline
            | beam.io.ReadFromText(str(tmp_path / "in.txt"))
            | beam.Map(add_one)
            | beam.io.WriteToText(str(tmp_path / "out"))
        )
    assert read(tmp_path / "out") == ["2", "3", "40"]


@pytest.mark.parametrize("name", [name for name in ps.__all__ if name.startswith(("Read", "Write")) and name != "Writer"])
def test_readers_and_writers_are_in_io_too(name):
    assert getattr(ps.io, name) is getattr(ps, name)
    assert name in dir(ps.io)


def test_a_name_that_io_does_not_have_names_those_that_it_has():
    with pytest.raises(AttributeError, match="no attribute 'ReadFromAvro'; it has Read, ReadFromCsv"):
        ps.io.ReadFromAvro  # noqa: B018


def test_text_of_anything(tmp_path):
    rows = ["text", 7, 1.5, None, {"a": 1}, ("k", "v"), b"bytes"]
    with ps.Pipeline() as p:
        p | ps.Create(rows) | ps.WriteToText(tmp_path / "out")
    assert read(tmp_path / "out") == ["text", "7", "1.5", "None", "{'a': 1}", "('k', 'v')", "bytes"]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"min_batch_size": 3, "max_batch_size": 4}, [4, 4, 2]),
        ({"min_batch_size": 100}, [10]),
        ({"max_batch_size": 6}, [6, 4]),
        ({}, [10]),
    ],
)
def test_batches_with_both_sizes(settings, sizes):
    batches = ps.Pipeline(workers=0) | ps.Create(range(10)) | ps.BatchElements(**settings) | ps.Map(len)
    assert batches.collect() == sizes


def test_both_sizes_by_position_and_their_check():
    assert (ps.Pipeline(workers=0) | ps.Create(range(10)) | ps.BatchElements(2, 5) | ps.Map(len)).collect() == [5, 5]
    with pytest.raises(UsageError, match="min_batch_size=9 is over max_batch_size=5"):
        ps.BatchElements(min_batch_size=9, max_batch_size=5)
    with pytest.raises(UsageError, match="min_batch_size=0: expected a whole number of at least 1"):
        ps.BatchElements(min_batch_size=0)


def scale(row, by, plus=0):
    return row * by + plus


class Scale(ps.DoFn):
    def process(self, element, by, plus=0):
        yield element * by + plus


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (ps.Map(scale, 3, plus=1), [1, 4, 7]),
        (ps.FlatMap(lambda row, times: [row] * times, 2), [0, 0, 1, 1, 2, 2]),
        (ps.Filter(lambda row, least, most=9: least <= row <= most, 1, most=1), [1]),
        (ps.ParDo(Scale(), 3, plus=1), [1, 4, 7]),
        (ps.ParDo(lambda row, by: [row * by], by=5), [0, 5, 10]),
    ],
)
def test_arguments_after_the_row(step, expected):
    assert (ps.Pipeline(workers=0) | ps.Create(range(3)) | step).collect() == expected


# Options.


def test_options_that_penstock_has_are_used_and_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flags = ["--runner=DirectRunner", "--direct_num_workers", "3", "--number_of_worker_harness_threads=2"]
        options = PipelineOptions([*flags, "--save_main_session"])
        pipeline = beam.Pipeline(options=options)
    assert (pipeline.options.workers, pipeline.options.threads_per_worker) == (3, 2)


def test_options_that_penstock_has_not_are_named_in_one_warning():
    options = PipelineOptions(["--runner=DataflowRunner", "--project", "p", "--streaming"], temp_location="gs://t")
    with pytest.warns(UserWarning, match="ignored") as warned:
        beam.Pipeline(options=options)
    assert [str(each.message) for each in warned] == [
        "PipelineOptions: ignored, because Penstock has nothing like it: runner='DataflowRunner', project='p', "
        "streaming=True, temp_location='gs://t'"
    ]


def test_options_by_name_and_by_attribute():
    options = PipelineOptions.from_dictionary({"direct_num_workers": 0})
    assert beam.Pipeline(options=options).options.workers is None
    options.view_as(PipelineOptions).direct_num_workers = 2
    assert options.direct_num_workers == 2
    assert beam.Pipeline(options=options).options.workers == 2
    assert beam.Pipeline(options=options, workers=5).options.workers == 5
    with pytest.raises(AttributeError, match="no option 'runner'; it was given direct_num_workers"):
        options.runner  # noqa: B018


def test_without_flags_those_of_the_script_are_looked_at(monkeypatch):
    monkeypatch.setattr("sys.argv", ["job.py", "--input=x", "--direct_num_workers=4"])
    assert PipelineOptions().get_all_options() == {"direct_num_workers": "4"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipelineOptions("--runner=x"), "expected a list of flags"),
        (lambda: ps.Pipeline(options={"workers": 2}), r"expected ps\.PipelineOptions\(\.\.\.\); others by name"),
        (lambda: ps.Pipeline(options=PipelineOptions(direct_num_workers="many")), "'many'\\): expected a whole number"),
    ],
)
def test_options_that_are_wrong(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# Objects that are made once in each process.


@pytest.mark.parametrize("options", [{"workers": 0, "threads_per_worker": 3}, {"workers": 2}], ids=["threads", "workers"])
def test_a_shared_object_is_made_once_in_each_process(tmp_path, options):
    shared = ps.Shared()

    def made():
        with open(tmp_path / "made", "a") as file:
            file.write(f"{os.getpid()}\n")
        return {"offset": 100}

    rows = ps.Pipeline(**options) | ps.Create(range(3000))
    answers = rows | ps.Map(lambda row: (row + shared.acquire(made)["offset"], os.getpid()))
    found = answers.collect()
    assert [answer for answer, _ in found] == list(range(100, 3100))
    makers = (tmp_path / "made").read_text().split()
    assert sorted(set(makers)) == sorted(makers) == sorted({str(pid) for _, pid in found})


def test_a_shared_object_of_another_tag_takes_its_place():
    shared, other = ps.Shared(), ps.Shared()
    made = []

    def maker():
        made.append(object())
        return made[-1]

    first = shared.acquire(maker)
    assert shared.acquire(maker) is first
    assert other.acquire(maker) is not first
    second = shared.acquire(maker, tag="v2")
    assert second is not first
    assert shared.acquire(maker, tag="v2") is second
    assert len(made) == 3


def test_an_error_while_a_shared_object_is_made_is_raised_and_the_next_one_makes_it():
    shared = ps.Shared()
    with pytest.raises(ZeroDivisionError):
        shared.acquire(lambda: 1 // 0)
    assert shared.acquire(lambda: 7) == 7


# Windows.


class AddNumber(ps.ModelHandler):
    """A model that is a number in a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def update_model_path(self, model_path):
        self.path = model_path

    def load_model(self):
        with open(self.path) as file:
            return json.load(file)

    def run_inference(self, batch, model, inference_args=None):
        return [row + model for row in batch]


@pytest.fixture
def models(tmp_path):
    for number in (1, 2):
        path = tmp_path / f"model-{number}.json"
        path.write_text(f"{number}00")
        os.utime(path, (time.time() - 100 + number,) * 2)
    return tmp_path


def test_automatic_model_refresh_as_talks_show_it(models):
    """The windows are of the rows, in front of the model, and of the branch of its versions."""
    file_pattern, end_timestamp = str(models / "model-*.json"), time.time() + 3600
    pipeline = beam.Pipeline(workers=0)
    image_data = pipeline | beam.Create(range(5))
    side_input_pcoll = (
        pipeline
        | "WatchFilePattern" >> WatchFilePattern(file_pattern=file_pattern, interval=1, stop_timestamp=end_timestamp)
        | "Window" >> beam.WindowInto(beam.window.GlobalWindows())
    )
    inferences = (
        image_data
        | "ApplyWindowing" >> beam.WindowInto(beam.window.FixedWindows(10))
        | "RunInference"
        >> RunInference(model_handler=AddNumber(str(models / "model-1.json")), model_metadata_pcoll=side_input_pcoll)
    )
    assert inferences.collect() == [200, 201, 202, 203, 204]


def test_windows_that_would_mean_something_are_refused():
    p = ps.Pipeline()
    rows = p | ps.Create(range(5)) | "Cut" >> ps.WindowInto(ps.window.SlidingWindows(60, 5)) | ps.Map(str)
    with pytest.raises(UsageError, match="step 'Cut': Penstock has no windows.*leave WindowInto out"):
        rows.collect()
    with pytest.raises(UsageError, match="expected windows such as ps.window.FixedWindows"):
        ps.WindowInto(10)
