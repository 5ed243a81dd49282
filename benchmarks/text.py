"""What batching by length is worth: a small text encoder on the CPU, one thread to a process, beside loops and rivals.

    pip install 'penstock[bench]'
    python benchmarks/text.py [--quick] [--only SECTION] [--texts N] [--rounds N] [--markdown FILE]

Every case runs in a fresh process and tokenises its texts. Its clock runs from when the model is loaded, or from after
the sorting for loops that sort beforehand, until the last answer. What has a setting to choose (a loop its budget, a
rival its batch size) is tried first with each, on half of the texts; the best one runs in the rounds. Ratios are taken
within a round; their median is held against the target. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Case, Outcome, run_rounds
from report import Check, Outcomes, section, speedup

ARRIVAL, NO_SETTING = "arrival order, 32", "Penstock, no setting"
BUDGETS = (1_024, 2_048, 4_096, 8_192)  # tokens in a batch, padding included
BATCH_SIZES = (8, 32, 128)
ONE_WORKER, TWO_WORKERS = "Penstock, 1 worker process", "Penstock, 2 worker processes"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run."""

    texts: int = 600
    rounds: int = 3


def mixed(settings: Settings) -> list[str]:
    """Film reviews and short questions."""
    tried = {
        family: _with_each(family, {"kind": "mixed", "count": settings.texts // 2}) for family in ("sorted", "Beam", "Ray")
    }
    trial = run_rounds([case for cases in tried.values() for case in cases], max(1, settings.rounds - 1))
    best = {family: _fastest(trial, cases) for family, cases in tried.items()}
    options = {"kind": "mixed", "count": settings.texts}
    budget = best["sorted"].options["budget"]
    told = f"Penstock, max_padded_cost={budget}"
    cases = [
        Case(name=ARRIVAL, call="encoder:arrival_order", options={**options, "batch_size": 32}),
        _penstock(told, options, max_padded_cost=budget),
        _penstock(NO_SETTING, options),
        *[Case(name=case.name, call=case.call, options={**case.options, **options}) for case in best.values()],
    ]
    outcomes = run_rounds(cases, settings.rounds)
    checks = [
        speedup(outcomes, told, ARRIVAL, at_least=2.0),
        speedup(outcomes, told, best["sorted"].name, at_least=0.95),
        speedup(outcomes, NO_SETTING, best["sorted"].name, at_least=0.90),
        speedup(outcomes, NO_SETTING, best["Beam"].name, at_least=1.5),
        speedup(outcomes, NO_SETTING, best["Ray"].name, at_least=1.5),
    ]
    return [
        *section(f"Mixed texts: settings tried, {settings.texts // 2} texts", trial, []),
        *section(f"Mixed texts, {settings.texts} texts", outcomes, checks),
    ]


def _with_each(family: str, options: dict[str, Any]) -> list[Case]:
    """One case for each value of the setting that a contender has."""
    if family == "sorted":
        return [
            Case(name=f"sorted, budget {each}", call="encoder:sorted_by_length", options={**options, "budget": each})
            for each in BUDGETS
        ]
    name, call = {"Beam": ("Beam, buckets", "beam_text"), "Ray": ("Ray Data", "ray_text")}[family]
    return [
        Case(name=f"{name}, {size}", call=f"text_contenders:{call}", options={**options, "batch_size": size})
        for size in BATCH_SIZES
    ]


def _fastest(outcomes: Outcomes, cases: Sequence[Case]) -> Case:
    return min(cases, key=lambda case: min(_seconds(done) for done in outcomes[case.name]))


def _seconds(done: Outcome) -> float:
    return float("inf") if done.error else done.seconds


def _penstock(name: str, options: dict[str, Any], workers: int = 0, **settings: Any) -> Case:
    return Case(name=name, call="text_contenders:penstock_text", options={**options, "workers": workers, **settings})


def rare(settings: Settings) -> list[str]:
    """One long text for every 64 short ones."""
    options = {"kind": "rare long", "count": 0}
    cases = [
        Case(name=ARRIVAL, call="encoder:arrival_order", options={**options, "batch_size": 32}),
        Case(name="sorted, budget 2048", call="encoder:sorted_by_length", options={**options, "budget": 2_048}),
        _penstock(NO_SETTING, options),
    ]
    outcomes = run_rounds(cases, settings.rounds)
    return section("Rare long texts", outcomes, [speedup(outcomes, NO_SETTING, ARRIVAL, at_least=12)])


def workers(settings: Settings) -> list[str]:
    """Two worker processes against one. The encoder takes one thread in each, whatever the engine allows it: a single
    worker would be given all cores. The clock starts with the first model that is loaded, so that a second one that comes
    late counts against the two."""
    options = {"kind": "mixed", "count": settings.texts}
    cases = [_penstock(ONE_WORKER, options, workers=1), _penstock(TWO_WORKERS, options, workers=2)]
    outcomes = run_rounds(cases, settings.rounds)
    checks = [speedup(outcomes, TWO_WORKERS, ONE_WORKER, at_least=1.8)]
    return section(f"Worker processes, {settings.texts} mixed texts", outcomes, checks)


def session(settings: Settings) -> list[str]:
    """What the session adds to a model that returns its batch."""
    names = ("blocks, bare calls", "blocks, session", "single rows, bare calls", "single rows, session")
    functions = ("bare_blocks", "session_blocks", "bare_calls", "session_calls")
    cases = [Case(name=name, call=f"text_contenders:{each}") for name, each in zip(names, functions, strict=True)]
    outcomes = run_rounds(cases, 2 * settings.rounds + 1)
    checks = [
        _added("blocks at batch size 64: us per row", outcomes, names[1], names[0], at_most=0.2),
        _added("single rows: us per call", outcomes, names[3], names[2], at_most=20),
    ]
    return section("The session over bare calls", outcomes, checks)


def _added(label: str, outcomes: Outcomes, ours: str, bare: str, at_most: float) -> Check:
    rounds = zip(outcomes[ours], outcomes[bare], strict=True)
    values = [1e6 * (a.seconds - b.seconds) / a.rows for a, b in rounds if not a.error and not b.error]
    return Check(label=label, values=values, limit=at_most, unit=" us")


def adaptive(settings: Settings) -> list[str]:
    """The size that the adaptation finds on made-up cost curves: pure code, in curves.py."""
    if importlib.util.find_spec("curves") is None:
        return []
    import curves

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        curves.main()
    return ["### The size found on made-up cost curves", "", *printed.getvalue().splitlines(), ""]


SECTIONS: dict[str, Callable[[Settings], list[str]]] = {
    "mixed": mixed,
    "rare": rare,
    "workers": workers,
    "session": session,
    "adaptive": adaptive,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Batching by length on real texts, beside loops and other systems.")
    parser.add_argument("--quick", action="store_true", help="100 texts and one round: to see that all of it runs")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--texts", type=int, help="how many mixed texts (600)")
    parser.add_argument("--rounds", type=int, help="how often each case runs (3)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    default = Settings(texts=100, rounds=1) if given.quick else Settings()
    settings = Settings(texts=given.texts or default.texts, rounds=given.rounds or default.rounds)
    lines = []
    for name in [given.only] if given.only else SECTIONS:
        lines += (found := SECTIONS[name](settings))
        print("\n".join(found), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
