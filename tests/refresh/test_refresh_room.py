"""A model that changes where there is no room for two: the old one goes first, and callers wait for the new one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

TOO_LARGE = 10**12  # bytes of a file that is empty: nobody has room for that much beside another model
LIMIT = 10.0  # seconds that any wait may take

loads: list[str] = []
answering, loading, brought, over = (threading.Event() for _ in range(4))


class Handler(ps.ModelHandler[int, str, str]):
    def __init__(self, path: str) -> None:
        super().__init__(max_batch_size=4)
        self.path = path

    def update_model_path(self, model_path: str) -> None:
        self.path = model_path

    def model_files(self) -> Sequence[str]:
        return (self.path,)

    def load_model(self) -> str:
        loads.append(Path(self.path).name)
        if loads.count("new") > 1:  # a caller does it, too
            brought.set()
        elif loads[-1] == "new":
            loading.set()
            assert brought.wait(LIMIT)
        return Path(self.path).name

    def run_inference(self, batch: Sequence[int], model: str, inference_args: Any = None) -> list[str]:
        answering.set()
        if model == "new" or loads.count("old") > 1:  # the new one was refused
            over.set()
        return [model] * len(batch)


class Feed(ps.Source[int]):
    """Two splits of one row after the other: one until the new model answers, one that begins while it is loaded."""

    def splits(self, goal: ps.SplitGoal) -> Sequence[int]:
        return range(2)

    def read(self, split: int) -> Iterator[list[int]]:
        if split == 1:
            assert loading.wait(LIMIT)
            yield [1]
            brought.set()
        while split == 0 and not over.is_set():
            yield [1]


class Versions:
    def __init__(self, path: str) -> None:
        self.path = path

    def look(self) -> list[ps.ModelMetadata]:
        if not answering.is_set() or self.path == "":
            return []
        path, self.path = self.path, ""
        return [ps.ModelMetadata(path)]

    def describe(self) -> str:
        return "one new version"


@pytest.mark.timeout(60)
def test_callers_do_not_load_the_model_that_is_being_loaded(tmp_path):
    for name, size in [("old", 1), ("new", TOO_LARGE)]:
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    p = ps.Pipeline(workers=0, threads_per_worker=2)
    versions = p | ps.WatchModels(Versions(str(tmp_path / "new")), interval=0.05)
    answers = p | ps.Read(Feed()) | ps.RunInference(Handler(str(tmp_path / "old")), model_metadata_pcoll=versions)
    found = set(answers.collect())
    assert found == {"old", "new"}
    assert loads == ["old", "new"]
