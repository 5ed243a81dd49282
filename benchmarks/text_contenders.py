"""Penstock, Beam and Ray Data with the encoder of encoder.py, and Penstock's session by itself.

Every function runs in a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from encoder import Answer, Encoder, encoded, encoder, model_folder, texts_of
from ours import Identity
from rivals import start_ray
from workload import Stopwatch, answer, outcome

import penstock as ps
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.observe.metrics import Metrics

BEAM_BUCKETS = [16, 32, 64, 128, 256]  # Beam's own, as far as texts go


class TextHandler(ps.ModelHandler[str, Answer, Encoder]):
    """Lengths are counted with the tokenizer, so that every text is tokenised twice: the loops do that beforehand. It names
    its files, so that workers load at once: of a model of unknown size the first copy is measured before there are more."""

    def model_files(self) -> list[str]:
        return [model_folder()]

    def load_model(self) -> Encoder:
        return encoder()

    def run_inference(self, batch: Sequence[str], model: Encoder, inference_args: Any = None) -> list[Answer]:
        return model.answer(batch)

    def measures_length(self) -> bool:
        return True

    def get_lengths(self, batch: Sequence[str]) -> list[int]:
        return encoder().count_tokens(batch)


def penstock_text(kind: str, count: int, workers: int, **settings: Any) -> dict[str, Any]:
    """`settings` are the handler's; without any, Penstock finds its own."""
    texts = texts_of(kind, count)
    with Stopwatch() as watch:
        answers = (ps.Pipeline(workers=workers) | ps.Create(texts) | ps.RunInference(TextHandler(**settings))).collect()
    return encoded(watch, answers)


_seen: list[Answer] = []  # what came out of Beam's last step, in this process as its local runner is


def beam_text(kind: str, count: int, batch_size: int) -> dict[str, Any]:
    """RunInference with Beam's own buckets by length, for which it also needs a duration: one that never cuts."""
    import apache_beam as beam
    from apache_beam.ml.inference.base import ModelHandler, RunInference

    class Handler(ModelHandler):  # type: ignore[misc]
        def load_model(self) -> Encoder:
            return encoder()

        def run_inference(self, batch: Any, model: Encoder, inference_args: Any = None) -> Any:
            return model.answer(batch)

    handler = Handler(
        min_batch_size=batch_size,
        max_batch_size=batch_size,
        max_batch_duration_secs=600,
        batch_length_fn=lambda text: encoder().count_tokens([text])[0],
        batch_bucket_boundaries=BEAM_BUCKETS,
    )
    texts = texts_of(kind, count)
    with Stopwatch() as watch, beam.Pipeline(runner="FnApiRunner") as pipeline:
        (pipeline | beam.Create([0]) | beam.FlatMap(lambda _: texts) | RunInference(handler) | beam.Map(_see))
    return encoded(watch, _seen)


def _see(row: Answer) -> None:
    _seen.append(row)


def ray_text(kind: str, count: int, batch_size: int) -> dict[str, Any]:
    """Ray Data, the model in one actor."""
    ray = start_ray()

    class Actor:
        def __init__(self) -> None:
            self.model = encoder()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            import numpy as np

            vectors, loaded, given = zip(*self.model.answer(batch["text"].tolist()), strict=True)
            return {"vector": np.stack(vectors), "loaded": np.array(loaded), "given": np.array(given)}

    texts = texts_of(kind, count)
    with Stopwatch() as watch:
        dataset = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=1)
        dataset = dataset.map_batches(
            Actor, batch_size=batch_size, batch_format="numpy", compute=ray.data.ActorPoolStrategy(size=1), num_cpus=1
        )
        answers = [Answer(row["vector"], row["loaded"], row["given"]) for row in dataset.iter_rows()]
    return encoded(watch, answers)


# The session by itself, with a model that returns its batch: what it costs over calling that model.

BATCH_SIZE, BLOCKS, ROWS_PER_BLOCK, CALLS = 64, 500, 1_024, 20_000


def bare_blocks() -> dict[str, Any]:
    return _in_blocks(lambda block: [row for at in range(0, len(block), BATCH_SIZE) for row in _call(block, at)])


def _call(block: list[int], at: int) -> list[int]:
    return answer(block[at : at + BATCH_SIZE])


def session_blocks() -> dict[str, Any]:
    return _in_blocks(_through_session())


def _in_blocks(call: Callable[[list[int]], list[int]]) -> dict[str, Any]:
    blocks = [list(range(number, number + ROWS_PER_BLOCK)) for number in range(BLOCKS)]
    return _timed(call, blocks)


def bare_calls() -> dict[str, Any]:
    return _timed(answer, [[number] for number in range(CALLS)])


def session_calls() -> dict[str, Any]:
    return _timed(_through_session(), [[number] for number in range(CALLS)])


def _timed(call: Callable[[list[int]], list[int]], blocks: list[list[int]]) -> dict[str, Any]:
    call(blocks[0])  # loads the model
    total = 0
    with Stopwatch() as watch:
        for block in blocks:
            total += call(block)[-1]
    return outcome(watch, sum(map(len, blocks)), total)


def _through_session() -> Callable[[list[int]], list[int]]:
    session = ProcessSessions(Metrics()).open("step", InferenceSpec.of(Identity(max_batch_size=BATCH_SIZE)))
    lane = session.join(Caller())

    def call(block: list[int]) -> list[int]:
        ticket = Ticket(block)
        lane.submit(ticket)
        return lane.wait(ticket)

    return call
