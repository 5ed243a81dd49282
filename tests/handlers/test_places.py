"""Handlers whose model lives in a process of its own: the answers are those of the same model in the user's process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import penstock as ps
from penstock.handlers.catalog import FAMILIES
from penstock.handlers.pytorch import PytorchModelHandlerKeyedTensor
from penstock.testing import check_handler
from test_refresh_frameworks import KINDS, bias

ROWS = range(1, 8)


class Padded(torch.nn.Module):
    """The sum of each row's own values, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (x * attention_mask).sum(dim=1, keepdim=True).float() + self.bias


OF_LENGTHS = (
    bias,
    lambda path, **more: PytorchModelHandlerKeyedTensor(model_class=Padded, state_dict_path=path, pad={"x": 9}, **more),
    lambda row: {"x": torch.arange(row % 3 + 1) + row},
)
PLACED = [
    "scikit-learn",
    "pytorch",
    "images",
    "ONNX",
    "ONNX, texts",
    "XGBoost",
    "LightGBM",
    "JAX",
    "pipeline",
    "encoder",
]
ALL: dict[str, Any] = {name: KINDS[name] for name in PLACED} | {"keyed tensors": OF_LENGTHS}


def plain(example: Any) -> dict[str, Any]:
    """An example as columns hold it: numbers in one each, lists, texts and images whole."""
    if isinstance(example, Mapping):
        return {name: value.tolist() for name, value in example.items()}
    if isinstance(example, (str, bytes)):
        return {"x": example}
    return dict(zip("xy", map(float, example), strict=False))


def columns_of(example: Any) -> str | list[str]:
    return "x" if isinstance(example, (str, bytes)) else list(plain(example))


def numbers_of(answer: Any) -> list[float]:
    scored = answer["score"] if isinstance(answer, dict) else answer
    return np.asarray(scored, float).ravel().tolist()  # type: ignore[no-any-return]


def same_as(expected: list[list[float]]) -> Any:
    return [pytest.approx(each, rel=1e-4, abs=1e-4) for each in expected]


@pytest.mark.parametrize("kind", ALL)
def test_in_the_process(kind: str, tmp_path: Path) -> None:
    save, handler_of, example_of = ALL[kind]
    save(tmp_path / "model", 1)
    examples = [example_of(row) for row in ROWS]
    check_handler(handler_of(str(tmp_path / "model")), examples, tolerance=1e-4)
    of_columns = handler_of(str(tmp_path / "model"), columns=columns_of(examples[0]))
    check_handler(of_columns, list(map(plain, examples)), tolerance=1e-4)


@pytest.mark.parametrize("kind", ALL)
def test_rows_and_columns_in_a_host(kind: str, tmp_path: Path) -> None:
    save, handler_of, example_of = ALL[kind]
    save(tmp_path / "model", 1)
    examples = [example_of(row) for row in ROWS]
    table = pa.Table.from_pylist([{"id": at, **plain(example)} for at, example in enumerate(examples)])
    pq.write_table(table, tmp_path / "rows.parquet")
    with ps.Pipeline(workers=0) as p:
        here = (p | ps.Create(examples) | ps.RunInference(handler_of(str(tmp_path / "model")))).collect()
    hosted = handler_of(str(tmp_path / "model"), large_model=True)
    columns = handler_of(str(tmp_path / "model"), large_model=True, output_column="answer", columns=columns_of(examples[0]))
    with ps.Pipeline(workers=1) as p:
        rows = p | ps.Create(list(enumerate(examples))) | ps.RunInference(ps.KeyedModelHandler(hosted))
        (
            rows
            | ps.Map(lambda row: {"id": row[0], "answer": numbers_of(row[1].inference)})
            | "rows" >> ps.WriteToParquet(str(tmp_path / "of-rows"))
        )
        read = p | ps.ReadFromParquet(str(tmp_path / "rows.parquet")) | "columns" >> ps.RunInference(columns)
        read | "table" >> ps.WriteToParquet(str(tmp_path / "of-columns"))
    expected = same_as([numbers_of(answer.inference) for answer in here])
    for folder in ("of-rows", "of-columns"):
        seen = pq.read_table(tmp_path / folder).sort_by("id")["answer"].to_pylist()
        assert list(map(numbers_of, seen)) == expected, folder


def test_all_families_of_files_are_here() -> None:
    """TensorFlow's are tested in an environment of their own, those of servers with their servers."""
    made = {type(handler_of("model")).__module__.split(".")[-1].split("_")[0] for _, handler_of, _ in ALL.values()}
    elsewhere = {"tensorflow", "llama_cpp", "remote", "vllm"}
    assert made == {family.name for family in FAMILIES} - elsewhere
