"""Encoders of many keys on one GPU with room for a few: answers, memory of the device and loads.

    pip install 'penstock[huggingface]'
    python benchmarks/gpu_keyed.py [--models N] [--room N] [--rows N] [--layers N]
    python benchmarks/gpu_keyed.py --device cpu --models 6 --room 2 --rows 400 --layers 1    # to see that it runs

Encoders the size of BERT-base with weights of their own, in one model host; rows are tensors of 32 token ids, keys
Zipf-distributed with exponent 1. Every answer is compared with that of a plain loop over the models. The memory is what the
driver says is used, sampled every 20 ms; what a run with one model uses beside its weights is not the models'. Nothing is
asserted.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Check, check_table
from transformers import BertConfig, BertModel

import penstock as ps
from penstock.handlers.pytorch import PytorchModelHandlerTensor

LENGTH, VOCABULARY, BATCH = 32, 30_522, 256
EVERY = 0.02  # seconds between two looks at the memory
MB = 1_000_000


class Encoder(torch.nn.Module):
    """The mean of the last hidden states."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, max_position_embeddings=LENGTH)
        self.model = BertModel(config, add_pooling_layer=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).last_hidden_state.mean(1)


def make(folder: Path, models: int, layers: int) -> int:
    """A file of weights for each key; the bytes of one model. Only the first layer's differ: all would take minutes."""
    torch.manual_seed(0)
    encoder = Encoder(layers).eval()
    words = encoder.model.embeddings.word_embeddings.weight
    for key in range(models):
        with torch.no_grad():
            words.copy_(torch.randn(words.shape, generator=torch.Generator().manual_seed(key)) * 0.02)
        torch.save(encoder.state_dict(), folder / f"{key}.pt")
    return sum(each.numel() * each.element_size() for each in (*encoder.parameters(), *encoder.buffers()))


def rows_of(count: int, models: int) -> list[tuple[str, torch.Tensor]]:
    random = np.random.default_rng(7)
    shares = 1 / np.arange(1, models + 1)
    keys = random.choice(models, count, p=shares / shares.sum())
    ids = torch.from_numpy(random.integers(0, VOCABULARY, (count, LENGTH)))
    return [(str(key), row) for key, row in zip(keys, ids, strict=True)]


def expected(folder: Path, rows: list[tuple[str, torch.Tensor]], layers: int, device: str) -> torch.Tensor:
    """Model by model."""
    encoder = Encoder(layers).eval().to(device)
    answers: dict[int, torch.Tensor] = {}
    for key in sorted({key for key, _ in rows}):
        encoder.load_state_dict(torch.load(folder / f"{key}.pt", weights_only=True))
        at = [place for place, (other, _) in enumerate(rows) if other == key]
        for start in range(0, len(at), 1024):
            places = at[start : start + 1024]
            with torch.inference_mode():
                found = encoder(torch.stack([rows[place][1] for place in places]).to(device)).cpu()
            answers.update(zip(places, found, strict=True))
    return torch.stack([answers[place] for place in range(len(rows))])


@contextmanager
def watched_memory(device: str) -> Iterator[list[int]]:
    """Bytes in use on the device, as often as they are looked at."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", str(int(EVERY * 1e3))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                seen.append(int(line) * (1 << 20))
                if over.is_set():
                    process.kill()

    thread = threading.Thread(target=look, daemon=True)
    if device != "cpu":
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        if device != "cpu":
            thread.join()


def run(folder: Path, rows: list[tuple[str, Any]], layers: int, device: str, budget: int) -> tuple[list[Any], Any, float]:
    one = PytorchModelHandlerTensor(
        state_dict_path=str(folder / "0.pt"),
        model_class=Encoder,
        model_params={"layers": layers},
        device="CPU" if device == "cpu" else "GPU",
        large_model=True,
        min_batch_size=BATCH,
        max_batch_size=BATCH,
    )
    handler = ps.KeyedModelHandler.from_pattern(str(folder / "{key}.pt"), one, memory_budget=budget)
    p = ps.Pipeline(workers=2)
    answers = p | ps.Create(rows) | ps.RunInference(handler)
    started = time.perf_counter()
    found = answers.collect()
    return found, p, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Encoders of many keys on one GPU.")
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--room", type=int, default=8, help="how many of them fit the budget (8)")
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = make(folder, given.models, given.layers)
        rows = rows_of(given.rows, given.models)
        budget = int(size * (given.room + 0.5))
        with watched_memory(given.device) as alone:
            run(folder, [("0", row) for _, row in rows[: given.rows // 4]], given.layers, given.device, budget)
        with watched_memory(given.device) as seen:
            found, p, seconds = run(folder, rows, given.layers, given.device, budget)
        plain = expected(folder, rows, given.layers, given.device)
    print(f"{len(found):,} rows in {seconds:.1f} s, models of {size / MB:.0f} MB")
    report_memory(alone, seen, size, given.room)
    report(found, rows, plain, p.result.metrics)


def report_memory(alone: list[int], seen: list[int], size: int, room: int) -> None:
    if seen:
        beside = max(alone) - min(alone) - size
        peak = (max(seen) - min(seen) - beside) / size
        print(f"{(max(seen) - min(seen)) / MB:,.0f} MB of the device at the peak, {beside / MB:,.0f} MB of it beside models")
        print("\n".join(check_table([Check(label="models on the device at the peak", values=[peak], limit=room + 1.5)])))


def report(found: list[Any], rows: list[Any], plain: torch.Tensor, metrics: Any) -> None:
    far = plain.std(0).mean()
    right = len(found) == len(rows) and all(
        key == asked and float((answer.inference - wanted).abs().max()) < far
        for (key, answer), (asked, _), wanted in zip(found, rows, plain, strict=True)
    )
    wrong_model = sum(not answer.model_id.endswith(f"/{key}.pt") for key, answer in found)
    loads = sum(count for key, count in metrics.counters.items() if key.name == "model_loads")
    print(f"{loads} loads; answers are the plain loop's: {right}; answers by another model: {wrong_model}")
    print("\n".join(f"{key.name}: {note}" for key, note in sorted(metrics.notes.items())))


if __name__ == "__main__":
    main()
