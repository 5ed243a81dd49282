"""What a model for each of many keys costs, when only some of them fit into memory: 1,000 models of 10 MB, room for 50.

    pip install 'penstock[bench]'
    python benchmarks/keyed.py [--quick] [--only CASE ...] [--rounds N] [--folder DIR] [--markdown FILE]

100,000 rows, each with a key; keys follow a Zipf distribution with exponent 1, in random order. A model adds some of its
numbers to the row, which takes next to no time: what is measured is loading, and what is around it. Files are in the page
cache (see keyed_inputs.py), so that a load takes some milliseconds. Every case runs in a fresh process and checks the sum
of all answers.

The bare loop answers rows as they come and keeps the 50 models that were used last. It and Beam would take minutes for all
rows, so they get fewer, and rows/s are compared. Beam starts two threads for each load, which never end, and becomes slower
with each: a short job is to its favour. One case of Penstock has just Beam's rows.

Loads are compared with those of the loop over as many rows, and with those of two schedulers that know the future and see
as many rows ahead as Penstock (see keyed_loads.py). Memory is sampled in one more round, as sampling costs time. Ratios
are taken within a round; their median is held against the target. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from keyed_inputs import MODEL_BYTES, key_numbers
from keyed_loads import lru_loads, sliding_loads, window_loads
from measure import Case, Outcome, run_case, run_rounds
from report import Check, Outcomes, check_table, section, table

MB = 1_000_000
MODELS, CAPACITY = 1_000, 50
BUDGET = CAPACITY * MODEL_BYTES + MODEL_BYTES // 2  # half a model more: sizes are measured, and not exact
WINDOW, BLOCK = 16_384, 1_024  # rows that Penstock may have in sight, and that come in at a time

HOST, DEFAULT, JOURNAL = "Penstock, one host", "Penstock, one host, default workers", "Penstock, one host, journal"
WORKERS, SHORT = "Penstock, in 2 workers", "Penstock, one host, Beam's rows"
BEAM, LOOP = "Beam", "bare loop"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run."""

    folder: str = ""
    rows: int = 100_000
    loop_rows: int = 10_000
    beam_rows: int = 2_000
    rounds: int = 3


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A function of keyed_contenders.py, and how many of the rows it has."""

    name: str
    function: str
    rows: Callable[[Settings], int]
    options: dict[str, Any]

    def case(self, settings: Settings, memory: bool) -> Case:
        inputs = {"folder": settings.folder, "models": MODELS, "rows": self.rows(settings)}
        options = {**inputs, **self.options, "memory": memory}
        return Case(name=self.name, call=f"keyed_contenders:{self.function}", options=options)


def _penstock(name: str, rows: Callable[[Settings], int] = lambda each: each.rows, **options: Any) -> Contender:
    return Contender(name=name, function="penstock_keyed", rows=rows, options={"budget": BUDGET, **options})


CONTENDERS = {
    "host": _penstock(HOST, workers=0, large_model=True),
    "default": _penstock(DEFAULT, workers=None, large_model=True),
    "journal": _penstock(JOURNAL, workers=0, large_model=True, journal=True),
    "workers": _penstock(WORKERS, workers=2, large_model=False),
    "short": _penstock(SHORT, rows=lambda each: each.beam_rows, workers=0, large_model=True),
    "beam": Contender(name=BEAM, function="beam_keyed", rows=lambda each: each.beam_rows, options={"capacity": CAPACITY}),
    "loop": Contender(name=LOOP, function="loop", rows=lambda each: each.loop_rows, options={"capacity": CAPACITY}),
}


def keyed(settings: Settings, contenders: Sequence[Contender]) -> list[str]:
    made = run_case(
        Case(name="inputs", call="keyed_inputs:make_inputs", options={"folder": settings.folder, "models": MODELS})
    )
    assert not made.error, f"the inputs could not be made: {made.error}"
    timed = run_rounds([each.case(settings, memory=False) for each in contenders], settings.rounds)
    watched = run_rounds([each.case(settings, memory=True) for each in contenders], rounds=1)
    title = f"A model for each key: {MODELS:,} models of {MODEL_BYTES // MB} MB, room for {CAPACITY}"
    return [*section(title, timed, _speed_checks(timed)), *_loads(settings, timed), *_memory(watched)]


def _speed_checks(outcomes: Outcomes) -> list[Check]:
    """The same as report.speedup(), for cases that differ in their rows."""
    ours = [name for name in (HOST, DEFAULT, JOURNAL, WORKERS, SHORT) if name in outcomes and BEAM in outcomes]
    return [
        Check(
            label=f"{name}: times the rows/s of {BEAM}",
            values=[_rate(a) / _rate(b) for a, b in _good_pairs(outcomes[name], outcomes[BEAM])],
            limit=3,
            at_least=True,
            unit="x",
        )
        for name in ours
    ]


def _rate(done: Outcome) -> float:
    return done.rows / done.seconds


def _good_pairs(these: Sequence[Outcome], others: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    return [(a, b) for a, b in zip(these, others, strict=True) if not a.error and not b.error]


# Loads.


@dataclass(frozen=True)
class Counts:
    """What the same rows need, by rules that need not be run."""

    lru: int
    windows: int
    sliding: int


@cache
def _counts(rows: int) -> Counts:
    keys = key_numbers(rows, MODELS).tolist()
    sliding = sliding_loads(keys, CAPACITY, WINDOW, BLOCK)
    return Counts(lru_loads(keys, CAPACITY), window_loads(keys, CAPACITY, WINDOW), sliding)


def _loads(settings: Settings, outcomes: Outcomes) -> list[str]:
    full = _counts(settings.rows)
    rows = [["loads", "rows", "median", "min - max", "/ LRU's", "/ windows'", "/ sliding's", "told by the run"]]
    for name, loads in [("LRU", full.lru), ("windows, best", full.windows), ("sliding, farthest out", full.sliding)]:
        rows.append([f"counted: {name}", f"{settings.rows:,}", f"{loads:,}", "", *_shares(loads, full), ""])
    rows += [_loads_row(name, good) for name, runs in outcomes.items() if (good := _good(runs))]
    checks = [
        check for name in (HOST, DEFAULT, JOURNAL) if name in outcomes for check in _loads_checks(name, outcomes[name])
    ]
    return ["### Loads", "", *table(rows), "", *([*check_table(checks), ""] if checks else [])]


def _good(runs: Sequence[Outcome]) -> list[Outcome]:
    return [done for done in runs if not done.error]


def _loads_row(name: str, good: Sequence[Outcome]) -> list[str]:
    loads = [done.figures["loads"] for done in good]
    told = {f"{done.figures['told loads']:,.0f}" for done in good if "told loads" in done.figures}
    middle, spread = statistics.median(loads), f"{min(loads):,.0f} - {max(loads):,.0f}"
    shares = _shares(middle, _counts(good[0].rows))
    return [name, f"{good[0].rows:,}", f"{middle:,.0f}", spread, *shares, " / ".join(sorted(told))]


def _shares(loads: float, counts: Counts) -> list[str]:
    return [f"{loads / other:.3g}" for other in (counts.lru, counts.windows, counts.sliding)]


def _loads_checks(name: str, runs: Sequence[Outcome]) -> list[Check]:
    found = [(done.figures["loads"], _counts(done.rows)) for done in _good(runs)]
    fewer = [counts.lru / loads for loads, counts in found]
    windows = [loads / counts.windows for loads, counts in found]
    sliding = [loads / counts.sliding for loads, counts in found]
    return [
        Check(label=f"{name}: times fewer loads than LRU", values=fewer, limit=5, at_least=True, unit="x"),
        Check(label=f"{name}: times the loads of the best for windows", values=windows, limit=1.15, unit="x"),
        Check(label=f"{name}: times the loads of a sliding window, farthest out", values=sliding, limit=1.15, unit="x"),
    ]


# Memory.


def _memory(outcomes: Outcomes) -> list[str]:
    """What the largest sample had beyond the size before any model, and beyond what the models may take."""
    rows = [["MB above the budget, largest sample", "processes with models, own memory", "all processes"]]
    for name, runs in outcomes.items():
        if good := _good(runs):
            rows.append([name, *[f"{_above(good[0], what):.1f}" for what in ("own", "all")]])
    checks = [
        Check(label=f"{name}: above the budget", values=above, limit=MODEL_BYTES / MB, unit=" MB")
        for name in (HOST, DEFAULT, JOURNAL, WORKERS)
        if (above := [_above(done, "own") for done in _good(outcomes.get(name, []))])
    ]
    return [
        f"### Memory, with a budget of {BUDGET / MB:g} MB",
        "",
        *table(rows),
        "",
        *([*check_table(checks), ""] if checks else []),
    ]


def _above(done: Outcome, what: str) -> float:
    return (done.figures[what] - BUDGET) / MB


def main() -> None:
    parser = argparse.ArgumentParser(description="A model for each of many keys, in a memory budget, beside Beam's.")
    parser.add_argument("--quick", action="store_true", help="few rows and one round: to see that all of it runs")
    parser.add_argument("--only", choices=CONTENDERS, nargs="+", metavar="CASE", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, help="how often each case runs (3)")
    parser.add_argument("--folder", help="where files go, 500 MB of them (a temporary folder)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    default = Settings(rows=10_000, loop_rows=1_000, beam_rows=500, rounds=1) if given.quick else Settings()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="penstock-keyed-") as folder:
        settings = replace(default, folder=folder, rounds=given.rounds or default.rounds)
        lines = keyed(settings, [CONTENDERS[name] for name in given.only or CONTENDERS])
    print("\n".join(lines), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
