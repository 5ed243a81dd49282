"""From outcomes to tables: times, and numbers held against their limits. The lines are Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from measure import Outcome

Outcomes = dict[str, list[Outcome]]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number per round; their median has to keep the limit."""

    label: str
    values: Sequence[float]
    limit: float
    at_least: bool = False  # otherwise: at most
    unit: str = ""

    @property
    def verdict(self) -> str:
        if not self.values:
            return "no result"
        middle = statistics.median(self.values)
        kept = middle >= self.limit if self.at_least else middle <= self.limit
        return "ok" if kept else "MISSED"


def speedup(outcomes: Outcomes, ours: str, rival: str, at_least: float) -> Check:
    """How many times the rows/s of a rival."""
    values = _quotients(outcomes[rival], outcomes[ours], _seconds)
    return Check(label=f"{ours}: times the rows/s of {rival}", values=values, limit=at_least, at_least=True, unit="x")


def job_speedup(outcomes: Outcomes, ours: str, rival: str, at_least: float) -> Check:
    """The same for the whole job: from starting the process, its imports included."""
    values = _quotients(outcomes[rival], outcomes[ours], lambda done: done.job)
    return Check(
        label=f"{ours}: times the speed of {rival}, whole job", values=values, limit=at_least, at_least=True, unit="x"
    )


def cost(outcomes: Outcomes, ours: str, other: str, at_most: float) -> Check:
    """How many times the seconds of another case."""
    values = _quotients(outcomes[ours], outcomes[other], _seconds)
    return Check(label=f"{ours}: times the time of {other}", values=values, limit=at_most, unit="x")


def growth(outcomes: Outcomes, large: str, small: str, at_most: float) -> Check:
    """How many times the peak memory of a smaller case."""
    values = _quotients(outcomes[large], outcomes[small], lambda done: done.peak_bytes)
    return Check(label=f"{large}: times the peak memory of {small}", values=values, limit=at_most, unit="x")


def time_limit(outcomes: Outcomes, name: str, at_most: float) -> Check:
    """The seconds of one case by itself."""
    values = [done.seconds for done in outcomes[name] if not done.error]
    return Check(label=name, values=values, limit=at_most, unit=" s")


def _seconds(done: Outcome) -> float:
    return done.seconds


def _quotients(over: Sequence[Outcome], under: Sequence[Outcome], number: Callable[[Outcome], float]) -> list[float]:
    """Round by round: both ran minutes apart at most, so that they met much the same noise."""
    rounds = zip(over, under, strict=True)
    return [number(a) / number(b) for a, b in rounds if not a.error and not b.error and number(b)]


def section(title: str, outcomes: Outcomes, checks: Iterable[Check]) -> list[str]:
    """A heading, a table of the cases and, where there are checks, a table of these."""
    held = check_table(checks)
    return [f"### {title}", "", *_case_table(outcomes), "", *([*held, ""] if len(held) > 2 else [])]


def _case_table(outcomes: Outcomes) -> list[str]:
    rows = [["case", "seconds (median)", "min - max", "with imports", "rows/s", "peak memory", "checksum"]]
    rows += [_case_row(name, runs) for name, runs in outcomes.items()]
    return table(rows)


def _case_row(name: str, runs: Sequence[Outcome]) -> list[str]:
    good = [done for done in runs if not done.error]
    if not good:
        return [name, "failed", "", "", "", "", next(done.error for done in runs if done.error) or ""]
    seconds = [done.seconds for done in good]
    middle = statistics.median(seconds)
    rows = good[0].rows
    peak = statistics.median(done.peak_bytes for done in good)
    return [
        name,
        f"{middle:.3f}",
        f"{min(seconds):.3f} - {max(seconds):.3f}",
        f"{statistics.median(done.job for done in good):.3f}",
        f"{rows / middle:,.0f}" if rows else "",
        f"{peak / 2**20:,.0f} MiB" if peak else "",
        " / ".join(sorted({f"{done.rows:,} rows: {done.checksum}" if done.rows else done.checksum for done in good})),
    ]


def check_table(checks: Iterable[Check]) -> list[str]:
    rows = [["what", "median", "min - max", "target", ""]]
    for check in checks:
        word = "at least" if check.at_least else "at most"
        target = f"{word} {check.limit:g}{check.unit}"
        if not check.values:
            rows.append([check.label, "", "", target, check.verdict])
            continue
        low, middle, high = min(check.values), statistics.median(check.values), max(check.values)
        spread = f"{low:.3g} - {high:.3g}"
        rows.append([check.label, f"{middle:.3g}{check.unit}", spread, target, check.verdict])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]
