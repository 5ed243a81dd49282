"""Beam's RunInference and Penstock's, in the same runner of Beam's in one run.

    pip install 'penstock[bench]'
    python benchmarks/beam.py [--quick] [--only CASE ...] [--rounds N] [--markdown FILE]

texts: an encoder over texts of mixed lengths. identity: a model that gives back its rows, so that all that is measured is
around it. images: rows of an image's size from two worker processes to one model (large_model=True). single rows: bundles
of one row from 12 threads, to the DoFns of both, which are called directly, without a runner. Every case
runs in a fresh process, its clock from before the pipeline is built until its last row is consumed. Ratios are taken within
a round; their median is held against the target. Nothing is asserted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from measure import Case, run_rounds
from report import Check, Outcomes, section, speedup

OURS, BEAM = "Penstock", "Beam"
SHIPPED = "Penstock, its own handler"


def cases_of(what: str, quick: bool) -> list[Case]:
    def case(name: str, call: str, **options: Any) -> Case:
        return Case(name=name, call=f"beam_contenders:{call}", options=options)

    if what == "texts":
        texts = {"kind": "mixed", "count": 200 if quick else 600}
        found = [
            case(f"{BEAM}, {kind} buckets, batches of {n}", "texts", base="beam", batch_size=n, buckets=kind, **texts)
            for kind in ("its own", "fine")
            for n in (8, 32)
        ]
        found += [case(SHIPPED, "texts_as_shipped", **texts)]
        both = {OURS: "penstock", BEAM: "beam"}
        found += [case(f"{name}, two copies", "texts", base=base, copies=2, **texts) for name, base in both.items()]
        return [*[case(name, "texts", base=base, **texts) for name, base in both.items()], *found]
    if what == "identity":
        rows = {"rows": 50_000 if quick else 400_000}
        sized = [
            case(f"{name}, batches of 64", "identity", base=name.lower(), batch_size=64, **rows) for name in (OURS, BEAM)
        ]
        return [case(OURS, "identity", base="penstock", **rows), case(BEAM, "identity", base="beam", **rows), *sized]
    if what == "images":
        rows = {"rows": 1_000 if quick else 6_000}
        sized = [case(f"{name}, batches of 32", "images", base=name.lower(), batch_size=32, **rows) for name in (OURS, BEAM)]
        return [case(OURS, "images", base="penstock", **rows), case(BEAM, "images", base="beam", **rows), *sized]
    single = {"rows": 1_200 if quick else 6_000, "threads": 12}
    return [case(OURS, "single_rows", base="penstock", **single), case(BEAM, "single_rows", base="beam", **single)]


def checks_of(what: str, outcomes: Outcomes) -> list[Check]:
    if what == "texts":
        best = min((name for name in outcomes if "buckets" in name), key=lambda name: sum(o.seconds for o in outcomes[name]))
        copies = [f"{name}, two copies" for name in (OURS, BEAM)]
        ours = [
            speedup(outcomes, name, rival, limit) for name in (OURS, SHIPPED) for rival, limit in ((best, 1.0), (BEAM, 2.0))
        ]
        return [*ours, speedup(outcomes, *copies, 2.0)]
    if what == "identity":
        sized = [f"{name}, batches of 64" for name in (OURS, BEAM)]
        return [speedup(outcomes, OURS, BEAM, 1.0), speedup(outcomes, *sized, 1.0)]
    if what == "images":
        sized = [f"{name}, batches of 32" for name in (OURS, BEAM)]
        return [speedup(outcomes, OURS, BEAM, 3.0), speedup(outcomes, *sized, 3.0)]
    return [speedup(outcomes, OURS, BEAM, 5.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["texts", "identity", "images", "single rows"]
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    given = parser.parse_args()
    lines: list[str] = []
    for what in given.only:
        outcomes = run_rounds(cases_of(what, given.quick), given.rounds)
        lines += section(what, outcomes, checks_of(what, outcomes))
    print("\n".join(lines))
    if given.markdown is not None:
        given.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
