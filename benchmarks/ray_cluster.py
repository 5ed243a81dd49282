"""Penstock on a Ray cluster, beside plain Ray Data on the same cluster and Penstock's own engine on the same cores.

    pip install 'penstock[bench]'
    python benchmarks/ray_cluster.py [--quick] [--only identity|texts] [--rounds N] [--markdown FILE]

Every case runs in a fresh process with a fresh cluster on this machine: one node with two cores. Its clock runs from before
the pipeline is built until its last row is consumed: imports and the start of the cluster are not on it, actors and worker
processes are, with their imports and the loads of their models. Ray Data encodes texts with several batch sizes; the
fastest of a round counts. Ratios are taken within a round; their median is held against the target. Nothing is asserted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import Case, Outcome, run_rounds
from report import Check, Outcomes, section, speedup

SHIPPED = "Penstock on Ray, its own handler"
ON_RAY, OWN, BEST = "Penstock on Ray", "Penstock, own engine", "the fastest Ray Data"
BATCH_SIZES = (8, 32, 128)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run."""

    rows: int = 10_000_000
    texts: int = 1_500  # a job of a minute
    rounds: int = 3


def identity(settings: Settings) -> list[str]:
    """Three cheap functions, and a model that returns its batch of 1,024."""
    options = {"rows": settings.rows, "batch_size": 1_024}
    rivals = {
        "Ray Data, functions in tasks": "rivals:ray_identity",
        "Ray Data, all in actors": "ray_contenders:ray_identity_in_actors",
    }
    cases = [
        *_ours("ray_contenders:penstock_identity", options),
        *[_case(name, call, options) for name, call in rivals.items()],
    ]
    outcomes = run_rounds(cases, settings.rounds)
    checks = [speedup(outcomes, ON_RAY, rival, at_least=3) for rival in rivals]
    checks += [speedup(outcomes, ON_RAY, OWN, at_least=0.8)]
    return section(f"Identity, {settings.rows:,} integers, batch size 1,024", outcomes, checks)


def texts(settings: Settings) -> list[str]:
    """A text encoder over film reviews and short questions."""
    options = {"count": settings.texts}
    rivals = [
        _case(f"Ray Data, {size}", "ray_contenders:ray_texts", {**options, "batch_size": size}) for size in BATCH_SIZES
    ]
    shipped = _case(SHIPPED, "ray_contenders:penstock_texts_as_shipped", {**options, "engine": "ray"})
    cases = [*_ours("ray_contenders:penstock_texts", options), shipped, *rivals]
    outcomes = _with_best(run_rounds(cases, settings.rounds))
    answering = {name: [_answering(done) for done in runs] for name, runs in outcomes.items()}
    checks = [
        speedup(outcomes, SHIPPED, BEST, at_least=2),
        speedup(outcomes, ON_RAY, BEST, at_least=2),
        speedup(outcomes, ON_RAY, OWN, at_least=0.8),
        _once_loaded(speedup(answering, ON_RAY, BEST, at_least=2)),
        _once_loaded(speedup(answering, ON_RAY, OWN, at_least=0.8)),
    ]
    return section(f"Texts of mixed lengths, {settings.texts} texts", outcomes, checks)


def _ours(call: str, options: dict[str, Any]) -> list[Case]:
    return [_case(ON_RAY, call, {**options, "engine": "ray"}), _case(OWN, call, {**options, "engine": "local"})]


def _case(name: str, call: str, options: dict[str, Any]) -> Case:
    return Case(name=name, call=call, options=options)


def _with_best(outcomes: Outcomes) -> Outcomes:
    """And the fastest rival of each round."""
    rivals = [runs for name, runs in outcomes.items() if name.startswith("Ray Data")]
    return {**outcomes, BEST: [min(runs, key=_seconds) for runs in zip(*rivals, strict=True)]}


def _seconds(done: Outcome) -> float:
    return float("inf") if done.error else done.seconds


def _answering(done: Outcome) -> Outcome:
    return replace(done, seconds=done.figures.get("answering", 0.0))


def _once_loaded(check: Check) -> Check:
    return replace(check, label=f"{check.label}, from the first model that is loaded")


SECTIONS: dict[str, Callable[[Settings], list[str]]] = {"identity": identity, "texts": texts}


def main() -> None:
    parser = argparse.ArgumentParser(description="Penstock on a Ray cluster, beside Ray Data and its own engine.")
    parser.add_argument("--quick", action="store_true", help="1,000,000 rows, 100 texts and one round: to see that all runs")
    parser.add_argument("--only", choices=SECTIONS, help="one section of the two")
    parser.add_argument("--rounds", type=int, help="how often each case runs (3)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    settings = Settings(rows=1_000_000, texts=100, rounds=1) if given.quick else Settings()
    settings = replace(settings, rounds=given.rounds or settings.rounds)
    lines = []
    for name in [given.only] if given.only else SECTIONS:
        lines += (found := SECTIONS[name](settings))
        print("\n".join(found), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
