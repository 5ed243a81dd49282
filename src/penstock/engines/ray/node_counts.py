"""On how many nodes the workers of a pool can be: so many share the limits of the services that its steps ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.engines.ray.cluster import GPU, by_resource, nodes, wanted
from penstock.run.pools import Pool


def nodes_for(needs: Mapping[str, float], offers: Iterable[Mapping[str, float]]) -> int:
    """How many nodes could have a worker that needs this, free or not; at least one. Pure."""
    return max(1, sum(all(each.get(name, 0) >= value for name, value in needs.items()) for each in offers))


def needs_of(pool: Pool, pools: int) -> dict[str, float]:
    """What a worker needs of its node, with the device of its models."""
    return by_resource(wanted(pool, pools)) | ({GPU: 1} if pool.on_device else {})


class NodeCounts:
    """What the workers of each pool were told."""

    def __init__(self, pools: Mapping[int, Pool]) -> None:
        self._needs = {index: needs_of(pool, len(pools)) for index, pool in pools.items()}
        self._told = self._now()

    def of(self, pool: int) -> int:
        return self._told[pool]

    def changed(self) -> dict[int, int]:
        """Of the pools for which nodes have come or gone since the last time."""
        before, self._told = self._told, self._now()
        return {pool: count for pool, count in self._told.items() if before[pool] != count}

    def _now(self) -> dict[int, int]:
        offers = [node["Resources"] for node in nodes()]
        return {pool: nodes_for(needs, offers) for pool, needs in self._needs.items()}
