"""Whether too many elements have failed, as Beam checks it: when all of a window are through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apache_beam as beam

from penstock.errors import TooManyFailuresError


def check_threshold(good: Any, failed: Sequence[Any], threshold: float) -> None:
    """Fail the pipeline if more than this share of the elements has failed, in any window."""
    if threshold >= 1:
        return
    marks = [good | "Good" >> beam.Map(lambda _: (None, (1, 0)))]
    marks += [each | f"Failed{number}" >> beam.Map(lambda _: (None, (0, 1))) for number, each in enumerate(failed)]
    counted = marks | beam.Flatten() | "Count" >> beam.CombinePerKey(_added)
    counted | "Threshold" >> beam.Map(_check, threshold)


def _added(counts: Any) -> tuple[int, int]:
    good = bad = 0
    for each in counts:
        good, bad = good + each[0], bad + each[1]
    return good, bad


def _check(counted: tuple[None, tuple[int, int]], threshold: float) -> None:
    good, bad = counted[1]
    if bad > threshold * (good + bad):
        raise TooManyFailuresError(
            f"{bad:,} of {good + bad:,} elements failed, more than the threshold of {threshold:g}; the dead letters say why"
        )
