"""The nodes of a cluster that share the limits of a service: each keeps to its part."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.remote.shared_numbers import SharedNumbers

LOOK_EVERY = 1.0  # seconds


class Nodes:
    """How many nodes there are. path: of the file in which this one's workers are told, as nodes come and go (tell());
    None: there is one."""

    def __init__(self, path: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._numbers = SharedNumbers(path, [1.0]) if path else None
        self._clock = clock
        self._looked = -LOOK_EVERY
        self._count = 1

    def count(self) -> int:
        if self._numbers is not None and (now := self._clock()) - self._looked >= LOOK_EVERY:
            self._looked = now
            self._count = max(1, int(self._numbers.read()[0]))
        return self._count

    def close(self) -> None:
        if self._numbers is not None:
            self._numbers.close()
            self._numbers = None


def tell(path: str, count: int) -> None:
    """All processes of this node that use the file know of so many nodes, a moment later."""
    numbers = SharedNumbers(path, [float(count)])
    with numbers.held() as values:
        values[0] = float(count)
    numbers.close()
