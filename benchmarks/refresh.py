"""What it costs to replace a model while the pipeline runs, and whether every answer is that of the model it names.

    pip install 'penstock[bench]'
    python benchmarks/refresh.py [--quick] [--only CASE ...] [--control SECONDS] [--folder DIR] [--markdown FILE]

Under full load: a PyTorch model of 200 MB, batches of 20 to 50 ms, and rows without end. A new file is put into the watched
folder every 7 seconds. Each batch notes when it began and ended, in whatever process. Of each change, the slower of the
seconds before and after the first answer of the new model is held against the mean while nothing changes, and so is the
slowest of all seconds from the file's arrival until the old model is freed; the longest time between two answers of one
process against two such times and one look (0.2 s). The slowest second and the longest gap are shown also for the time in
which nothing changes: that much is the machine's. "Usual priority" is a handler whose load_model() is the user's own.

Many changes: a model of 50 MB (with keys: one for each of two) is replaced 100 times, as soon as the last one has answered a
batch, while 8 threads submit. Every answer is compared with what the model of its `model_id` answers, and the memory of the
process that holds the model after the last change with that before the first; so is the number of models that are alive in
it. `--control` makes one change only, and the same rows for as long: what memory grows by then is the rows'.

Each case runs in a fresh process. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import Case, Outcome, run_case
from refresh_models import NETWORK_BYTES, TABLE_BYTES
from report import Check, check_table, table

MB = 1_000_000
LOOK = 0.2  # seconds between two looks of whoever holds a model at what is wanted

NETWORKS: dict[str, dict[str, Any]] = {
    "load-process": {"workers": 0, "large_model": False},
    "load-workers": {"workers": 2, "large_model": False},
    "load-host": {"workers": 0, "large_model": True},
    "load-process-own": {"workers": 0, "large_model": False, "own_loading": True},
    "load-workers-own": {"workers": 2, "large_model": False, "own_loading": True},
    "load-host-own": {"workers": 0, "large_model": True, "own_loading": True},
}
TABLES: dict[str, dict[str, Any]] = {
    "many-process": {"workers": 0, "large_model": False, "keyed": False},
    "many-worker": {"workers": 1, "large_model": False, "keyed": False},
    "many-host": {"workers": 1, "large_model": True, "keyed": False},
    "many-worker-keys": {"workers": 1, "large_model": False, "keyed": True},
    "many-host-keys": {"workers": 1, "large_model": True, "keyed": True},
}
PLACES = {
    "load-process": "in the process",
    "load-workers": "in 2 workers",
    "load-host": "in a host",
    "load-process-own": "in the process, usual priority",
    "load-workers-own": "in 2 workers, usual priority",
    "load-host-own": "in a host, usual priority",
    "many-process": "in the process, 8 threads",
    "many-worker": "in a worker, 8 threads",
    "many-host": "in a host, fed by 8 threads",
    "many-worker-keys": "in a worker, 8 threads, 2 keys",
    "many-host-keys": "in a host, fed by 8 threads, 2 keys",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run."""

    folder: str = ""
    changes: int = 5
    many: int = 100
    threads: int = 8
    rest: float = 2.0  # seconds of rows after the last of many changes


def refresh(settings: Settings, names: Sequence[str]) -> list[str]:
    loaded = {name: _run_network(settings, name) for name in _with_files(settings, [n for n in NETWORKS if n in names])}
    many = {name: _run_tables(settings, name) for name in TABLES if name in names}
    return [*(_under_load(settings, loaded) if loaded else []), *(_many(settings, many) if many else [])]


def _with_files(settings: Settings, names: Sequence[str]) -> Sequence[str]:
    if names:
        options = {"folder": settings.folder, "versions": settings.changes}
        made = run_case(Case(name="inputs", call="refresh_runs:make_networks", options=options))
        assert not made.error, f"the models could not be made: {made.error}"
    return names


def _run_network(settings: Settings, name: str) -> Outcome:
    options = {"folder": settings.folder, "versions": settings.changes, **NETWORKS[name]}
    return _told(name, run_case(Case(name=name, call="refresh_runs:network", options=options)))


def _run_tables(settings: Settings, name: str) -> Outcome:
    options = {"folder": settings.folder, "versions": settings.many, "threads": settings.threads, "rest": settings.rest}
    return _told(name, run_case(Case(name=name, call="refresh_runs:tables", options=options | TABLES[name])))


