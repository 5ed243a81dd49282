"""Counters and distributions, kept where the work is done and added up in the user's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.display import Displayed, Look, as_text


class MetricKey(NamedTuple):
    step: str
    namespace: str
    name: str


@dataclass(slots=True)
class Distribution:
    """The count, sum, least and greatest of the values that were recorded."""

    count: int = 0
    sum: float = 0
    min: float = float("inf")
    max: float = float("-inf")

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else float("nan")

    def record(self, value: float, times: int = 1) -> None:
        self.count += times
        self.sum += value * times
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value

    def merge(self, other: Distribution) -> None:
        self.count += other.count
        self.sum += other.sum
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)


@dataclass(slots=True)
class ModelUse:
    """What one of many models has cost."""

    bytes: int = 0  # when it was last loaded, also of one that was unloaded since
    loads: int = 0
    unloads: int = 0
    hits: int = 0  # blocks of rows that found it loaded
    seconds: float = 0.0  # of loading
    resident: int = 0  # bytes that are in memory, of all places together: more with a load, fewer when it goes

    def add(self, more: ModelUse) -> None:
        self.bytes = more.bytes or self.bytes
        self.loads += more.loads
        self.unloads += more.unloads
        self.hits += more.hits
        self.seconds += more.seconds
        self.resident += more.resident


@dataclass(repr=False)
class Metrics(Displayed):
    """Values by step, namespace and name. Not locked: whoever shares one between threads holds a lock."""

    counters: dict[MetricKey, int] = field(default_factory=dict)
    distributions: dict[MetricKey, Distribution] = field(default_factory=dict)
    notes: dict[MetricKey, str] = field(default_factory=dict)  # the newest words on something that was found
    models: dict[MetricKey, ModelUse] = field(default_factory=dict)  # by name, where a step has many
    answered: dict[MetricKey, int] = field(default_factory=dict)  # rows by model_id, where a step's model changes

    def __repr__(self) -> str:
        return as_text(self._safe_look())

    def _look(self) -> Look:
        found = self.by_step()
        table = [(step, name, _shown(value)) for step, values in found.items() for name, value in values.items()]
        return Look(f"Metrics of {len(found)} step{'' if len(found) == 1 else 's'}", ("step", "metric", "value"), table)

    def count(self, key: MetricKey, n: int = 1) -> None:
        self.counters[key] = self.counters.get(key, 0) + n

    def record(self, key: MetricKey, value: float) -> None:
        self.distribution_of(key).record(value)

    def distribution_of(self, key: MetricKey) -> Distribution:
        found = self.distributions.get(key)
        if found is None:
            found = self.distributions[key] = Distribution()
        return found

    def used(self, key: MetricKey, use: ModelUse) -> None:
        """What a model has cost besides."""
        self.models.setdefault(key, ModelUse()).add(use)

    def answered_by(self, step: str, namespace: str, rows: Mapping[str | None, int]) -> None:
        """Rows that models of these ids have answered."""
        for model_id, count in rows.items():
            if count:
                key = MetricKey(step, namespace, str(model_id))
                self.answered[key] = self.answered.get(key, 0) + count

    def merge(self, other: Metrics) -> None:
        for key, n in other.counters.items():
            self.count(key, n)
        for key, distribution in other.distributions.items():
            self.distribution_of(key).merge(distribution)
        self.notes.update(other.notes)
        for key, use in other.models.items():
            self.used(key, use)
        for key, rows in other.answered.items():
            self.answered[key] = self.answered.get(key, 0) + rows

    def drain(self) -> Metrics:
        """What was recorded since the last drain."""
        kept: list[dict[Any, Any]] = [self.counters, self.distributions, self.notes, self.models, self.answered]
        drained = Metrics(*map(dict, kept))
        for each in kept:
            each.clear()
        return drained

    def renamed(self, names: Mapping[str, str]) -> Metrics:
        """The same under other names of the steps."""

        def renamed(key: MetricKey) -> MetricKey:
            return key._replace(step=names.get(key.step, key.step))

        return Metrics(
            {renamed(key): n for key, n in self.counters.items()},
            {renamed(key): distribution for key, distribution in self.distributions.items()},
            {renamed(key): note for key, note in self.notes.items()},
            {renamed(key): use for key, use in self.models.items()},
            {renamed(key): rows for key, rows in self.answered.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """All of it in lists, which JSON knows."""
        return {
            "counters": [[*key, n] for key, n in self.counters.items()],
            "distributions": [[*key, d.count, d.sum, d.min, d.max] for key, d in self.distributions.items() if d.count],
            "notes": [[*key, note] for key, note in self.notes.items()],
            "models": [[*key, u.bytes, u.loads, u.unloads, u.hits, u.seconds] for key, u in self.models.items()],
            "answered": [[*key, rows] for key, rows in self.answered.items()],
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Metrics:
        return cls(
            {MetricKey(*key): n for *key, n in told["counters"]},
            {MetricKey(*each[:3]): Distribution(*each[3:]) for each in told["distributions"]},
            {MetricKey(*key): note for *key, note in told["notes"]},
            {MetricKey(*each[:3]): ModelUse(*each[3:]) for each in told.get("models", ())},
            {MetricKey(*key): rows for *key, rows in told.get("answered", ())},
        )

    def by_step(self) -> dict[str, dict[str, Any]]:
        """For people and programs: numbers, and for a distribution its count, mean, min and max, by step and name."""
        found: dict[str, dict[str, Any]] = {}
        for key, n in self.counters.items():
            found.setdefault(key.step, {})[key.name] = n
        for key, d in self.distributions.items():
            if d.count:
                found.setdefault(key.step, {})[key.name] = {"count": d.count, "mean": d.mean, "min": d.min, "max": d.max}
        return found

    def counter(self, name: str, *, step: str | None = None) -> int:
        """The sum of the counters of that name, over all steps or of one."""
        return sum(n for key, n in self.counters.items() if key.name == name and step in (None, key.step))

    def distribution(self, name: str, *, step: str | None = None) -> Distribution:
        """The distributions of that name put together, over all steps or of one."""
        total = Distribution()
        for key, distribution in self.distributions.items():
            if key.name == name and step in (None, key.step):
                total.merge(distribution)
        return total


def _shown(value: Any) -> str:
    """A counter, or a distribution as by_step() gives it."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value['mean']:,.4g} on average, {value['min']:,.4g} to {value['max']:,.4g}, {value['count']:,} times"
