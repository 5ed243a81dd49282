"""What many models of a place may take together."""

from __future__ import annotations

from typing import NamedTuple


class MemoryBudget(NamedTuple):
    """What the models of a place may take; None: no limit."""

    bytes: int | None = None  # of all copies together
    models: int | None = None  # in each copy
    of_each: bool = False  # copy are the bytes: they are on devices of their own
    is_soft: bool = False  # a model that is larger than all of it may be loaded, alone
    by_default: bool = False  # nobody has set the bytes: where models are on a device, its memory counts instead
    steps: int = 1  # whose models have what is free together, by default
    workers: int = 1  # that have it together: the bytes are what one of them may take

    def shared(self, workers: int) -> MemoryBudget:
        """Of one of several workers that have it together."""
        if self.bytes is None:
            return self
        return self._replace(bytes=max(1, self.bytes // workers), workers=workers)
