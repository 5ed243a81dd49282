"""What is counted of requests, for the metrics of a step."""

from __future__ import annotations

import threading
from collections import Counter


class Counts:
    """By the names that users see. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts: += on a dict's item is no single step
        self._counts: Counter[str] = Counter()

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    def take(self) -> dict[str, int]:
        """What was counted since the last time."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)
