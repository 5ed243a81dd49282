"""No handler runs code from a file without trusted=True, whatever the file is called. TensorFlow has its own tests."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
import xgboost

from penstock.errors import InputError, UsageError
from penstock.handlers.jax import JaxModelHandler
from penstock.handlers.lightgbm import LightGBMModelHandlerNumpy
from penstock.handlers.onnx import OnnxModelHandlerNumpy
from penstock.handlers.pytorch import PytorchModelHandlerTensor
from penstock.handlers.sklearn import SklearnModelHandlerNumpy
from penstock.handlers.xgboost import XGBoostModelHandlerNumpy


class Planted:
    """What leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def torch_script(path: Path, _: Any) -> None:
    torch.jit.script(torch.nn.Linear(2, 1)).save(str(path))


FILES: dict[str, Callable[[Path, Any], object]] = {
    "pickle": lambda path, planted: path.write_bytes(pickle.dumps(planted)),
    "pickle of protocol 0": lambda path, planted: path.write_bytes(pickle.dumps(planted, protocol=0)),
    "joblib": lambda path, planted: joblib.dump(planted, path),
    "compressed joblib": lambda path, planted: joblib.dump(planted, path, compress=("gzip", 3)),
    "array of objects": lambda path, planted: np.save(path.open("wb"), np.array([planted], object), allow_pickle=True),
    "torch": lambda path, planted: torch.save({"weight": planted}, path),
    "TorchScript": torch_script,
}
HANDLERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "sklearn": (SklearnModelHandlerNumpy, ".skops"),
    "xgboost": (lambda path: XGBoostModelHandlerNumpy(xgboost.Booster, path), ".json"),
    "lightgbm": (LightGBMModelHandlerNumpy, ".txt"),
    "onnx": (OnnxModelHandlerNumpy, ".onnx"),
    "jax": (lambda path: JaxModelHandler(lambda params, rows: rows, path), ".safetensors"),
    "torch": (lambda path: PytorchModelHandlerTensor(state_dict_path=path, model_class=torch.nn.Identity), ".pt"),
    "safetensors": (
        lambda path: PytorchModelHandlerTensor(state_dict_path=path, model_class=torch.nn.Identity),
        ".safetensors",
    ),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("handler", HANDLERS)
def test_files_that_run_code_by_the_name_of_others(handler: str, file: str, tmp_path: Path) -> None:
    make, ending = HANDLERS[handler]
    path, mark = tmp_path / f"model{ending}", tmp_path / "mark"
    FILES[file](path, Planted(mark))
    with pytest.raises((InputError, UsageError)):
        make(str(path)).load_model()
    assert not mark.exists()


def test_a_folder_of_orbax_holds_no_pickles(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in ("_METADATA", "checkpoint", "manifest.ocdbt", "_CHECKPOINT_METADATA"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(pickle.dumps(Planted(mark)))
    with pytest.raises(InputError):
        JaxModelHandler(lambda params, rows: rows, str(tmp_path / "folder")).load_model()
    assert not mark.exists()
