"""Progress: one line for each stage, painted over in place in a terminal, or a plain line now and then elsewhere."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TextIO

from penstock.observe.pace import Pace

REPAINT_EVERY = 0.2  # seconds
FIRST_PLAIN, MOST_PLAIN = 10.0, 60.0  # seconds before the first plain line, and between two later on
PLAIN_WIDTH = 200  # characters
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
    state: str = ""  # what it does while no row is done, such as "loading the model"


def render(stage: StageProgress, rate: float | None, seconds: float, width: int) -> str:
    """One stage as one line that fits the terminal: `rate` is in rows a second, `seconds` how long its first rows were ago.
    What matters least gives way first."""
    parts = {"rows": f"{stage.rows:,}" + (f" of {stage.known:,}" if stage.known else "") + " rows"}
    if stage.state:
        parts["state"] = stage.state
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


class Lines:
    """The stages as lines. The rows of a stage never become fewer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._started = clock()
        self._paces: dict[str, Pace] = {}  # by stage

    def now(self, stages: Sequence[StageProgress], width: int) -> list[str]:
        return [self._line(stage, self.clock(), width) for stage in stages]

    def at_the_end(self, stages: Sequence[StageProgress], width: int) -> list[str]:
        """How fast it all went, with the start."""
        took = self.clock() - self._started
        rates = [(stage.rows - stage.before) / took if took > 0 else None for stage in stages]
        return [render(stage, rate, took, width) for stage, rate in zip(stages, rates, strict=True)]

    def _line(self, stage: StageProgress, now: float, width: int) -> str:
        pace = self._paces.setdefault(stage.name, Pace(stage.before))
        pace.saw(stage.rows, now)
        return render(replace(stage, rows=pace.rows), pace.rate(now), pace.seconds(now), width)


class Progress:
    """Paints stages to a terminal, each time over the last picture."""

    every = REPAINT_EVERY

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lines = Lines()
        self._painted = 0
        self._last = 0.0

    def show(self, stages: Sequence[StageProgress]) -> None:
        now = time.monotonic()
        if now - self._last >= REPAINT_EVERY:
            self._last = now
            self._paint(self._lines.now(stages, _width()))

    def finish(self, stages: Sequence[StageProgress]) -> None:
        """The last picture, which stays."""
        self._paint(self._lines.at_the_end(stages, _width()))

    def _paint(self, lines: Sequence[str]) -> None:
        up = f"\x1b[{self._painted}A" if self._painted else ""
        self._out.write(up + "".join(f"\r{line}\x1b[K\n" for line in lines))
        self._out.flush()
        self._painted = len(lines)


class PlainProgress:
    """Writes a line for each stage now and then, for logs: nothing in runs of seconds, then less and less often."""

    every = 1.0  # seconds between two looks, from which the rate is known

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._lines = Lines(clock)
        self._wait = FIRST_PLAIN
        self._next = clock() + self._wait
        self._has_shown = False

    def show(self, stages: Sequence[StageProgress]) -> None:
        now = self._lines.clock()
        lines = self._lines.now(stages, PLAIN_WIDTH)  # the rate is of what was seen in between, too
        if now >= self._next:
            self._wait = min(2 * self._wait, MOST_PLAIN)
            self._next = now + self._wait
            self._has_shown = True
            self._write(lines)

    def finish(self, stages: Sequence[StageProgress]) -> None:
        if self._has_shown:
            self._write(self._lines.at_the_end(stages, PLAIN_WIDTH))

    def _write(self, lines: Sequence[str]) -> None:
        self._out.write("".join(f"penstock: {line}\n" for line in lines))
        self._out.flush()


@contextmanager
def shown(painter: Progress | PlainProgress | None, stages: Callable[[], Sequence[StageProgress]]) -> Iterator[None]:
    """Show where the stages stand while the block runs, from a thread of its own: a block that runs a model in this process
    is busy with it. The thread alone writes until it has ended."""
    if painter is None:
        yield
        return
    is_over = threading.Event()

    def show() -> None:
        with suppress(OSError, ValueError):  # whoever reads it is gone, or it is closed: the run goes on
            while not is_over.wait(painter.every):
                if now := stages():
                    painter.show(now)

    thread = threading.Thread(target=show, daemon=True, name="penstock-progress")
    thread.start()
    try:
        yield
    finally:  # joined, so that what is written next does not mix with it
        is_over.set()
        thread.join()
    with suppress(OSError, ValueError):
        painter.finish(stages())


def _width() -> int:
    return shutil.get_terminal_size().columns
