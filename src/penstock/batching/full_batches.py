"""What a full batch is right now: the user's limits, what the search found, and what fits into memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from penstock.batching.device_sizes import ENOUGH, DeviceSizeFinder, TimedBatch
from penstock.batching.entry import LOOKAHEAD, Aim
from penstock.batching.limits import MOST_SHORT_ROWS, BatchLimits, up_to_bucket
from penstock.batching.shapes import FirstTimes
from penstock.batching.sizes import Ceiling, SizeFinder, device_ladder, ladder

FIRST_ROWS = 8
FIRST_COST = 1024
DEVICE_COST = 1 << 17  # where shapes cost: at smaller ones a batch takes no longer than the choice of its kernels
DEVICE_LOOKAHEAD = 32_768  # rows: at 16,384 padding took 5% more (H200, 77 tokens on average)
DEVICE_ROWS = 64
BATCHES_AHEAD = 64
MOST_COST = 1 << 20
SAMPLED = 256  # rows of a batch whose lengths are looked at


class Aiming:
    """Sets the aim for the next batch and learns from every batch that ran. Pure; one for each model copy.

    Where rows have lengths it searches for a padded cost, otherwise for a number of rows; what the user sets is not
    searched for. `by_length` tells which of the two a batch is about.
    """

    def __init__(self, limits: BatchLimits, by_length: bool, most_seconds: float | None = None) -> None:
        self._limits = limits
        self._most_seconds = most_seconds  # for a batch of a size that is searched for
        self._by_length = by_length
        self._ceiling = Ceiling()
        self._first_times = FirstTimes()
        self._usual_rows = 0.0  # in a batch
        self._aim: Aim | None = None  # while nothing was learned that may change it
        self._has_device_time = False
        self._kept: int | None = None  # that an earlier run has found
        self._ladder: Sequence[int] = ()
        self._finder: SizeFinder | DeviceSizeFinder | None = None
        sizes = device_ladder if limits.new_shapes_cost else ladder
        if by_length and limits.max_padded_cost is None:
            self._ladder = sizes(1, MOST_COST)
            self._finder = self._new_finder(FIRST_COST, DEVICE_COST)
        elif not by_length and limits.max_size is None:
            self._ladder = limits.size_buckets or sizes(min(limits.min_size, limits.most_rows), limits.most_rows)
            first, on_device = (max(rows, limits.min_size) for rows in (FIRST_ROWS, DEVICE_ROWS))
            self._finder = self._new_finder(first, on_device)

    def _new_finder(self, first: int, on_device: int) -> SizeFinder | DeviceSizeFinder:
        if self._limits.new_shapes_cost:
            return DeviceSizeFinder(self._ladder, on_device, on_device)
        return SizeFinder(self._ladder, first, trend=self._by_length)

    def begin_at(self, size: int) -> None:
        """An earlier run has found this size: a search on a device begins there, if it has seen no batch yet."""
        if isinstance(self._finder, DeviceSizeFinder) and not self._finder.observed:
            self._aim, self._kept = None, size
            self._finder = DeviceSizeFinder(self._ladder, size, self._finder.least)

    @property
    def is_fixed(self) -> bool:
        """Whether batches that fit into memory teach nothing."""
        return self._finder is None and not self._by_length and not self._ceiling.is_known

    def aim(self) -> Aim:
        if self._aim is None:
            self._aim = self._new_aim()
        return self._aim

    def _new_aim(self) -> Aim:
        if self._by_length:
            cost = self._finder.size if self._finder is not None else self._limits.max_padded_cost
            assert cost is not None
            return Aim(self._most_rows(), self._ceiling.under(cost), self._lookahead())
        rows = self._finder.size if self._finder is not None else self._limits.most_rows
        return Aim(self._bucket_below(self._ceiling.under(rows)))

    def ran(
        self, aim: Aim, rows: int, lengths: list[int] | None, seconds: float, device_seconds: float | None = None
    ) -> None:
        """A batch that was cut for this aim took this long, and so much of its device's time, if that is known: the search
        then looks at nothing else."""
        now, self._aim = self.aim(), None
        self._ceiling.ran(seconds)
        self._usual_rows += 0.1 * (rows - self._usual_rows)
        if self._finder is None:
            return
        if self._most_seconds is not None and seconds > self._most_seconds:
            self.out_of_memory(rows, lengths)  # too large as well
            return
        self._has_device_time = self._has_device_time or device_seconds is not None
        spent = device_seconds if self._has_device_time else seconds
        if spent is None or (self._by_length and (lengths is None or aim.cost is None)):
            return
        length = self._limits.padded_length(max(lengths)) if lengths and self._by_length else 1
        aimed = aim.cost if self._by_length and aim.cost is not None else aim.rows
        full = self._by_length and (rows + 1) * length > aimed  # no row more fits, however much is left
        if isinstance(self._finder, SizeFinder):
            useful = sum(lengths) if lengths and self._by_length else rows
            self._finder.observe(aimed, aimed if full else rows * length, useful, spent)
            return
        known = self._first_times.taken_off((rows, length), spent)
        if known is not None:
            amount = rows * length if self._by_length else up_to_bucket(self._limits.size_buckets, rows)
            needed = rows * self._mean_length(lengths) if lengths and self._by_length else float(amount)
            is_current = (aim.rows, aim.cost) == (now.rows, now.cost)
            full = is_current and (full or amount * 4 >= aimed * 3)
            self._finder.observe(TimedBatch(amount, needed, length, known), full=full)

    def out_of_memory(self, rows: int, lengths: list[int] | None) -> None:
        """A batch of these rows did not fit."""
        self._aim = None
        if isinstance(self._finder, DeviceSizeFinder):
            self._finder.did_not_fit()
        if self._by_length and lengths is not None:
            self._ceiling.out_of_memory(rows * self._limits.padded_length(max(lengths)))
        else:
            self._ceiling.out_of_memory(rows)

    def found(self) -> int | None:
        """What a search on a device has come to, for the next run to begin at; None while it has seen too little."""
        if not isinstance(self._finder, DeviceSizeFinder) or self._finder.fit is None or self._finder.observed < ENOUGH:
            return None
        return self._finder.found

    def explain(self) -> str | None:
        """The size that was found, and why; None where the user set it."""
        if self._finder is None:
            return None
        found = f"{'padded cost' if self._by_length else 'rows'} {self._finder.explain()}"
        if self._kept is None or not isinstance(self._finder, DeviceSizeFinder) or not self._finder.is_far_from(self._kept):
            return found
        return f"{found}; the last run had found {self._kept}"

    def _mean_length(self, lengths: list[int]) -> float:
        """Of rows that are padded alone: what they are rounded up by costs in batches of any size."""
        some = lengths[:: max(1, len(lengths) // SAMPLED)]
        return max(1.0, statistics.fmean(map(self._limits.padded_length, some)))

    def _most_rows(self) -> int:
        """Where rows have lengths the cost is what bounds a batch; rows alone should not, unless the user says so."""
        told = self._limits.max_size is not None or self._limits.size_buckets
        return self._limits.most_rows if told else max(MOST_SHORT_ROWS, self._limits.min_size)

    def _lookahead(self) -> int:
        """Enough rows for many batches, so that the rows of each are alike."""
        if self._limits.lookahead_rows is not None:
            return self._limits.lookahead_rows
        if self._limits.new_shapes_cost:
            return DEVICE_LOOKAHEAD
        least, most = LOOKAHEAD
        return int(min(most, max(least, BATCHES_AHEAD * self._usual_rows)))

    def _bucket_below(self, rows: int) -> int:
        """The largest bucket of at most so many rows; the least one where all are larger."""
        fitting = [bucket for bucket in self._limits.size_buckets if bucket <= rows]
        return fitting[-1] if fitting else up_to_bucket(self._limits.size_buckets, rows)
