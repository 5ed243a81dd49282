"""Columns through a model, Parquet to Parquet: Penstock beside the loops that one would write, Ray Data and Daft.

    pip install 'penstock[bench]'
    python benchmarks/columns.py [--quick] [--only texts|images|vectors|handling] [--rounds N] [--rows N] [--markdown FILE]

Every case runs in a fresh process. For texts, images and vectors its clock is for the whole job: from the start of the
process, imports included, until the last file is written. What has a setting to choose (batch size, threads, processes) is
tried first with each, on a third of the rows; the best one runs in the rounds, beside Penstock with no setting. Ratios and
differences are taken within a round; their median is held against the target. Every case reads back what it wrote: a row is
wrong if it is missing, changed, or has another answer than a plain loop's. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import Case, Outcome, run_case, run_rounds
from report import Check, Outcomes, job_speedup, section, speedup
from workload import MODEL_FILE

PENSTOCK, LOOP, LOADER, RAY, DAFT = "Penstock, no setting", "loop", "loop, DataLoader", "Ray Data", "Daft"
LOOP_BATCHES, RIVAL_BATCHES = (8, 16, 32), {"texts": (32, 128), "images": (8, 32)}
THREADS = sorted({1, 2, os.cpu_count() or 1})  # of torch in a loop; its own choice is the number of cores
CLASSIFIER = "logistic regression"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run."""

    texts: int = 1_200
    images: int = 500
    rows: int = 1_000_000
    handled_texts: int = 400
    handled_images: int = 200
    rounds: int = 3
    tries: bool = True  # each setting of the loops and rivals, not only the first one


QUICK = Settings(texts=60, images=24, rows=100_000, handled_texts=60, handled_images=24, rounds=1, tries=False)


def texts(settings: Settings) -> list[str]:
    """Sentence vectors of film reviews and questions."""
    return _compared("texts", f"{settings.texts:,} mixed texts, MiniLM", settings.texts, {LOOP: "text loop"}, settings)


def images(settings: Settings) -> list[str]:
    """Logits of photos."""
    loops = {LOOP: "image loop", LOADER: "image loop with a DataLoader"}
    return _compared("images", f"{settings.images:,} photos, EfficientNet-lite0", settings.images, loops, settings)


