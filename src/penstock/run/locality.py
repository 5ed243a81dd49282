"""Which workers of a cluster are nearer to rows than others. Pure. On one machine all are equally near."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Locality(NamedTuple):
    """What makes some workers nearer to rows."""

    place: str = ""  # the node that has them; empty where all are equally near
    models: frozenset[int] = frozenset()  # that they are for, where there is one for each key


ANYWHERE = Locality()


class Homes:
    """The nodes that have the models of keys: each where it was wanted first, for as long as that node is there."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], str] = {}  # by stage and model

    def place_of(self, stage: int, locality: Locality) -> str:
        """The node that has most of their models, else the one that has the rows; empty: any."""
        nodes = Counter(node for model in locality.models if (node := self._nodes.get((stage, model))))
        return max(nodes, key=lambda node: (nodes[node], node)) if nodes else locality.place

    def remember(self, stage: int, locality: Locality, node: str) -> None:
        """Rows go to this node, so their models will be there."""
        for model in locality.models if node else ():
            self._nodes.setdefault((stage, model), node)

    def forget(self, node: str) -> None:
        self._nodes = {model: home for model, home in self._nodes.items() if home != node}
