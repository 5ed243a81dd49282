"""Where the time of a text job on a GPU goes: what each stage of a batch's path costs in the model's process.

    python benchmarks/gpu_stages.py [--rows N] [--folder FOLDER] [--workers N] [--device cpu --layers 1]

One run of Penstock with no setting over the inputs of gpu_texts.py. Stages of different threads overlap, and share one
interpreter: a stage's seconds include those in which it waited for its turn. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from gpu_progress import Noting, run_watched, words_of

from penstock.handlers.huggingface import SentenceTransformerModelHandler


class StagedEncoderHandler(Noting, SentenceTransformerModelHandler):
    """Writes down when each stage of a batch began and ended."""

    stages_in: str

    def load_model(self) -> Any:
        import torch

        from penstock.handlers import huggingface_encoders, pytorch_running
        from penstock.models import server

        model = super().load_model()
        self._note = _notes(self.stages_in)
        self._wrap(server._Server, "_unpack", "unpack rows")
        self._wrap(server._Server, "_job", "unpack and gather")
        self._wrap(server._Server, "_run", "a batch, whole")
        self._wrap(server, "_packed_by_reader", "pack answers")
        self._wrap(server._Server, "_send", "send")
        self._wrap(huggingface_encoders, "collated", "collate")
        self._wrap(pytorch_running, "_launch", "launch")
        self._wrap(pytorch_running._Own, "staged", "stage a tensor")
        self._wrap(torch.cuda.Event, "synchronize", "wait for the device")
        return model

    def _wrap(self, owner: Any, name: str, stage: str) -> None:
        function, note = getattr(owner, name), self._note

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            started = time.time()
            try:
                return function(*args, **options)
            finally:
                note(stage, started)

        setattr(owner, name, timed)


def _notes(path: str) -> Any:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return lambda stage, started: os.write(file, f"{stage}\t{started}\t{time.time()}\n".encode())


def table(path: Path, start: float, end: float, batches: int) -> list[str]:
    """Of the stages that ended in this time."""
    spent: dict[str, list[float]] = defaultdict(list)
    for line in path.read_text().splitlines():
        stage, began, ended = line.split("\t")
        if start <= float(ended) <= end:
            spent[stage].append(float(ended) - float(began))
    rows = [
        f"| {stage} | {len(each)} | {1e3 * sum(each) / batches:.1f} | {sum(each) / (end - start):.0%} |"
        for stage, each in sorted(spent.items(), key=lambda item: -sum(item[1]))
    ]
    head = [f"{batches} batches in {end - start:.2f} s, after the first quarter of the rows:", ""]
    return [*head, "| stage | times | ms for a batch | share of the time |", "|---|---|---|---|", *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a batch of texts costs in the model's process, stage by stage.")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--folder", type=Path, help="of the inputs, which are made if they are not there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch, "inputs")
        if not folder.exists():
            from gpu_texts_inputs import make

            folder.mkdir(parents=True)
            make(str(folder), rows=given.rows, layers=given.layers, device=given.device)
        print("\n".join(_run(folder, Path(scratch), given.device, given.workers)))


def _run(folder: Path, scratch: Path, device: str, workers: int | None) -> list[str]:
    import penstock as ps

    place = "CPU" if device == "cpu" else "GPU"
    handler = StagedEncoderHandler(folder / "model", device=place, columns="text", output_column="vector")
    handler.noted_in, handler.stages_in = f"{scratch}/calls", f"{scratch}/stages"
    started = time.time()
    p = ps.Pipeline() if workers is None else ps.Pipeline(workers=workers)
    vectors = p | ps.ReadFromParquet(f"{folder}/texts/*.parquet") | ps.RunInference(handler)
    vectors | ps.WriteToParquet(scratch / "vectors")
    watched = run_watched(p, handler)
    ended = time.time()
    at = watched.quarter()
    late = [call for call in watched.calls if call.ended > at]
    first, last = watched.calls[0].started - started, watched.calls[-1].ended - started
    told = [f"- {name}: {value:,.4g}" for name, value in watched.figures().items()]
    whole = f"first batch after {first:.1f} s, the last one ended after {last:.1f}, all written after {ended - started:.1f}"
    sizes = " ".join(f"{call.rows}x{call.length // call.rows}:{call.ended - call.started:.2f}" for call in watched.calls)
    return [whole, *told, *words_of(watched.result), sizes, "", *table(scratch / "stages", at, late[-1].ended, len(late))]


if __name__ == "__main__":
    main()
