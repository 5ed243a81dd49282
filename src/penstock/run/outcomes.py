"""What becomes of the splits of sources: each flows through all stages, and counts as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.observe.metrics import Metrics
from penstock.observe.result import StepCount
from penstock.steps.bundle import Key


class SplitId(NamedTuple):
    """One split of one source, for as long as the run is remembered."""

    source: int  # the position among the plan's sources
    number: int


@dataclass(slots=True)
class SplitResult:
    """What came of a split, through all stages."""

    counts: dict[str, StepCount] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    stage_rows: dict[int, int] = field(default_factory=dict)  # rows in
    bundles: int = 0

    def add(self, other: SplitResult) -> None:
        for label, count in other.counts.items():
            self.counts.setdefault(label, StepCount()).add(count)
        self.metrics.merge(other.metrics)
        for stage, rows in other.stage_rows.items():
            self.stage_rows[stage] = self.stage_rows.get(stage, 0) + rows
        self.bundles += other.bundles

    def renamed(self, names: Mapping[str, str]) -> SplitResult:
        """The same under other names of the steps."""
        return SplitResult(
            {names.get(label, label): count for label, count in self.counts.items()},
            self.metrics.renamed(names),
            self.stage_rows,
            self.bundles,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": {label: count.to_json() for label, count in self.counts.items()},
            "metrics": self.metrics.to_json(),
            "stage_rows": list(self.stage_rows.items()),
            "bundles": self.bundles,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> SplitResult:
        counts = {label: StepCount.from_json(count) for label, count in told["counts"].items()}
        return cls(counts, Metrics.from_json(told["metrics"]), dict(told["stage_rows"]), told["bundles"])


class PreparedPart(NamedTuple):
    """A part that lies aside: the sink's place among all, its token for publish(), and the sink's details of it."""

    sink: int
    token: Any
    details: Mapping[str, Any]


@dataclass(slots=True)
class Tally(SplitResult):
    """What a run has done so far: what came of all its splits, and what is under way."""

    collected: dict[int, list[tuple[Key, list[list[Any]]]]] = field(
        default_factory=dict
    )  # blocks, by position in graph.collect
    stage_splits: dict[int, int] = field(default_factory=dict)  # that are done, by this process
    running_rows: dict[int, int] = field(default_factory=dict)  # by task
    running_metrics: dict[int, Metrics] = field(default_factory=dict)  # by worker: of splits that are not done
