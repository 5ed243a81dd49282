"""Which pools wait for a service instead of for workers: more workers would only wait beside them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from penstock.observe.metrics import Metrics

METRIC = "throttled_milli_secs"
WINDOW = 5.0  # seconds that are looked back
SHARE = 0.5  # of one process's time in it: a pool that held requests back for longer does not grow


class Throttling:
    """Of one run. Used by the coordinator's thread."""

    def __init__(self, pools: Mapping[str, int] | None = None) -> None:
        """pools: of steps, by their labels."""
        self._pools = dict(pools or {})
        self._seen: dict[int, deque[tuple[float, int]]] = {}

    def seen(self, metrics: Metrics, now: float) -> None:
        """What a worker has measured since its last word."""
        for key, n in metrics.counters.items():
            if key.name == METRIC and key.step in self._pools:
                self._seen.setdefault(self._pools[key.step], deque()).append((now, n))

    def pools(self, now: float) -> set[int]:
        """Those that must not grow now. Each has held requests back, in all its processes together, for a good part of the
        last seconds."""
        for held in self._seen.values():
            while held and held[0][0] <= now - WINDOW:
                held.popleft()
        return {pool for pool, held in self._seen.items() if sum(n for _, n in held) >= 1000 * WINDOW * SHARE}
