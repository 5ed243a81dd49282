"""What became of the rows of one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from penstock.failures import Failure

NONE: Mapping[int, Failure | None] = {}


class Outcome(NamedTuple):
    """What a batch came to."""

    answers: Any  # one for each row (penstock.answers); of a row that failed None, or anything in an array
    failures: Mapping[int, Failure | None] = (
        NONE  # by position in the batch; None: the row runs again, and is answered later
    )
    calls: int = 1  # of run_inference()
    again: Sequence[int] = ()  # rows that are to run once more, in a fresh process: they have neither
    model_id: str | None = None  # of the model that ran it
    wrapped: bool = False  # each answer is to be a PredictionResult of its row, by this model
    out_of_memory: int | None = None  # the least number of rows that did not fit, if any did not
    size: int | None = None  # bytes of the batch, if they were counted
    device_seconds: float | None = None  # that its device was at work, if that is known
    counts: Mapping[str, int] = {}  # what the handler has counted by itself
    stale: int | None = None  # nothing was called: the rows are to be prepared again, for the version of this number

    def is_plain(self) -> bool:
        """Whether it is a list of answers by one call, and no more is to be said of it."""
        whole = self.stale is None and type(self.answers) is list and self.calls == 1 and self.out_of_memory is None
        return whole and not (self.failures or self.again or self.wrapped)


def in_one(outcomes: Sequence[Outcome]) -> Outcome | None:
    """What batches of one model that ran in a row came to, as if they were one; None where more is to be said of one."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    if not all(each.is_plain() and each.model_id == first.model_id for each in outcomes):
        return None
    return first._replace(answers=list(chain.from_iterable([each.answers for each in outcomes])))
