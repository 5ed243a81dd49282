"""Texts in Parquet files to their vectors in others, on one GPU: Penstock, SentenceTransformer.encode, and the device alone.

Every function runs in a fresh process, whose start and imports are on the clock of the whole job.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from encoder import cut_by_budget
from gpu_texts_inputs import checked, load
from workload import Stopwatch, outcome

IN_FLIGHT = 4  # batches of the device alone
MULTIPLE = 8  # lengths are rounded up to one of it


def penstock(folder: str, device: str) -> dict[str, Any]:
    """As users have it: with no setting."""
    from gpu_progress import words_of

    import penstock as ps
    from penstock.handlers.huggingface import SentenceTransformerModelHandler

    handler = SentenceTransformerModelHandler(
        f"{folder}/model", device=_device(device), columns="text", output_column="vector"
    )
    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch:
            p = ps.Pipeline()
            p | ps.ReadFromParquet(f"{folder}/texts/*.parquet") | ps.RunInference(handler) | ps.WriteToParquet(output)
            result = p.run()
        return checked(watch, folder, output, words=words_of(result))


def penstock_noted(folder: str, device: str, workers: int | None = None) -> dict[str, Any]:
    """With a handler that notes its batches: one with a run_inference() of its own, which starts more slowly, because its
    model is a SentenceTransformer. With no setting, or only with so many workers."""
    from gpu_handlers import NotingEncoderHandler
    from gpu_progress import run_watched, words_of

    import penstock as ps

    handler = NotingEncoderHandler(f"{folder}/model", device=_device(device), columns="text", output_column="vector")
    with tempfile.TemporaryDirectory() as scratch:
        output, handler.noted_in = f"{scratch}/vectors", f"{scratch}/calls"
        with Stopwatch() as watch:
            p = ps.Pipeline() if workers is None else ps.Pipeline(workers=workers)
            p | ps.ReadFromParquet(f"{folder}/texts/*.parquet") | ps.RunInference(handler) | ps.WriteToParquet(output)
            watched = run_watched(p, handler)
        return checked(watch, folder, output, figures=watched.figures(), words=words_of(watched.result))


def _device(name: str) -> str:
    return "CPU" if name == "cpu" else "GPU"


def encode(folder: str, device: str, batch_size: int) -> dict[str, Any]:
    """All texts at once: encode() sorts them by length. Its rate is that of the call alone: nothing is read or written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch:
            model = load(folder, device)
            table = pq.read_table(Path(folder, "texts"))
            texts = table["text"].to_pylist()
            started = time.perf_counter()
            vectors = model.encode(texts, batch_size=batch_size, show_progress_bar=False)
            rate = len(texts) / (time.perf_counter() - started)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
            pq.write_table(table.append_column("vector", lists), Path(output, "part-0.parquet"), compression="zstd")
        return checked(watch, folder, output, figures={"rate": rate})


# The device alone.


def device_alone(folder: str, device: str, budgets: list[int]) -> dict[str, Any]:
    """Rows/s of each budget of padded tokens: while its shapes are new, once more, and with the kernels that plan none, as
    Penstock's handlers have them. Batches are tokenised, sorted and padded before the clock starts. Each budget has a thread
    of its own, because cuDNN plans each shape once for a thread."""
    import pyarrow.parquet as pq
    import torch

    model = load(folder, device)
    texts = pq.read_table(Path(folder, "texts"), columns=["text"])["text"].to_pylist()
    ids = model.tokenizer(texts, truncation=True, max_length=512)["input_ids"]
    figures = {}
    with Stopwatch() as watch:
        for budget in budgets:
            batches = _padded_batches(ids, budget)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(_run, model, batches[-1:]).result()  # what a thread sets up at its first call
                for what in ("new", "seen"):
                    seconds = thread.submit(_run, model, batches).result()
                    figures[f"{budget} {what}"] = len(texts) / seconds
                figures[f"{budget} unplanned"] = len(texts) / thread.submit(_run_unplanned, model, batches).result()
            del batches
            if device != "cpu":
                torch.cuda.empty_cache()
    return {**outcome(watch, len(texts), None), "figures": figures}


def _padded_batches(ids: list[list[int]], budget: int) -> list[dict[str, Any]]:
    """Longest rows first, in memory that the device reads by itself."""
    import numpy as np
    import torch

    lengths = [-(-len(row) // MULTIPLE) * MULTIPLE for row in ids]
    order = sorted(range(len(ids)), key=lambda at: len(ids[at]), reverse=True)
    batches = []
    for batch in cut_by_budget(order, lengths, budget):
        padded = np.zeros((2, len(batch), lengths[batch[0]]), np.int64)
        for number, at in enumerate(batch):
            padded[0, number, : len(ids[at])] = ids[at]
            padded[1, number, : len(ids[at])] = 1
        both = torch.from_numpy(padded)
        both = both.pin_memory() if torch.cuda.is_available() else both
        batches.append({"input_ids": both[0], "attention_mask": both[1]})
    return batches


def _run(model: Any, batches: list[dict[str, Any]]) -> float:
    """Seconds until the last vectors are on the CPU; several batches are in flight."""
    import torch

    started = time.perf_counter()
    in_flight: deque[tuple[Any, Any]] = deque()
    with torch.inference_mode():
        for batch in batches:
            if len(in_flight) == IN_FLIGHT:
                _wait(in_flight.popleft())
            in_flight.append(_launch(model, batch))
        while in_flight:
            _wait(in_flight.popleft())
    return time.perf_counter() - started


def _run_unplanned(model: Any, batches: list[dict[str, Any]]) -> float:
    from penstock.handlers.pytorch_running import attention_without_plans

    with attention_without_plans(model.device):
        return _run(model, batches)


def _launch(model: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    features = {name: each.to(model.device, non_blocking=True) for name, each in batch.items()}
    vectors = model(features)["sentence_embedding"].float()
    if model.device.type == "cpu":
        return vectors, None
    on_cpu = torch.empty(vectors.shape, pin_memory=True)
    on_cpu.copy_(vectors, non_blocking=True)
    return on_cpu, torch.cuda.current_stream().record_event()


def _wait(started: tuple[Any, Any]) -> None:
    if started[1] is not None:
        started[1].synchronize()
