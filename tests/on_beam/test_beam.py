"""RunInference for pipelines of Apache Beam: programs that were written for Beam's give the same answers with Penstock's."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apache_beam as beam
import cloudpickle
import pytest
import torch
from apache_beam.ml.inference import base as of_beam
from apache_beam.ml.inference import pytorch_inference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.testing import test_stream
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import resources
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

import beam_programs
import penstock as ps
import penstock.beam as of_penstock
from beam_programs import (
    PROGRAMS,
    Weights,
    adding,
    as_lists,
    fixed_windows,
    from_file,
    refresh_per_key,
    session_windows,
    sliding_windows,
    timed,
    written,
)
from beam_runs import RUNNERS, counters, distributions, run
from penstock.beam.inference_dofn import InferenceDoFn
from penstock.beam.siblings import workers_of
from penstock.errors import TooManyFailuresError, UsageError
from penstock.handlers.pytorch import PytorchModelHandlerTensor
from penstock.inference.spec import InferenceSpec

for each in (sys.modules[__name__], beam_programs):
    cloudpickle.register_pickle_by_value(each)  # as from a script: no host imports these files


def in_folder(folder, name):
    (folder / name).mkdir()
    return str(folder / name)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_gives_the_same_with_either(program, tmp_path):
    expected = run_by_beam(program, tmp_path)
    found = run(program, of_penstock, in_folder(tmp_path, "penstock"))
    assert sum(map(len, expected.values())) > 0
    for name in expected:
        assert without_times(found[name]) == without_times(expected[name]), name


def run_by_beam(program, folder, tries=4):
    """With Beam's own. On a busy machine its look at a pattern gives the newest model twice now and then, which it refuses
    itself."""
    for again in range(tries):
        try:
            return run(program, of_beam, in_folder(folder, f"beam-{again}"))
        except (ValueError, RuntimeError) as exc:
            if "accessed as a singleton view" not in str(exc) or again == tries - 1:
                raise
    raise AssertionError


def without_times(answers):
    """Beam's batches lose them."""
    return sorted(((value, own) for value, _, own in answers), key=repr)


def test_one_output_is_compared_in_each_place_of_failure(tmp_path):
    """What the programs compare is what should come out, not twice the same mistake."""
    failing = next(each for each in PROGRAMS if each.__name__ == "failing_rows")
    found = run(failing, of_penstock, str(tmp_path))
    assert found.values_of("inferences") == [([each], "ValueError", "ValueError") for each in (13, 23, 33, 3)]
    assert found.values_of("preprocessing 0") == [([6], "TypeError", "TypeError")]
    assert found.values_of("preprocessing 1") == [([5], "KeyError", "KeyError")]
    assert found.values_of("postprocessing 0") == [([10.0], "RuntimeError", "RuntimeError")]
    assert len(found["answers"]) == 40 - 7


@pytest.mark.parametrize("program", [fixed_windows, sliding_windows, session_windows])
def test_answers_keep_the_times_of_their_elements(program, tmp_path):
    """Elements of all windows share batches; in sliding ones each element is answered once for each of its windows."""
    found = run(program, of_penstock, str(tmp_path))
    assert {(value, time) for value, time, _ in found["answers"]} == {(each + 1, float(each)) for each in range(60)}
    assert all(start <= time < end for _, time, (start, end) in found["answers"])
    assert len(found["answers"]) == (120 if program is sliding_windows else 60)


def test_a_new_version_for_each_key(tmp_path):
    """Beam's first batch is answered by the old one."""
    found = run(refresh_per_key, of_penstock, str(tmp_path))
    expected = [("ab"[each % 2], each + (2 if each % 2 else 1000)) for each in range(20)]
    assert sorted(found.values_of()) == sorted(expected)


class Sizes(of_penstock.ModelHandler):
    """Answers with the size of its batch."""

    def load_model(self):
        return Weights(0)

    def run_inference(self, batch, model, inference_args=None):
        return [len(batch)] * len(batch)


def test_elements_of_several_windows_share_a_batch(tmp_path):
    def program(base, p, folder):
        windows = beam.WindowInto(beam.window.FixedWindows(1))
        return {"answers": timed(p) | windows | base.RunInference(Sizes(max_batch_size=60, min_batch_size=60))}

    found = run(program, of_penstock, str(tmp_path))
    assert len({own for _, _, own in found["answers"]}) == 60
    assert max(found.values_of()) > 1


