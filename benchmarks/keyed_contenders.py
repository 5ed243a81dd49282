"""A model for each of many keys: Penstock, Beam and a bare loop. Every function runs in a fresh process."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keyed_inputs import Model, Row, Tally, key_of, make_rows, model_path
from keyed_memory import Watched
from workload import Stopwatch, outcome

import penstock as ps
import penstock.engines.local.inline  # what runs a pipeline is imported with the first run: imports are not on the clock

BATCH_SIZE = 64


class Handler(ps.ModelHandler[int, int, Model]):
    """The model at a path."""

    def __init__(self, path: str, **place: Any) -> None:
        super().__init__(max_batch_size=BATCH_SIZE, **place)
        self.path = path

    def update_model_path(self, model_path: str) -> None:
        self.path = model_path

    def load_model(self) -> Model:
        return Model(self.path)

    def run_inference(self, batch: Sequence[int], model: Model, inference_args: Any = None) -> list[int]:
        return model.answers(batch)


def penstock_keyed(
    folder: str,
    models: int,
    rows: int,
    budget: int,
    workers: int | None,
    large_model: bool,
    journal: bool = False,
    memory: bool = False,
) -> dict[str, Any]:
    """Answers are added up on the way, so that none are kept; the parts are written, as a run with a journal has no other
    output."""
    made, tally = make_rows(rows, models), Tally()
    one = Handler("", large_model=large_model)
    handler = ps.KeyedModelHandler.from_pattern(model_path(folder, "{key}"), one, memory_budget=budget)
    with tempfile.TemporaryDirectory() as output:
        settings = {"run_dir": f"{output}/run"} if journal else {}
        with Watched(memory) as watched, Stopwatch() as watch, ps.Pipeline(workers=workers, **settings) as p:
            answers = p | ps.Create(made) | ps.RunInference(handler)
            answers | ps.MapBatches(_tallied, batch_size=4_096) | ps.WriteToText(f"{output}/parts")
        for path in Path(output, "parts").iterdir():
            for line in path.read_text().splitlines():
                tally.merge(*map(int, line.split()))
    told = sum(count for key, count in p.result.metrics.counters.items() if key.name == "model_loads")
    figures = {**watched.figures(), "told loads": told}
    return outcome(watch, tally.rows, tally.checked(folder, rows, models)) | {"figures": figures}


def _tallied(answers: list[Row]) -> list[str]:
    tally = Tally()
    tally.add(answers)
    return [f"{tally.rows} {tally.total}"]


def loop(folder: str, models: int, rows: int, capacity: int, memory: bool = False) -> dict[str, Any]:
    """What one would write without any library: rows as they come, and the models that were used last."""
    made, tally = make_rows(rows, models), Tally()
    held: OrderedDict[str, Model] = OrderedDict()
    with Watched(memory) as watched, Stopwatch() as watch:
        for key, question in made:
            model = held.get(key)
            if model is None:
                if len(held) == capacity:
                    held.popitem(last=False)
                model = held[key] = Model(model_path(folder, key))
            held.move_to_end(key)
            tally.add([(key, model.answers([question])[0])])
    return outcome(watch, tally.rows, tally.checked(folder, rows, models)) | {"figures": watched.figures()}


_tally = Tally()  # of Beam's answers: its local runner is in this process, so that adding them up here costs it the least
_rows: list[Row] = []


def beam_keyed(
    folder: str, models: int, rows: int, capacity: int, batch_size: int | None = None, memory: bool = False
) -> dict[str, Any]:
    """KeyedModelHandler with a handler for each key on the local runner. A FlatMap as source, because Create shuffles its
    rows. `batch_size`: instead of the one that Beam finds by itself."""
    import apache_beam as beam
    from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, ModelHandler, RunInference

    class OneKey(ModelHandler):  # type: ignore[misc]
        def __init__(self, path: str) -> None:
            self.path = path

        def load_model(self) -> Model:
            return Model(self.path)

        def run_inference(self, batch: Any, model: Model, inference_args: Any = None) -> Any:
            return model.answers(batch)

    class Keyed(KeyedModelHandler):  # type: ignore[misc]
        def batch_elements_kwargs(self) -> dict[str, int]:
            return {} if batch_size is None else {"min_batch_size": batch_size, "max_batch_size": batch_size}

    _rows[:] = make_rows(rows, models)
    keys = [key_of(number) for number in range(models)]
    mappings = [KeyModelMapping([key], OneKey(model_path(folder, key))) for key in keys]
    with Watched(memory) as watched, Stopwatch() as watch, beam.Pipeline(runner="FnApiRunner") as pipeline:
        made = pipeline | beam.Create([0]) | beam.FlatMap(_generate)
        made | RunInference(Keyed(mappings, max_models_per_worker_hint=capacity)) | beam.Map(_see)
    return outcome(watch, _tally.rows, _tally.checked(folder, rows, models)) | {"figures": watched.figures()}


def _generate(_: Any) -> list[Row]:
    return _rows


def _see(answer: Row) -> None:
    _tally.add([answer])
