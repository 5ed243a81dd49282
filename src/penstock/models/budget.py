"""What many models of a place may take together."""

from __future__ import annotations

from typing import NamedTuple

FREE_SHARE = 0.8  # of the memory that is free, for copies of a model: the rest is for the rows


class MemoryBudget(NamedTuple):
    """What the models of a place may take; None: no limit."""

    bytes: int | None = None  # of all copies together
    models: int | None = None  # in each copy
    of_each: bool = False  # copy are the bytes: they are on devices of their own
    is_soft: bool = False  # a model that is larger than all of it may be loaded, alone
    by_default: bool = False  # nobody has set the bytes: where models are on a device, its memory counts instead
    steps: int = 1  # whose models have what is free together, by default
    workers: int = 1  # that have it together: the bytes are what one of them may take

    @classmethod
    def of_free(cls, available: int) -> MemoryBudget:
        """What copies of one model may take of the memory that is there."""
        return cls(bytes=int(FREE_SHARE * available))

    def holds(self, size: int) -> bool:
        return self.bytes is None or size <= self.bytes

    def shared(self, workers: int) -> MemoryBudget:
        """Of one of several workers that have it together."""
        if self.bytes is None:
            return self
        return self._replace(bytes=max(1, self.bytes // workers), workers=workers)
