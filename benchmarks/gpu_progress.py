"""How fast a run of Penstock goes once it has started: rows/s after the first quarter of the rows."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

EVERY = 0.02  # seconds between two looks; workers report their rows about twice a second, and when a split is written
START = 0.25  # of the rows: loading the model and the search for a batch size are in it


class Watched(NamedTuple):
    """A run that is done."""

    rate: float  # rows/s after the first quarter; 0 where too few looks saw the rows in between
    first: float  # seconds from the start until rows were seen that are done
    result: Any

    def figures(self) -> dict[str, float]:
        """For an outcome."""
        sizes = self.result.metrics.distribution("inference_request_batch_size")
        counters = {name: self.result.metrics.counter(name) for name in ("useful_cost", "padded_cost")}
        return {"rate": self.rate, "first rows": self.first, "batches": sizes.count, "rows a batch": sizes.mean, **counters}

    def words(self) -> list[str]:
        """Where the model lived, and which batch size was found."""
        return [f"{key.name}: {note}" for key, note in sorted(self.result.metrics.notes.items())]


def run_watched(pipeline: Any, rows: int) -> Watched:
    """Run a pipeline of one stage; a thread looks at RunHandle.progress(), which counts rows that are through all steps."""
    started = time.perf_counter()
    run = pipeline.start()
    over = threading.Event()
    seen = [(0.0, 0)]  # when, and how many rows, each time that there were more

    def look() -> None:
        stages = run.progress()
        if stages and stages[-1].rows > seen[-1][1]:
            seen.append((time.perf_counter() - started, stages[-1].rows))

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
    return Watched(_late_rate(seen, rows), seen[1][0] if len(seen) > 1 else 0.0, result)


def _late_rate(seen: list[tuple[float, int]], rows: int) -> float:
    at, done = next((each for each in seen if each[1] >= START * rows), seen[-1])
    end, all_done = seen[-1]
    return (all_done - done) / (end - at) if end > at else 0.0
