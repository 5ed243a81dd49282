"""What rows that fail cost: 100,000 rows in batches of 64, a model whose cost is linear in rows, and 1% of rows that raise.

    pip install 'penstock[bench]'
    python benchmarks/poison.py [--quick] [--rows N] [--rounds N] [--markdown FILE]

Every case runs in a fresh process. Bad rows are spread by chance, the same in every case. The model raises at once when it
meets one, or, which costs most, at the end of its batch. Ratios are taken within a round; their median is held against the
target. Beam's RunInference.with_exception_handling() runs over the same rows: how many
good ones end in its dead letters is in its checksum. Nothing is asserted.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Case, run_rounds
from report import Check, Outcomes, cost, section

BATCH_SIZE = 64
PLAIN, HANDLED = "Penstock, clean", "Penstock, clean, handling"
POISONED, LATE = "Penstock, 1% raise at once, handling", "Penstock, 1% raise at the end, handling"
BEAM, BEAM_POISONED = "Beam, clean, handling", "Beam, 1% raise at once, handling"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run."""

    rows: int = 100_000
    rounds: int = 5


def poison(settings: Settings) -> list[str]:
    cases = [
        _penstock(PLAIN, settings, bad=0.0, handling=False),
        _penstock(HANDLED, settings, bad=0.0, handling=True),
        _penstock(POISONED, settings, bad=0.01, handling=True),
        _penstock(LATE, settings, bad=0.01, handling=True, late=True),
        _case(BEAM, "beam_poison", settings, bad=0.0),
        _case(BEAM_POISONED, "beam_poison", settings, bad=0.01),
    ]
    outcomes = run_rounds(cases, settings.rounds)
    checks = [
        cost(outcomes, HANDLED, PLAIN, at_most=1.05),
        cost(outcomes, POISONED, PLAIN, at_most=2.0),
        cost(outcomes, LATE, PLAIN, at_most=2.0),
        _lost("good rows that Penstock loses", outcomes, LATE),
    ]
    return section(f"Rows that fail, {settings.rows:,} rows, batches of {BATCH_SIZE}", outcomes, checks)


def _penstock(name: str, settings: Settings, **options: Any) -> Case:
    return _case(name, "penstock_poison", settings, **options)


def _case(name: str, function: str, settings: Settings, **options: Any) -> Case:
    options |= {"rows": settings.rows, "batch_size": BATCH_SIZE}
    return Case(name=name, call=f"poison_contenders:{function}", options=options)


def _lost(label: str, outcomes: Outcomes, name: str) -> Check:
    """Good rows in the dead letters: the first number of the checksum."""
    lost = [float(done.checksum.split()[0]) for done in outcomes[name] if not done.error]
    return Check(label=label, values=lost, limit=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="What rows that fail cost, beside Beam's dead letters.")
    parser.add_argument("--quick", action="store_true", help="5,000 rows and one round: to see that all of it runs")
    parser.add_argument("--rows", type=int, help="how many rows (100,000)")
    parser.add_argument("--rounds", type=int, help="how often each case runs (5)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    default = Settings(rows=5_000, rounds=1) if given.quick else Settings()
    lines = poison(Settings(rows=given.rows or default.rows, rounds=given.rounds or default.rounds))
    print("\n".join(lines), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
