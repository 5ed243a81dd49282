"""Beam, Ray Data and Daft, each in the fastest way found for it. Every function runs in a fresh process.

Their imports, `ray.init()` and the import of scikit-learn in this process happen before the clock starts.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import (
    COLUMNS,
    COMPRESSION,
    FUNCTIONS,
    Stopwatch,
    add_seven,
    answer,
    check_output,
    double,
    drop_three,
    load_classifier,
    outcome,
)

# What came out of Beam's last step: its local runner is in this process, so that appending here costs it the least.
_seen: list[int] = []


def beam_identity(rows: int, batch_size: int) -> dict[str, Any]:
    """RunInference on the local runner. A FlatMap as source, because Create shuffles its rows."""
    import apache_beam as beam
    from apache_beam.ml.inference.base import ModelHandler, RunInference

    class Identity(ModelHandler):  # type: ignore[misc]
        def load_model(self) -> None:
            return None

        def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
            return answer(batch)

        def batch_elements_kwargs(self) -> dict[str, int]:
            return {"min_batch_size": batch_size, "max_batch_size": batch_size}

    with Stopwatch() as watch:
        with beam.Pipeline(runner="FnApiRunner") as pipeline:
            (
                pipeline
                | beam.Create([0])
                | beam.FlatMap(lambda _: range(rows))
                | beam.Map(add_seven)
                | beam.Map(double)
                | beam.Map(drop_three)
                | RunInference(Identity())
                | beam.Map(_see)
            )
        total = sum(_seen)
    return outcome(watch, len(_seen), total)


def _see(row: int) -> None:
    _seen.append(row)


def ray_identity(rows: int, batch_size: int) -> dict[str, Any]:
    """Ray Data, the model in a pool of 2 actors. Each function is a map_batches over whole Arrow blocks: about a
    quarter of the time of ds.map(), which makes a dict of every row."""
    ray = start_ray()

    class Identity:
        def __call__(self, table: Any) -> Any:
            return answer(table)

    with Stopwatch() as watch:
        dataset = ray.data.range(rows)
        for function in FUNCTIONS:
            dataset = dataset.map_batches(_over_arrow(function), batch_size=None, batch_format="pyarrow")
        dataset = dataset.map_batches(Identity, batch_size=batch_size, batch_format="pyarrow", **two_actors(ray))
        count = total = 0
        for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
            count += len(batch["id"])
            total += int(batch["id"].sum())
    return outcome(watch, count, total)


def _over_arrow(function: Callable[[int], int]) -> Callable[[Any], Any]:
    def apply(table: Any) -> Any:
        import pyarrow as pa

        return pa.table({"id": pa.array(map(function, table["id"].to_pylist()), pa.int64())})

    return apply


def ray_parquet(folder: str, model_path: str) -> dict[str, Any]:
    """Ray Data over Arrow tables: the fastest of its three batch formats here, and 65,536 of several batch sizes."""
    ray = start_ray()
    import sklearn.linear_model  # noqa: F401

    class Classifier:
        def __init__(self) -> None:
            self.model = load_classifier(model_path)

        def __call__(self, table: Any) -> Any:
            import numpy as np
            import pyarrow as pa

            answers = self.model.predict(np.column_stack([table[name].to_numpy() for name in COLUMNS]))
            return table.append_column("inference", pa.array(answers))

    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch:
            dataset = ray.data.read_parquet(str(Path(folder, "input")))
            dataset = dataset.map_batches(Classifier, batch_size=65_536, batch_format="pyarrow", **two_actors(ray))
            dataset.write_parquet(output, compression=COMPRESSION)
        return check_output(watch, output, model_path)


def start_ray() -> Any:
    os.environ["RAY_TMPDIR"] = tempfile.gettempdir()  # its logs and sockets, removed with the case's other files
    import ray
    import ray.data

    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def two_actors(ray: Any) -> dict[str, Any]:
    """Half a core for each actor: with whole ones, on a machine of two cores, the steps before them never get to run."""
    return {"compute": ray.data.ActorPoolStrategy(size=2), "num_cpus": 0.5}


def daft_parquet(folder: str, model_path: str) -> dict[str, Any]:
    """A class with a batch method. Daft's own batch size and place (threads of this process): the fastest here, a
    quarter of the time of `use_process=True` or `max_concurrency=2`."""
    import daft
    import numpy as np
    import sklearn.linear_model  # noqa: F401

    @daft.cls
    class Classifier:
        def __init__(self, path: str) -> None:
            self.model = load_classifier(path)

        @daft.method.batch(return_dtype=daft.DataType.int64())
        def predict(self, *columns: Any) -> Any:
            arrays = [column.to_arrow().to_numpy(zero_copy_only=False) for column in columns]
            return self.model.predict(np.column_stack(arrays))

    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch:
            frame = daft.read_parquet(str(Path(folder, "input", "*.parquet")))
            answers = Classifier(model_path).predict(*[frame[name] for name in COLUMNS])
            frame.with_column("inference", answers).write_parquet(output, compression=COMPRESSION)
        return check_output(watch, output, model_path)
