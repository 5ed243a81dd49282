"""Live progress in a terminal: one line per stage, painted over in place."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from penstock.observe.pace import Pace

REPAINT_EVERY = 0.2  # seconds
FORECAST_FROM = 0.001  # of the work: what is left cannot be told from less
LEAST_NAME = 12  # characters of a stage's name that stay, before numbers give way


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


def render(stage: StageProgress, rate: float | None, seconds: float, width: int) -> str:
    """One stage as one line that fits the terminal: `rate` is in rows a second, `seconds` how long its first rows were ago.
    What matters least gives way first."""
    parts = {"rows": f"{stage.rows:,}" + (f" of {stage.known:,}" if stage.known else "") + " rows"}
    if rate is not None:
        parts["rate"] = f"{rate:,.0f} rows/s"
    if stage.batch_size is not None:
        parts["batch"] = f"batch {_batch_size(stage.batch_size)}"
    parts["failed" if stage.failures else "none failed"] = f"{stage.failures:,} failed"
    if stage.known and rate and stage.rows < stage.known:
        parts["left"] = f"{_duration((stage.known - stage.rows) / rate)} left"
    elif not stage.known and stage.share is not None and FORECAST_FROM <= stage.share < 1:
        parts["share"] = f"{stage.share:.0%} done"
        if seconds > 0:
            parts["left"] = f"{_duration(seconds * (1 / stage.share - 1))} left"
    least = min(len(stage.name), LEAST_NAME)
    for part in ("batch", "none failed", "rate", "share", "failed"):
        if least + len(_numbers(parts)) < width:
            break
        parts.pop(part, None)
    numbers = _numbers(parts)
    return (_shortened(stage.name, max(least, width - 1 - len(numbers))) + numbers)[: width - 1]


def _numbers(parts: Mapping[str, str]) -> str:
    return "".join(f" | {part}" for part in parts.values())


def _shortened(name: str, room: int) -> str:
    """A name in so many characters: the middle is left out, because names differ at their ends."""
    if len(name) <= room:
        return name
    tail = max(0, room - 3) // 2
    return f"{name[: max(0, room - 3 - tail)]}...{name[len(name) - tail :]}"


def _batch_size(mean: float) -> str:
    return f"{mean:.0f}" if mean >= 99.95 else f"{mean:.1f}".removesuffix(".0")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Paints stages to a terminal, each time over the last picture. The rows of a stage never become fewer."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._started = time.monotonic()
        self._painted = 0
        self._last = 0.0
        self._paces: dict[str, Pace] = {}  # by stage

    def show(self, stages: Sequence[StageProgress]) -> None:
        now = time.monotonic()
        if now - self._last >= REPAINT_EVERY:
            self._last = now
            self._paint([self._line(stage, now) for stage in stages])

    def finish(self, stages: Sequence[StageProgress]) -> None:
        """The last picture, which stays: how fast it all went, with the start."""
        now = time.monotonic()
        took = now - self._started
        rates = [(stage.rows - stage.before) / took if took > 0 else None for stage in stages]
        self._paint([render(stage, rate, took, _width()) for stage, rate in zip(stages, rates, strict=True)])

    def _line(self, stage: StageProgress, now: float) -> str:
        pace = self._paces.setdefault(stage.name, Pace(stage.before))
        pace.saw(stage.rows, now)
        return render(replace(stage, rows=pace.rows), pace.rate(now), pace.seconds(now), _width())

    def _paint(self, lines: Sequence[str]) -> None:
        up = f"\x1b[{self._painted}A" if self._painted else ""
        self._out.write(up + "".join(f"\r{line}\x1b[K\n" for line in lines))
        self._out.flush()
        self._painted = len(lines)


def _width() -> int:
    return shutil.get_terminal_size().columns