def _told(name: str, done: Outcome) -> Outcome:
    print(f"  {name}: {done.error or f'{done.seconds:.1f} s, {done.rows:,} rows, {done.checksum}'}", file=sys.stderr)
    for word in done.words:
        print(f"    {word}", file=sys.stderr)
    print(f"    {', '.join(f'{what} {value:.4g}' for what, value in done.figures.items())}", file=sys.stderr, flush=True)
    return done


# Under full load.


def _under_load(settings: Settings, outcomes: dict[str, Outcome]) -> list[str]:
    rows = [["the model", "rows/s", "one answer to the next", "file to first answer", "wrong answers", "without a change:"]]
    rows[0] += ["slowest second", "longest gap"]
    checks: list[Check] = []
    for name, done in outcomes.items():
        if done.error:
            rows.append([PLACES[name], done.error, "", "", "", "", "", ""])
            continue
        figures = done.figures
        taken = _each(done, "taken", settings.changes)
        rows.append(
            [
                PLACES[name],
                f"{figures['quiet rate']:,.0f}",
                f"{figures['quiet usual_gap'] * 1_000:.0f} ms",
                f"{min(taken):.1f} - {max(taken):.1f} s",
                f"{figures['wrong']:.0f} of {done.rows:,}",
                "",
                f"{figures['quiet slowest']:.2f} of the mean",
                f"{figures['quiet gap'] * 1_000:.0f} ms",
            ]
        )
        checks += _load_checks(PLACES[name], done, settings.changes)
    title = f"### A model of {NETWORK_BYTES // MB} MB, {settings.changes} changes under full load"
    return [title, "", *table(rows), "", *check_table(checks), ""]


def _load_checks(place: str, done: Outcome, changes: int) -> list[Check]:
    limit = round(2 * done.figures["quiet usual_gap"] + LOOK, 3)
    second, slowest, gaps = (_each(done, name, changes) for name in ("second", "slowest", "gap"))
    return [
        Check(label=f"{place}: second of the change, of the mean", values=second, limit=0.8, at_least=True),
        Check(label=f"{place}: slowest second from file to freed", values=slowest, limit=0.8, at_least=True),
        Check(label=f"{place}: longest gap between answers", values=gaps, limit=limit, unit=" s"),
    ]


def _each(done: Outcome, name: str, changes: int) -> list[float]:
    return [done.figures[f"{name} {at}"] for at in range(changes)]


# Many changes.


def _many(settings: Settings, outcomes: dict[str, Outcome]) -> list[str]:
    rows = [
        [
            "the model",
            "seconds",
            "changes that answered",
            "answers",
            "wrong",
            "MB before",
            "at most",
            "after",
            "models alive",
        ]
    ]
    checks: list[Check] = []
    for name, done in outcomes.items():
        if done.error:
            rows.append([PLACES[name], done.error, "", "", "", "", "", "", ""])
            continue
        figures = done.figures
        held = [f"{figures[what] / MB:,.0f}" for what in ("before", "most", "after")]
        held.append(f"{figures['alive']:.0f}")
        wrong = f"{figures['wrong']:.0f}"
        rows.append([PLACES[name], f"{done.seconds:.0f}", f"{figures['changes']:.0f}", f"{done.rows:,}", wrong, *held])
        grown = [(figures["after"] - figures["before"]) / MB]
        limit = TABLE_BYTES / MB / 2
        checks.append(Check(label=f"{PLACES[name]}: memory gained", values=grown, limit=limit, unit=" MB"))
        checks.append(Check(label=f"{PLACES[name]}: wrong answers", values=[figures["wrong"]], limit=0))
    many = "One change" if settings.many == 1 else f"{settings.many} changes"
    title = f"### {many} of a model of {TABLE_BYTES // MB} MB"
    return [title, "", *table(rows), "", *check_table(checks), ""]


def main() -> None:
    names = [*NETWORKS, *TABLES]
    parser = argparse.ArgumentParser(description="Models that change while the pipeline runs: what that costs.")
    parser.add_argument("--quick", action="store_true", help="few changes: to see that all of it runs")
    parser.add_argument("--only", choices=names, nargs="+", metavar="CASE", help=f"of {', '.join(names)}")
    what = "of many changes, make one, and go on with the rows for so long: the memory that is not the models'"
    parser.add_argument("--control", type=float, metavar="SECONDS", help=what)
    parser.add_argument("--folder", help="where files go, 1.5 GB of them (a temporary folder)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    default = Settings(changes=2, many=5) if given.quick else Settings()
    if given.control is not None:
        default = replace(default, many=1, rest=given.control)
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="penstock-refresh-") as folder:
        lines = refresh(replace(default, folder=folder), given.only or names)
    print("\n".join(lines), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
