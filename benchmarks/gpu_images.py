"""Photos to logits on one GPU, Parquet to Parquet: Penstock with no setting beside torch's DataLoader.

    pip install 'penstock[torch,images]' transformers
    python benchmarks/gpu_images.py [--rows N] [--rounds N] [--only jobs|decode] [--markdown FILE]
    python benchmarks/gpu_images.py --device cpu --rows 200 --layers 1    # to see that it runs

JPEG files of 320 by 240 pixels in 16 files of Parquet; a model the shape of ResNet-50 with random weights, bf16, channels
last. Every case runs in a fresh process, and its clock is for the whole job: from the start of the process, imports
included, until the last file is written. The DataLoader is tried first with each number of workers, on a third of the rows;
the best one runs in the rounds. The rate of Penstock is that of its model from when a quarter of the rows is
answered until all are: its handler notes when each batch was. Decoding alone has a process for
each core, on a third of the rows. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from gpu_report import figures_of, told, wrong
from measure import Case, run_case, run_rounds
from report import Check, Outcomes, job_speedup, section

PENSTOCK, DECODE = "Penstock, no setting", "decoding alone, all cores"
WORKERS = (14, 16, 8) if (os.cpu_count() or 1) > 8 else (1, 2)  # of the DataLoader
CONTENDERS = "gpu_images_contenders"


def jobs(folder: str, given: argparse.Namespace) -> list[str]:
    """Penstock, the best DataLoader and decoding alone, by turns."""
    shared = {"folder": folder, "device": given.device, "layers": given.layers}
    trial = run_rounds([_loader(workers, "few", shared) for workers in WORKERS], 1)
    workers = max(WORKERS, key=lambda each: max(figures_of(trial[_loader_name(each)], "rate"), default=0.0))
    rival = _loader(workers, "images", shared)
    options = {**shared, "source": "images"}
    ours = Case(name=PENSTOCK, call=f"{CONTENDERS}:penstock", options=options)
    outcomes = run_rounds([ours, rival, _decode_case(folder)], given.rounds)
    few = section(f"DataLoader: workers tried, {-(-given.rows // 3):,} rows", trial, [])
    title = f"{given.rows:,} photos, the shape of ResNet-50"
    return [*few, *section(title, outcomes, _checks(outcomes, rival.name)), *told(outcomes)]


def _loader_name(workers: int) -> str:
    return f"DataLoader, {workers} workers"


def _loader(workers: int, source: str, shared: dict[str, Any]) -> Case:
    options = {**shared, "source": source, "workers": workers}
    return Case(name=_loader_name(workers), call=f"{CONTENDERS}:loader", options=options)


def _decode_case(folder: str) -> Case:
    return Case(name=DECODE, call=f"{CONTENDERS}:decode", options={"folder": folder, "source": "few"})


def _checks(outcomes: Outcomes, rival: str) -> list[Check]:
    rates = zip(figures_of(outcomes[PENSTOCK], "rate"), figures_of(outcomes[DECODE], "rate"), strict=False)
    shares = [ours / decoding for ours, decoding in rates if decoding]
    written = {name: runs for name, runs in outcomes.items() if name != DECODE}
    off = [value for runs in written.values() for value in figures_of(runs, "off")]
    return [
        job_speedup(outcomes, PENSTOCK, rival, at_least=1.05),
        Check(label=f"{PENSTOCK}: rows/s after a quarter, of {DECODE}", values=shares, limit=0.85, at_least=True, unit="x"),
        wrong(written),
        Check(label="largest error of logits, in distances of two rows", values=off, limit=0.25),
    ]


def decode(folder: str, given: argparse.Namespace) -> list[str]:
    """Only how fast all cores decode."""
    outcomes = run_rounds([_decode_case(folder)], given.rounds)
    return [*section(DECODE, outcomes, []), *told(outcomes)]


SECTIONS = {"jobs": jobs, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(description="Photos to logits on one GPU, whole jobs.")
    parser.add_argument("--rows", type=int, default=96_000)
    parser.add_argument("--layers", type=int, default=6, help="blocks in each of the four stages, at most (6: all of them)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3, help="how often each case runs (3)")
    parser.add_argument("--only", choices=SECTIONS, default="jobs", help="decode: without the jobs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": folder, "rows": given.rows, "layers": given.layers, "device": given.device}
        made = run_case(Case(name="input files", call="gpu_images_inputs:make", options=options))
        lines = [f"input files: {made.error or f'{made.checksum}, made in {made.job:.1f} s'}", ""]
        print(lines[0], flush=True)
        if not made.error:
            lines += (found := SECTIONS[given.only](folder, given))
            print("\n".join(found), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