def test_many_elements_in_several_windows_go_out_once_each(tmp_path):
    """More than a block of them: answers are ready while elements with two windows come in."""

    def program(base, p, folder):
        windows = beam.WindowInto(beam.window.SlidingWindows(size=200, period=100))
        rows = p | beam.Create([0]) | beam.FlatMap(lambda _: range(5000))
        times = rows | "Timed" >> beam.Map(lambda number: beam.window.TimestampedValue(number, number))
        return {"answers": times | windows | base.RunInference(adding(base)(0, max_batch_size=100))}

    found = run(program, of_penstock, str(tmp_path))
    expected = {(each, float(each), (start, start + 200)) for each in range(5000) for start in starts(each)}
    assert len(found["answers"]) == len(expected)
    assert set(found["answers"]) == expected


def in_panes(window, values, number):
    """Elements of one second, which came by the trigger's firing of this number."""
    pane = PaneInfo(number == 0, False, PaneInfoTiming.EARLY, number, -1)
    return [WindowedValue(value, value, (window,), pane) for value in values]


def test_elements_of_several_bundles_share_batches_and_keep_their_windows_and_panes():
    """Two threads, each with a bundle of a window and a pane of its own: neither has enough rows for the only batch."""
    spec = InferenceSpec.of(Sizes(min_batch_size=20, max_batch_size=20))
    run_id, together = f"test-{os.getpid()}-panes", threading.Barrier(2)

    def bundle(number):
        step = InferenceDoFn(spec, "step", run_id)
        step.setup()
        try:
            step.start_bundle()
            here = beam.window.IntervalWindow(number * 10, number * 10 + 10)
            values = range(number * 10, number * 10 + 10)
            together.wait(60)
            made = [each for given in in_panes(here, values, number) for each in step.process(given.value, given)]
            return [*made, *step.finish_bundle()]
        finally:
            step.teardown()

    with ThreadPoolExecutor(2) as threads:
        bundles = list(threads.map(bundle, range(2)))
    for number, answers in enumerate(bundles):
        times = [each.timestamp.micros // 10**6 for each in answers]
        assert times == list(range(number * 10, number * 10 + 10))
        assert {each.windows for each in answers} == {(beam.window.IntervalWindow(number * 10, number * 10 + 10),)}
        assert {each.pane_info.index for each in answers} == {number}
        assert {each.pane_info.timing for each in answers} == {PaneInfoTiming.EARLY}
        assert {each.value for each in answers} == {20}, "one batch of both"


@pytest.mark.parametrize("way", ["answers", "failures"])
def test_panes_are_kept(way, tmp_path):
    """Of a trigger that fires for every three elements of a key."""
    rows = test_stream.TestStream()
    for number in range(6):
        rows = rows.add_elements([("key", number)])
    often = beam.transforms.trigger.Repeatedly(beam.transforms.trigger.AfterCount(3))
    discarding = beam.transforms.trigger.AccumulationMode.DISCARDING
    windows = beam.WindowInto(beam.window.GlobalWindows(), trigger=often, accumulation_mode=discarding)

    def value(key, numbers):
        return len(list(numbers)) if way == "answers" else "text"

    def note(_, pane=beam.DoFn.PaneInfoParam):
        (tmp_path / f"{pane.index}").touch()

    with beam.Pipeline(runner=BundleBasedDirectRunner(), options=PipelineOptions(["--streaming"])) as p:
        grouped = p | rows.advance_watermark_to_infinity() | windows | beam.GroupByKey() | beam.MapTuple(value)
        answers, other = grouped | of_penstock.RunInference(adding(of_penstock)(1)).with_exception_handling()
        (answers if way == "answers" else other.failed_inferences) | beam.Map(note)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def starts(time):
    last = time // 100 * 100
    return last - 100, last


@pytest.mark.parametrize("model", [{"much": 3}, (3, "three"), [3], 3], ids=lambda model: type(model).__name__)
def test_models_may_be_of_any_type(model, tmp_path):
    class Given(of_penstock.ModelHandler):
        def load_model(self):
            return model

        def run_inference(self, batch, model, inference_args=None):
            return [(each, model) for each in batch]

    def program(base, p, folder):
        return {"answers": p | beam.Create(range(5)) | base.RunInference(Given())}

    assert run(program, of_penstock, str(tmp_path)).values_of() == [(each, model) for each in range(5)]


BOTH = pytest.mark.parametrize("base", [of_beam, of_penstock], ids=["of Beam", "of Penstock"])


@BOTH
def test_a_handler_may_say_that_rows_are_batches(base, tmp_path):
    class Ranks(base.ModelHandler):
        def load_model(self):
            return Weights(0)

        def should_skip_batching(self):
            return True

        def run_inference(self, batch, model, inference_args=None):
            return [(each, len(batch)) for each in batch]

    def program(_, p, folder):
        plain = p | beam.Create([[1, 2], [3]]) | of_penstock.RunInference(Ranks())
        around = Ranks().with_preprocess_fn(lambda batch: [each * 10 for each in batch])
        again = p | "Again" >> beam.Create([[1, 2], [3]])
        return {"answers": plain, "around": again | "Around" >> of_penstock.RunInference(around)}

    found = run(program, of_penstock, str(tmp_path))
    assert found.values_of() == [(1, 2), (2, 2), (3, 1)]
    assert found.values_of("around") == [(10, 2), (20, 2), (30, 1)]


@BOTH
@pytest.mark.parametrize("large", [False, True], ids=["in the process", "in a host"])
def test_a_handler_may_set_the_environment_itself(base, large, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_MODEL", "not set")

    class Reads(base.ModelHandler):
        def set_environment_vars(self):
            os.environ["OF_THE_MODEL"] = "set"

        def load_model(self):
            return [os.environ["OF_THE_MODEL"]]

        def run_inference(self, batch, model, inference_args=None):
            return [model[0] for _ in batch]

    def program(_, p, folder):
        return {"answers": p | beam.Create([1]) | of_penstock.RunInference(Reads(large_model=large))}

    assert run(program, of_penstock, str(tmp_path)).values_of() == ["set"]


def test_a_bad_element_fails_alone(tmp_path):
    class Halves(of_penstock.ModelHandler):
        def load_model(self):
            return Weights(2)

        def run_inference(self, batch, model, inference_args=None):
            return [model.much / each for each in batch]

    def program(base, p, folder):
        handler = Halves(min_batch_size=50, max_batch_size=50)
        main, other = p | beam.Create(range(-20, 80)) | base.RunInference(handler).with_exception_handling(threshold=0.1)
        return {"answers": main, "failed": other.failed_inferences | beam.Map(lambda failed: (failed[0], failed[1][0]))}

    found = run(program, of_penstock, str(tmp_path))
    assert len(found["answers"]) == 99
    assert found.values_of("failed") == [(0, ZeroDivisionError)]


def hang(number):
    if number == 2:
        time.sleep(5)  # Beam leaves its thread behind, and a process waits for it before it ends
    return number


def die(number):
    if number == 2:
        os._exit(3)
    return number


class Seen(beam.PTransform):
    def expand(self, answers):
        return answers | beam.Map(lambda answer: answer)


@pytest.mark.parametrize(
    ("guard", "function", "error"),
    [({"timeout": 1.0}, hang, "TimeoutError"), ({"use_subprocess": True}, die, "BrokenProcessPool")],
    ids=["timeout", "use_subprocess"],
)
@pytest.mark.parametrize("where", ["before", "behind", "behind, monitored"])
def test_functions_that_hang_or_crash_cost_a_row(guard, function, error, where, tmp_path):
    """Whatever exc_class says, as of the model."""

    def program(base, p, folder):
        handler = adding(base)(0)
        handler = handler.with_preprocess_fn(function) if where == "before" else handler.with_postprocess_fn(function)
        step = base.RunInference(handler, monitoring_transform=Seen() if "monitored" in where else None)
        main, other = p | beam.Create([1, 2, 3]) | step.with_exception_handling(exc_class=ValueError, **guard)
        (failed,) = other.failed_preprocessing or other.failed_postprocessing
        return {"answers": main, "failed": failed | beam.MapTuple(lambda row, error: (row, error[0].__name__))}

    found = run(program, of_penstock, str(tmp_path))
    assert found.values_of() == [1, 3]
    assert found.values_of("failed") == [(2, error)]


def test_too_many_failures_fail_the_pipeline(tmp_path):
    def program(base, p, folder):
        handler = adding(base)(1)
        main, _ = p | beam.Create([1, 2, 3, "four"]) | base.RunInference(handler).with_exception_handling(threshold=0.2)
        return {"answers": main}

    with pytest.raises(Exception, match="1 of 4 elements failed, more than the threshold of 0.2") as caught:
        run(program, of_penstock, str(tmp_path))
    assert TooManyFailuresError.__name__ in f"{type(caught.value).__name__} {caught.value}"


def test_penstocks_own_handlers(tmp_path):
    path = str(tmp_path / "linear.pt")
    torch.save({"weight": torch.tensor([[2.0, 3.0]]), "bias": torch.tensor([1.0])}, path)
    handler = PytorchModelHandlerTensor(
        state_dict_path=path, model_class=torch.nn.Linear, model_params={"in_features": 2, "out_features": 1}
    )
    rows = [torch.tensor([float(number), 1.0]) for number in range(20)]

    def program(base, p, folder):
        answers = p | beam.Create(rows) | base.RunInference(handler)
        return {"answers": answers | beam.Map(lambda found: (*as_lists(found)[:2], found.model_id))}

    expected = [([float(number), 1.0], [2.0 * number + 4.0], path) for number in range(20)]
    assert sorted(run(program, of_penstock, str(tmp_path)).values_of()) == expected


# What Beam is told.

NAMES = {
    "inference_request_batch_size",
    "inference_request_batch_byte_size",
    "inference_batch_latency_micro_secs",
    "model_byte_size",
    "load_model_latency_milli_secs",
}


def test_metrics_have_beams_names(tmp_path):
    def program(base, p, folder):
        rows = p | beam.Create(range(100))
        own = rows | "Own" >> base.RunInference(adding(base)(1, max_batch_size=10), metrics_namespace="own")
        return {"answers": own, "other": rows | "Other" >> base.RunInference(adding(base)(1))}

    of = {base: run(program, base, in_folder(tmp_path, base.__name__)) for base in (of_beam, of_penstock)}
    for base, outcome in of.items():
        assert counters(outcome)["own", "num_inferences"] == 100, base.__name__
        assert counters(outcome)["RunInference", "num_inferences"] == 100, base.__name__
        for namespace in ("own", "RunInference"):
            assert {name for where, name in distributions(outcome) if where == namespace} >= NAMES, base.__name__
    sizes = distributions(of[of_penstock])["own", "inference_request_batch_size"]
    assert sizes.sum == 100
    assert sizes.max <= 10


def test_batches_that_fail_are_counted(tmp_path):
    def program(base, p, folder):
        handler = adding(base)(1, max_batch_size=1)
        main, _ = p | beam.Create([1, "two", 3]) | base.RunInference(handler).with_exception_handling()
        return {"answers": main}

    found = counters(run(program, of_penstock, str(tmp_path)))
    assert found["RunInference", "num_inferences"] == 2
    assert found["RunInference", "failed_batches_counter"] == 1


@BOTH
@pytest.mark.parametrize("wrapped", ["plain", "keyed", "of many models"])
def test_resource_hints_become_beams(base, wrapped):
    class Large(base.ModelHandler):
        def load_model(self):
            return Weights(0)

        def run_inference(self, batch, model, inference_args=None):
            return batch

        def get_resource_hints(self):
            return {"min_ram": "3GB", "accelerator": "type:nvidia-tesla-t4;count:1"}

    handler = Large()
    if wrapped != "plain":
        handler = base.KeyedModelHandler(handler if wrapped == "keyed" else [base.KeyModelMapping(["a"], handler)])
    p = beam.Pipeline()
    p | beam.Create([("a", 1)]) | of_penstock.RunInference(handler)
    hints = [dict(each.resource_hints) for each in p.to_runner_api().components.environments.values()]
    expected = {"min_ram": "3GB", "accelerator": "type:nvidia-tesla-t4;count:1"}
    if base is of_beam and wrapped == "of many models":
        expected = {}  # Beam's own says nothing of its models' hints
    assert resources.parse_resource_hints(expected) in hints


# What is promised by name.

PROMISED = [
    *("RunInference", "ModelHandler", "RemoteModelHandler", "KeyedModelHandler", "MaybeKeyedModelHandler"),
    *("KeyModelMapping", "KeyModelPathMapping", "ModelMetadata", "PredictionResult", "RunInferenceDLQ", "RateLimitExceeded"),
]


@pytest.mark.parametrize("name", PROMISED)
def test_a_name_that_programs_import_is_there(name):
    assert isinstance(getattr(of_beam, name), type)
    assert isinstance(getattr(of_penstock, name), type)
    assert name in dir(of_penstock)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="'penstock.beam' has no attribute 'RunInferense'"):
        of_penstock.RunInferense  # noqa: B018


def test_annotations_are_beams():
    def annotated(base):
        step = base.RunInference(Sizes(), model_identifier="one").with_monitoring_transform(beam.Map(print))
        return {name: str(value) for name, value in step.annotations().items() if "monitoring" not in name}

    assert annotated(of_penstock).keys() >= annotated(of_beam).keys()
    assert annotated(of_penstock)["model_identifier"] == "one"
    assert annotated(of_penstock)["model_handler_type"].endswith(".Sizes")


def test_beam_warns_of_nothing_when_a_step_is_built(caplog):
    p = beam.Pipeline()
    rows = p | beam.Create([1])
    rows | of_penstock.RunInference(Sizes())
    versions = p | "Versions" >> beam.Create([of_penstock.ModelMetadata("path", "name")])
    rows | "Changes" >> of_penstock.RunInference(from_file(of_penstock)("old"), model_metadata_pcoll=versions)
    assert caplog.messages == []


# What is refused.


@pytest.mark.parametrize("handler", [Sizes, of_beam.ModelHandler, pytorch_inference.PytorchModelHandlerTensor])
def test_a_class_is_no_handler(handler):
    with pytest.raises(
        UsageError, match=rf"expected a ModelHandler of Penstock or of Beam; call it: {handler.__name__}\(\.\.\.\)"
    ):
        of_penstock.RunInference(handler)


@pytest.mark.parametrize("handler", [None, "model.pt", len])
def test_what_is_no_handler(handler):
    with pytest.raises(UsageError, match="expected a ModelHandler of Penstock or of Beam"):
        of_penstock.RunInference(handler)


@BOTH
def test_a_handler_that_ignores_new_paths_cannot_be_refreshed(base):
    """With Beam, the old model would answer under the new name."""
    with pytest.raises(UsageError, match=r"cannot change while a pipeline runs: define update_model_path"):
        of_penstock.RunInference(adding(base)(1), watch_model_pattern="/models/*.json")
    of_penstock.RunInference(from_file(base)("old.json"), watch_model_pattern="/models/*.json")


def test_versions_in_windows_are_refused():
    """A model has one version at a time: each window would be answered by the newest."""
    p = beam.Pipeline()
    versions = p | beam.Create([of_penstock.ModelMetadata("a", "b")])
    windowed = versions | beam.WindowInto(beam.window.FixedWindows(10))
    with pytest.raises(UsageError, match="is in FixedWindows.*expected a collection in the global window"):
        of_penstock.RunInference(from_file(of_penstock)("a"), model_metadata_pcoll=windowed)
    trigger = beam.transforms.trigger.Repeatedly(beam.transforms.trigger.AfterProcessingTime(1))
    in_global = beam.WindowInto(
        beam.window.GlobalWindows(),
        trigger=trigger,
        accumulation_mode=beam.transforms.trigger.AccumulationMode.DISCARDING,
    )
    of_penstock.RunInference(from_file(of_penstock)("a"), model_metadata_pcoll=windowed | "Global" >> in_global)


def test_two_sources_of_versions(tmp_path):
    p = beam.Pipeline()
    metadata = p | beam.Create([of_penstock.ModelMetadata("a", "b")])
    with pytest.raises(UsageError, match="not both"):
        of_penstock.RunInference(
            from_file(of_penstock)("a"), model_metadata_pcoll=metadata, watch_model_pattern=str(tmp_path / "*")
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"canary": 0.1}, r"RunInference\(canary=...\): on Apache Beam nobody tries a new model on a share of the rows"),
        ({"canary_rows": 10}, "leave it out, or check new models with validate= and golden_rows="),
        ({"max_error_rate": 0.1}, "max_error_rate=...*leave it out"),
        ({"compare": max}, "compare=...*leave it out"),
        ({"batch_size": 3}, r"RunInference\(batch_size=...\): there is no such argument"),
        ({"validate": max}, r"RunInference\(validate=...\) is for a model that changes: give watch_model_pattern="),
        ({"interval": 3}, "interval= is for watch_model_pattern="),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_arguments_that_mean_nothing_here(settings, message):
    with pytest.raises(UsageError, match=message):
        of_penstock.RunInference(adding(of_penstock)(1), **settings)


