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

    def shared(self, places: int) -> MemoryBudget:
        """Of one of several places that have it together."""
        return self if self.bytes is None else self._replace(bytes=max(1, self.bytes // places))
