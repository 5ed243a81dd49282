"""What became of the rows of one batch, and which part of it is whose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from penstock.failures import Failure

T = TypeVar("T")

NONE: Mapping[int, Failure | None] = {}


class Outcome(NamedTuple):
    """What a batch came to."""

    answers: Any  # one for each row: a list, None where a row failed; or for a table an Arrow array
    failures: Mapping[int, Failure | None] = (
        NONE  # by position in the batch; None: the row runs again, and is answered later
    )
    calls: int = 1  # of run_inference()
    again: Sequence[int] = ()  # rows that are to run once more, in a fresh process: they have neither
    model_id: str | None = None  # of the model that ran it
    wrapped: bool = False  # each answer is to be a PredictionResult of its row, by this model
    out_of_memory: int | None = None  # the least number of rows that did not fit, if any did not
    size: int | None = None  # bytes of the batch, if they were counted


def dealt(
    outcome: Outcome, pieces: Iterable[tuple[T, int, int]]
) -> Iterator[tuple[T, int, int, Any, Mapping[int, Failure | None]]]:
    """For each piece that a batch was put together from, rows start to stop of something, the piece with its own answers,
    and with its failures by position in that something."""
    answers, failures = outcome.answers, outcome.failures
    at = 0
    for whose, start, stop in pieces:
        end = at + stop - start
        own = {n - at + start: failures[n] for n in range(at, end) if n in failures} if failures else NONE
        yield whose, start, stop, answers[at:end], own
        at = end
