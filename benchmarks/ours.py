"""Penstock over the same work. Starting its worker processes, and what they import, is on the clock."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workload import COLUMNS, COMPRESSION, Stopwatch, add_seven, answer, check_output, double, drop_three, outcome

import penstock as ps
import penstock.engines.local.inline  # what runs a pipeline is imported with the first run: imports are not on the clock
import penstock.journal.starting

FRAMEWORKS = {
    *("apache_beam", "daft", "jax", "lightgbm", "onnxruntime", "pandas", "ray", "sklearn", "tensorflow"),
    *("torch", "transformers", "vllm", "xgboost"),
}


class Identity(ps.ModelHandler[int, int, None]):
    """A model that returns its batch."""

    def load_model(self) -> None:
        return None

    def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
        return answer(batch)


def identity(rows: int, batch_size: int, workers: int | None) -> dict[str, Any]:
    with Stopwatch() as watch:
        answers = (
            ps.Pipeline(workers=workers)
            | ps.Create(range(rows))
            | ps.Map(add_seven)
            | ps.Map(double)
            | ps.Map(drop_three)
            | ps.RunInference(Identity(max_batch_size=batch_size))
        ).collect()
        total = sum(answers)
    return outcome(watch, len(answers), total)


def parquet(folder: str, model_path: str, own_compression: bool = False, **options: Any) -> dict[str, Any]:
    """Columns all the way. `own_compression`: that of WriteToParquet by itself, zstd, instead of that of the rivals."""
    if options.get("workers") == 0:
        import sklearn.linear_model  # noqa: F401  # as for the rivals: what this process imports is not on the clock

    from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy

    handler = SklearnModelHandlerNumpy(
        model_uri=model_path,
        model_file_type=ModelFileType.PICKLE,
        trusted=True,
        columns=COLUMNS,
        max_batch_size=65_536,
    )
    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch:
            pipeline = ps.Pipeline(**options)
            write = ps.WriteToParquet(output) if own_compression else ps.WriteToParquet(output, compression=COMPRESSION)
            source = str(Path(folder, "input", "*.parquet"))
            pipeline | ps.ReadFromParquet(source) | ps.RunInference(handler) | write
            pipeline.run()
        return check_output(watch, output, model_path)


def generate(rows: int, one_row_source: bool) -> dict[str, Any]:
    """Rows that exist nowhere before the run, into text files. Its memory is watched from outside."""
    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch:
            pipeline = ps.Pipeline()
            if one_row_source:
                numbers = pipeline | ps.Create([rows]) | ps.FlatMap(range)
            else:
                numbers = pipeline | ps.Create(range(rows))
            numbers | ps.Map(str) | ps.WriteToText(output)
            pipeline.run()
        return outcome(watch, *_count_and_sum(output))


def _count_and_sum(folder: str) -> tuple[int, int]:
    count = total = 0
    for path in sorted(Path(folder).iterdir()):
        with path.open() as lines:
            for line in lines:
                count += 1
                total += int(line)
    return count, total


# The start of a small script: each in an interpreter that has imported nothing else.

IMPORT = """
import sys, time
started = time.perf_counter()
import penstock
print(time.perf_counter() - started, *sys.modules)
"""

FOUR_ROWS = """
import time
import penstock as ps
import penstock.engines.local.inline  # what runs a pipeline is imported with the first run: imports are not on the clock

class Identity(ps.ModelHandler):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return batch

started = time.perf_counter()
rows = ps.Pipeline() | ps.Create([1, 2, 3, 4]) | ps.Map(lambda row: row * 2) | ps.RunInference(Identity())
answers = rows.collect()
print(time.perf_counter() - started, len(answers), sum(answers))
"""


def import_penstock() -> dict[str, Any]:
    """Seconds of `import penstock`. The checksum names the frameworks that it loads."""
    watch, modules = _run_script(IMPORT)
    return outcome(watch, 0, ", ".join(sorted(FRAMEWORKS.intersection(modules))) or "no framework")


def four_rows() -> dict[str, Any]:
    """Seconds from Create to collect(), after the import."""
    watch, (count, total) = _run_script(FOUR_ROWS)
    return outcome(watch, int(count), int(total))


def _run_script(code: str) -> tuple[Stopwatch, list[str]]:
    printed = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    watch = Stopwatch()
    watch.seconds, rest = float(printed.split()[0]), printed.split()[1:]
    return watch, rest
