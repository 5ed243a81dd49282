"""What the models of a place take, copy by copy, and what is left of its budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.models.budget import MemoryBudget


class Room:
    """Of a place with so many copies, which models share. `apart`: and one more beside the first, on the device of that,
    which holds one model at a time."""

    def __init__(self, budget: MemoryBudget, copies: int, apart: bool) -> None:
        self.budget = budget
        self.shared: Sequence[int] = range(copies)
        self.apart: Sequence[int] = [copies] if apart else []
        self.bytes = [0] * (copies + apart)
        self.models = [0] * (copies + apart)

    def add(self, copy: int, size: int, models: int) -> None:
        self.bytes[copy] += size
        self.models[copy] += models

    def left(self, copy: int) -> tuple[float, float]:
        """The bytes and the models that a copy may still take."""
        limit, most = self.budget.bytes, 1 if copy in self.apart else self.budget.models
        return (
            float("inf") if limit is None else limit - self.taken(copy),
            float("inf") if most is None else most - self.models[copy],
        )

    def taken(self, copy: int) -> int:
        """The bytes that count where this copy is."""
        return sum(size for other, size in enumerate(self.bytes) if self.are_together(copy, other))

    def at_most(self, size: int) -> int:
        """The bytes that a model of this size is given: a larger one is loaded alone, and measured."""
        return size if self.budget.bytes is None else min(size, self.budget.bytes)

    def over(self) -> dict[int, int]:
        """The bytes that are taken beyond the budget, where the copies are: by the first of those that are together."""
        limit = self.budget.bytes
        places = self.shared if self.budget.of_each else self.shared[:1]
        return {} if limit is None else {copy: over for copy in places if (over := self.taken(copy) - limit) > 0}

    def are_together(self, one: int, other: int) -> bool:
        """Whether their bytes are taken from the same: all are, unless each has a device of its own."""
        return not self.budget.of_each or self._device(one) == self._device(other)

    def _device(self, copy: int) -> int:
        return self.shared[0] if copy in self.apart else copy
