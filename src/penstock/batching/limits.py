"""The limits on a batch, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError

DEFAULT_SIZE = 32
LONGEST_WAIT = 86_400  # seconds

# What Beam's BatchElements can be told besides limits: how it searches for a size. Nothing here needs telling.
_TUNING_OF_BEAM = {"target_batch_overhead", "target_batch_duration_secs", "variance", "clock", "record_metrics"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """When a batch leaves: it is full, it is heavy enough, its oldest row has waited long enough, or no row can come."""

    max_size: int = DEFAULT_SIZE
    max_weight: int | None = None  # the most that the weights of its rows add up to; a row over it goes alone
    max_wait: float | None = None  # seconds since its oldest row came in; None: as long as more rows can come
    weigh: Callable[[Any], int] | None = None  # the weight of a row

    def __post_init__(self) -> None:
        if not _is_whole(self.max_size):
            raise UsageError(f"max_batch_size={self.max_size!r}: expected a whole number of at least 1")
        if self.max_weight is not None and not _is_whole(self.max_weight):
            raise UsageError(f"max_batch_weight={self.max_weight!r}: expected a whole number of at least 1")
        if self.max_weight is not None and self.weigh is None:
            raise UsageError("max_batch_weight needs element_size_fn: a function that gives the weight of one row")
        if self.weigh is not None and not callable(self.weigh):
            raise UsageError(f"element_size_fn={self.weigh!r}: expected a function of one row")
        if self.max_wait is not None and not (
            isinstance(self.max_wait, (int, float)) and 0 <= self.max_wait <= LONGEST_WAIT
        ):
            raise UsageError(f"max_batch_duration_secs={self.max_wait!r}: expected seconds, from 0 to {LONGEST_WAIT}")

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> BatchLimits:
        """Limits from what a handler's batch_elements_kwargs() says."""
        given = {name: value for name, value in kwargs.items() if value is not None and name not in _TUNING_OF_BEAM}
        smallest = given.pop("min_batch_size", 1)
        if not _is_whole(smallest):
            raise UsageError(f"min_batch_size={smallest!r}: expected a whole number of at least 1")
        limits = cls(
            max_size=given.pop("max_batch_size", max(smallest, DEFAULT_SIZE)),
            max_weight=given.pop("max_batch_weight", None),
            max_wait=given.pop("max_batch_duration_secs", None),
            weigh=given.pop("element_size_fn", None),
        )
        if given:
            raise UsageError(f"batch_elements_kwargs() returned {', '.join(map(repr, given))}, which Penstock does not know")
        if smallest > limits.max_size:
            raise UsageError(f"min_batch_size={smallest} is over max_batch_size={limits.max_size}")
        return limits


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
