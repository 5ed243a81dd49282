"""What all sessions of a process have in common."""

from __future__ import annotations

import threading

from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics


class Shared:
    """One lock for all sessions, `changed`, held only to decide, never while a model runs: a bundle that waits at one model
    is a bundle that cannot add rows at another. It guards tickets, callers, batchers and the metrics."""

    def __init__(self, metrics: Metrics, around: Surroundings | None = None) -> None:
        self.changed = threading.Condition()
        self.metrics = metrics
        self.around = around or Surroundings()
