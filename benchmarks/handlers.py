"""Handlers beside their frameworks: rows/s through Penstock against the framework's own batch call, files included.

    pip install 'penstock[bench]'
    python benchmarks/handlers.py [--quick] [--only ONNX ... | --gpu] [--rounds N] [--markdown FILE]

For each framework, a model over 32 columns of numbers in 4 Parquet files: a network of two layers of 1024 (on a GPU, eight
of 4096), or 200 trees; and an encoder over texts. The loop reads a batch, calls the model, and writes the batch with its
answers, compressed alike. Penstock does the same with no setting but the batch size; of texts it has none, where the loop
has 32. What is held against the target is the whole job, from the start of a process of its own, imports included. Ratios
are taken within a round. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

from handlers_models import ALL, FRAMEWORKS, ON_GPU
from measure import Case, run_case
from report import Check, Outcomes, job_speedup, section

LOOP, PENSTOCK = "its own call", "Penstock"
LEAST = 0.95


def compared(framework: str, rows: int, rounds: int) -> list[str]:
    outcomes: Outcomes = {LOOP: [], PENSTOCK: []}
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": folder, "framework": framework}
        made = run_case(Case(name="make", call="handlers_contenders:make", options={**options, "rows": rows}))
        if made.error:
            return [f"{framework}: the model could not be made: {made.error}", ""]
        calls = [(LOOP, "loop"), (PENSTOCK, "penstock")]
        for number, at in itertools.product(range(rounds), (0, 1)):
            name, call = calls[(number + at) % 2]  # each round begins with the other one
            output = {"output": f"{folder}/{call}{number}"}
            done = run_case(Case(name=name, call=f"handlers_contenders:{call}", options={**options, **output}))
            outcomes[name].append(done)
            print(
                f"  {framework}, round {number + 1}: {name}: {done.error or f'{done.job:.2f} s, {done.checksum}'}",
                flush=True,
            )
    times = [done.figures["model_ms"] for done in outcomes[LOOP] if not done.error]
    what = "texts" if isinstance(ALL[framework].takes, str) else "rows of 32 columns"
    title = f"{framework}, {rows:,} {what}"
    if times:
        title += f", {statistics.median(times):.1f} ms a batch"
    return section(title, outcomes, [*_checks(outcomes)])


def _checks(outcomes: Outcomes) -> list[Check]:
    sums = [{done.checksum for done in runs} for runs in outcomes.values()]
    same = Check(label="sums of answers that differ", values=[float(len(set.union(*sums)) - 1)], limit=0)
    return [job_speedup(outcomes, PENSTOCK, LOOP, at_least=LEAST), same]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rows, one round: to see that it runs")
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--gpu", action="store_true", help="the frameworks that use a GPU, on one, with a larger network")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write the tables there, too")
    given = parser.parse_args()
    rounds = 1 if given.quick else given.rounds
    sizes = {name: ALL[name].rows // (20 if given.quick else 1) for name in (ON_GPU if given.gpu else given.only)}
    lines = [line for name, rows in sizes.items() for line in compared(name, rows, rounds)]
    print("\n".join(lines))
    if given.markdown:
        given.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
