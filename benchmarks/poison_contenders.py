"""Penstock and Beam over rows of which some raise in the model. Every function runs in a fresh process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from workload import Stopwatch, outcome

import penstock as ps

WORK = 1_000  # steps of a sum for each row: some 20 us, as long as a small model takes for it


class PoisonError(ValueError):
    """What the model raises for a batch with a bad row."""


def bad_rows(rows: int, share: float) -> frozenset[int]:
    """The same in every case: exactly this share, spread by chance."""
    return frozenset(random.Random(5).sample(range(rows), round(rows * share)))


def infer(batch: Sequence[int], bad: frozenset[int], late: bool) -> list[int]:
    """The model: its cost is linear in rows. It raises where it meets a bad row; or `late`, when all work is done."""
    answers = []
    for row in batch:
        total = row
        for step in range(WORK):
            total += step
        if row in bad and not late:
            raise PoisonError(f"cannot take {row}")
        answers.append(total)
    if late and not bad.isdisjoint(batch):
        raise PoisonError(f"cannot take one of {len(batch)}")
    return answers


def _checked(watch: Stopwatch, answers: Sequence[int], failed: Sequence[int], bad: frozenset[int]) -> dict[str, Any]:
    """The checksum says how many good rows have no answer, and how many bad ones are where they belong."""
    dead = set(failed)
    found = f"{len(dead - bad)} good rows lost, {len(dead & bad)} of {len(bad)} bad ones found"
    return outcome(watch, len(answers) + len(failed), found)


class Model(ps.ModelHandler[int, int, None]):
    def __init__(self, bad: frozenset[int], late: bool, batch_size: int) -> None:
        super().__init__(max_batch_size=batch_size)
        self.bad, self.late = bad, late

    def load_model(self) -> None:
        return None

    def run_inference(self, batch: Sequence[int], model: None, inference_args: Any = None) -> list[int]:
        return infer(batch, self.bad, self.late)


def penstock_poison(rows: int, batch_size: int, bad: float, handling: bool, late: bool = False) -> dict[str, Any]:
    """In one process, as Beam's local runner. Answers and failures are counted as they come out of one run."""
    guilty = bad_rows(rows, bad)
    step = ps.RunInference(Model(guilty, late, batch_size))
    with Stopwatch() as watch:
        numbers = ps.Pipeline(workers=0) | ps.Create(range(rows))
        if handling:
            good, failures = numbers | step.with_exception_handling()
            made = ((good, failures.failed_inferences) | ps.Flatten()).collect()
        else:
            made = (numbers | step).collect()
    dead = [each[0] for each in made if type(each) is tuple]
    return _checked(watch, made[: len(made) - len(dead)], dead, guilty)


_seen: list[int] = []  # what came out of Beam's last steps, in this process as its local runner is
_dead: list[int] = []


def beam_poison(rows: int, batch_size: int, bad: float, late: bool = False) -> dict[str, Any]:
    """RunInference.with_exception_handling() on the local runner. A FlatMap as source, because Create shuffles its rows."""
    import apache_beam as beam
    from apache_beam.ml.inference.base import ModelHandler, RunInference

    guilty = bad_rows(rows, bad)

    class Handler(ModelHandler):  # type: ignore[misc]
        def load_model(self) -> None:
            return None

        def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> Any:
            return infer(batch, guilty, late)

        def batch_elements_kwargs(self) -> dict[str, int]:
            return {"min_batch_size": batch_size, "max_batch_size": batch_size}

    with Stopwatch() as watch, beam.Pipeline(runner="FnApiRunner") as pipeline:
        numbers = pipeline | beam.Create([0]) | beam.FlatMap(lambda _: range(rows))
        good, failures = numbers | RunInference(Handler()).with_exception_handling()
        good | "answers" >> beam.Map(_see)
        failures.failed_inferences | "failures" >> beam.Map(_bury)
    return _checked(watch, _seen, _dead, guilty)


def _see(row: int) -> None:
    _seen.append(row)


def _bury(failed: Any) -> None:
    """Beam's dead letter is the whole batch, with what it raised."""
    _dead.extend(failed[0])
