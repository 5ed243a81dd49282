"""The limits on a batch, checked when they are made."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.batching.shapes import rounded_up
from penstock.errors import UsageError

MOST_ROWS = 8192  # in a batch, where the user sets no limit: the search for a size ends here
MOST_SHORT_ROWS = 32_768  # the same where rows have lengths, and their padded cost is what is searched for
LONGEST_WAIT = 86_400  # seconds

# What is otherwise found while running, where batches are fixed.
FIXED_ROWS = 64
FIXED_COST = 16_384  # 64 rows of 256 tokens, 32 of 512
FIXED_LOOKAHEAD = 16_384  # rows

# What Beam's BatchElements can be told besides limits: how it searches for a size. Nothing here needs telling.
_TUNING_OF_BEAM = {"target_batch_overhead", "target_batch_duration_secs", "variance", "clock", "record_metrics"}

_NAMES = {  # of a handler's settings -> of the limits here
    "min_batch_size": "min_size",
    "max_batch_size": "max_size",
    "max_batch_weight": "max_weight",
    "max_batch_duration_secs": "max_wait",
    "element_size_fn": "weigh",
    "max_padded_cost": "max_padded_cost",
    "lookahead_rows": "lookahead_rows",
    "lookahead_bytes": "lookahead_bytes",
    "batch_size_buckets": "size_buckets",
    "length_buckets": "length_buckets",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """When a batch leaves: it is full, it is heavy enough, its oldest row has waited long enough, or no row can come."""

    min_size: int = 1  # a target: the search for a size starts no lower
    max_size: int | None = None  # None: the size is found while running
    max_weight: int | None = None  # the most that the weights of its rows add up to; a row over it goes alone
    max_wait: float | None = None  # seconds since its oldest row came in; None: as long as more rows can come
    weigh: Callable[[Any], int] | None = None  # the weight of a row
    max_padded_cost: int | None = None  # rows x longest, where rows have lengths; None: found while running
    lookahead_rows: int | None = None  # that wait, where rows have lengths, before the longest leave; None: many batches
    lookahead_bytes: int = 64 << 20
    size_buckets: tuple[int, ...] = ()  # the only numbers of rows that the model is called with
    length_buckets: tuple[int, ...] = ()  # the only lengths that rows are padded to
    new_shapes_cost: bool = False  # lengths are rounded up where there are no buckets, and first times are not compared

    def __post_init__(self) -> None:
        for name in ("min_size", "max_size", "max_weight", "max_padded_cost", "lookahead_rows", "lookahead_bytes"):
            _check_whole(name, getattr(self, name))
        for name in ("size_buckets", "length_buckets"):
            _check_buckets(name, getattr(self, name))
        if self.max_weight is not None and self.weigh is None:
            raise UsageError("max_batch_weight needs element_size_fn: a function that gives the weight of one row")
        if self.weigh is not None and not callable(self.weigh):
            raise UsageError(f"element_size_fn={self.weigh!r}: expected a function of one row")
        if self.max_wait is not None and not (
            isinstance(self.max_wait, (int, float)) and 0 <= self.max_wait <= LONGEST_WAIT
        ):
            raise UsageError(f"max_batch_duration_secs={self.max_wait!r}: expected seconds, from 0 to {LONGEST_WAIT}")
        if self.max_size is not None and self.min_size > self.max_size:
            raise UsageError(f"min_batch_size={self.min_size} is over max_batch_size={self.max_size}")

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], new_shapes_cost: bool = False) -> BatchLimits:
        """Limits from what a handler's batch_elements_kwargs() and new_shapes_cost() say."""
        given = {name: value for name, value in kwargs.items() if value is not None and name not in _TUNING_OF_BEAM}
        if unknown := [name for name in given if name not in _NAMES]:
            raise UsageError(
                f"batch_elements_kwargs() returned {', '.join(map(repr, unknown))}, which Penstock does not know"
            )
        limits: dict[str, Any] = {_NAMES[name]: value for name, value in given.items()}
        for name in limits.keys() & {"size_buckets", "length_buckets"}:
            limits[name] = tuple(limits[name])
        return cls(**limits, new_shapes_cost=new_shapes_cost)

    @property
    def most_rows(self) -> int:
        """The most rows that a batch can have."""
        most = self.max_size or max(MOST_ROWS, self.min_size)
        return min(most, self.size_buckets[-1]) if self.size_buckets else most

    def fixed(self, by_length: bool) -> BatchLimits:
        """These limits with nothing left to find while running, and no part for time."""
        if by_length:
            cost, lookahead = self.max_padded_cost or FIXED_COST, self.lookahead_rows or FIXED_LOOKAHEAD
            return replace(self, max_wait=None, max_padded_cost=cost, lookahead_rows=lookahead)
        return replace(self, max_wait=None, max_size=self.max_size or max(FIXED_ROWS, self.min_size))

    def padded_length(self, length: int) -> int:
        """What a row of this length is padded to when it is the longest of its batch."""
        if self.new_shapes_cost and not self.length_buckets:
            return rounded_up(length)
        return up_to_bucket(self.length_buckets, length)


def up_to_bucket(buckets: tuple[int, ...], value: int) -> int:
    """The least bucket that holds the value; the value itself where none does."""
    at = bisect_left(buckets, value)
    return buckets[at] if at < len(buckets) else value


def _told(name: str) -> str:
    return next(told for told, own in _NAMES.items() if own == name)


def _check_whole(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise UsageError(f"{_told(name)}={value!r}: expected a whole number of at least 1")


def _check_buckets(name: str, buckets: tuple[int, ...]) -> None:
    for value in buckets:
        _check_whole(name, value)
    if list(buckets) != sorted(set(buckets)):
        raise UsageError(f"{_told(name)}={list(buckets)}: expected different numbers, the smallest first")
