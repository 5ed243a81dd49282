"""Batching by length on one GPU: an encoder the size of BERT-base, bf16, Penstock beside a loop over sorted rows.

    pip install penstock torch transformers
    python benchmarks/gpu_encoder.py [--rows N] [--rounds N]
    python benchmarks/gpu_encoder.py --device cpu --rows 200 --layers 2    # to see that it runs

Random weights, random token ids in memory. The loop and Penstock's handler share one function that pads a batch on the
CPU, moves it, runs it and brings the answers back. Penstock is told nothing about sizes. It is timed from when half of the
rows are answered, when its size has settled; the loop then runs over the same rows that were left. The last loop leaves its
answers on the device until its end: what waiting for each batch costs. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from encoder import cut_by_budget
from report import Check, check_table
from transformers import BertConfig, BertModel

import penstock as ps
from penstock.observe.metrics import Metrics

SHORTEST, LONGEST, MEAN, SPREAD = 8, 512, 75, 0.8  # tokens; SPREAD is the sigma of the log-normal
VOCABULARY = 30_522
BUDGETS = [kilo << 10 for kilo in (16, 64, 128, 256, 512)]  # tokens in a batch, padding included
SAMPLE = 10  # one row in so many, for loops that only look for the best budget


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model is made from."""

    device: str
    layers: int

    def make(self) -> Any:
        torch.manual_seed(12)
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        config = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=self.layers, max_position_embeddings=LONGEST)
        model = BertModel(config, add_pooling_layer=False).to(self.device, dtype).eval()
        model.launching = threading.Lock()  # one batch at a time: the device runs them in turn
        return model


def make_rows(count: int) -> list[Any]:
    """Arrays of token ids, their lengths log-normal."""
    random = np.random.default_rng(75)
    lengths = random.lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, count).round().clip(SHORTEST, LONGEST).astype(int)
    ids = random.integers(1_000, VOCABULARY, lengths.sum(), dtype=np.int32)
    return np.split(ids, lengths.cumsum()[:-1])


class OnDevice(NamedTuple):
    """Answers that the device works on."""

    answers: Any
    done: Any


def run_batch(rows: Sequence[Any], model: Any) -> OnDevice:
    """Pad, move, run: the masked mean of each row, on the device."""
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    ids = np.zeros((len(rows), lengths.max()), np.int32)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row)] = row
    with torch.inference_mode():
        if model.device.type != "cuda":
            return OnDevice(_encode(torch.from_numpy(ids), torch.from_numpy(lengths), model), None)
        host = torch.from_numpy(ids).pin_memory(), torch.from_numpy(lengths).pin_memory()
        with model.launching:
            answers = _encode(*(each.to(model.device, non_blocking=True) for each in host), model)
            return OnDevice(answers, torch.cuda.current_stream().record_event())


def _encode(ids: Any, lengths: Any, model: Any) -> Any:
    counts = lengths.unsqueeze(1)
    mask = torch.arange(ids.shape[1], device=ids.device) < counts
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return ((states * mask.unsqueeze(2)).sum(1) / counts).float()


def fetch(batch: OnDevice) -> Any:
    """From the device to NumPy: waits for this batch, not for one that was started after it."""
    if batch.done is None:
        return batch.answers.numpy()
    with torch.cuda.stream(torch.cuda.Stream()):
        batch.done.wait()
        return batch.answers.cpu().numpy()


class Speed(NamedTuple):
    rows: float  # per second
    tokens: float  # per second, without padding

    def __str__(self) -> str:
        return f"{self.rows:,.0f} rows/s, {self.tokens:,.0f} tokens/s"


# The loops.


def loop(batches: Iterable[Sequence[Any]], model: Any, finish: Callable[[Any], Any] = fetch) -> Speed:
    """One batch after the other. `finish` is what happens to the answers of each."""
    batches = list(batches)
    _wait_for(model)
    started = time.perf_counter()
    answers = [finish(run_batch(batch, model)) for batch in batches]
    _wait_for(model)
    if finish is not fetch:
        answers = [fetch(each) for each in answers]
    seconds = time.perf_counter() - started
    return Speed(sum(map(len, answers)) / seconds, sum(len(row) for batch in batches for row in batch) / seconds)


def sorted_batches(rows: Sequence[Any], budget: int) -> list[list[Any]]:
    lengths = [len(row) for row in rows]
    order = sorted(range(len(rows)), key=lengths.__getitem__, reverse=True)
    return [[rows[at] for at in batch] for batch in cut_by_budget(order, lengths, budget)]


