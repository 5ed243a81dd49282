"""Handlers of Beam's own modules whose base is replaced by penstock.beam."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import types

import apache_beam as beam
import numpy as np
import onnx
import pytest
import torch
import transformers
import xgboost
from apache_beam.ml.inference import base as of_beam
from apache_beam.ml.inference import onnx_inference, pytorch_inference, sklearn_inference
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


def check_alike(handler_of, own, of_base, rows, folder):
    """Beam's RunInference with Beam's module, and Penstock's with the one whose base is replaced."""

    def program(base, p, folder):
        handler = handler_of(own if base is of_penstock else of_base)
        assert isinstance(handler, ps.ModelHandler) == (base is of_penstock)
        return {"answers": p | beam.Create(rows) | base.RunInference(handler) | beam.Map(as_lists)}

    expected = run(program, of_beam, str(folder)).values_of()
    assert run(program, of_penstock, str(folder)).values_of() == expected
    assert len(expected) == len(rows)
    return expected


def test_beams_onnx_handler_with_its_base_replaced(replaced, tmp_path):
    path = str(tmp_path / "plus.onnx")
    float_type, shape = onnx.TensorProto.FLOAT, [None, 2]
    add = onnx.helper.make_node("Add", ["x", "one"], ["y"])
    ends = [onnx.helper.make_tensor_value_info(name, float_type, shape) for name in ("x", "y")]
    one = onnx.helper.make_tensor("one", float_type, [1], [1.0])
    graph = onnx.helper.make_graph([add], "plus", ends[:1], ends[1:], [one])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    rows = [np.array([number, -number], dtype=np.float32) for number in range(20)]

    def handler(module):
        return module.OnnxModelHandlerNumpy(path, providers=["CPUExecutionProvider"], max_batch_size=9)

    answers = check_alike(handler, replaced(onnx_inference), onnx_inference, rows, tmp_path)
    assert [3.0, -3.0] in [example for example, _, _ in answers]
    assert [4.0, -2.0] in [answer for _, answer, _ in answers]


@pytest.fixture
def imported(replaced, monkeypatch):
    """A module of Beam's, and the same with its base replaced. It imports a package which nothing here calls, and which is
    large: that is empty, and gone when the module is there."""

    def load(name, package, needed):
        empty = types.ModuleType(package)
        empty.__spec__ = importlib.util.spec_from_loader(package, None)  # transformers looks for it
        setattr(empty, needed, type(needed, (), {}))
        monkeypatch.delitem(sys.modules, f"apache_beam.ml.inference.{name}", raising=False)
        with monkeypatch.context() as meanwhile:
            meanwhile.setitem(sys.modules, package, empty)
            module = importlib.import_module(f"apache_beam.ml.inference.{name}")
            return module, replaced(module)

    return load


def test_beams_xgboost_handler_with_its_base_replaced(imported, tmp_path):
    module, own = imported("xgboost_inference", "datatable", "Frame")
    inputs = np.arange(40, dtype=float).reshape(20, 2)
    model = xgboost.XGBRegressor(n_estimators=3, max_depth=2, n_jobs=1).fit(inputs, inputs.sum(axis=1))
    path = str(tmp_path / "trees.json")
    model.save_model(path)
    rows = [row.reshape(1, 2) for row in inputs]

    def handler(module):
        return module.XGBoostModelHandlerNumpy(xgboost.XGBRegressor, path, max_batch_size=9)

    answers = check_alike(handler, own, module, rows, tmp_path)
    assert len({str(answer) for _, answer, _ in answers}) > 2


@pytest.fixture
def small_bert(tmp_path):
    """The folder of a text classifier, with its tokenizer."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=len(words), **sizes)
    transformers.BertForSequenceClassification(config).eval().save_pretrained(tmp_path)
    return str(tmp_path)


def test_beams_hugging_face_handlers_with_their_base_replaced(imported, monkeypatch, small_bert, tmp_path):
    """Two names of TensorFlow's, which the module imports, are stand-ins."""
    monkeypatch.setitem(sys.modules["transformers"].__dict__, "TFAutoModel", type("TFAutoModel", (), {}))
    module, own = imported("huggingface_inference", "tensorflow", "Tensor")

    def program(base, p, folder):
        of = own if base is of_penstock else module
        pipe = of.HuggingFacePipelineModelHandler(task="text-classification", model=small_bert, device="CPU")
        tensors = of.HuggingFaceModelHandlerKeyedTensor(
            model_uri=small_bert, model_class=transformers.AutoModel, framework="pt", device="CPU", max_batch_size=4
        )
        assert isinstance(pipe, ps.ModelHandler) == (base is of_penstock)
        texts = p | "Texts" >> beam.Create(["good film", "bad film", "good"])
        ids = p | "Ids" >> beam.Create([{"input_ids": torch.tensor([2, word, 3])} for word in (5, 6, 7)])
        return {
            "texts": texts | "Pipe" >> base.RunInference(pipe) | "Label" >> beam.Map(labelled),
            "ids": ids | "Tensors" >> base.RunInference(tensors) | "Round" >> beam.Map(rounded),
        }

    expected = run(program, of_beam, str(tmp_path))
    found = run(program, of_penstock, str(tmp_path))
    assert found.values_of("texts") == expected.values_of("texts")
    assert found.values_of("ids") == expected.values_of("ids")
    assert (len(found["texts"]), len(found["ids"])) == (3, 3)


def labelled(found):
    return found.example, found.inference["label"], round(found.inference["score"], 3)


def rounded(found):
    values = found.inference["last_hidden_state"].detach().numpy()
    return found.example["input_ids"].tolist(), (values.round(2) + 0.0).tolist()
