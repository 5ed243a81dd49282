"""Live progress in a terminal: one line per stage, painted over in place."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

REPAINT_EVERY = 0.2  # seconds
FORECAST_FROM = 0.001  # of the work: what is left cannot be told from less


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Where one stage stands."""

    name: str
    rows: int
    known: int | None  # rows in all, if that is known
    batch_size: float | None  # mean, of its models
    failures: int = 0
    before: int = 0  # of these rows, those that earlier processes of the run have done
    share: float | None = None  # of what this process has to do, that is done: for where rows in all are not known


def render(stage: StageProgress, seconds: float, width: int) -> str:
    """One stage as one line that fits the terminal."""
    rate = max(stage.rows - stage.before, 0) / seconds if seconds > 0 else 0.0
    parts = [f"{stage.rows:,}" + (f" of {stage.known:,}" if stage.known else "") + " rows", f"{rate:,.0f} rows/s"]
    if stage.batch_size is not None:
        parts.append(f"batch {stage.batch_size:.3g}")
    parts.append(f"{stage.failures} failed")
    if stage.known and rate and stage.rows < stage.known:
        parts.append(f"{_duration((stage.known - stage.rows) / rate)} left")
    elif not stage.known and stage.share is not None and FORECAST_FROM <= stage.share < 1:
        parts.append(f"{stage.share:.0%} done | {_duration(seconds * (1 / stage.share - 1))} left")
    numbers = " | ".join(parts)
    room = max(8, width - len(numbers) - 4)
    name = stage.name if len(stage.name) <= room else f"{stage.name[: room - 3]}..."
    return f"{name} | {numbers}"[: width - 1]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Paints stages to a terminal, each time over the last picture."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._started = time.monotonic()
        self._painted = 0
        self._last = 0.0

    def show(self, stages: Sequence[StageProgress]) -> None:
        now = time.monotonic()
        if now - self._last >= REPAINT_EVERY:
            self._last = now
            self._paint(stages, now)

    def finish(self, stages: Sequence[StageProgress]) -> None:
        """The last picture, which stays."""
        self._paint(stages, time.monotonic())

    def _paint(self, stages: Sequence[StageProgress], now: float) -> None:
        width = shutil.get_terminal_size().columns
        lines = [render(stage, now - self._started, width) for stage in stages]
        up = f"\x1b[{self._painted}A" if self._painted else ""
        self._out.write(up + "".join(f"\r{line}\x1b[K\n" for line in lines))
        self._out.flush()
        self._painted = len(lines)
