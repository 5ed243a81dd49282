"""What a run asks of Ray's autoscaler: places for the workers that it could use, and that no node has room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Demand:
    """Placement groups that wait, one for each pool: an autoscaler adds nodes for them, and Ray removes them when this
    process ends. They are for nobody to use: one that gets its place gives it back."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._asked: dict[int, tuple[int, Any]] = {}  # by pool: for how many workers, and the group

    def ask(self, pool: int, workers: int, each: Mapping[str, float]) -> None:
        """Places for so many more workers of this pool than there are."""
        number, group = self._asked.get(pool, (0, None))
        if group is not None and (number != workers or self._has_its_place(group)):
            self._ray.util.remove_placement_group(group)
            del self._asked[pool]
        elif group is None and workers > 0:
            self._asked[pool] = workers, self._ray.util.placement_group([dict(each)] * workers)

    def close(self) -> None:
        """Take back what is asked for."""
        for _, group in self._asked.values():
            self._ray.util.remove_placement_group(group)
        self._asked = {}

    def _has_its_place(self, group: Any) -> bool:
        return bool(self._ray.wait([group.ready()], timeout=0)[0])
