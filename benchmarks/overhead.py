"""What Penstock costs, against a bare loop, Apache Beam, Ray Data and Daft on the same rows in the same run.

    pip install 'penstock[bench]'
    python benchmarks/overhead.py [--quick] [--only overhead|parquet|daft|memory|start] [--rounds N] [--markdown FILE]

Every case runs in a fresh process, its clock from before the pipeline is built until its last row is consumed.
Not on the clock: imports in that process, and `ray.init()`. On the clock: the worker processes that Penstock starts,
with their imports, and the actors that Ray starts. Ratios are taken within a round; their median is held against the
target, and the spread over the rounds stands beside it. Cases that did the same work show the same checksum.
Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Case, run_case, run_rounds
from report import cost, growth, job_speedup, section, speedup, time_limit
from workload import MODEL_FILE

CLASSIFIERS = ["logistic regression", "gradient boosting"]
IN_PROCESS, WORKERS, THREADS = "Penstock in-process", "Penstock workers", "Penstock in-process, 2 threads"
OWN_COMPRESSION = "Penstock workers, zstd"
NO_SETTING = "Penstock, no setting"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run."""

    rows: int = 1_000_000
    rounds: int = 3


def overhead(settings: Settings) -> list[str]:
    """A handler that returns its batch, three Maps before it."""
    return [line for batch_size in (64, 1024) for line in _identity(settings, batch_size)]


def _identity(settings: Settings, batch_size: int) -> list[str]:
    options = {"rows": settings.rows, "batch_size": batch_size}
    cases = [
        Case(name="bare loop", call="workload:bare_loop", options=options),
        *_both_modes("ours:identity", options),
        Case(name="Beam", call="rivals:beam_identity", options=options),
        Case(name="Ray Data", call="rivals:ray_identity", options=options),
    ]
    outcomes = run_rounds(cases, settings.rounds)
    checks = [
        speedup(outcomes, WORKERS, "Beam", at_least=5),
        speedup(outcomes, WORKERS, "Ray Data", at_least=3),
        speedup(outcomes, IN_PROCESS, "Beam", at_least=5),
        speedup(outcomes, IN_PROCESS, "Ray Data", at_least=3),
        cost(outcomes, IN_PROCESS, "bare loop", at_most=2),
    ]
    return section(f"Identity handler, {settings.rows:,} integers, batch size {batch_size}", outcomes, checks)


