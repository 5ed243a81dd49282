"""What the PyTorch handlers do with whole batches: padding and masks, the type of weights, autocast, torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import penstock as ps
from penstock.errors import BadRowsError, RowError, UsageError
from penstock.handlers.pytorch import PytorchModelHandlerKeyedTensor, PytorchModelHandlerTensor, make_tensor_model_fn
from penstock.testing import check_handler


class Bag(torch.nn.Module):
    """The mean of the vectors of a row's own tokens, and how long the batch was padded."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 4)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        weights = attention_mask.unsqueeze(-1).to(self.table.weight.dtype)
        mean = (self.table(ids) * weights).sum(1) / weights.sum(1)
        return mean if scale is None else mean * scale.unsqueeze(1)


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (x * attention_mask).sum(1)


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


X = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
LENGTHS = [3, 1, 7, 2, 5]
ROWS = [{"ids": [at + 1] * length, "scale": float(at + 1)} for at, length in enumerate(LENGTHS)]
TENSORS = [{"ids": torch.tensor(row["ids"]), "scale": torch.tensor(row["scale"])} for row in ROWS]


@pytest.fixture
def bag(tmp_path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Bag()
    torch.save(model.state_dict(), tmp_path / "bag.pt")
    return {"model_class": Bag, "state_dict_path": str(tmp_path / "bag.pt"), "pad": {"ids": 0}}


@pytest.fixture
def linear(tmp_path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Linear()
    torch.save(model.state_dict(), tmp_path / "linear.pt")
    return {"model_class": Linear, "state_dict_path": str(tmp_path / "linear.pt")}


# Padding.


def test_rows_of_different_lengths_are_padded_and_masked(bag: dict[str, Any]) -> None:
    handler = PytorchModelHandlerKeyedTensor(**bag)
    model = handler.load_model()
    answers = handler.run_inference(TENSORS, model)
    expected = [model.table.weight[at + 1] * (at + 1) for at in range(len(ROWS))]
    torch.testing.assert_close(answers, torch.stack(expected))
    assert handler.get_lengths(TENSORS) == LENGTHS
    assert handler.wraps_answers
    check_handler(handler, TENSORS)


def test_columns_of_lists_are_padded(bag: dict[str, Any], tmp_path: Path) -> None:
    handler = PytorchModelHandlerKeyedTensor(**bag, columns=["ids", "scale"], output_column="vector")
    check_handler(handler, ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    with ps.Pipeline(workers=0) as p:
        rows = p | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
        rows | ps.RunInference(handler) | ps.WriteToParquet(str(tmp_path / "out"))
    seen = pq.read_table(tmp_path / "out").sort_by("scale")["vector"].to_pylist()
    torch.testing.assert_close(torch.tensor(seen), handler.run_inference(TENSORS, handler.load_model()))


def test_few_lengths_and_weights_of_another_type(bag: dict[str, Any]) -> None:
    seen: list[Any] = []

    class Seen(Bag):
        def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
            seen.append((tuple(ids.shape), None if scale is None else scale.dtype))
            return super().forward(ids, attention_mask, scale)

    settings = {**bag, "model_class": Seen, "dtype": "float64", "columns": ["ids", "scale"]}
    handler = PytorchModelHandlerKeyedTensor(**settings, length_buckets=[4, 8])
    model = handler.load_model()
    for rows in (ROWS[:2], ROWS, TENSORS[3:4]):
        assert handler.run_inference(rows, model).dtype == torch.float64
    assert [shape for shape, _ in seen] == [(2, 4), (5, 8), (1, 4)]
    assert {kind for _, kind in seen} == {torch.float64}


def test_a_mask_of_the_rows_own_is_kept(bag: dict[str, Any]) -> None:
    rows = [{"ids": row["ids"], "attention_mask": torch.ones(len(row["ids"]), dtype=torch.long)} for row in TENSORS]
    rows[2]["attention_mask"][:3] = 0
    handler = PytorchModelHandlerKeyedTensor(**{**bag, "pad": {"ids": 0, "attention_mask": 0}}, mask=None)
    check_handler(handler, rows)
    padded = PytorchModelHandlerKeyedTensor(**bag)
    check_handler(padded, rows)
    mixed = [{"ids": rows[0]["ids"]}, *rows[1:]]  # where the first has none, the others keep theirs
    answers = padded.run_inference(mixed, padded.load_model())
    torch.testing.assert_close(answers, padded.run_inference(rows, padded.load_model()))


def test_rows_of_several_types_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "sum.pt")
    handler = PytorchModelHandlerKeyedTensor(model_class=Sum, state_dict_path=str(tmp_path / "sum.pt"), pad={"x": 0})
    rows = [{"x": torch.tensor([1, 2])}, {"x": torch.tensor([0.5])}]  # as whole numbers it would be 0
    with pytest.raises(RowError, match=r"must have one type, but saw torch.float32, torch.int64; convert them"):
        handler.run_inference(rows, handler.load_model())


def test_rows_that_cannot_be_padded_fail_alone(bag: dict[str, Any]) -> None:
    handler = PytorchModelHandlerKeyedTensor(**bag)
    rows = [TENSORS[0], {"ids": torch.tensor(1)}, {"other": torch.tensor([1])}, TENSORS[1]]
    with pytest.raises(BadRowsError, match=r"the keys \['ids'\], which pad= names, must be tensors of one length") as caught:
        handler.run_inference(rows, handler.load_model())
    assert list(caught.value.errors) == [1, 2]
    null = PytorchModelHandlerKeyedTensor(**bag, columns=["ids", "scale"])
    with pytest.raises(BadRowsError) as caught:
        null.run_inference([ROWS[0], {"ids": None, "scale": 1.0}, ROWS[1]], null.load_model())
    assert list(caught.value.errors) == [1]


def test_wrong_settings(bag: dict[str, Any], linear: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"pad=\{\}: expected keys and what fills them up"):
        PytorchModelHandlerKeyedTensor(**{**bag, "pad": {}})
    with pytest.raises(UsageError, match="mask='ids' is one of the keys that pad= names"):
        PytorchModelHandlerKeyedTensor(**bag, mask="ids")
    with pytest.raises(UsageError, match="pad= is for the model itself, but inference_fn= gets rows as they are"):
        PytorchModelHandlerKeyedTensor(**bag, inference_fn=print)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="dtype='int8': expected one of float32, float16, bfloat16, float64"):
        PytorchModelHandlerTensor(**linear, dtype="int8")
    with pytest.raises(UsageError, match="compile='yes': expected True, False, or a dict"):
        PytorchModelHandlerTensor(**linear, compile="yes")  # type: ignore[arg-type]


# Types and compilation.


class Narrow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn)


