"""Penstock's runs with a model that is large, busy or stuck. Every function runs in a fresh process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from workload import Stopwatch, outcome

import penstock as ps

WORKERS = 4  # processes

# A model of so many bytes, under worker processes.


class Ballast(ps.ModelHandler[int, int, Any]):
    """A model that is nothing but memory."""

    def __init__(self, size: int, **place: Any) -> None:
        super().__init__(max_batch_size=8, **place)
        self.size = size

    def load_model(self) -> Any:
        return np.full(self.size, 1, np.uint8)

    def run_inference(self, batch: Sequence[int], model: Any, inference_args: Any = None) -> list[int]:
        return [row + int(model[row]) for row in batch]


def memory(size: int, **place: Any) -> dict[str, Any]:
    """Rows that take their time, so that all workers are there at once. The memory is watched from outside."""
    with Stopwatch() as watch:
        rows = ps.Pipeline(workers=WORKERS) | ps.Create(range(400)) | ps.RunInference(Ballast(size, **place))
        answers = (rows | ps.Map(_take_time)).collect()
    workers = len({process for process, _ in answers})
    return outcome(watch, len(answers), f"{sum(answer for _, answer in answers)}, {workers} workers")


def _take_time(row: int) -> tuple[int, int]:
    time.sleep(0.02)
    return os.getpid(), row


# A model that keeps a core busy, once and twice.

BUSY_SECONDS = 0.02  # of processor time, for each row


class Moment(NamedTuple):
    """An answer: when its model was loaded, and when it was given."""

    loaded: float
    given: float


class Busy(ps.ModelHandler[int, Moment, float]):
    def load_model(self) -> float:
        return time.time()

    def run_inference(self, batch: Sequence[int], model: float, inference_args: Any = None) -> list[Moment]:
        keep_busy(len(batch))
        return [Moment(model, time.time()) for _ in batch]


def keep_busy(rows: int) -> None:
    until = time.thread_time() + BUSY_SECONDS * rows
    while time.thread_time() < until:
        pass


def copies(rows: int, **place: Any) -> dict[str, Any]:
    """The clock runs from the first model that is loaded: a second one that comes late counts against the two."""
    with Stopwatch() as watch:
        handler = Busy(max_batch_size=4, **place)
        answers = (ps.Pipeline(workers=WORKERS) | ps.Create(range(rows)) | ps.RunInference(handler)).collect()
    watch.seconds = max(moment.given for moment in answers) - min(moment.loaded for moment in answers)
    return outcome(watch, len(answers), f"{len({moment.loaded for moment in answers})} models")


def bare_loops(rows: int, processes: int) -> dict[str, Any]:
    """The same work without any library: what the machine has left for two at this hour."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(keep_busy, [0] * 2 * processes))  # starts them
        with Stopwatch() as watch:
            list(pool.map(keep_busy, [1] * rows))
    return outcome(watch, rows, f"{processes} processes")


# A model that hangs in C.

ROWS, AT_A_TIME, TIMEOUT, LOAD_SECONDS = 1_000, 10, 2.0, 1.0


class Hanging(ps.ModelHandler[int, int, None]):
    """It sleeps in C on one row, for as long as a hang is, without letting any other thread of its process run."""

    def __init__(self, bad_row: int | None, log: str, **place: Any) -> None:
        super().__init__(max_batch_size=AT_A_TIME, **place)
        self.bad_row, self.log = bad_row, log

    def load_model(self) -> None:
        self._note("load")
        time.sleep(LOAD_SECONDS)

    def run_inference(self, batch: Sequence[int], model: None, inference_args: Any = None) -> list[int]:
        if self.bad_row in batch:
            self._note("hang")
            ctypes.PyDLL(None).sleep(1_000)
        time.sleep(0.001 * len(batch))
        return list(batch)

    def _note(self, what: str) -> None:
        with Path(self.log).open("a") as lines:
            lines.write(f"{what}\n")


def hang(bad_row: int | None, **place: Any) -> dict[str, Any]:
    """The rows that count are those with an answer."""
    with tempfile.TemporaryDirectory() as folder, Stopwatch() as watch:
        log = Path(folder, "log")
        step = ps.RunInference(Hanging(bad_row, str(log), **place)).with_exception_handling(timeout=TIMEOUT)
        good, failures = ps.Pipeline(workers=WORKERS) | ps.Create(range(ROWS)) | step
        failed = failures.failed_inferences | ps.Map(lambda pair: ("failed", pair[0]))
        ends = ((good | ps.Map(lambda row: ("answered", row)), failed) | ps.Flatten()).collect()
        noted = Counter(log.read_text().splitlines())
    once = sorted(row for _, row in ends) == list(range(ROWS))
    bad = [row for end, row in ends if end == "failed"]
    blamed = bad_row is None or bad_row in bad
    rows = "each row once" if once and blamed else "ROWS LOST, TWICE OR AMISS"
    return outcome(watch, len(ends) - len(bad), f"{len(bad)} failed, {noted['load']} loads, {noted['hang']} hangs, {rows}")
