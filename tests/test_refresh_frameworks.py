"""Models of frameworks that change while a pipeline runs: each answer is what its model says, as the handler alone does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skops.io
import torch
import transformers
from sklearn.dummy import DummyRegressor

import penstock as ps
from penstock.handlers.huggingface import HuggingFacePipelineModelHandler, SentenceTransformerModelHandler
from penstock.handlers.pytorch import PytorchModelHandlerTensor
from penstock.handlers.sklearn import SklearnModelHandlerNumpy

WORDS = ["good", "bad", "film", "plot", "dull"]
MOST = 50_000  # rows, if what is waited for never comes


class Rows(ps.Source[int]):
    """Numbers, until a file says that it is enough."""

    def __init__(self, folder: Path) -> None:
        self.enough = str(folder / "enough")

    def splits(self, goal: Any) -> list[int]:
        return [0]

    def read(self, split: int) -> Any:
        at = 0
        while not os.path.exists(self.enough) and at < MOST:
            yield list(range(at, at + 16))
            at += 16


class Replaces:
    """When the first model has answered, the second takes its place among the files; when that has, it is enough."""

    def __init__(self, folder: Path, first: str, second: str) -> None:
        self.folder, self.first, self.second = folder, first, second

    def __call__(self, answer: Any) -> Any:
        if answer.model_id == self.first and not os.path.exists(self.second):
            os.replace(self.folder / "second", self.second)
        elif answer.model_id == self.second:
            (self.folder / "enough").touch()
        return answer


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


def text(row: int) -> str:
    return " ".join(WORDS[row % n] for n in range(1, 1 + len(WORDS)))


FEW: Any = {"max_batch_size": 16, "lookahead_rows": 64}  # rows are under way at once
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "pytorch": (
        linear,
        lambda path: PytorchModelHandlerTensor(
            model_class=torch.nn.Linear, model_params={"in_features": 1, "out_features": 1}, state_dict_path=path
        ),
        lambda row: torch.tensor([float(row)]),
    ),
    "scikit-learn": (dummy, SklearnModelHandlerNumpy, lambda row: np.array([float(row)])),
    "pipeline": (bert, lambda path: HuggingFacePipelineModelHandler("text-classification", path, device="cpu", **FEW), text),
    "another tokenizer": (
        other_bert,
        lambda path: HuggingFacePipelineModelHandler("text-classification", path, device="cpu", **FEW),
        text,
    ),
    "encoder": (bert, lambda path: SentenceTransformerModelHandler(path, device="cpu", **FEW), text),
}


def alone(handler: Any, examples: list[Any]) -> list[Any]:
    """What the handler says of each example by itself."""
    with ps.Pipeline(workers=0) as p:
        return [each.inference for each in (p | ps.Create(examples) | ps.RunInference(handler)).collect()]


def numbers(answer: Any) -> Any:
    if isinstance(answer, dict):
        return [answer["label"], pytest.approx(answer["score"], abs=1e-4)]
    return pytest.approx(np.asarray(answer, dtype=float).ravel().tolist(), abs=1e-4)


@pytest.mark.parametrize(("kind", "large_model"), [*((kind, False) for kind in KINDS), ("another tokenizer", True)])
def test_every_answer_is_that_of_the_model_that_it_names(kind: str, large_model: bool, tmp_path: Path) -> None:
    save, handler_of, example_of = KINDS[kind]
    first, second = str(tmp_path / "model-1"), str(tmp_path / "model-2")
    save(Path(first), 1)
    save(tmp_path / "second", 2)
    handler = handler_of(first)
    handler._large_model = large_model
    with ps.Pipeline(workers=0) as p:
        new = p | ps.WatchFilePattern(str(tmp_path / "model-*"), interval=0.05)
        rows = p | ps.Read(Rows(tmp_path)) | ps.Map(example_of)
        inference = ps.RunInference(handler, model_metadata_pcoll=new)
        answers = (rows | inference | ps.Map(Replaces(tmp_path, first, second))).collect()
    handler._large_model = False
    assert {answer.model_id for answer in answers} == {first, second}
    for path in (first, second):
        own = [answer for answer in answers if answer.model_id == path]
        own = [*own[:3], *own[-3:]]
        expected = alone(handler_of(path), [answer.example for answer in own])
        for answer, right in zip(own, expected, strict=True):
            got = answer.inference
            seen = [got["label"], got["score"]] if isinstance(got, dict) else np.asarray(got, dtype=float).ravel().tolist()
            assert seen == numbers(right)
