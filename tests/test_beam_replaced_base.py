"""Handlers of Beam's own modules whose base is replaced by penstock.beam."""

from __future__ import annotations

import importlib.util
import pickle
import sys

import apache_beam as beam
import numpy as np
import pytest
import torch
from apache_beam.ml.inference import base as of_beam
from apache_beam.ml.inference import pytorch_inference, sklearn_inference
from sklearn.linear_model import LinearRegression

import penstock as ps
import penstock.beam as of_penstock
from beam_programs import as_lists
from beam_runs import run


@pytest.fixture
def replaced():
    """A module of Beam's whose base is penstock.beam."""
    name = "apache_beam.ml.inference.base"
    made = []

    def load(module):
        spec = importlib.util.spec_from_file_location(f"replaced_{module.__name__.rpartition('.')[2]}", module.__file__)
        own = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        made.append(spec.name)
        before, sys.modules[name] = sys.modules[name], of_penstock
        try:
            spec.loader.exec_module(own)
        finally:
            sys.modules[name] = before
        return own

    yield load
    for each in made:
        del sys.modules[each]


def test_beams_pytorch_handler_with_its_base_replaced(replaced, tmp_path):
    module = replaced(pytorch_inference)
    assert issubclass(module.PytorchModelHandlerTensor, ps.ModelHandler)
    assert not issubclass(module.PytorchModelHandlerTensor, of_beam.ModelHandler)
    path = str(tmp_path / "linear.pt")
    torch.save({"weight": torch.tensor([[2.0]]), "bias": torch.tensor([1.0])}, path)

    def handler(module, **settings):
        return module.PytorchModelHandlerTensor(path, torch.nn.Linear, {"in_features": 1, "out_features": 1}, **settings)

    def program(base, p, folder):
        rows = p | beam.Create([torch.tensor([float(number)]) for number in range(20)])
        own = handler(module if base is of_penstock else pytorch_inference, min_batch_size=4, max_batch_size=9)
        return {"answers": rows | base.RunInference(own) | beam.Map(as_lists)}

    expected = run(program, of_beam, str(tmp_path)).values_of()
    assert run(program, of_penstock, str(tmp_path)).values_of() == expected
    assert len(expected) == 20


def test_beams_sklearn_handler_with_its_base_replaced(replaced, tmp_path):
    module = replaced(sklearn_inference)
    inputs = np.array([[1.0], [2.0]])
    path = tmp_path / "linear.pickle"
    path.write_bytes(pickle.dumps(LinearRegression().fit(inputs, inputs[:, 0] * 3)))

    def program(base, p, folder):
        rows = p | beam.Create([np.array([float(number)]) for number in range(20)])
        keyed = base.KeyedModelHandler(module.SklearnModelHandlerNumpy(str(path)))
        with_keys = rows | beam.Map(lambda row: ("key", row)) | "Keyed" >> base.RunInference(keyed)
        return {
            "answers": rows | base.RunInference(module.SklearnModelHandlerNumpy(str(path))) | beam.Map(as_lists),
            "keyed": with_keys | "Lists" >> beam.MapTuple(lambda key, found: (key, as_lists(found))),
        }

    found = run(program, of_penstock, str(tmp_path))
    expected = [([float(number)], 3.0 * number) for number in range(20)]
    assert sorted(value[:2] for value in found.values_of()) == expected
    assert sorted((key, value[:2]) for key, value in found.values_of("keyed")) == [("key", each) for each in expected]
