"""What a journal costs: the encoder and a large Parquet job with and without run_dir, and how soon a long run goes on.

    pip install 'penstock[bench]'
    python benchmarks/journal.py [--quick] [--rounds N] [--folder DIR] [--markdown FILE]

Every case runs in a fresh process, over two workers. Ratios are taken within a round. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from measure import Case, run_case, run_rounds
from report import cost, section, time_limit

PLAIN, JOURNALED = "no journal", "journal"
GOING_ON = "first row of the rest"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run: on two cores a minute of encoding, and a minute of Parquet."""

    texts: int = 1_500
    rows: int = 300_000_000
    rounds: int = 3


def journal(settings: Settings, folder: str) -> list[str]:
    made = Case(name="inputs", call="journal_contenders:make_inputs", options=_inputs(settings, folder))
    assert not run_case(made).error, "the inputs could not be made"
    lines = _compare(f"Encoder, {settings.texts:,} texts", "encode", settings, folder)
    lines += _compare(f"Parquet, {settings.rows:,} rows of 8 columns", "convert", settings, folder)
    return [*lines, *_resume(settings, f"{folder}/long")]


def _inputs(settings: Settings, folder: str) -> dict[str, object]:
    return {"folder": folder, "texts": settings.texts, "rows": settings.rows}


def _compare(title: str, function: str, settings: Settings, folder: str) -> list[str]:
    cases = [
        Case(name=name, call=f"journal_contenders:{function}", options={"folder": folder, "journal": name == JOURNALED})
        for name in (PLAIN, JOURNALED)
    ]
    outcomes = run_rounds(cases, settings.rounds)
    return section(title, outcomes, [cost(outcomes, JOURNALED, PLAIN, at_most=1.03)])


def _resume(settings: Settings, folder: str) -> list[str]:
    case = Case(name=GOING_ON, call="journal_contenders:resume", options={"folder": folder})
    outcomes = run_rounds([case], settings.rounds)
    return section("A run with 10,000 finished splits goes on", outcomes, [time_limit(outcomes, GOING_ON, at_most=2.0)])


def main() -> None:
    parser = argparse.ArgumentParser(description="What a journal costs.")
    parser.add_argument("--quick", action="store_true", help="small jobs and one round: to see that all of it runs")
    parser.add_argument("--rounds", type=int, help="how often each case runs (3)")
    parser.add_argument("--folder", help="where files go, several GB of them (a temporary folder)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    default = Settings(texts=200, rows=1_000_000, rounds=1) if given.quick else Settings()
    settings = Settings(texts=default.texts, rows=default.rows, rounds=given.rounds or default.rounds)
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="penstock-journal-") as folder:
        lines = journal(settings, folder)
    print("\n".join(lines), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
