"""Python's garbage collector while rows flow.

By default it looks at every container that is alive each time some thousands more have been made. A run makes and holds
containers by the million, hardly any of them in cycles, and would spend more time on that than on its work.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLD = 100_000  # containers made before the youngest are looked at


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, the collector runs, but seldom. What the user has set is left alone if it is less eager still, or off."""
    before = gc.get_threshold()
    if 0 < before[0] < THRESHOLD:
        gc.set_threshold(THRESHOLD, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
