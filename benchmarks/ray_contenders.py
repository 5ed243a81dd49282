"""Penstock on Ray, Penstock's own engine and plain Ray Data over the same work. Every function runs in a fresh process.

A cluster is one node on this machine, with two cores: on two nodes of one core each, the halves that two actors of Ray Data
leave are too small for its tasks, which never run. It is started before the clock; on the clock are actors and worker
processes, with their imports and the loads of their models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from encoder import LONGEST, Answer, checksum_of, encoder, model_folder, texts_of
from ours import Identity
from rivals import start_ray, two_actors
from text_contenders import TextHandler
from workload import Stopwatch, add_seven, answer, double, drop_three, outcome

import penstock as ps
import penstock.engines.local.inline  # what runs a pipeline is imported with the first run: imports are not on the clock
import penstock.engines.ray.fleet

CORES = 2


def _pipeline(engine: str) -> ps.Pipeline:
    """Two workers."""
    if engine == "ray":
        start_ray()
    return ps.Pipeline(engine=engine, workers=CORES)


# Three cheap functions and a model that returns its batch.


def penstock_identity(engine: str, rows: int, batch_size: int) -> dict[str, Any]:
    pipeline = _pipeline(engine)
    with Stopwatch() as watch:
        answers = (
            pipeline
            | ps.Create(range(rows))
            | ps.Map(add_seven)
            | ps.Map(double)
            | ps.Map(drop_three)
            | ps.RunInference(Identity(max_batch_size=batch_size))
        ).collect()
        total = sum(answers)
    return outcome(watch, len(answers), total)


def ray_identity_in_actors(rows: int, batch_size: int) -> dict[str, Any]:
    """All of it in one class: blocks are passed on once."""
    ray = start_ray()

    class All:
        def __call__(self, table: Any) -> Any:
            import pyarrow as pa

            found = answer([drop_three(double(add_seven(row))) for row in table["id"].to_pylist()])
            return pa.table({"id": pa.array(found, pa.int64())})

    with Stopwatch() as watch:
        dataset = ray.data.range(rows)
        dataset = dataset.map_batches(All, batch_size=batch_size, batch_format="pyarrow", **two_actors(ray))
        count = total = 0
        for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
            count += len(batch["id"])
            total += int(batch["id"].sum())
    return outcome(watch, count, total)


# The encoder over texts of mixed lengths, one thread in each of two processes.


def penstock_texts(engine: str, count: int) -> dict[str, Any]:
    texts = texts_of("mixed", count)
    pipeline = _pipeline(engine)
    with Stopwatch() as watch:
        answers = (pipeline | ps.Create(texts) | ps.RunInference(TextHandler())).collect()
    return _encoded(watch, answers)


def penstock_texts_as_shipped(engine: str, count: int) -> dict[str, Any]:
    """The same vectors by Penstock's own handler, which knows no times: a user's job."""
    from penstock.handlers.huggingface import SentenceTransformerModelHandler

    texts = texts_of("mixed", count)
    pipeline = _pipeline(engine)
    handler = SentenceTransformerModelHandler(model_folder(), max_seq_length=LONGEST, normalize_embeddings=True)
    with Stopwatch() as watch:
        answers = (pipeline | ps.Create(texts) | ps.RunInference(handler)).collect()
    return outcome(watch, len(answers), checksum_of(each.inference for each in answers))


def ray_texts(count: int, batch_size: int) -> dict[str, Any]:
    """Blocks of a batch or more, eight at least, so that both actors have work to the end."""
    texts = texts_of("mixed", count)
    ray = start_ray()

    class Actor:
        def __init__(self) -> None:
            self.model = encoder()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            import numpy as np

            vectors, loaded, given = zip(*self.model.answer(batch["text"].tolist()), strict=True)
            return {"vector": np.stack(vectors), "loaded": np.array(loaded), "given": np.array(given)}

    with Stopwatch() as watch:
        blocks = max(8, count // max(32, batch_size))
        dataset = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=blocks)
        dataset = dataset.map_batches(Actor, batch_size=batch_size, batch_format="numpy", **two_actors(ray))
        answers = [Answer(row["vector"], row["loaded"], row["given"]) for row in dataset.iter_rows()]
    return _encoded(watch, answers)


def _encoded(watch: Stopwatch, answers: Sequence[Answer]) -> dict[str, Any]:
    """`answering`: seconds from the first model that is loaded to the last answer."""
    answering = max(answer.given for answer in answers) - min(answer.loaded for answer in answers)
    checksum = checksum_of(answer.vector for answer in answers)
    return {**outcome(watch, len(answers), checksum), "figures": {"answering": answering}}
