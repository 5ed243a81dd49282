"""What a full batch is right now: the user's limits, what the search found, and what fits into memory."""

from __future__ import annotations

from penstock.batching.entry import LOOKAHEAD, Aim
from penstock.batching.limits import MOST_SHORT_ROWS, BatchLimits, up_to_bucket
from penstock.batching.shapes import FirstTimes
from penstock.batching.sizes import Ceiling, SizeFinder, ladder

FIRST_ROWS = 8
FIRST_COST = 1024
DEVICE_COST = 1 << 17  # where shapes cost: at smaller ones a batch takes no longer than the choice of its kernels
DEVICE_LOOKAHEAD = 32_768  # rows: at 16,384 padding took 5% more (H200, 77 tokens on average)
BATCHES_AHEAD = 64
MOST_COST = 1 << 20


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
        self._finder: SizeFinder | None = None
        if by_length and limits.max_padded_cost is None:
            first, least = (DEVICE_COST, DEVICE_COST) if limits.new_shapes_cost else (FIRST_COST, 1)
            self._finder = SizeFinder(ladder(1, MOST_COST), first, trend=True, least=least)
        elif not by_length and limits.max_size is None:
            sizes = limits.size_buckets or ladder(min(limits.min_size, limits.most_rows), limits.most_rows)
            self._finder = SizeFinder(sizes, max(FIRST_ROWS, limits.min_size))

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

    def ran(self, aim: Aim, rows: int, lengths: list[int] | None, seconds: float) -> None:
        """A batch that was cut for this aim took this long."""
        self._aim = None
        self._ceiling.ran(seconds)
        self._usual_rows += 0.1 * (rows - self._usual_rows)
        if self._finder is None:
            return
        if self._most_seconds is not None and seconds > self._most_seconds:
            self.out_of_memory(rows, lengths)  # too large as well
            return
        longest = self._limits.padded_length(max(lengths)) if lengths else 1
        if self._limits.new_shapes_cost:
            known = self._first_times.taken_off((rows, longest), seconds)
            if known is None:
                return
            seconds = known
        if self._by_length and lengths is not None:
            if aim.cost is not None:
                full = (rows + 1) * longest > aim.cost  # no row more fits, however much is left
                self._finder.observe(aim.cost, aim.cost if full else rows * longest, sum(lengths), seconds)
        elif not self._by_length:
            self._finder.observe(aim.rows, rows, rows, seconds)

    def out_of_memory(self, rows: int, lengths: list[int] | None) -> None:
        """A batch of these rows did not fit."""
        self._aim = None
        if self._by_length and lengths is not None:
            self._ceiling.out_of_memory(rows * self._limits.padded_length(max(lengths)))
        else:
            self._ceiling.out_of_memory(rows)

    def explain(self) -> str | None:
        """The size that was found, and why; None where the user set it."""
        if self._finder is None:
            return None
        return f"{'padded cost' if self._by_length else 'rows'} {self._finder.explain()}"

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
