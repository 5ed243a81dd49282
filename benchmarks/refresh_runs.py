"""Pipelines whose models change. Every function runs in a fresh process."""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from refresh_figures import costs
from refresh_models import (
    FEATURES,
    NOTES,
    TABLE_BYTES,
    Network,
    Notes,
    Table,
    mark_of,
    right_values,
    save_network,
    save_table,
)
from workload import Stopwatch, outcome

import penstock as ps
from penstock.handlers.pytorch import PytorchModelHandlerTensor

WARM, APART = 3.0, 7.0  # seconds before the first change, and from one to the next
NETWORK_BATCH, TABLE_BATCH = 8, 256
CALM = 2.0  # seconds before the first and after the last change of a Table, in which memory is looked at
KEYS = ("a", "b")


class Feed(ps.Source[Any]):
    """Rows without end, until a file is there: as many splits as are asked for, each of one block after the other."""

    def __init__(self, stop: str, splits: int, block: list[Any]) -> None:
        self._stop, self._splits, self._block = stop, splits, block

    def splits(self, goal: ps.SplitGoal) -> Sequence[int]:
        return range(self._splits)

    def read(self, split: int) -> Iterator[list[Any]]:
        while not os.path.exists(self._stop):
            yield self._block


# One large model, under full load.


class OwnLoading(PytorchModelHandlerTensor):
    """The same, as a class of the user's own, of which nothing is known: it is loaded with the priority of any thread."""

    def load_model(self) -> torch.nn.Module:
        return super().load_model()


def make_networks(folder: str, versions: int) -> dict[str, Any]:
    """The files of all versions; what is measured has nothing to do with writing them."""
    with Stopwatch() as watch:
        weights = Network().state_dict()
        for version in range(versions + 1):
            save_network(f"{folder}/{version}.pt", version, weights)
    return outcome(watch, 0, f"{os.path.getsize(f'{folder}/0.pt'):,} bytes each")


