"""How large a share of a step's rows may fail before the run stops. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.errors import TooManyFailuresError
from penstock.observe.result import StepCount
from penstock.run.plan import Plan

LEAST_ROWS = 1000  # of a step, before its share of failures says something; at the end of the run any number does
COMMONEST = 5  # errors that are shown


class Thresholds:
    """The limits of a run's steps."""

    def __init__(self, plan: Plan) -> None:
        self._limits: dict[str, float] = {}
        for step in (step for stage in plan.stages for step in stage.steps()):
            handling = step.traits.handling
            if handling is not None and handling.threshold < 1:
                self._limits[step.label] = handling.threshold

    def check(self, steps: Iterable[str], counts: Mapping[str, StepCount], least_rows: int = LEAST_ROWS) -> None:
        """Raise if a larger share of the rows of one of these steps has failed than it may, over all workers."""
        for label in steps:
            limit, count = self._limits.get(label), counts.get(label)
            if limit is None or count is None or count.rows_in < least_rows:
                continue
            if count.rows_failed > limit * count.rows_in:
                raise TooManyFailuresError(_told(label, limit, count))

    def check_all(self, counts: Mapping[str, StepCount]) -> None:
        """At the end of a run."""
        self.check(self._limits, counts, least_rows=1)


def _told(label: str, limit: float, count: StepCount) -> str:
    commonest = sorted(count.errors.items(), key=lambda item: -item[1])[:COMMONEST]
    return "\n".join(
        [
            f"step {label!r}: {count.rows_failed:,} of {count.rows_in:,} rows failed; its threshold is {limit:.4g} of them, "
            "so the run was stopped",
            "  the commonest errors:",
            *[f"  {rows:,} x {error_type}: {message}" for (error_type, message), rows in commonest],
        ]
    )