def _wait_for(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


# Penstock.


class EncoderHandler(ps.ModelHandler[Any, Any, Any]):
    """Answers are (vector, when it was there)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._spec = spec

    def load_model(self) -> Any:
        return self._spec.make()

    def run_inference(self, batch: Sequence[Any], model: Any, inference_args: Any = None) -> list[tuple[Any, float]]:
        vectors = fetch(run_batch(batch, model))
        now = time.perf_counter()
        return [(vector, now) for vector in vectors]

    def measures_length(self) -> bool:
        return True

    def get_lengths(self, batch: Sequence[Any]) -> list[int]:
        return [len(row) for row in batch]

    def prepares_ahead(self) -> bool:
        return self._spec.device != "cpu"


class InMemory(ps.Source[Any]):
    """All rows as one split."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def splits(self, goal: ps.SplitGoal) -> list[int]:
        return [0]

    def read(self, split: int) -> Iterator[list[Any]]:
        for start in range(0, len(self._rows), 4096):
            yield list(self._rows[start : start + 4096])


class Settled(NamedTuple):
    """What a run of Penstock did after half of its rows were answered."""

    rows: list[Any]  # those that were left
    speed: Speed
    before: Speed  # start and search included
    metrics: Metrics


def penstock(rows: Sequence[Any], spec: ModelSpec) -> Settled:
    pipeline = ps.Pipeline(workers=0, progress=False)
    started = time.perf_counter()
    answers = (pipeline | ps.Read(InMemory(rows)) | ps.RunInference(EncoderHandler(spec))).collect()
    times = [now for _, now in answers]
    settled_at = sorted(times)[len(rows) // 2]
    early, late = (
        [row for row, now in zip(rows, times, strict=True) if (now > settled_at) is late] for late in (False, True)
    )
    assert pipeline.result is not None
    speeds = _speed(late, max(times) - settled_at), _speed(early, settled_at - started)
    return Settled(late, *speeds, pipeline.result.metrics)


def _speed(rows: Sequence[Any], seconds: float) -> Speed:
    return Speed(len(rows) / seconds, sum(map(len, rows)) / seconds)


# What is printed.


def main() -> None:
    parser = argparse.ArgumentParser(description="Penstock on one GPU, beside a loop over sorted rows.")
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2, help="how often Penstock and the best loop run, by turns")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    spec = ModelSpec(device=given.device, layers=given.layers)
    rows = make_rows(given.rows)
    print(f"{given.rows:,} rows, {sum(map(len, rows)) / len(rows):.1f} tokens on average")
    budget = look_for_budget(rows[::SAMPLE], spec.make())
    print("\n".join(check_table(compare(rows, spec, budget, given.rounds))))


def look_for_budget(rows: Sequence[Any], model: Any) -> int:
    """The best of the budgets over a sample of the rows."""
    for each in (BUDGETS[0], BUDGETS[-1]):  # what is set up at the first calls
        loop(sorted_batches(rows, each)[:2], model)
    in_order = loop([rows[start : start + 32] for start in range(0, len(rows), 32)], model)
    print(f"arrival order, batch size 32, {len(rows):,} rows: {in_order}")
    found = {}
    for each in BUDGETS:
        found[each] = loop(sorted_batches(rows, each), model)
        print(f"sorted, budget {each}, {len(rows):,} rows: {found[each]}", flush=True)
    return max(found, key=lambda each: found[each].rows)


def compare(rows: Sequence[Any], spec: ModelSpec, budget: int, rounds: int) -> list[Check]:
    """Penstock and the best loop by turns."""
    ours: list[Speed] = []
    theirs: list[Speed] = []
    for number in range(rounds):
        settled = penstock(rows, spec)
        ours.append(settled.speed)
        print(f"round {number + 1}: Penstock, no setting, the last {len(settled.rows):,} rows: {settled.speed}")
        print(f"  before that, while the size was searched for, with the start: {settled.before}")
        _print_metrics(settled.metrics)
        model = spec.make()
        batches = sorted_batches(settled.rows, budget)
        theirs.append(loop(batches, model))
        print(f"round {number + 1}: sorted, budget {budget}, the same rows: {theirs[-1]}")
        print(f"  once more, the same shapes: {loop(batches, model)}")
        print(f"  once more, answers fetched at the end: {loop(batches, model, lambda each: each)}", flush=True)
        del model
    quotients = {
        "rows/s": [a.rows / b.rows for a, b in zip(ours, theirs, strict=True)],
        "tokens/s": [a.tokens / b.tokens for a, b in zip(ours, theirs, strict=True)],
    }
    label = f"Penstock, settled: times the {{}} of sorted, budget {budget}"
    return [
        Check(label=label.format(what), values=values, limit=0.92, at_least=True, unit="x")
        for what, values in quotients.items()
    ]


def _print_metrics(metrics: Metrics) -> None:
    """All of them: among them what the search for a size has found."""
    for key, note in metrics.notes.items():
        print(f"  {key.name}: {note}")
    for key, each in metrics.distributions.items():
        print(f"  {key.name}: {each.count:,} times, mean {each.mean:,.1f}, {each.min:,.1f} to {each.max:,.1f}")
    for key, count in metrics.counters.items():
        print(f"  {key.name}: {count:,}", flush=True)


if __name__ == "__main__":
    main()