def _compared(kind: str, title: str, count: int, loops: dict[str, str], settings: Settings) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        few = -(-count // 3)
        if error := _not_made(f"columns_inputs:make_{kind}", folder=folder, count=count, few=few):
            return [error, ""]
        families = {name: _loop_cases(name, contender, kind) for name, contender in loops.items()}
        families |= {RAY: _ray_cases(kind), DAFT: _daft_cases(kind)}
        trial: Outcomes = {}
        if settings.tries:
            tried = [case for cases in families.values() for case in cases]
            trial = run_rounds([_over(case, folder, "few") for case in tried], 1)
        best = {name: _fastest(trial, cases) for name, cases in families.items()}
        ours = _case(PENSTOCK, "penstock", kind)
        outcomes = run_rounds([_over(case, folder, "good") for case in (ours, *best.values())], settings.rounds)
    checks = [
        *[job_speedup(outcomes, PENSTOCK, best[name].name, at_least=1.0) for name in loops],
        *[job_speedup(outcomes, PENSTOCK, best[name].name, at_least=1.5) for name in (RAY, DAFT)],
        _wrong(outcomes),
    ]
    return [
        *(section(f"{title}: settings tried, {few:,} rows", trial, []) if trial else []),
        *section(title, outcomes, checks),
    ]


def _loop_cases(name: str, contender: str, kind: str) -> list[Case]:
    return [
        _case(f"{name}, batch {size}, {_plural(threads, 'thread')}", contender, kind, batch_size=size, threads=threads)
        for threads in reversed(THREADS)
        for size in LOOP_BATCHES
    ]


def _ray_cases(kind: str) -> list[Case]:
    return [_case(f"{RAY}, batch {size}", "ray", kind, batch_size=size) for size in RIVAL_BATCHES[kind]]


def _daft_cases(kind: str) -> list[Case]:
    places = {0: "in its process", 2: "2 processes"}
    return [
        _case(f"{DAFT}, batch {size}, {place}", "daft", kind, batch_size=size, processes=processes)
        for processes, place in places.items()
        for size in RIVAL_BATCHES[kind]
    ]


def _case(name: str, contender: str, kind: str, **options: Any) -> Case:
    return Case(name=name, call="columns_contenders:run", options={"contender": contender, "kind": kind, **options})


def _over(case: Case, folder: str, source: str) -> Case:
    return replace(case, options={**case.options, "source": f"{folder}/{source}"})


def _fastest(outcomes: Outcomes, cases: Sequence[Case]) -> Case:
    """The first one where none was tried, or none worked."""
    return min(cases, key=lambda case: min(map(_job, outcomes.get(case.name, [])), default=0.0))


def _job(done: Outcome) -> float:
    return float("inf") if done.error else done.job


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _not_made(call: str, **options: Any) -> str | None:
    """Make input files, in a process of their own; say why if that failed."""
    made = run_case(Case(name="input files", call=call, options=options))
    return f"The input files could not be made: {made.error}" if made.error else None


def _wrong(outcomes: Outcomes) -> Check:
    """The most wrong rows of any run: the first number of its checksum. No result where a run failed."""
    runs = [done for each in outcomes.values() for done in each]
    is_whole = all(done.error is None for done in runs)
    worst = [max(float(str(done.checksum).split()[0]) for done in runs)] if is_whole else []
    return Check(label="rows that are wrong, in the worst run of all cases", values=worst, limit=0)


def vectors(settings: Settings) -> list[str]:
    """A model that costs next to nothing: 384 floats for each row."""
    in_process, one, two, by_hand = "Penstock, workers=0", "Penstock, workers=1", "Penstock, workers=2", "pyarrow and NumPy"
    with tempfile.TemporaryDirectory() as folder:
        if error := _not_made("columns_vectors:make", folder=folder, rows=settings.rows):
            return [error, ""]
        cases = [
            Case(name=by_hand, call="columns_vectors:loop", options={"folder": folder}),
            *[
                Case(name=name, call="columns_vectors:penstock", options={"folder": folder, "workers": workers})
                for workers, name in enumerate((in_process, one, two))
            ],
        ]
        outcomes = run_rounds(cases, settings.rounds)
    rounds = zip(outcomes[in_process], outcomes[by_hand], strict=True)
    more = [ours.cpu - other.cpu for ours, other in rounds if not ours.error and not other.error]
    checks = [
        Check(label=f"{in_process}: CPU time above that of {by_hand}", values=more, limit=0.7, unit=" s"),
        job_speedup(outcomes, two, one, at_least=1.8),
        _wrong(outcomes),
    ]
    return section(f"{settings.rows:,} short texts to 384 floats each", outcomes, checks)


def handling(settings: Settings) -> list[str]:
    """What exception handling costs: where no row fails, and where one of a hundred does. The clock starts with the
    pipeline."""
    lines = []
    for kind, count in (("texts", settings.handled_texts), ("images", settings.handled_images)):
        with tempfile.TemporaryDirectory() as folder:
            if error := _not_made(f"columns_inputs:make_{kind}", folder=folder, count=count, few=0):
                lines += [error, ""]
                continue
            lines += _handled(f"{count:,} {kind}", "columns_handling:run", f"{folder}/good", folder, settings, kind=kind)
    return [*lines, *_classified(settings)]


def _classified(settings: Settings) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        error = _not_made("workload:make_tables", folder=folder, rows=settings.rows, kinds=[CLASSIFIER])
        if error := error or _not_made("columns_handling:spoil", folder=folder):
            return [error, ""]
        model_path = str(Path(folder, MODEL_FILE.format(kind=CLASSIFIER)))
        lines = []
        for workers, place in ((0, "in-process"), (None, "workers")):
            title = f"{CLASSIFIER}, {settings.rows:,} rows of 20 columns, {place}"
            options = {"model_path": model_path, "workers": workers}
            lines += _handled(title, "columns_handling:classify", f"{folder}/input", folder, settings, **options)
        return lines


def _handled(title: str, call: str, good: str, folder: str, settings: Settings, **options: Any) -> list[str]:
    plain, handled, failing = "no handling", "handling", "handling, 1% of rows fail"
    sources = [(plain, good, False), (handled, good, True), (failing, f"{folder}/bad", True)]
    cases = [
        Case(name=name, call=call, options={**options, "source": source, "handling": is_handled})
        for name, source, is_handled in sources
    ]
    outcomes = run_rounds(cases, settings.rounds)
    checks = [
        speedup(outcomes, handled, plain, at_least=0.95),
        speedup(outcomes, failing, plain, at_least=0.6),
        _wrong(outcomes),
    ]
    return section(f"Exception handling: {title}", outcomes, checks)


SECTIONS: dict[str, Callable[[Settings], list[str]]] = {
    "texts": texts,
    "images": images,
    "vectors": vectors,
    "handling": handling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Columns through models, beside loops and other systems.")
    parser.add_argument("--quick", action="store_true", help="few rows, one round, one setting: to see that all of it runs")
    parser.add_argument("--only", choices=SECTIONS, help="one section of the four")
    parser.add_argument("--rounds", type=int, help="how often each case runs (3)")
    parser.add_argument("--rows", type=int, help="of the tables of vectors and numbers (1,000,000)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    default = QUICK if given.quick else Settings()
    settings = replace(default, rounds=given.rounds or default.rounds, rows=given.rows or default.rows)
    lines = []
    for name in [given.only] if given.only else SECTIONS:
        lines += (found := SECTIONS[name](settings))
        print("\n".join(found), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
