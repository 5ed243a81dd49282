"""What programs for Beam's RunInference say of handlers and types: the same words mean the same here."""

from __future__ import annotations

import inspect
import sys

import apache_beam as beam
import cloudpickle
import pytest
from apache_beam import typehints
from apache_beam.ml.inference import base as of_beam
from apache_beam.transforms import resources

import beam_programs
import penstock.beam as of_penstock
from beam_programs import Weights, adding, from_file, written
from beam_runs import counters, run
from penstock.errors import UsageError

for each in (sys.modules[__name__], beam_programs):
    cloudpickle.register_pickle_by_value(each)

BOTH = pytest.mark.parametrize("base", [of_beam, of_penstock], ids=["of Beam", "of Penstock"])
HANDLERS = ["ModelHandler", "KeyedModelHandler", "MaybeKeyedModelHandler"]


class Sizes(of_penstock.ModelHandler):
    """Answers with the size of its batch."""

    def load_model(self):
        return Weights(0)

    def run_inference(self, batch, model, inference_args=None):
        return [len(batch)] * len(batch)


@pytest.mark.parametrize("name", HANDLERS)
def test_handlers_have_all_methods_of_beams(name):
    own, beams = getattr(of_penstock, name), getattr(of_beam, name)
    for method in (each for each in dir(beams) if not each.startswith("_")):
        expected = inspect.signature(getattr(beams, method)).parameters
        found = inspect.signature(getattr(own, method)).parameters
        assert list(found) == list(expected), method
        assert [each.default for each in found.values()] == [each.default for each in expected.values()], method
    assert issubclass(own, of_penstock.ModelHandler)


@BOTH
def test_types_that_annotations_name(base):
    keyed = [str, int, int, object]
    assert base.RunInference[int, str]
    assert base.ModelHandler[int, str, object]
    assert base.KeyModelPathMapping[str](["a"], "path") == base.KeyModelPathMapping(["a"], "path")
    assert base.KeyModelMapping[*keyed](["a"], adding(base)(1)).mh is not None

    class Own(base.KeyedModelHandler[*keyed]):
        pass

    assert isinstance(Own(adding(base)(1)), base.ModelHandler)
    assert isinstance(base.MaybeKeyedModelHandler[*keyed](adding(base)(1)), base.MaybeKeyedModelHandler)


def test_outputs_have_types():
    p = beam.Pipeline()
    handler = adding(of_penstock)(1).with_preprocess_fn(str).with_postprocess_fn(str)
    step = of_penstock.RunInference(handler).with_exception_handling()
    _, other = p | beam.Create([1, 2]) | step
    error = typehints.Tuple[type, str, typehints.List[str]]
    assert other.failed_inferences.element_type == typehints.Tuple[int, error]
    assert other.failed_preprocessing[0].element_type == typehints.Tuple[int, error]
    assert other.failed_postprocessing[0].element_type == typehints.Tuple[typehints.Any, error]
    given = of_penstock.RunInference(handler).with_exception_handling().with_output_types(str)
    assert (p | "More" >> beam.Create([1]) | "Given" >> given)[0].element_type is str


def test_results_of_beams_handlers_are_beams(tmp_path):
    """Programs that change the import of RunInference alone look for that class."""

    class Results(of_beam.ModelHandler):
        def load_model(self):
            return Weights(1)

        def run_inference(self, batch, model, inference_args=None):
            return [of_beam.PredictionResult(each, each) for each in batch]

    def program(base, p, folder):
        handler = Results().with_postprocess_fn(lambda found: (type(found) is of_beam.PredictionResult, found))
        answers = p | beam.Create([1, 2]) | of_penstock.RunInference(handler)
        return {"answers": answers | beam.MapTuple(lambda seen, found: (seen, isinstance(found, of_beam.PredictionResult)))}

    assert run(program, of_penstock, str(tmp_path)).values_of() == [(True, True), (True, True)]


# Keys.


def test_one_model_for_all_keys_takes_a_number_of_models(tmp_path):
    """Beam takes it, and has nothing to do with it."""

    def program(base, p, folder):
        handler = base.KeyedModelHandler(adding(base)(1), max_models_per_worker_hint=3)
        return {"answers": p | beam.Create([("a", 1)]) | base.RunInference(handler)}

    assert run(program, of_beam, str(tmp_path)).values_of() == [("a", 2)]
    assert run(program, of_penstock, str(tmp_path)).values_of() == [("a", 2)]


def test_beams_handlers_and_mappings_inside_keyed_ones(tmp_path):
    written(tmp_path, "a.json", 1)
    written(tmp_path, "b.json", 20)

    def program(base, p, folder):
        rows = p | beam.Create([("a", 1), ("b", 2), ("c", 3)])
        inside = from_file(of_beam)("")
        pattern = base.KeyedModelHandler.from_pattern(f"{folder}/{{key}}.json", inside, default=adding(of_beam)(100))
        mapping = of_beam.KeyModelMapping(["a"], adding(of_beam)(1))
        listed = base.KeyedModelHandler([mapping], default=adding(of_beam)(200))
        return {
            "answers": rows | "Pattern" >> base.RunInference(pattern),
            "listed": rows | "Listed" >> base.RunInference(listed),
        }

    found = run(program, of_penstock, str(tmp_path))
    assert found.values_of() == [("a", 2), ("b", 22), ("c", 103)]
    assert found.values_of("listed") == [("a", 2), ("b", 202), ("c", 203)]


def test_a_pattern_for_a_handler_that_ignores_paths():
    with pytest.raises(UsageError, match=r"Adding ignores a new path: define update_model_path"):
        of_penstock.KeyedModelHandler.from_pattern("models/{key}.json", adding(of_beam)(1))


@pytest.mark.parametrize("many", [False, True], ids=["one model", "a model for each key"])
def test_a_keyed_handler_of_a_class_of_ones_own(many, tmp_path):
    class Own(of_penstock.KeyedModelHandler):
        def batch_elements_kwargs(self):
            return {"min_batch_size": 2, "max_batch_size": 2}

        def get_resource_hints(self):
            return {"min_ram": "2GB"}

        def override_metrics(self, metrics_namespace=""):
            return True

    handler = Own([of_penstock.KeyModelMapping(["a"], Sizes())] if many else Sizes())

    def program(base, p, folder):
        answers = p | beam.Create([("a", number) for number in range(6)]) | of_penstock.RunInference(handler)
        environments = p.to_runner_api().components.environments.values()
        hints = resources.parse_resource_hints({"min_ram": "2GB"})
        assert hints in [dict(each.resource_hints) for each in environments]
        return {"answers": answers}

    found = run(program, of_penstock, str(tmp_path))
    assert found.values_of() == [("a", 2)] * 6
    assert not [name for _, name in counters(found) if "num_inferences" in name]


@BOTH
def test_an_inner_handler_that_counts_by_itself(base, tmp_path):
    class Counts(base.ModelHandler):
        def override_metrics(self, metrics_namespace=""):
            return True

        def load_model(self):
            return Weights(0)

        def run_inference(self, batch, model, inference_args=None):
            return batch

    def program(_, p, folder):
        handler = of_penstock.KeyedModelHandler(Counts())
        return {"answers": p | beam.Create([("a", 1)]) | of_penstock.RunInference(handler)}

    assert not [name for _, name in counters(run(program, of_penstock, str(tmp_path))) if "num_inferences" in name]
