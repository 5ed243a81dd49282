"""Texts to vectors on one GPU, Parquet to Parquet: Penstock with no setting beside SentenceTransformer.encode.

    pip install 'penstock[huggingface]'
    python benchmarks/gpu_texts.py [--rows N] [--rounds N] [--only jobs|device] [--markdown FILE]
    python benchmarks/gpu_texts.py --device cpu --rows 200 --layers 2    # to see that it runs

An encoder the size of BERT-base with random weights, bf16; texts of 77 tokens on average in 16 files. Every case runs in a
fresh process, and its clock is for the whole job: from the start of the process, imports included, until the last file is
written. The rate of Penstock is that of its model from when a quarter of the rows is answered until all are, in runs of
their own: a handler notes when each batch was. The rate of encode() is that of the call alone. All cases run in the first
round; in the others run Penstock, with no setting and with 14 workers, and the encode() that was the fastest. The device
alone has its rows tokenised, sorted and padded in memory. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_report import figures_of, told, wrong
from measure import Case, Outcome, run_case, run_rounds
from report import Check, Outcomes, job_speedup, section

PENSTOCK, NOTED, WORKERS = "Penstock, no setting", "Penstock, batches noted", "Penstock, many workers, noted"
BATCHES = (4_096, 8_192, 1_024)  # of encode()
BUDGETS = [kilo << 10 for kilo in (64, 128, 256, 512)]  # padded tokens in a batch of the device alone


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run, and where."""

    rows: int
    layers: int
    device: str
    rounds: int

    @property
    def workers(self) -> int:
        return 14 if self.device != "cpu" else 2

    @property
    def budgets(self) -> list[int]:
        return BUDGETS if self.device != "cpu" else BUDGETS[:1]


def device_alone(folder: str, settings: Settings) -> tuple[list[str], Outcome]:
    """What the device gives for batches that are ready, by their size."""
    options = {"folder": folder, "device": settings.device, "budgets": settings.budgets}
    done = run_case(Case(name="device alone", call="gpu_texts_contenders:device_alone", options=options))
    lines = [f"### Device alone: {settings.rows:,} rows that are tokenised, sorted and padded", ""]
    if done.error:
        return [*lines, f"failed: {done.error}", ""], done
    lines += ["| padded tokens in a batch | rows/s, new shapes | shapes seen | kernels without plans |", "|---|---|---|---|"]
    for budget in settings.budgets:
        rates = " | ".join(f"{done.figures[f'{budget} {what}']:,.0f}" for what in ("new", "seen", "unplanned"))
        lines.append(f"| {budget:,} | {rates} |")
    return [*lines, ""], done


def jobs(folder: str, settings: Settings, alone: Outcome | None) -> list[str]:
    """Penstock and encode(), whole jobs."""
    shared = {"folder": folder, "device": settings.device}
    contenders = "gpu_texts_contenders"
    ours = Case(name=PENSTOCK, call=f"{contenders}:penstock", options=shared)
    noted = Case(name=NOTED, call=f"{contenders}:penstock_noted", options=shared)
    workers = Case(name=WORKERS, call=f"{contenders}:penstock_noted", options={**shared, "workers": settings.workers})
    rivals = [
        Case(name=f"encode, batch {size:,}", call=f"{contenders}:encode", options={**shared, "batch_size": size})
        for size in BATCHES
    ]
    outcomes = run_rounds([ours, *rivals, workers, noted], 1)
    best = max(rivals, key=lambda case: max(figures_of(outcomes[case.name], "rate"), default=0.0))
    if settings.rounds > 1:
        for name, runs in run_rounds([best, noted, workers, ours], settings.rounds - 1).items():
            outcomes[name] += runs
    checks = [*_job_checks(outcomes, best.name, [case.name for case in rivals]), *_device_checks(outcomes, alone)]
    title = f"{settings.rows:,} texts, an encoder of {settings.layers} layers"
    return [*section(title, outcomes, checks), *told(outcomes)]


def _job_checks(outcomes: Outcomes, best: str, rivals: Sequence[str]) -> list[Check]:
    ours, other = figures_of(outcomes[NOTED], "rate"), figures_of(outcomes[best], "rate")
    ratios = [a / b for a, b in zip(ours, other, strict=False)]
    off = [value for runs in outcomes.values() for value in figures_of(runs, "off")]
    whole = [done.job for done in outcomes[PENSTOCK] if not done.error]
    return [
        Check(label=f"{NOTED}: rows/s after a quarter", values=ours, limit=17_000, at_least=True),
        Check(label=f"the same: times the rows/s of {best}", values=ratios, limit=2.5, at_least=True, unit="x"),
        Check(label=f"{PENSTOCK}: whole job", values=whole, limit=25, unit=" s"),
        *[_compared(outcomes, name) for name in rivals],
        wrong(outcomes),
        Check(label="largest error of a vector, in distances of two rows", values=off, limit=0.25),
    ]


def _compared(outcomes: Outcomes, rival: str) -> Check:
    """Over the rounds that both ran in."""
    count = len(outcomes[rival])
    return job_speedup({name: runs[:count] for name, runs in outcomes.items()}, PENSTOCK, rival, at_least=1.0)


def _device_checks(outcomes: Outcomes, alone: Outcome | None) -> list[Check]:
    """Rates held against the best of the device alone, with new shapes or with kernels that plan none: Penstock has both."""
    if alone is None or alone.error:
        return []
    best = max(rate for name, rate in alone.figures.items() if not name.endswith("seen"))
    return [
        Check(
            label=f"{name}: rows/s after a quarter, of the best of the device alone",
            values=[rate / best for rate in figures_of(outcomes[name], "rate")],
            limit=0.8,
            at_least=True,
            unit="x",
        )
        for name in (NOTED, WORKERS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Texts to vectors on one GPU, whole jobs.")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3, help="how often Penstock and the best rival run (3)")
    parser.add_argument("--only", choices=("jobs", "device"), help="one section")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    settings = Settings(rows=given.rows, layers=given.layers, device=given.device, rounds=given.rounds)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": folder, "rows": given.rows, "layers": given.layers, "device": given.device}
        made = run_case(Case(name="input files", call="gpu_texts_inputs:make", options=options))
        lines.append(f"input files: {made.error or f'{made.checksum}, made in {made.job:.1f} s'}")
        alone = None
        if not made.error and given.only != "jobs":
            found, alone = device_alone(folder, settings)
            lines += found
            print("\n".join(lines), flush=True)
        if not made.error and given.only != "device":
            lines += (found := jobs(folder, settings, alone))
            print("\n".join(found), flush=True)
    if made.error:
        print(lines[0])
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
