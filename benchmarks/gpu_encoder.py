"""Batching by length on one GPU: an encoder the size of BERT-base, bf16, Penstock beside a loop over sorted rows.

    pip install penstock torch transformers
    python benchmarks/gpu_encoder.py [--rows N] [--rounds N]
    python benchmarks/gpu_encoder.py --device cpu --rows 200 --layers 2    # to see that it runs

Random weights, random token ids in memory. The loops and Penstock's handler share the functions that pad a batch on the
CPU, move it, run it and bring the answers back. Penstock is told nothing about sizes. It is timed from when half of the
rows are answered, when its size has settled; loops then run over the same rows that were left: one that pads to the longest
row, and one that rounds lengths up as Penstock does. Each runs on a thread of its own, because cuDNN plans each shape once
for a thread: all of them meet new shapes. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from encoder import cut_by_budget
from report import Check, check_table
from transformers import BertConfig, BertModel

import penstock as ps
from penstock.observe.metrics import Metrics

T = TypeVar("T")

SHORTEST, LONGEST, MEAN, SPREAD = 8, 512, 75, 0.8  # tokens; SPREAD is the sigma of the log-normal
VOCABULARY = 30_522
BUDGETS = [kilo << 10 for kilo in (64, 128, 256, 512, 1024)]  # tokens in a batch, padding included
SAMPLE = 10  # one row in so many, for loops that only look for the best budget
BATCH = 32


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
        model.launcher = ThreadPoolExecutor(1)  # for callers on several threads: the device runs their batches in turn
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


class Padded(NamedTuple):
    """A batch on the CPU."""

    ids: Any
    lengths: Any


def pad(rows: Sequence[Any], length: int) -> Padded:
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    ids = np.zeros((len(rows), length), np.int32)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row)] = row
    return Padded(torch.from_numpy(ids), torch.from_numpy(lengths))


def pinned(batch: Padded) -> Padded:
    return Padded(batch.ids.pin_memory(), batch.lengths.pin_memory()) if torch.cuda.is_available() else batch


def launch(batch: Padded, model: Any) -> OnDevice:
    """Move and run: the masked mean of each row, on the device."""
    with torch.inference_mode():
        answers = _encode(*(each.to(model.device, non_blocking=True) for each in batch), model)
        done = torch.cuda.current_stream().record_event() if model.device.type == "cuda" else None
        return OnDevice(answers, done)


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a loop makes its batches."""

    budget: int
    multiple: int = 1  # lengths are padded to one of it

    def __str__(self) -> str:
        rounded = f", lengths rounded to {self.multiple}" if self.multiple > 1 else ""
        return f"sorted, budget {self.budget}{rounded}"

    def padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def batches(self, rows: Sequence[Any]) -> list[list[Any]]:
        lengths = [self.padded(len(row)) for row in rows]
        order = sorted(range(len(rows)), key=lambda at: len(rows[at]), reverse=True)
        return [[rows[at] for at in batch] for batch in cut_by_budget(order, lengths, self.budget)]


def loop(batches: Sequence[Sequence[Any]], plan: Plan, model: Any) -> Speed:
    """One batch after the other."""
    started = time.perf_counter()
    answers = [fetch(launch(pinned(pad(batch, plan.padded(max(map(len, batch))))), model)) for batch in batches]
    seconds = time.perf_counter() - started
    return Speed(sum(map(len, answers)) / seconds, sum(len(row) for batch in batches for row in batch) / seconds)


def on_own_thread(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


# Penstock.


class EncoderHandler(ps.ModelHandler[Any, Any, Any]):
    """Answers are (vector, when it was there)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._spec = spec

    def load_model(self) -> Any:
        return self._spec.make()

    def run_inference(self, batch: Sequence[Any], model: Any, inference_args: Any = None) -> list[tuple[Any, float]]:
        padded = pinned(pad(batch, self.padded_length(max(map(len, batch)))))
        vectors = fetch(model.launcher.submit(launch, padded, model).result())
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
    few = rows[:: SAMPLE * SAMPLE]
    in_order = [few[start : start + BATCH] for start in range(0, len(few), BATCH)]
    speed, _ = after_start(in_order, Plan(budget=BATCH * LONGEST), spec.make())
    print(f"arrival order, batch size {BATCH}, {len(few):,} rows: {speed}")
    plans = [look_for_budget(rows[::SAMPLE], spec.make(), multiple) for multiple in (1, 8)]
    print("\n".join(check_table(compare(rows, spec, plans, given.rounds))))


def look_for_budget(rows: Sequence[Any], model: Any, multiple: int) -> Plan:
    """The plan with the best of the budgets over a sample of the rows."""
    found = {}
    for budget in BUDGETS:
        plan = Plan(budget=budget, multiple=multiple)
        found[plan] = on_own_thread(lambda plan=plan: loop(plan.batches(rows), plan, model))
        print(f"{plan}, {len(rows):,} rows: {found[plan]}", flush=True)
    return max(found, key=lambda plan: found[plan].rows)


def after_start(batches: Sequence[Sequence[Any]], plan: Plan, model: Any) -> tuple[Speed, Speed]:
    """A loop on a thread of its own, and the same once more. What a thread sets up at its first call is done before."""

    def run() -> tuple[Speed, Speed]:
        loop([batches[0][:5]], plan, model)
        return loop(batches, plan, model), loop(batches, plan, model)

    return on_own_thread(run)


def compare(rows: Sequence[Any], spec: ModelSpec, plans: Sequence[Plan], rounds: int) -> list[Check]:
    """Penstock and the best loops by turns."""
    quotients: dict[Plan, list[float]] = {plan: [] for plan in plans}
    for number in range(rounds):
        settled = penstock(rows, spec)
        print(f"round {number + 1}: Penstock, no setting, the last {len(settled.rows):,} rows: {settled.speed}")
        print(f"  before that, while the size was searched for, with the start: {settled.before}")
        _print_metrics(settled.metrics)
        model = spec.make()
        for plan in plans:
            first, again = after_start(plan.batches(settled.rows), plan, model)
            print(f"round {number + 1}: {plan}, the same rows: {first}; once more, the same shapes: {again}", flush=True)
            quotients[plan].append(settled.speed.rows / first.rows)
        del model
    label = "Penstock, settled: times the rows/s of {}"
    return [
        Check(label=label.format(plan), values=values, limit=0.92, at_least=True, unit="x")
        for plan, values in quotients.items()
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
