"""What models may return is the same for all frameworks: one answer for each row, whatever holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import lightgbm
import numpy as np
import onnx
import pyarrow as pa
import pytest
import skops.io
import torch
import xgboost
from onnx import TensorProto, helper
from safetensors.numpy import save_file
from sklearn.dummy import DummyRegressor
from transformers.utils import ModelOutput

import penstock as ps
from penstock.errors import PredictionCountError
from penstock.handlers.jax import JaxModelHandler
from penstock.handlers.lightgbm import LightGBMModelHandlerNumpy
from penstock.handlers.onnx import OnnxModelHandlerNumpy
from penstock.handlers.pytorch import PytorchModelHandlerTensor
from penstock.handlers.sklearn import SklearnModelHandlerNumpy
from penstock.handlers.xgboost import XGBoostModelHandlerNumpy

X = np.arange(10, dtype=np.float32).reshape(5, 2)
TABLE = pa.table({"a": X[:, 0], "b": X[:, 1]})


class Named(NamedTuple):
    sums: Any
    rows: Any
    none: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    sums: Any
    rows: Any
    none: Any = None


@dataclasses.dataclass
class Transformed(ModelOutput):
    sums: Any = None
    rows: Any = None


OUTPUTS: dict[str, Any] = {  # of an array or tensor x
    "an array": lambda x: x * 2,
    "no memory of its own": lambda x: (x * 2).T.reshape(2, -1).T,
    "every other": lambda x: x.reshape(-1)[::2],
    "a tuple": lambda x: (x.sum(1), x),
    "a dict": lambda x: {"sums": x.sum(1), "rows": x},
    "a named tuple": lambda x: Named(x.sum(1), x),
    "a dataclass": lambda x: Fields(x.sum(1), x),
    "a ModelOutput": lambda x: Transformed(sums=x.sum(1), rows=x),
    "dicts in a dict": lambda x: {"one": {"sums": x.sum(1), "rows": x}, "two": (x.sum(1), x)},
}
BY_NAME = [{"sums": row.sum(), "rows": row} for row in X]
EXPECTED: dict[str, list[Any]] = {
    "an array": list(X * 2),
    "no memory of its own": list(X * 2),
    "every other": list(X[:, 0]),
    "a tuple": [(row.sum(), row) for row in X],
    "dicts in a dict": [{"one": each, "two": (each["sums"], each["rows"])} for each in BY_NAME],
}
REFUSED: dict[str, tuple[Any, str]] = {
    "one number": (lambda x: x.sum(), r"shape \(\)"),
    "one row too few": (lambda x: x[:-1], r"shape \(\d, 2\)"),
    "uneven dict": (lambda x: {"sums": x.sum(1)[:-1], "rows": x}, r"output\['sums'\]"),
    "uneven tuple": (lambda x: (x, x[:-1]), r"output\[1\]"),
    "one number in a dict": (lambda x: {"rows": x, "total": x.sum()}, r"output\['total'\]"),
    "nothing": (lambda x: {}, "dict"),
}


class Module(torch.nn.Module):
    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return given(self.output)(x)


def given(output: str) -> Any:
    return OUTPUTS.get(output) or REFUSED[output][0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    skops.io.dump(DummyRegressor().fit(X, X[:, 0]), folder / "sklearn")
    xgboost.XGBRegressor(n_estimators=1).fit(X, X[:, 0]).save_model(folder / "xgboost.json")
    lightgbm.train({"verbose": -1}, lightgbm.Dataset(X, X[:, 0]), 1).save_model(folder / "lightgbm")
    torch.save(Module("").state_dict(), folder / "torch")
    save_file({"weight": np.zeros(1, np.float32)}, folder / "jax")
    described = helper.make_tensor_value_info
    node, kind = helper.make_node("Identity", ["x"], ["y"]), (TensorProto.FLOAT, ["rows", 2])
    graph = helper.make_graph([node], "graph", [described("x", *kind)], [described("y", *kind)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(folder / "onnx"))
    return folder


FRAMEWORKS: dict[str, Any] = {
    "sklearn": lambda path, output, more: SklearnModelHandlerNumpy(
        f"{path}/sklearn", inference_fn=lambda model, data, arguments: given(output)(data.astype(np.float32)), **more
    ),
    "xgboost": lambda path, output, more: XGBoostModelHandlerNumpy(
        xgboost.XGBRegressor, f"{path}/xgboost.json", lambda data, model, arguments: given(output)(data), **more
    ),
    "lightgbm": lambda path, output, more: LightGBMModelHandlerNumpy(
        f"{path}/lightgbm", inference_fn=lambda model, data, arguments: given(output)(data), **more
    ),
    "onnx": lambda path, output, more: OnnxModelHandlerNumpy(
        f"{path}/onnx", inference_fn=lambda model, batch, arguments: given(output)(np.stack(batch)), **more
    ),
    "jax": lambda path, output, more: JaxModelHandler(lambda params, x: given(output)(x), f"{path}/jax", **more),
    "pytorch": lambda path, output, more: PytorchModelHandlerTensor(
        model_class=Module, model_params={"output": output}, state_dict_path=f"{path}/torch", **more
    ),
}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return np.asarray(value).tolist()


def in_table(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: in_table(part) for name, part in value.items()}
    return {str(at): in_table(part) for at, part in enumerate(value)} if isinstance(value, tuple) else value


BOTH = [(framework, output) for framework in FRAMEWORKS for output in OUTPUTS]
NOT_OF_JAX = ("jax", "a ModelOutput")  # it compiles no function that gives one


@pytest.mark.parametrize(("framework", "output"), [each for each in BOTH if each != NOT_OF_JAX])
def test_one_answer_for_each_row(framework: str, output: str, folder: Path) -> None:
    expected = [plain(each) for each in EXPECTED.get(output, BY_NAME)]
    rows = [torch.tensor(row) for row in X] if framework == "pytorch" else list(X)
    handler = FRAMEWORKS[framework](folder, output, {})
    with ps.Pipeline(workers=0) as p:
        answers = (p | ps.Create(rows) | ps.RunInference(handler)).collect()
    assert [plain(answer.inference) for answer in answers] == expected
    assert {answer.model_id for answer in answers} == {handler.model_id()}
    handler = FRAMEWORKS[framework](folder, output, {"columns": ["a", "b"]})
    if not handler.takes_columns():
        return
    made = handler.run_inference_columns(TABLE, handler.load_model())
    by_row = (
        [dict(zip(made, row, strict=True)) for row in zip(*made.values(), strict=True)] if isinstance(made, dict) else made
    )
    if output != "dicts in a dict":
        assert [plain(each) for each in by_row] == [in_table(each) for each in expected]


@pytest.mark.parametrize("output", REFUSED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_number_of_answers(framework: str, output: str, folder: Path) -> None:
    handler = FRAMEWORKS[framework](folder, output, {})
    rows = [torch.tensor(row) for row in X] if framework == "pytorch" else list(X)
    with pytest.raises(PredictionCountError, match=REFUSED[output][1]):
        handler.run_inference(rows, handler.load_model())


def test_lists_have_one_answer_for_each_row(folder: Path) -> None:
    handler = FRAMEWORKS["pytorch"](folder, "", {})
    model: Any = torch.nn.Module()
    for output in ([torch.tensor(1.0), torch.tensor(2.0)], [(torch.tensor(1.0), "a"), (torch.tensor(2.0), "b")]):
        model.forward = lambda x, output=output: output
        assert handler.run_inference([torch.zeros(1)] * 2, model) == output
    for wrong in ("ab", {"a", "b"}, None, 2.0):
        model.forward = lambda x, output=wrong: output
        with pytest.raises(PredictionCountError, match="a batch of 2 rows"):
            handler.run_inference([torch.zeros(1)] * 2, model)


class OnTheDevice(ps.ModelHandler):
    """Its answers are where it has computed them."""

    def __init__(self, answers: Callable[[torch.Tensor], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.answers = answers

    def load_model(self) -> torch.device:
        return torch.device("cuda")

    def run_inference(self, batch: Any, model: torch.device, inference_args: Any = None) -> Any:
        return self.answers(torch.tensor(batch, dtype=torch.float32, device=model).unsqueeze(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", [{}, {"large_model": True}], ids=str)
@pytest.mark.parametrize("answers", [lambda x: x, list, lambda x: [{"x": each} for each in x], lambda x: {"x": x}])
@pytest.mark.parametrize("workers", [0, 2])
def test_answers_leave_the_gpu(workers: int, answers: Any, settings: dict[str, Any]) -> None:
    """Else every process that reads them takes a share of its memory."""
    pipeline = ps.Pipeline(workers=workers)
    made = (pipeline | ps.Create(range(100)) | ps.RunInference(OnTheDevice(answers, **settings))).collect()
    tensors = [each["x"] if isinstance(each, dict) else each for each in made]
    assert {each.device.type for each in tensors} == {"cpu"}
    assert [each.tolist() for each in tensors] == [[float(row)] for row in range(100)]
