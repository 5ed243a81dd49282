"""A text job while another process takes nearly all of the GPU's memory for some seconds: what becomes of its batches.

As a program it is the other process: python gpu_memory.py CALLS FLAG ROWS SECONDS
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_progress import Call, Noting
from gpu_texts_inputs import checked
from workload import Stopwatch

from penstock.handlers.huggingface import SentenceTransformerModelHandler

LEFT = 1 << 30  # bytes that the other process leaves free: enough for some rows, not for a full batch
LOOK_EVERY = 0.02  # seconds


class GivingHandler(Noting, SentenceTransformerModelHandler):
    """While the flag is there it keeps no memory between batches, so that the other process can have it: torch would keep
    what it once had, and never run out."""

    flag: str

    def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
        if Path(self.flag).exists():
            self.after_out_of_memory()
        return super().run_inference(batch, model, inference_args)


def crowded(folder: str, device: str, rows: int, hold: float) -> dict[str, Any]:
    """Encoder `a` over the texts of `long`; from when a third of the rows is answered, memory is short for so many
    seconds."""
    from gpu_progress import run_watched, words_of

    import penstock as ps

    long = f"{folder}/long"
    handler = GivingHandler(f"{long}/model", device="GPU", columns="text", output_column="vector")
    with tempfile.TemporaryDirectory() as scratch:
        output, handler.noted_in, handler.flag = f"{scratch}/vectors", f"{scratch}/calls", f"{scratch}/flag"
        command = [sys.executable, __file__, handler.noted_in, handler.flag, str(rows // 3), str(hold)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            try:
                with Stopwatch() as watch:
                    p = ps.Pipeline()
                    rows_in = p | ps.ReadFromParquet(f"{long}/texts/*.parquet")
                    _ = rows_in | ps.RunInference(handler) | ps.WriteToParquet(output)
                    watched = run_watched(p, handler)
                said = other.communicate(timeout=hold + 5)[0]
            finally:
                other.kill()
        taken, freed, most = map(float, said.split())
        metrics = watched.result.metrics
        figures = {
            "out of memory": float(metrics.counter("out_of_memory_counter")),
            "failed batches": float(metrics.counter("failed_batches_counter")),
            "GiB taken": most / 2**30,
            **sizes(watched.calls, taken, freed),
        }
        words = [*words_of(watched.result), *by_second(watched.calls, taken)]
        return checked(watch, long, output, figures=figures, words=words)


def sizes(calls: list[Call], taken: float, freed: float) -> dict[str, float]:
    """Tokens in the largest batch of each time, and how long after the other process had gone one was as large as 80% of
    what was usual before; inf: never."""
    settled = calls[len(calls) // 20].ended  # the search has begun by then
    before = [call.length for call in calls if settled < call.ended < taken]
    during = [call.length for call in calls if taken + 1 < call.ended < freed]
    after = [call for call in calls if call.started > freed]
    usual = sorted(before)[len(before) // 2] if before else 0
    back = [call.ended - freed for call in after if call.length >= 0.8 * usual]
    return {
        "tokens a batch before, in the middle": usual,
        "largest batch before": max(before, default=0),
        "largest batch during": max(during, default=0),
        "largest batch after": max((call.length for call in after), default=0),
        "rows after": sum(call.rows for call in after),
        "seconds until sizes are back": min(back, default=math.inf),
    }


def by_second(calls: list[Call], taken: float) -> list[str]:
    """Rows and the largest batch in each second, counted from when memory was taken."""
    found: dict[int, list[Call]] = {}
    for call in calls:
        found.setdefault(int((call.ended - taken) // 1), []).append(call)
    return [
        f"second {second:+d}: {sum(call.rows for call in each):,} rows in {len(each)} batches, "
        f"the largest {max(call.length for call in each):,} tokens"
        for second, each in sorted(found.items())
    ]


def hold_memory(calls: str, flag: str, rows: int, seconds: float) -> None:
    """Wait for so many rows, then take all memory but some for so long, again and again; print when it began and ended, and
    the most bytes held."""
    import torch

    torch.ones(1, device="cuda")  # what CUDA sets up takes seconds
    while _rows_in(Path(calls)) < rows:
        time.sleep(LOOK_EVERY)
    Path(flag).touch()
    taken, held, most = time.time(), [], 0
    while time.time() < taken + seconds:
        free = torch.cuda.mem_get_info()[0] - LEFT
        if free > LEFT // 16:
            try:
                held.append(torch.empty(free, dtype=torch.uint8, device="cuda"))
                most += free
            except torch.OutOfMemoryError:  # the model was quicker
                pass
        time.sleep(LOOK_EVERY)
    Path(flag).unlink()
    held.clear()
    torch.cuda.empty_cache()
    print(taken, time.time(), most, flush=True)


def _rows_in(calls: Path) -> int:
    return sum(int(line.split()[2]) for line in calls.read_text().splitlines()) if calls.exists() else 0


if __name__ == "__main__":
    hold_memory(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
