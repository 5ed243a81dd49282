"""Beam's RunInference and Penstock's in the same runner of Beam's. Every function runs in a fresh process; `base` is the
module whose names the program uses: "beam" or "penstock"."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from encoder import LONGEST, Answer, Encoder, checksum_of, encoded, encoder, model_folder, texts_of
from workload import Stopwatch, outcome

BUCKETS = [16, 32, 64, 128, 256]  # Beam's own, as far as texts go
FINE_BUCKETS = [*range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32)]
IMAGE, SOURCES = (3, 224, 224), 8

_seen: list[Any] = []  # what came out of the last step, in this process as the runner is
_rows: list[Any] = []


def names(base: str) -> Any:
    """The names of Beam's RunInference, or those that take their place."""
    logging.getLogger().setLevel(logging.ERROR)
    if base == "beam":
        from apache_beam.ml.inference import base as beam_base

        return beam_base
    import penstock.beam

    return penstock.beam


def run(transform: Any) -> Stopwatch:
    """Rows of one bundle through a transform. A FlatMap as source, because Create shuffles its rows."""
    import apache_beam as beam

    with Stopwatch() as watch, beam.Pipeline(runner="FnApiRunner") as pipeline:
        pipeline | beam.Create([0]) | beam.FlatMap(_generate) | transform | "see" >> beam.Map(_see)
    return watch


def _generate(_: Any) -> list[Any]:
    return _rows


def _see(row: Any) -> None:
    _seen.append(row)


def identity(base: str, rows: int, batch_size: int | None = None) -> dict[str, Any]:
    """A model that gives back what it is given: all that is measured is around it."""
    api = names(base)

    class Identity(api.ModelHandler):  # type: ignore[misc,name-defined]
        def load_model(self) -> Any:
            return np.zeros(1)

        def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
            return list(batch)

        def batch_elements_kwargs(self) -> Any:
            return {} if batch_size is None else {"min_batch_size": batch_size, "max_batch_size": batch_size}

    _rows[:] = range(rows)
    watch = run(api.RunInference(Identity()))
    return outcome(watch, len(_seen), str(sum(_seen)))


def texts(
    base: str, kind: str, count: int, batch_size: int | None = None, buckets: str | None = None, copies: int | None = None
) -> dict[str, Any]:
    """The encoder of encoder.py, on one thread. buckets: Beam's way for rows of like length, which needs a duration: one
    that never cuts. Penstock is told how long a text is, and nothing else; or to keep copies, one for each core."""
    api = names(base)

    class Handler(api.ModelHandler):  # type: ignore[misc,name-defined]
        def load_model(self) -> Encoder:
            return encoder()

        def run_inference(self, batch: Any, model: Encoder, inference_args: Any = None) -> Any:
            return model.answer(batch)

    settings: dict[str, Any] = {}
    if batch_size is not None:
        settings |= {"min_batch_size": batch_size, "max_batch_size": batch_size}
    if buckets:
        boundaries = FINE_BUCKETS if buckets == "fine" else BUCKETS
        settings |= {"max_batch_duration_secs": 600, "batch_bucket_boundaries": boundaries}
    if copies is not None:
        settings |= {"model_copies": copies}
    if buckets or base == "penstock":
        settings |= {"batch_length_fn": lambda text: encoder().count_tokens([text])[0]}
    _rows[:] = texts_of(kind, count)
    encoder()
    watch = run(api.RunInference(Handler(**settings)))
    answers: list[Answer] = _seen
    return encoded(watch, answers)


def texts_as_shipped(kind: str, count: int) -> dict[str, Any]:
    """The same vectors by Penstock's own handler, on one thread: a user's job, the load included."""
    import torch

    import penstock.beam
    from penstock.handlers.huggingface import SentenceTransformerModelHandler

    torch.set_num_threads(1)
    _rows[:] = texts_of(kind, count)
    handler = SentenceTransformerModelHandler(model_folder(), max_seq_length=LONGEST, normalize_embeddings=True)
    watch = run(penstock.beam.RunInference(handler))
    return outcome(watch, len(_seen), checksum_of(each.inference for each in _seen))


class Corner:
    """A model that does next to nothing with an image, and says when. Beam calls it across processes, Penstock calls the
    handler there."""

    def answer(self, images: list[Any]) -> list[tuple[float, float]]:
        values = [float(image[0, 0, 0]) for image in images]
        return [(value, time.time()) for value in values]