def test_answers_of_eight_bits(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "narrow.pt")
    settings: Any = {"model_class": Narrow, "state_dict_path": str(tmp_path / "narrow.pt")}
    p = ps.Pipeline(workers=1)
    answers = (p | ps.Create([X[0], X[1]]) | ps.RunInference(PytorchModelHandlerTensor(**settings))).collect()
    assert {answer.inference.dtype for answer in answers} == {torch.float8_e4m3fn}  # in rows they stay what they are
    expected = [answer.inference.float().tolist() for answer in answers]
    with ps.Pipeline(workers=0) as p:
        handler = PytorchModelHandlerTensor(**settings, columns="x", output_column="y")
        (
            p
            | ps.Create([{"x": row.tolist()} for row in X[:2]])
            | ps.RunInference(handler)
            | ps.WriteToParquet(str(tmp_path / "out"))
        )
    column = pq.read_table(tmp_path / "out")["y"]
    assert (column.to_pylist(), column.type.value_type) == (expected, pa.float32())


def test_weights_of_another_type(linear: dict[str, Any]) -> None:
    handler = PytorchModelHandlerTensor(**linear, dtype=torch.float64, columns=["a", "b", "c"])
    rows = [dict(zip("abc", row, strict=True)) for row in X.tolist()]
    model = handler.load_model()
    assert handler.run_inference(rows, model).dtype == torch.float64
    check_handler(handler, rows)


def test_a_compiled_model(linear: dict[str, Any]) -> None:
    handler = PytorchModelHandlerTensor(**linear, compile={"backend": "eager"})
    plain = PytorchModelHandlerTensor(**linear)
    model = handler.load_model()
    assert type(model).__name__ == "OptimizedModule"
    expected = plain.run_inference(list(X), plain.load_model())
    torch.testing.assert_close(handler.run_inference(list(X), model), expected)
    check_handler(handler, list(X))
    assert handler.new_shapes_cost()
    assert not plain.new_shapes_cost()


@pytest.mark.parametrize("wrong", [{"nope": 1}, {"backend": "nope"}, {"mode": "default", "options": {"debug": True}}])
def test_arguments_that_torch_compile_does_not_take(wrong: dict[str, Any], linear: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"compile=\{.*\}: torch.compile\(\) does not take that: "):
        PytorchModelHandlerTensor(**linear, compile=wrong).load_model()


def test_autocast_is_not_for_an_inference_fn(linear: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="autocast= is for the model itself, but inference_fn= calls it as it likes"):
        PytorchModelHandlerTensor(**linear, autocast="bfloat16", inference_fn=make_tensor_model_fn("forward"))


AUTOCAST = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from test_pytorch_batches import Linear, X
from penstock.handlers.pytorch import PytorchModelHandlerTensor
handler = PytorchModelHandlerTensor(model_class=Linear, state_dict_path=sys.argv[1], autocast="bfloat16")
answers = handler.run_inference(list(X), handler.load_model())
plain = PytorchModelHandlerTensor(model_class=Linear, state_dict_path=sys.argv[1])
print(answers.dtype, bool((answers - plain.run_inference(list(X), plain.load_model())).abs().max() < 0.05))
"""


def test_autocast(linear: dict[str, Any]) -> None:
    """In a process of its own: some machines say that they have instructions for such numbers, and have not."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", AUTOCAST, linear["state_dict_path"], str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "torch.bfloat16 True\n", done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("how", [True, {"mode": "reduce-overhead"}, {"mode": "max-autotune"}])
def test_compiled_models_on_a_gpu_answer_as_plain_ones(how: bool | dict[str, Any], linear: dict[str, Any]) -> None:
    """CUDA graphs give every batch's outputs in the same memory, while several batches are under way."""
    rows = list(torch.linspace(-1, 1, 64 * 200).view(-1, 1).expand(-1, X.shape[1]))
    plain = PytorchModelHandlerTensor(**linear)
    expected = plain.run_inference(rows, plain.load_model())
    handler = PytorchModelHandlerTensor(**linear, device="GPU", compile=how, min_batch_size=64, max_batch_size=64)
    pipeline = ps.Pipeline(workers=2)
    answers = (pipeline | ps.Create(rows) | ps.RunInference(handler)).collect()
    torch.testing.assert_close(torch.stack([each.inference for each in answers]), torch.stack(list(expected)))
