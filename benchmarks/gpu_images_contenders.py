"""Photos in Parquet files to their logits in others, on one GPU: Penstock, torch's DataLoader, and decoding alone.

Every function runs in a fresh process, whose start and imports are on the clock of the whole job.
"""

from __future__ import annotations

import os
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gpu_images_inputs import DEVIATION, MEAN, SIDE, checked, load, pixels, resnet
from workload import Stopwatch, outcome

BATCH = 256


def penstock(folder: str, source: str, device: str, layers: int) -> dict[str, Any]:
    """With no setting. The bytes of the photos are not written."""
    from gpu_handlers import NotingImageHandler
    from gpu_progress import run_watched, words_of

    import penstock as ps

    handler = NotingImageHandler(
        state_dict_path=f"{folder}/model.pt",
        model_class=resnet,
        model_params={"layers": layers, "half": device != "cpu"},
        device="CPU" if device == "cpu" else "GPU",
        columns="image",
        output_column="logits",
        size=(SIDE, SIDE),
        mean=MEAN,
        std=DEVIATION,
    )
    with tempfile.TemporaryDirectory() as scratch:
        output, handler.noted_in = f"{scratch}/logits", f"{scratch}/calls"
        with Stopwatch() as watch:
            p = ps.Pipeline()
            answered = p | ps.ReadFromParquet(f"{folder}/{source}/*.parquet") | ps.RunInference(handler)
            answered | ps.MapBatches(without_image, format="arrow") | ps.WriteToParquet(output)
            watched = run_watched(p, handler)
        return checked(watch, folder, source, output, figures=watched.figures(), words=words_of(watched.result))


def without_image(table: Any) -> Any:
    return table.drop_columns(["image"])


class Photos:
    """What a DataLoader asks for the rows of."""

    def __init__(self, images: list[bytes]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, at: int) -> Any:
        import torch

        return torch.from_numpy(pixels(self._images[at]))


def loader(folder: str, source: str, device: str, layers: int, workers: int) -> dict[str, Any]:
    """So many processes decode and stack, this one runs the model, a batch ahead of what it writes down. Its rate is that of
    the loop: nothing is read from files or written in it."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from torch.utils.data import DataLoader

    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch:
            run = load(folder, layers, device)
            table = pq.read_table(Path(folder, source))
            photos: Any = Photos(table["image"].to_pylist())
            on_gpu = device != "cpu"
            batches = DataLoader(photos, BATCH, num_workers=workers, pin_memory=on_gpu)
            started = time.perf_counter()
            made: list[Any] = []
            before: Any = None
            for batch in batches:
                now = run(batch.to(device, non_blocking=on_gpu))
                if before is not None:
                    made.append(before.cpu().numpy())
                before = now
            made.append(before.cpu().numpy())
            rate = len(photos) / (time.perf_counter() - started)
            logits = np.concatenate(made)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(logits.reshape(-1)), logits.shape[1])
            result = table.drop_columns(["image"]).append_column("logits", lists)
            pq.write_table(result, Path(output, "part-0.parquet"), compression="zstd")
        return checked(watch, folder, source, output, figures={"rate": rate})


def decode(folder: str, source: str) -> dict[str, Any]:
    """A process for each core, which decodes and resizes its part of the photos, and throws them away. On the clock is what
    they do between a common start and the end of the last one."""
    parts = sorted(str(path) for path in Path(folder, source).glob("*.parquet"))
    count = os.cpu_count() or 1
    context = get_context("spawn")
    barrier = context.Barrier(count + 1)
    processes = [context.Process(target=_decode, args=(parts, number, count, barrier)) for number in range(count)]
    with Stopwatch() as watch:
        for process in processes:
            process.start()
        barrier.wait()
        started = time.perf_counter()
        for process in processes:
            process.join()
        seconds = time.perf_counter() - started
    rows = sum(len(_bytes(part)) for part in parts)
    failed = sum(process.exitcode != 0 for process in processes)
    return {**outcome(watch, rows, f"{failed} processes failed"), "figures": {"rate": rows / seconds}}


def _decode(parts: list[str], number: int, count: int, barrier: Any) -> None:
    """Every so many-th photo of all files."""
    mine = [each for part in parts for each in _bytes(part)[number::count].to_pylist()]
    pixels(mine[0])
    barrier.wait()
    for each in mine:
        pixels(each)


def _bytes(part: str) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(part, columns=["image"])["image"].combine_chunks()