def images(base: str, rows: int, batch_size: int | None = None) -> dict[str, Any]:
    """Rows of an image's size from two worker processes to the one model that they share. The clock is the model's: from
    its first answer to its last, so that nobody's start is on it."""
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    api = names(base)

    class Handler(api.ModelHandler):  # type: ignore[misc,name-defined]
        def load_model(self) -> Any:
            return Corner()

        def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
            return model.answer(list(batch))

    def generate(source: int) -> Iterator[Any]:
        for number in range(source, rows, SOURCES):
            yield np.full(IMAGE, number, np.float32)

    sizes = {} if batch_size is None else {"min_batch_size": batch_size, "max_batch_size": batch_size}
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for the workers
    with tempfile.TemporaryDirectory() as folder, Stopwatch() as watch:
        options = PipelineOptions(["--direct_running_mode=multi_processing", "--direct_num_workers=2"])
        with beam.Pipeline(runner="FnApiRunner", options=options) as pipeline:
            made = pipeline | beam.Create(range(SOURCES)) | beam.FlatMap(generate)
            made | api.RunInference(Handler(large_model=True, **sizes)) | beam.ParDo(noting(folder))
        noted = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    watch.seconds = max(each["last"] for each in noted) - min(each["first"] for each in noted)
    workers = len({each["pid"] for each in noted})
    total = sum(each["total"] for each in noted)
    return outcome(watch, sum(each["rows"] for each in noted), f"{total:.0f}, {workers} workers")


def noting(folder: str) -> Any:
    """A function that writes into a file what its bundle has seen of (value, time)."""
    import apache_beam as beam

    class Noting(beam.DoFn):  # type: ignore[misc]
        def start_bundle(self) -> None:
            self._seen: list[tuple[float, float]] = []

        def process(self, answer: tuple[float, float]) -> None:
            self._seen.append(answer)

        def finish_bundle(self) -> None:
            if not self._seen:
                return
            values, times = zip(*self._seen, strict=True)
            noted = {"pid": os.getpid(), "rows": len(values), "total": sum(values), "first": min(times), "last": max(times)}
            Path(folder, uuid.uuid4().hex).write_text(json.dumps(noted))

    return Noting()


def single_rows(base: str, rows: int, threads: int) -> dict[str, Any]:
    """Bundles of one row, from many threads: what a runner of a stream gives. The functions that both RunInferences run are
    called as a worker of Beam's does. The model is a random forest: a call takes about as long for one row as for ten."""
    from sklearn.ensemble import RandomForestClassifier

    api = names(base)

    class Forest(api.ModelHandler):  # type: ignore[misc,name-defined]
        def load_model(self) -> Any:
            data = np.random.default_rng(0).normal(size=(500, 20))
            return RandomForestClassifier(100, random_state=0).fit(data, data[:, 0] > 0)

        def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
            return model.predict(np.stack(list(batch))).tolist()

    row = np.ones(20)
    functions = [_bundles(base, api, Forest()) for _ in range(threads)]
    for function in functions[:1]:
        list(function(row))  # the model is loaded
    made = [0] * threads

    def work(number: int) -> None:
        for _ in range(rows // threads):
            made[number] += len(list(functions[number](row)))

    workers = [threading.Thread(target=work, args=[number]) for number in range(threads)]
    with Stopwatch() as watch:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return outcome(watch, sum(made), str(sum(made)))


_step: list[Any] = []


def _bundles(base: str, api: Any, handler: Any) -> Any:
    """A function that runs a bundle of one row."""
    from apache_beam.transforms.window import GlobalWindow
    from apache_beam.utils.windowed_value import WindowedValue

    if base == "beam":
        import time

        do_fn = api._RunInferenceDoFn(handler, time, None, False, "benchmark")
        do_fn.setup()

        def beam_bundle(row: Any) -> Iterator[Any]:
            yield from do_fn.process([row], None, None)  # a batch of its own: others are in other bundles
            do_fn.finish_bundle()

        return beam_bundle
    from penstock.beam.inference_dofn import InferenceDoFn
    from penstock.inference.spec import InferenceSpec

    if not _step:
        _step.append(InferenceSpec.of(handler))
    own = InferenceDoFn(_step[0], "benchmark", "benchmark")
    own.setup()

    def bundle(row: Any) -> Iterator[Any]:
        own.start_bundle()
        own.process(row, WindowedValue(row, 0, (GlobalWindow(),)))
        yield from own.finish_bundle()

    return bundle
