"""Metrics of RunInference on Apache Beam: the names that Beam counts under, in each case in which it has others."""

from __future__ import annotations

import sys

import apache_beam as beam
import cloudpickle
import pytest
from apache_beam.metrics import Metrics
from apache_beam.ml.inference import base as of_beam

import beam_programs
import penstock.beam as of_penstock
from beam_programs import (
    Weights,
    adding,
    from_file,
    model_per_key,
    refresh_by_side_input,
    refresh_per_key,
    refresh_without_a_version,
    written,
)
from beam_runs import counters, distributions, run

for each in (sys.modules[__name__], beam_programs):
    cloudpickle.register_pickle_by_value(each)

BOTH = pytest.mark.parametrize("base", [of_beam, of_penstock], ids=["of Beam", "of Penstock"])
INFERENCES = "num_inferences"
OF_BATCHES = {
    "inference_request_batch_size",
    "inference_request_batch_byte_size",
    "inference_batch_latency_micro_secs",
}
OF_LOADS = {"load_model_latency_milli_secs", "model_byte_size"}


def counts(outcome, name=INFERENCES):
    """The counters that end with this name, by what stands before it."""
    return {key.removesuffix(name): n for (_, key), n in counters(outcome).items() if key.endswith(name)}


def seen(outcome):
    return {name for _, name in distributions(outcome)}


@BOTH
def test_a_new_version_has_its_name_before_all_metrics(base, tmp_path):
    found = run(refresh_by_side_input, base, str(tmp_path))
    assert counts(found) == {"new_": 20}
    assert {f"new_{name}" for name in OF_BATCHES | OF_LOADS} <= seen(found)
    assert not (OF_BATCHES | OF_LOADS) & seen(found)


@BOTH
def test_without_a_version_metrics_have_no_prefix(base, tmp_path):
    found = run(refresh_without_a_version, base, str(tmp_path))
    assert counts(found) == {"": 20}
    assert seen(found) >= OF_BATCHES


@BOTH
def test_a_version_without_a_name_has_no_prefix(base, tmp_path):
    def program(base, p, folder):
        new = written(folder, "new.json", 1000)
        metadata = p | "Versions" >> beam.Create([base.ModelMetadata(model_id=new, model_name="")])
        step = base.RunInference(from_file(base)(new), metrics_namespace="own", model_metadata_pcoll=metadata)
        return {"answers": p | beam.Create(range(20)) | step}

    found = run(program, base, str(tmp_path))
    assert counts(found) == {"": 20}
    assert {namespace for namespace, name in counters(found) if name == INFERENCES} == {"own"}


@BOTH
def test_each_of_several_models_is_counted_by_its_first_key(base, tmp_path):
    found = run(model_per_key, base, str(tmp_path))
    assert counts(found) == {"": 30, "a-_": 20, "c-_": 10}
    assert {f"{key}{name}" for key in ("", "a-_", "c-_") for name in OF_LOADS} <= seen(found)
    assert seen(found) >= OF_BATCHES


def test_each_of_several_models_that_change_is_counted_by_its_version(tmp_path):
    """Beam's first batch is answered by the old ones."""
    found = run(refresh_per_key, of_penstock, str(tmp_path))
    assert counts(found) == {"": 20, "a-new-_": 10, "b-same-_": 10}


def test_a_version_that_is_refused_is_logged_and_counted(tmp_path, caplog):
    """By one of the steps' copies; the model that was there answers."""

    def program(base, p, folder):
        bad = written(folder, "bad.json", "no number")
        metadata = p | "Versions" >> beam.Create([base.ModelMetadata(model_id=bad, model_name="bad")])
        handler = from_file(base)(written(folder, "old.json", 1))
        step = base.RunInference(handler, model_metadata_pcoll=metadata, validate=lambda model, _: model.much != "no number")
        return {"answers": p | beam.Create(range(20)) | beam.Reshuffle() | step}

    found = run(program, of_penstock, str(tmp_path), runner="threads")
    assert sorted(found.values_of()) == list(range(1, 21))
    assert counts(found, "model_refreshes_refused") == {"": 1}
    (said,) = [message for message in caplog.messages if "was refused" in message]
    assert f"the model {tmp_path}/bad.json was refused: " in said
    assert said.endswith("the model that was there stays")


def test_models_by_a_pattern_are_counted_together(tmp_path):
    """There may be thousands of them."""

    def program(base, p, folder):
        for key in "ab":
            written(folder, f"{key}.json", 1)
        handler = base.KeyedModelHandler.from_pattern(f"{folder}/{{key}}.json", from_file(base)(""))
        return {"answers": p | beam.Create([("a", 1), ("b", 2)]) | base.RunInference(handler)}

    assert counts(run(program, of_penstock, str(tmp_path))) == {"": 2}


@BOTH
def test_a_handler_may_count_by_itself(base, tmp_path):
    class Own(base.ModelHandler):
        def override_metrics(self, metrics_namespace=""):
            self.counter = Metrics.counter(metrics_namespace, "mine")
            return True

        def load_model(self):
            return Weights(1)

        def run_inference(self, batch, model, inference_args=None):
            self.counter.inc(len(batch))
            return batch

    def program(base, p, folder):
        rows = p | beam.Create(range(20))
        own = rows | "Own" >> base.RunInference(Own(), metrics_namespace="own")
        return {"answers": own, "other": rows | "Other" >> base.RunInference(adding(base)(1), metrics_namespace="other")}

    found = run(program, base, str(tmp_path))
    names = {key: n for key, n in counters(found).items() if key[0] == "own"}
    assert names == {("own", "mine"): 20}
    assert "own" not in {namespace for namespace, _ in distributions(found)}
    assert counters(found)["other", INFERENCES] == 20
