"""Which of the models that are loaded in a place go, so that another has room. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.models.room import Room
from penstock.models.uses import Model, Uses


@dataclass(slots=True)
class HeldModel:
    """A model in a copy: it is loaded, or will be soon."""

    copy: int
    bytes: int  # known, or guessed while it loads
    loading: bool = True
    beside: bool = False  # other loads, or calls, so that what its process grew by is not its size alone
    admitting: bool = False  # the rows that waited for it are about to be let in
    closing: bool = False  # new rows wait, so that it can be unloaded


class Evictions:
    """`held`: the models, the one that was needed longest ago first. None goes that is `in_use`."""

    def __init__(self, held: Mapping[Model, HeldModel], room: Room, uses: Uses, in_use: Callable[[Model], bool]) -> None:
        self._held = held
        self._room = room
        self._uses = uses
        self._in_use = in_use

    def too_much(self) -> list[Model]:
        """What goes because others turned out larger than was guessed."""
        victims: list[Model] = []
        least, left = int(self._room.budget.is_soft), list(self._room.models)
        for where, over in self._room.over().items():
            for model, held in self._held.items():
                if over <= 0:
                    break
                is_there = self._room.are_together(where, held.copy)
                if is_there and left[held.copy] > least and self._is_idle(model, held):
                    victims.append(model)
                    over -= held.bytes
                    left[held.copy] -= 1
        return victims

    def victims(self, model: Model, copy: int) -> list[Model] | None:
        """What has to go for a model to be loaded in a copy; None if not enough can."""
        if self._uses[model].crowded:
            others = {other: held for other, held in self._held.items() if self.can_help(held, copy, slots=1)}
            return list(others) if all(self._is_idle(*other) for other in others.items()) else None
        free, room = self._room.left(copy), self._room.at_most(self._uses.guess(model))
        victims: list[Model] = []
        candidates = iter(self._held.items())
        while not (free[0] >= room and free[1] >= 1) and len(victims) < len(self._held):
            for victim, held in candidates:
                if self.can_help(held, copy, free[1]) and self._is_idle(victim, held):
                    break
            else:
                return None
            victims.append(victim)
            free = free[0] + held.bytes, free[1] + (held.copy == copy)
        return victims

    def can_help(self, held: HeldModel, copy: int, slots: float) -> bool:
        """Whether it helps a copy that may take so many more models if this one goes."""
        return held.copy == copy or (slots >= 1 and self._room.are_together(held.copy, copy))

    def _is_idle(self, model: Model, held: HeldModel) -> bool:
        return not (held.loading or held.admitting or self._in_use(model))
