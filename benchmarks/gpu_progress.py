"""How fast a run of Penstock goes once it has started: rows/s after the first quarter of the rows."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

EVERY = 0.02  # seconds between two looks; a split's rows are counted as written within one of these
START = 0.25  # of the rows: loading the model and the search for a batch size are in it


class Noting:
    """In front of a handler's class: a line for each batch, when its call began and ended, its rows, and their total length.
    Written where the model lives."""

    noted_in: str

    def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
        started = time.time()
        answers = super().run_inference(batch, model, inference_args)  # type: ignore[misc]
        line = f"{started} {time.time()} {len(batch)} {self._length(batch)}\n"
        file = os.open(self.noted_in, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
        return answers

    def _length(self, batch: Any) -> int:
        """Rows where the model has no lengths."""
        handler: Any = self
        return sum(handler.get_lengths(batch)) if handler.measures_length() else len(batch)


class Call(NamedTuple):
    """One batch at the model; by the clock of the machine."""

    started: float
    ended: float
    rows: int
    length: int


class Watched(NamedTuple):
    """A run that is done."""

    calls: list[Call]  # by when they ended
    written: float  # when all rows were
    result: Any

    def figures(self) -> dict[str, float]:
        """For an outcome. `rate` is from when a quarter of the rows was answered until all were; `rate, written` until all
        were written. Both count rows of average length: where long ones come first, the others are quicker."""
        at = self.quarter()
        calls = [call for call in self.calls if call.ended > at]
        rows = _rows(calls)
        late = sum(call.length for call in calls) * _rows(self.calls) / sum(call.length for call in self.calls)
        end = self.calls[-1].ended
        began = float(os.environ.get("PENSTOCK_BENCHMARK_STARTED", 0))
        sizes = self.result.metrics.distribution("inference_request_batch_size")
        return {
            "rate": late / (end - at) if end > at else 0.0,
            "rate, written": late / (self.written - at) if self.written > at else 0.0,
            "seconds before the first call": min(call.started for call in self.calls) - began,
            "batches": sizes.count,
            "rate, of the rows as they came": rows / (end - at) if end > at else 0.0,
            "rows a batch, late": rows / len(calls) if calls else 0.0,
            "seconds a call, late": sum(call.ended - call.started for call in calls) / len(calls) if calls else 0.0,
            "share without a call, late": _idle(calls, at, end),
            **{name: self.result.metrics.counter(name) for name in ("useful_cost", "padded_cost")},
        }

    def quarter(self) -> float:
        """When the first quarter of the rows was answered."""
        rows, wanted = 0, START * _rows(self.calls)
        for call in self.calls:
            rows += call.rows
            if rows >= wanted:
                break
        return call.ended


def words_of(result: Any) -> list[str]:
    """Where the model lived, and which batch size was found."""
    return [f"{key.name}: {note}" for key, note in sorted(result.metrics.notes.items())]


def _rows(calls: list[Call]) -> int:
    return sum(call.rows for call in calls)


def _idle(calls: list[Call], start: float, end: float) -> float:
    """The share of this time in which the model was called for no batch."""
    idle, busy_until = 0.0, start
    for call in sorted(calls):
        idle += max(0.0, call.started - busy_until)
        busy_until = max(busy_until, call.ended)
    return idle / (end - start) if end > start else 0.0


def run_watched(pipeline: Any, handler: Noting) -> Watched:
    """Run a pipeline of one stage with this handler. A thread looks at RunHandle.progress(), for when all is written."""
    run = pipeline.start()
    over = threading.Event()
    written, seen = 0.0, 0

    def look() -> None:
        nonlocal written, seen
        stages = run.progress()
        if stages and stages[-1].rows > seen:
            written, seen = time.time(), stages[-1].rows

    def watch() -> None:
        while not over.wait(EVERY):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        result = run.wait()
    finally:
        over.set()
        thread.join()
    look()
    lines = [line.split() for line in Path(handler.noted_in).read_text().splitlines()]
    calls = sorted((Call(float(a), float(b), int(c), int(d)) for a, b, c, d in lines), key=lambda call: call.ended)
    return Watched(calls, written, result)
