"""Jobs with and without a journal, and a run that goes on after 10,000 splits. Every function runs in a fresh process."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from encoder import encoder, reviews
from workload import Stopwatch, outcome

import penstock as ps

COLUMNS = 8
SPLITS = 10_000
LEFT = 4  # splits that the resumed run has to do


class Embedder(ps.ModelHandler[str, Any, Any]):
    """The real encoder, on one thread."""

    def load_model(self) -> Any:
        return encoder()

    def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
        return [answer.vector for answer in model.answer(batch)]


def make_inputs(folder: str, texts: int, rows: int) -> dict[str, Any]:
    """The files that both jobs read; made once."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    lines = [text.replace("\n", " ").replace("\r", " ") for text in reviews()[:texts]]
    Path(folder, "texts.txt").write_text("".join(f"{line}\n" for line in lines))
    random = np.random.default_rng(7)
    schema = pa.schema([(f"c{i}", pa.float64()) for i in range(COLUMNS)])
    with pq.ParquetWriter(f"{folder}/rows.parquet", schema) as file:
        for _ in range(0, rows, 1_000_000):
            columns = [random.standard_normal(1_000_000).round(3) for _ in range(COLUMNS)]
            file.write_table(pa.table(columns, schema=schema))
    return outcome(Stopwatch(), rows, "")


def encode(folder: str, journal: bool) -> dict[str, Any]:
    def build(p: ps.Pipeline, out: str) -> None:
        answers = p | ps.ReadFromText(f"{folder}/texts.txt") | ps.RunInference(Embedder(max_batch_size=32))
        answers | ps.Map(lambda vector: {"vector": vector}) | ps.WriteToParquet(out)

    return _run(folder, journal, build)


def convert(folder: str, journal: bool) -> dict[str, Any]:
    def build(p: ps.Pipeline, out: str) -> None:
        rows = p | ps.ReadFromParquet(f"{folder}/rows.parquet")
        rows | ps.MapBatches(_with_sum, format="arrow", batch_size=65_536) | ps.WriteToParquet(out)

    return _run(folder, journal, build)


def _with_sum(table: pa.Table) -> pa.Table:
    total = table.column(0)
    for column in table.columns[1:]:
        total = pc.add(total, column)
    return table.append_column("sum", total)


def _run(folder: str, journal: bool, build: Any) -> dict[str, Any]:
    out, run_dir = f"{folder}/out", f"{folder}/run"
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    os.sync()
    with Stopwatch() as watch, ps.Pipeline(workers=2, **({"run_dir": run_dir} if journal else {})) as p:
        build(p, out)
    rows = sum(pq.ParquetFile(path).metadata.num_rows for path in Path(out).iterdir())
    shutil.rmtree(out)
    return outcome(watch, rows, rows)


class ManySplits(ps.Source[int]):
    """Ten thousand splits of one row each."""

    def splits(self, goal: ps.SplitGoal) -> list[int]:
        return list(range(SPLITS))

    def read(self, split: int) -> Any:
        yield [split]


def resume(folder: str) -> dict[str, Any]:
    """Make a run with 10,000 splits, of which the last few are not done, and go on with it: seconds to the first row."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _many(folder).run()
    except ps.RowError:
        Path(folder, "mended").touch()
    started = time.time()
    with Stopwatch() as watch:
        _many(folder).run()
    watch.seconds = min(map(float, Path(folder, "first").read_text().split())) - started
    return outcome(watch, SPLITS, len(os.listdir(f"{folder}/out")))


def _many(folder: str) -> ps.Pipeline:
    def work(row: int) -> str:
        if row >= SPLITS - LEFT:
            if not os.path.exists(f"{folder}/mended"):
                raise ValueError("stopped")
            with open(f"{folder}/first", "a") as file:
                file.write(f"{time.time()}\n")
        return str(row)

    p = ps.Pipeline(workers=2, run_dir=f"{folder}/run")
    p | ps.Read(ManySplits()) | ps.Map(work) | ps.WriteToText(f"{folder}/out")
    return p