def test_a_version_that_is_none_fails_the_pipeline(tmp_path):
    def program(base, p, folder):
        metadata = p | "Versions" >> beam.Create(["a/path"])
        handler = from_file(base)(written(folder, "old.json", 1))
        return {"answers": p | beam.Create(range(3)) | base.RunInference(handler, model_metadata_pcoll=metadata)}

    with pytest.raises(Exception, match="model_metadata_pcoll gave a str; expected ModelMetadata"):
        run(program, of_penstock, str(tmp_path))


def test_arguments_are_checked_while_the_pipeline_is_built():
    class Strict(of_beam.ModelHandler):
        def load_model(self):
            return Weights(0)

        def run_inference(self, batch, model, inference_args=None):
            return batch

        def validate_inference_args(self, inference_args):
            if inference_args:
                raise ValueError("no arguments")

    with pytest.raises(ValueError, match="no arguments"):
        of_penstock.RunInference(Strict(), inference_args={"more": 1})


# Sharing.


class Recorded(ps.ModelHandler):
    """Notes in a file who has loaded it, and answers with the process that it is in."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def load_model(self):
        with open(f"{self.folder}/loads", "a") as file:
            file.write(f"{os.getpid()}\n")
        return Weights(0)

    def run_inference(self, batch, model, inference_args=None):
        return [os.getpid()] * len(batch)


def loads(folder):
    return Path(folder, "loads").read_text().split()


def test_steps_with_one_identifier_must_have_one_model():
    class Named(of_penstock.ModelHandler):
        def __init__(self, name):
            self.name = name

    with pytest.raises(UsageError, match="have the model_identifier 'm', but their handlers differ"):
        rows = beam.Pipeline("FnApiRunner") | beam.Create([1])
        for name in ("a", "b"):
            rows | name >> of_penstock.RunInference(Named(name), model_identifier="m")


@pytest.mark.parametrize("large", [False, True], ids=["in the process", "in a host"])
def test_steps_with_one_identifier_share_a_model(large, tmp_path, descendants):
    def program(base, p, folder):
        rows = p | beam.Create(range(30))
        handler = Recorded(folder, large_model=large)
        return {
            name: rows | name >> base.RunInference(handler, model_identifier=shared)
            for name, shared in [("1", "one"), ("2", "one"), ("3", None)]
        }

    found = run(program, of_penstock, str(tmp_path), runner="threads")
    assert len(loads(tmp_path)) == 2
    assert set(found.values_of("1")) == set(found.values_of("2"))
    if large:
        assert os.getpid() not in found.values_of("1")
        assert set(found.values_of("1")) != set(found.values_of("3"))


def test_from_callable_and_assert_that():
    """As pipelines of other languages call it, and as tests of Beam's users look."""
    with beam.Pipeline(runner=RUNNERS["process"][0]()) as p:
        answers = p | beam.Create([1, 2]) | of_penstock.RunInference.from_callable(adding(of_penstock), much=4)
        assert_that(answers, equal_to([5, 6]))


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ([], 1),
        (["--direct_num_workers=3"], 1),
        (["--direct_num_workers=3", "--direct_running_mode=multi_threading"], 1),
        (["--direct_num_workers=3", "--direct_running_mode=multi_processing"], 3),
        (["--direct_num_workers=0", "--direct_running_mode=multi_processing"], os.cpu_count()),
        (["--environment_type=PROCESS", "--sdk_worker_parallelism=4"], 4),
        (["--environment_type=PROCESS"], 1),
        (["--environment_type=DOCKER", "--sdk_worker_parallelism=4"], 1),
    ],
)
def test_processes_of_a_machine_that_options_name(options, workers):
    """Those that see one folder: containers do not."""
    assert workers_of(PipelineOptions(options)) == workers
