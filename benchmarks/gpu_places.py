"""One GPU shared by several worker processes: an encoder the size of BERT-base in a model host, beside a loop that feeds it.

    pip install penstock torch transformers
    python benchmarks/gpu_places.py [--rows N] [--rounds N] [--workers N]
    python benchmarks/gpu_places.py --device cpu --rows 2048 --layers 1 --rounds 1    # to see that it runs

Every case runs in a fresh process. Rows are tensors of 128 token ids; the loop has them all in memory, Penstock's workers
make theirs. Rows/s are counted from when a quarter of the answers is there until the last one. The memory is what the GPU
says is used, at its peak, less what was used before. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from report import Check, check_table
from transformers import BertConfig, BertModel

import penstock as ps
from penstock.handlers.pytorch import PytorchModelHandlerTensor

LENGTH, VOCABULARY, BATCH, SPLIT = 128, 30_522, 512, 8_192


class Encoder(torch.nn.Module):
    """The mean of the last hidden states."""

    def __init__(self, layers: int, half: bool) -> None:
        super().__init__()
        config = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, max_position_embeddings=LENGTH)
        self.bert = BertModel(config, add_pooling_layer=False)
        if half:
            self.to(torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=ids).last_hidden_state.mean(1).float()


def make_rows(split: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(split)
    return list(torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator, dtype=torch.int32))


class Rows(ps.Source[torch.Tensor]):
    """Rows that are made where they are read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def splits(self, goal: ps.SplitGoal) -> list[tuple[int, int]]:
        return [(at, min(SPLIT, self._count - at)) for at in range(0, self._count, SPLIT)]

    def read(self, split: tuple[int, int]) -> Iterator[list[torch.Tensor]]:
        rows = make_rows(*split)
        for at in range(0, len(rows), 1024):
            yield rows[at : at + 1024]


def when(answer: Any) -> float:
    """The answer is there; what is kept of it is when."""
    assert answer.inference.shape == (768,)
    return time.time()


def speed(times: list[float]) -> float:
    """Rows/s after the first quarter."""
    times = sorted(times)
    first = times[len(times) // 4]
    late = [each for each in times if each > first]
    return len(late) / (times[-1] - first)


def run_loop(given: argparse.Namespace) -> float:
    model = _model(given).to(given.device).eval()
    rows = [row for at, count in Rows(given.rows).splits(ps.SplitGoal()) for row in make_rows(at, count)]
    times: list[float] = []
    with torch.inference_mode():
        for at in range(0, len(rows), BATCH):
            batch = torch.stack(rows[at : at + BATCH])
            vectors = model(batch.to(given.device)).cpu()
            times += [time.time()] * len(vectors)
    return speed(times)


def run_penstock(given: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(_model(given).state_dict(), path)
        handler = PytorchModelHandlerTensor(
            state_dict_path=str(path),
            model_class=Encoder,
            model_params={"layers": given.layers, "half": given.device != "cpu"},
            device="GPU" if given.device == "cuda" else "CPU",
            large_model=True,
            max_batch_size=BATCH,
        )
        pipeline = ps.Pipeline(workers=given.workers, progress=False)
        times = (pipeline | ps.Read(Rows(given.rows)) | ps.RunInference(handler) | ps.Map(when)).collect()
    assert len(times) == given.rows
    assert pipeline.result is not None
    sizes = pipeline.result.metrics.distribution("inference_request_batch_size")
    print(f"  batches: {sizes.count}, {sizes.mean:.0f} rows on average", file=sys.stderr)
    return speed(times)


def _model(given: argparse.Namespace) -> Encoder:
    torch.manual_seed(12)
    return Encoder(given.layers, given.device != "cpu")


CASES = {"loop": run_loop, "penstock": run_penstock}


class GpuMemory:
    """The most that was used while it watched, in MB, above what was used when it began."""

    def __enter__(self) -> GpuMemory:
        self.before = self.peak = self._used()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self.peak = max(self.peak, self._used())

    def _used(self) -> int:
        try:
            command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
        except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
            return 0


def main() -> None:
    parser = argparse.ArgumentParser(description="One GPU, several worker processes, one model.")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--case", choices=CASES, help="run this one here, and print its rows/s")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(CASES[given.case](given)))
        return
    found: dict[str, list[float]] = {name: [] for name in CASES}
    memory: dict[str, list[int]] = {name: [] for name in CASES}
    for number in range(given.rounds):
        for name in CASES:
            with GpuMemory() as gpu:
                done = subprocess.run([sys.executable, *sys.argv, "--case", name], stdout=subprocess.PIPE, check=True)
            found[name].append(json.loads(done.stdout))
            memory[name].append(gpu.peak - gpu.before)
            print(f"round {number + 1}: {name}: {found[name][-1]:,.0f} rows/s, {memory[name][-1]:,} MB", flush=True)
    speeds = [a / b for a, b in zip(found["penstock"], found["loop"], strict=True)]
    sizes = [a / max(1, b) for a, b in zip(memory["penstock"], memory["loop"], strict=True)]
    checks = [
        Check(
            label=f"{given.workers} workers: times the rows/s of the loop",
            values=speeds,
            limit=0.95,
            at_least=True,
            unit="x",
        ),
        Check(label="GPU memory: times that of the loop", values=sizes, limit=1.5, unit="x"),
    ]
    print("\n".join(check_table(checks)))


if __name__ == "__main__":
    main()