def parquet(settings: Settings) -> list[str]:
    """Parquet in, a scikit-learn classifier over 20 float columns, Parquet out; snappy, but for the case that says not."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": folder, "rows": settings.rows, "kinds": CLASSIFIERS}
        made = run_case(Case(name="input files", call="workload:make_tables", options=options))
        if made.error:
            return [f"The input files could not be made: {made.error}", ""]
        return [line for kind in CLASSIFIERS for line in _classify(settings, kind, folder)]


def _classify(settings: Settings, kind: str, folder: str) -> list[str]:
    options = {"folder": folder, "model_path": str(Path(folder, MODEL_FILE.format(kind=kind)))}
    workers = len(os.sched_getaffinity(0))  # without this number, the run is a short job
    cases = [
        Case(name=NO_SETTING, call="ours:parquet", options=options),
        Case(name=IN_PROCESS, call="ours:parquet", options={**options, "workers": 0}),
        Case(name=WORKERS, call="ours:parquet", options={**options, "workers": workers}),
        Case(name=THREADS, call="ours:parquet", options={**options, "workers": 0, "threads_per_worker": 2}),
        Case(
            name=OWN_COMPRESSION,
            call="ours:parquet",
            options={**options, "workers": workers, "own_compression": True},
        ),
        Case(name="Daft", call="rivals:daft_parquet", options=options),
        Case(name="Ray Data", call="rivals:ray_parquet", options=options),
    ]
    outcomes = run_rounds(cases, settings.rounds)
    checks = [
        job_speedup(outcomes, NO_SETTING, "Daft", at_least=0.9),
        cost(outcomes, NO_SETTING, THREADS, at_most=1.2),
    ]
    checks += [
        check(outcomes, ours, rival, at_least=1)
        for check in (job_speedup, speedup)
        for ours in (WORKERS, OWN_COMPRESSION, THREADS, IN_PROCESS)
        for rival in ("Daft", "Ray Data")
    ]
    return section(f"Parquet to Parquet, {kind} over 20 columns, {settings.rows:,} rows", outcomes, checks)


def daft(settings: Settings) -> list[str]:
    """The same job with no setting beside Daft, also with ten times as many rows: whole processes, imports on the clock."""
    lines = []
    for rows in (settings.rows, 10 * settings.rows):
        with tempfile.TemporaryDirectory() as folder:
            made = {"folder": folder, "rows": rows, "kinds": CLASSIFIERS}
            run_case(Case(name="input files", call="workload:make_tables", options=made))
            for kind in CLASSIFIERS:
                options = {"folder": folder, "model_path": str(Path(folder, MODEL_FILE.format(kind=kind)))}
                cases = [
                    Case(name=NO_SETTING, call="ours:parquet", options=options),
                    Case(name="Daft", call="rivals:daft_parquet", options=options),
                ]
                outcomes = run_rounds(cases, settings.rounds)
                checks = [job_speedup(outcomes, NO_SETTING, "Daft", at_least=1)]
                lines += section(f"{kind}, {rows:,} rows, whole process", outcomes, checks)
    return lines


def _both_modes(call: str, options: dict[str, Any]) -> list[Case]:
    modes = {IN_PROCESS: 0, WORKERS: None}  # Pipeline(workers=...)
    return [Case(name=name, call=call, options={**options, "workers": mode}) for name, mode in modes.items()]


def memory(settings: Settings) -> list[str]:
    """The peak of all processes together, at a number of rows and at ten times as many."""
    sources = {"range of rows": False, "FlatMap of one row": True}
    names = {(source, rows): f"{source}, {rows:,}" for source in sources for rows in (settings.rows, 10 * settings.rows)}
    cases = [
        Case(
            name=name,
            call="ours:generate",
            options={"rows": rows, "one_row_source": sources[source]},
            watch_memory=True,
        )
        for (source, rows), name in names.items()
    ]
    outcomes = run_rounds(cases, settings.rounds)
    small, large = settings.rows, 10 * settings.rows
    checks = [growth(outcomes, names[source, large], names[source, small], at_most=1.2) for source in sources]
    return section("Memory, generated rows into text files", outcomes, checks)


def start(settings: Settings) -> list[str]:
    """What a small script waits for. The first run compiles the package, as installing it does, and is thrown away."""
    imported, four_rows = "import penstock", "four rows, Create to collect()"
    cases = [Case(name=imported, call="ours:import_penstock"), Case(name=four_rows, call="ours:four_rows")]
    run_rounds(cases, 1)
    outcomes = run_rounds(cases, 2 * settings.rounds + 1)
    checks = [time_limit(outcomes, imported, at_most=0.2), time_limit(outcomes, four_rows, at_most=0.05)]
    return section("Start", outcomes, checks)


SECTIONS: dict[str, Callable[[Settings], list[str]]] = {
    "overhead": overhead,
    "parquet": parquet,
    "daft": daft,
    "memory": memory,
    "start": start,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Penstock's overhead, beside other systems on the same work.")
    parser.add_argument("--quick", action="store_true", help="100,000 rows and one round: to see that all of it runs")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--rounds", type=int, help="how often each case runs (3)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    settings = Settings(rows=100_000, rounds=given.rounds or 1) if given.quick else Settings(rounds=given.rounds or 3)
    lines = []
    for name in [given.only] if given.only else SECTIONS:
        lines += (found := SECTIONS[name](settings))
        print("\n".join(found), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
