"""A pipeline whose model is replaced among its files while it runs, and what each of its answers must be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps

MOST = 2_000_000  # rows, if what is waited for never comes


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


def check_change(
    save: Callable[[Path, int], None],
    handler_of: Callable[..., Any],
    example_of: Callable[[int], Any],
    folder: Path,
    *,
    large_model: bool = False,
    ending: str = "",
) -> None:
    """save(path, number) writes the first model and the second. Each answer must name the model that gave it, and be what
    that says by itself. The files end as their format must."""
    first, second = str(folder / f"model-1{ending}"), str(folder / f"model-2{ending}")
    save(Path(first), 1)
    aside = folder / f"aside{ending}"
    save(aside, 2)
    os.replace(aside, folder / "second")
    handler = handler_of(first, large_model=large_model)
    with ps.Pipeline(workers=0) as p:
        new = p | ps.WatchFilePattern(str(folder / "model-*"), interval=0.05)
        rows = p | ps.Read(Rows(folder)) | ps.Map(example_of)
        inference = ps.RunInference(handler, model_metadata_pcoll=new)
        answers = (rows | inference | ps.Map(Replaces(folder, first, second))).collect()
    assert {answer.model_id for answer in answers} == {first, second}
    for path in (first, second):
        own = [answer for answer in answers if answer.model_id == path]
        own = [*own[:3], *own[-3:]]
        expected = _alone(handler_of(path), [answer.example for answer in own])
        for answer, right in zip(own, expected, strict=True):
            got = answer.inference
            seen = [got["label"], got["score"]] if isinstance(got, dict) else np.asarray(got, dtype=float).ravel().tolist()
            assert seen == _about(right)
    of_each = [_alone(handler_of(path), [example_of(1)])[0] for path in (first, second)]
    assert str(of_each[0]) != str(of_each[1]), "the models must differ"


def _alone(handler: Any, examples: list[Any]) -> list[Any]:
    """What the handler says of each example by itself."""
    with ps.Pipeline(workers=0) as p:
        return [each.inference for each in (p | ps.Create(examples) | ps.RunInference(handler)).collect()]


def _about(answer: Any) -> Any:
    if isinstance(answer, dict):
        return [answer["label"], pytest.approx(answer["score"], abs=1e-4)]
    return pytest.approx(np.asarray(answer, dtype=float).ravel().tolist(), abs=1e-4)
