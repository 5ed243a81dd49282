"""What a finished run hands back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.display import Displayed, Look, as_text
from penstock.errors import UsageError
from penstock.observe.metrics import Metrics

MESSAGES = 64  # of errors that are told apart, for each step
MESSAGE_LENGTH = 200  # characters of each
OTHER_MESSAGES = "(others)"


@dataclass(slots=True)
class StepCount:
    """Rows into and out of one step, each counted once, whatever was tried again."""

    rows_in: int = 0
    rows_out: int = 0
    rows_failed: int = 0  # where errors are handled: rows that went to the step's failures
    errors: dict[tuple[str, str], int] = field(default_factory=dict, compare=False)  # rows by error type and message
    kinds: dict[str, int] = field(default_factory=dict, compare=False)  # rows by the kind of their failure
    tags: dict[str, int] = field(default_factory=dict, compare=False)  # of steps with several outputs: rows by output

    def add(self, other: StepCount) -> None:
        self.rows_in += other.rows_in
        self.rows_out += other.rows_out
        self.rows_failed += other.rows_failed
        for (error_type, message), rows in other.errors.items():
            self.count_error(error_type, message, rows)
        for kind, rows in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + rows
        for tag, rows in other.tags.items():
            self.count_tag(tag, rows)

    def count_tag(self, tag: str, rows: int) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + rows

    def count_error(self, error_type: str, message: str, rows: int = 1) -> None:
        """Remember why rows failed: a bounded number of messages, and what is beyond them by type."""
        key = error_type[:MESSAGE_LENGTH], message[:MESSAGE_LENGTH]
        if key not in self.errors and len(self.errors) >= MESSAGES:
            key = key[0], OTHER_MESSAGES
            if key not in self.errors and len(self.errors) >= 2 * MESSAGES:
                key = OTHER_MESSAGES, ""
        self.errors[key] = self.errors.get(key, 0) + rows

    def to_json(self) -> list[Any]:
        errors = [[*key, rows] for key, rows in self.errors.items()]
        return [self.rows_in, self.rows_out, self.rows_failed, errors, self.kinds, self.tags]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> StepCount:
        rows_in, rows_out, rows_failed, errors, kinds, *tags = told  # journals of old have no tags
        return cls(rows_in, rows_out, rows_failed, {(name, message): rows for name, message, rows in errors}, kinds, *tags)


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult(Displayed):
    """A run that succeeded: how many rows went where, how long it took, and what was measured on the way."""

    run: str
    seconds: float
    counts: Mapping[str, StepCount]  # by step
    metrics: Metrics = field(default_factory=Metrics)
    outputs: Sequence[str] = ()  # where the sinks wrote
    splits: int = 0
    splits_before: int = 0  # of them, those that earlier processes have done, where the run was resumed
    rows_before: int = 0  # of the sources' rows, those that these splits had
    retries: int = 0  # splits that ran again, after a death or a transient error
    worker_deaths: int = 0
    was_finished: bool = False  # an earlier process had finished the run, so that nothing was left to do

    def rows_out(self, step: str) -> int:
        """How many rows a step gave."""
        if step not in self.counts:
            raise UsageError(f"there is no step {step!r}; the steps are {', '.join(map(repr, self.counts))}")
        return self.counts[step].rows_out

    def __repr__(self) -> str:
        return as_text(self._safe_look())

    def _look(self) -> Look:
        rows = sum(count.rows_out for count in self.counts.values() if not count.rows_in)
        line = f"RunResult: {rows:,} rows in {self.seconds:.1f} s"
        if self.outputs:
            line += f" -> {', '.join(self.outputs)}"
        has_failed = any(count.rows_failed for count in self.counts.values())
        columns = ("step", "rows in", "rows out", *(["failed"] if has_failed else []))
        table = [(step, c.rows_in, c.rows_out, c.rows_failed)[: len(columns)] for step, c in self.counts.items()]
        return Look(line, columns, table)
