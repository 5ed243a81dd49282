"""How fast a stage goes. Pure: the caller passes in the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

RECENT = 60.0  # seconds whose rows tell how fast a stage is now
NOTE_EVERY = 1.0  # seconds
ALMOST = 0.95  # of a split, the most that counts of it before it is done


def share_done(splits: int, done: int, rows: int, at_work: Collection[int]) -> float | None:
    """The share of a stage's work that is done: of so many splits these, with these rows together. Those at work count in
    part, by the rows that each has done, as if they were as long as the others. None if there is nothing to do."""
    if not splits:
        return None
    usual = rows / done if done else 0.0
    parts = sum(min(each / usual, ALMOST) for each in at_work) if usual else 0.0
    return min(1.0, (done + parts) / splits)


class Pace:
    """The rows of one stage over time. Counted from when the first row was done: what comes before that, the start of
    workers and the loading of models, comes only once."""

    def __init__(self, before: int = 0) -> None:
        self.rows = before  # the most that were seen: a split that runs again takes none of them back
        self._before = before
        self._began: float | None = None
        self._notes: deque[tuple[float, int]] = deque()  # when, and how many rows

    def saw(self, rows: int, now: float) -> None:
        """So many rows of the stage are done."""
        self.rows = max(self.rows, rows)
        if self._began is None:
            if self.rows <= self._before:
                return
            self._began = now
        if not self._notes or now - self._notes[-1][0] >= NOTE_EVERY:
            self._notes.append((now, self.rows))
        while len(self._notes) > 1 and self._notes[1][0] <= now - RECENT:
            self._notes.popleft()

    def rate(self, now: float) -> float | None:
        """Rows a second, lately; None if it is too early to tell."""
        if not self._notes or now <= self._notes[0][0]:
            return None
        then, rows = self._notes[0]
        return (self.rows - rows) / (now - then)

    def seconds(self, now: float) -> float:
        """Since the first row was done."""
        return 0.0 if self._began is None else now - self._began
