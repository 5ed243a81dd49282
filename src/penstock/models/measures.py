"""What is measured of a model and its batches, by the names that users see. Used where the model is: in a process, or in
the broker of a host, which sends it to a client now and then."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

from penstock.batching.entry import Span, lengths_of, rows_in
from penstock.batching.limits import BatchLimits
from penstock.observe.metrics import Distribution, MetricKey, Metrics, ModelUse

T = TypeVar("T")

NONE: Mapping[str, ModelUse] = {}


class Report(NamedTuple):
    """What was measured, told to one of the clients."""

    counters: dict[str, int]
    distributions: dict[str, Distribution]
    notes: dict[str, str]
    models: Mapping[str, ModelUse] = NONE  # of many, those whose numbers have changed: by how much; and their bytes


class Measures:
    """Of one model, since the last report. Not locked."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._report = Report({}, {}, {})
        self._models: dict[str, ModelUse] = {}
        self._first_batches = 0  # of models that were loaded, still to come
        self._sizes, self._latencies = Distribution(), Distribution()  # of every batch: not looked up by their names

    def loaded(self, seconds: float, size: int) -> None:
        self._record("load_model_latency_milli_secs", seconds * 1e3)
        self._record("model_byte_size", size)
        self._first_batches += 1

    def ran(
        self,
        spans: list[Span[T]],
        seconds: float,
        *,
        size: int | None,
        failed: bool,
        out_of_memory: int | None,
        times: int = 1,
    ) -> None:
        """A batch, of so many bytes if that was looked at, is answered; or several that are alike. `failed`: with failures
        among the answers."""
        rows, lengths = rows_in(spans), lengths_of(spans)
        if self._first_batches:
            self._first_batches -= 1
            self._record("first_batch_latency_milli_secs", seconds * 1e3)
        self._sizes.record(rows, times)
        self._latencies.record(seconds * 1e6, times)
        if size is not None:
            self._record("inference_request_batch_byte_size", size)
        if lengths is not None:
            self._count("useful_cost", sum(lengths))
            self._count("padded_cost", rows * self._limits.padded_length(max(lengths)))
        if out_of_memory is not None:
            self._count("out_of_memory_counter")
        if failed:
            self.failed()

    def failed(self) -> None:
        """A batch is not answered, or not all of it."""
        self._count("failed_batches_counter")

    def counted(self, counts: Mapping[str, int]) -> None:
        """What a handler has counted by itself."""
        for name, n in counts.items():
            self._count(name, n)

    def restarted(self) -> None:
        self._count("model_restarts")

    def used(self, news: Mapping[Hashable, ModelUse]) -> None:
        """What models have cost since this was last said (Uses.news())."""
        for model, use in news.items():
            name = str(model)
            if name in self._models:
                self._models[name].add(use)
            else:
                self._models[name] = use

    def found(self, size: str | None) -> None:
        """What the search for a size has found from these batches, in words."""
        if size is not None and self._sizes.count:
            self._report.notes["batch_size_found"] = size

    def take(self) -> Report:
        report, self._report = self._report, Report({}, {}, {})
        if self._models:
            report, self._models = report._replace(models=self._models), {}
        if self._sizes.count:
            report.distributions["inference_request_batch_size"] = self._sizes
            report.distributions["inference_batch_latency_micro_secs"] = self._latencies
            self._sizes, self._latencies = Distribution(), Distribution()
        return report

    def _count(self, name: str, n: int = 1) -> None:
        counters = self._report.counters
        counters[name] = counters.get(name, 0) + n

    def _record(self, name: str, value: float) -> None:
        known = self._report.distributions.get(name)
        if known is None:
            known = self._report.distributions[name] = Distribution()
        known.record(value)


def hand_in(report: Report, metrics: Metrics, step: str, namespace: str) -> None:
    """Add what was measured of a step's model to the metrics of this process."""
    for name, count in report.counters.items():
        metrics.count(MetricKey(step, namespace, name), count)
    for name, distribution in report.distributions.items():
        metrics.distribution_of(MetricKey(step, namespace, name)).merge(distribution)
    for name, note in report.notes.items():
        metrics.notes[MetricKey(step, namespace, name)] = note
    for name, use in report.models.items():
        metrics.used(MetricKey(step, namespace, name), use)
        for counter, count in [("model_loads", use.loads), ("model_unloads", use.unloads), ("model_hits", use.hits)]:
            metrics.count(MetricKey(step, namespace, counter), count)
