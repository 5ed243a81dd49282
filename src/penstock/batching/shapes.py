"""What a batch costs because its shape is new to the device. Pure: shapes and times in, times out.

On an accelerator the first batch of a shape waits until kernels are chosen, compiled or loaded for it: often longer than it
runs. Compared with a batch of a known shape, any other size would then look bad.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

Shape: TypeAlias = tuple[int, int]  # rows, padded length

MULTIPLE = 8  # of which padded lengths are: few shapes, and what matrix units like
MOST_SHAPES = 100_000  # remembered


def rounded_up(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


class FirstTimes:
    """Learns from shapes that come again how much longer the first time took, and takes it off where a shape is new."""

    def __init__(self) -> None:
        self._first: dict[Shape, float | None] = {}  # seconds, until it comes again
        self._more: deque[float] = deque(maxlen=9)  # seconds
        self._left_out = False

    def taken_off(self, shape: Shape, seconds: float) -> float | None:
        """The seconds of a batch as if its shape had been known. None where nearly all of them may be for the shape, and
        it is likely to come again; but not twice in a row."""
        import statistics  # here: limits.py needs this module, and `import penstock` needs that

        if shape in self._first:
            if (first := self._first[shape]) is not None:
                self._first[shape] = None
                self._more.append(max(first - seconds, 0.0))
            self._left_out = False
            return seconds
        if len(self._first) >= MOST_SHAPES:
            self._first.clear()
        self._first[shape] = seconds
        more = statistics.median(self._more) if self._more else 0.0
        self._left_out = more > seconds / 2 and not self._left_out
        return None if self._left_out else max(seconds - more, seconds / 4)
