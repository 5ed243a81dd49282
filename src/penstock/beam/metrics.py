"""What sessions measure, as Beam's metrics, under the names of Beam's RunInference."""

from __future__ import annotations

import threading

from apache_beam.metrics import Metrics as BeamMetrics

from penstock.beam.metric_names import Naming, Rows
from penstock.observe.metrics import Distribution, MetricKey, Metrics


class StepMetrics:
    """Of one process. Metrics of Beam belong to the step that is at work when they are counted: what a session has measured
    waits here until its own step is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what waits
        self._waiting: dict[str, Metrics] = {}

    def report(self, step: str, naming: Naming | None, rows: Rows, *measured: Metrics) -> None:
        """Count what was measured for this step, of a bundle whose rows these models have answered; the rest waits for its
        own."""
        with self._lock:
            for metrics in measured:
                for key in {*metrics.counters, *metrics.distributions, *metrics.models}:
                    waiting = self._waiting.setdefault(key.step, Metrics())
                    if key in metrics.counters:
                        waiting.count(key, metrics.counters[key])
                    if key in metrics.distributions:
                        waiting.distribution_of(key).merge(metrics.distributions[key])
                    if key in metrics.models:
                        waiting.used(key, metrics.models[key])
            due = self._waiting.pop(step, Metrics())
        # Without the lock: what was taken is this thread's alone, and Beam counts for the step that is at work on it.
        if naming is not None:
            due = naming(due, rows)
        for key, count in due.counters.items():
            BeamMetrics.counter(key.namespace, key.name).inc(count)
        for key, distribution in due.distributions.items():
            _update(key, distribution)


def _update(key: MetricKey, seen: Distribution) -> None:
    """Beam takes values one by one: these have the same count, sum, least and greatest."""
    if not seen.count:
        return
    beam = BeamMetrics.distribution(key.namespace, key.name)
    ends = [round(seen.min)] if seen.count == 1 else [round(seen.min), round(seen.max)]
    between = seen.count - len(ends)
    each, more = divmod(round(seen.sum) - sum(ends), between) if between else (0, 0)
    for value in ends:
        beam.update(value)
    for number in range(between):
        beam.update(each + (number < more))
