"""What the GPU benchmarks say of their outcomes besides the tables of report.py."""

from __future__ import annotations

from collections.abc import Sequence

from measure import Outcome
from report import Check, Outcomes


def figures_of(runs: Sequence[Outcome], name: str) -> list[float]:
    """What the runs that did not fail have measured under this name."""
    return [done.figures[name] for done in runs if not done.error]


def told(outcomes: Outcomes) -> list[str]:
    """All that each run has measured: rates, and what the search for a batch size has found."""
    lines = []
    for name, runs in outcomes.items():
        for number, done in enumerate(runs):
            figures = ", ".join(f"{what} {value:,.4g}" for what, value in done.figures.items())
            lines += [f"- {name}, run {number + 1}: {figures}", *[f"  - {word}" for word in done.words]]
    return [*lines, ""]


def wrong(outcomes: Outcomes) -> Check:
    """The most wrong rows of any run: the first number of its checksum. No result where a run failed."""
    runs = [done for each in outcomes.values() for done in each]
    is_whole = all(done.error is None for done in runs)
    worst = [max(float(str(done.checksum).split()[0]) for done in runs)] if is_whole else []
    return Check(label="rows that are wrong, in the worst run of all cases", values=worst, limit=0)