def network(folder: str, versions: int, workers: int, large_model: bool, own_loading: bool = False) -> dict[str, Any]:
    """A new model every few seconds, by a rename into the folder that is watched."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        os.environ[NOTES] = own
        watched, put = Path(own, "watched"), list[tuple[float, int]]()
        watched.mkdir()
        kind = OwnLoading if own_loading else PytorchModelHandlerTensor
        first = kind(
            state_dict_path=f"{folder}/0.pt", model_class=Network, max_batch_size=NETWORK_BATCH, large_model=large_model
        )
        publisher = threading.Thread(
            target=_publish, args=(folder, versions, own, 1 if large_model else max(1, workers), put)
        )
        publisher.start()
        rows = list(torch.randn(4 * NETWORK_BATCH, FEATURES))
        with Stopwatch() as watch, ps.Pipeline(workers=workers) as p:
            metadata = p | ps.WatchFilePattern(f"{watched}/*.pt", interval=0.2)
            answers = p | ps.Read(Feed(f"{own}/stop", max(1, workers), rows))
            answers |= ps.RunInference(first, model_metadata_pcoll=metadata)
            answers | ps.MapBatches(_checked_networks, batch_size=1_024) | ps.WriteToText(f"{own}/parts")
        publisher.join()
        batches = list(Notes.read(own))
        quiet, made = costs(batches, put, put[0][0] - WARM + 1)
        count, wrong = _sums(f"{own}/parts")
    figures = {f"quiet {name}": value for name, value in quiet._asdict().items()} | {"wrong": wrong}
    for at, change in enumerate(made):
        figures |= {f"{name} {at}": value for name, value in change._asdict().items()}
    return outcome(watch, count, f"{wrong} wrong") | {"figures": figures}


def _publish(folder: str, versions: int, own: str, holders: int, put: list[tuple[float, int]]) -> None:
    """When all processes that hold the model have answered."""
    while len({batch.process for batch in Notes.read(own)}) < holders:
        time.sleep(0.1)
    time.sleep(WARM)
    for version in range(1, versions + 1):
        os.link(f"{folder}/{version}.pt", f"{own}/{version}.pt")
        os.rename(f"{own}/{version}.pt", f"{own}/watched/{version}.pt")
        put.append((time.monotonic(), version))
        time.sleep(APART)
    Path(own, "stop").touch()


def _checked_networks(answers: list[ps.PredictionResult]) -> list[str]:
    wrong = sum(int(each.inference[-1]) != _version_of(each.model_id) for each in answers)
    return [f"{len(answers)} {wrong}"]


def _version_of(model_id: str | None) -> int:
    assert model_id is not None
    return int(Path(model_id).stem)


def _sums(folder: str) -> tuple[int, int]:
    """Rows, and those that were wrong."""
    lines = [line.split() for path in Path(folder).iterdir() for line in path.read_text().splitlines()]
    return sum(int(rows) for rows, _ in lines), sum(int(wrong) for _, wrong in lines)


# Many changes, while threads submit.


class Tables:
    """Versions of a Table, or of one for each key: the next one as soon as the last has answered a batch. Rows go on for
    `rest` seconds after the last."""

    def __init__(self, own: str, versions: int, keys: Sequence[str], rest: float) -> None:
        self._own, self._versions, self._keys, self._rest = own, versions, keys, rest
        self._last = len(keys) - 1  # those that the pipeline begins with

    def look(self) -> list[Any]:
        mark = mark_of(self._own, self._last)
        if not mark.exists():
            return []
        is_first, is_last = self._last < len(self._keys), self._last == self._versions + len(self._keys) - 1
        calm = self._rest if is_last else CALM if is_first else 0.0
        if time.time() - mark.stat().st_mtime < calm:
            return []
        if is_last:
            Path(self._own, "stop").touch()
            return []
        self._last += 1
        save_table(_table(self._own, self._last), self._last)
        Path(_table(self._own, self._last - 4 * len(self._keys))).unlink(missing_ok=True)
        path, key = _table(self._own, self._last), self._keys[self._last % len(self._keys)]
        return [ps.KeyModelPathMapping([key], path) if key else ps.ModelMetadata(path)]

    def describe(self) -> str:
        return "tables"


def _table(own: str, version: int) -> str:
    return f"{own}/{version}.pt"


def tables(
    folder: str, versions: int, workers: int, threads: int, large_model: bool, keyed: bool, rest: float = CALM
) -> dict[str, Any]:
    """Version after version, while threads submit. Every answer is held against its version."""
    warned = _Warnings()
    keys = KEYS if keyed else ("",)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        os.environ[NOTES] = own
        for version in range(len(keys)):
            save_table(_table(own, version), version)
        handlers = [_table_handler(own, version, large_model) for version in range(len(keys))]
        handler: Any = handlers[0]
        if keyed:
            mapped = [ps.KeyModelMapping([key], each) for key, each in zip(keys, handlers, strict=True)]
            handler = ps.KeyedModelHandler(mapped, memory_budget=20 * TABLE_BYTES)
        block: list[Any] = list(torch.arange(TABLE_BATCH) * 31)
        if keyed:
            block = [(keys[at % len(keys)], row) for at, row in enumerate(block)]
        with Stopwatch() as watch, ps.Pipeline(workers=workers, threads_per_worker=threads) as p:
            metadata = p | ps.WatchModels(Tables(own, versions, keys, rest), interval=0.05)
            answers = p | ps.Read(Feed(f"{own}/stop", threads, block))
            answers |= ps.RunInference(handler, model_metadata_pcoll=metadata)
            answers | ps.MapBatches(_checked_tables, batch_size=4_096) | ps.WriteToText(f"{own}/parts")
        count, wrong = _sums(f"{own}/parts")
        figures = _memory(own, len(keys)) | {"wrong": wrong}
    counters = p.result.metrics.counters if p.result is not None else {}
    figures |= {key.name: value for key, value in counters.items() if key.name in ("model_refreshes", "model_loads")}
    return outcome(watch, count, f"{wrong} wrong") | {"figures": figures, "words": warned.told[:5]}


def _table_handler(own: str, version: int, large_model: bool) -> Any:
    return PytorchModelHandlerTensor(
        state_dict_path=_table(own, version), model_class=Table, max_batch_size=TABLE_BATCH, large_model=large_model
    )


def _checked_tables(answers: list[Any]) -> list[str]:
    wrong = 0
    by_model: dict[str, list[Any]] = {}
    for each in answers:
        key, found = each if isinstance(each, tuple) and not isinstance(each, ps.PredictionResult) else ("", each)
        version = _version_of(found.model_id)
        wrong += bool(key) and KEYS[version % len(KEYS)] != key
        by_model.setdefault(found.model_id, []).append(found)
    for model_id, found in by_model.items():
        rows, values = torch.stack([each.example for each in found]), torch.stack([each.inference for each in found])
        wrong += int((values != right_values(rows, _version_of(model_id))).sum())
    return [f"{len(answers)} {wrong}"]


def _memory(own: str, models: int) -> dict[str, float]:
    """What the process with the models held before the first change, at most, and after the last; and its changes."""
    batches = sorted(Notes.read(own), key=lambda batch: batch.ended)
    ended = batches[-1].ended
    changed = min(batch.ended for batch in batches if batch.version >= models)
    return {
        "before": statistics.median(batch.own_bytes for batch in batches if batch.ended < changed),  # most of it is calm
        "most": max(batch.own_bytes for batch in batches),
        "after": statistics.median(batch.own_bytes for batch in batches if batch.ended > ended - 1),
        "alive": max(batch.alive for batch in batches if batch.ended > ended - 1),
        "processes": len({batch.process for batch in batches}),
        "changes": len({batch.version for batch in batches}) - models,
    }


class _Warnings(logging.Handler):
    """What the run has to say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []
        logging.getLogger("penstock").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage()[:300])
