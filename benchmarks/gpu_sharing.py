"""One GPU for several processes: copies of one encoder, two encoders, MPS, and a neighbour that takes its memory.

    pip install 'penstock[huggingface]'
    python benchmarks/gpu_sharing.py [--rows N] [--only SECTION] [--markdown FILE]
    python benchmarks/gpu_sharing.py --device cpu --rows 200 --layers 2    # to see that it runs

Whole jobs over the texts of gpu_texts.py, each in a fresh process. Sections: `jobs` (model_copies=1 and 2; two different
encoders in one pipeline beside two jobs one after the other; the GPU listed twice in CUDA_VISIBLE_DEVICES, as if there were
two), `mps` (these again, under CUDA's multi-process service where its daemon can be started), `memory` (another process
takes the memory after a third of the rows and gives it back).
`span` is from the first call of a model to the end of the last: loading is not in it. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_mps import mps
from gpu_report import figures_of, told, wrong
from measure import Case, Outcome, run_case, run_rounds
from report import Check, Outcomes, section

CONTENDERS = "gpu_sharing_contenders"
ONE, TWO, LISTED = "model_copies=1", "model_copies=2", "the GPU listed twice"
BOTH, SECOND = "two encoders in one pipeline", "the second encoder alone"
MPS = ", MPS"  # at the end of a case's name


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run, and where."""

    rows: int
    memory_rows: int
    layers: int
    device: str
    hold: float
    rounds: int

    def cases(self, folder: str) -> list[Case]:
        """The first encoder alone is the one of model_copies=1."""
        found = [
            self._case(ONE, "copies", folder, model_copies=1),
            self._case(TWO, "copies", folder, model_copies=2),
            self._case(BOTH, "encoders", folder, names=["a", "b"]),
            self._case(SECOND, "encoders", folder, names=["b"]),
        ]
        return found if self.device == "cpu" else [*found, self._case(LISTED, "copies", folder, visible="0,0")]

    def _case(self, name: str, function: str, folder: str, **options: object) -> Case:
        return Case(name=name, call=f"{CONTENDERS}:{function}", options={"folder": folder, "device": self.device, **options})


def jobs(folder: str, settings: Settings, outcomes: Outcomes) -> list[str]:
    outcomes |= run_rounds(settings.cases(folder), settings.rounds)
    checks = [*_compared(outcomes, TWO, [ONE]), *_compared(outcomes, BOTH, [ONE, SECOND])]
    if LISTED in outcomes:
        checks += _compared(outcomes, LISTED, [ONE])
    title = f"{settings.rows:,} texts, encoders of {settings.layers} and {max(1, settings.layers // 2)} layers"
    return [*section(title, outcomes, [*checks, wrong(outcomes)]), *told(outcomes)]


def under_mps(folder: str, settings: Settings, outcomes: Outcomes) -> list[str]:
    """Beside what was measured without it. A job that has the GPU alone, with one process, gains nothing: one will do."""
    with mps() as daemon:
        if not daemon.runs:
            return ["### MPS", "", f"could not be started: {daemon.said}", ""]
        cases = [replace(case, name=case.name + MPS) for case in settings.cases(folder) if case.name in (ONE, TWO, BOTH)]
        found = run_rounds(cases, settings.rounds)
    checks = _compared(found, TWO + MPS, [ONE + MPS])
    for name in (ONE, TWO, BOTH) if outcomes else ():
        checks += _compared({**outcomes, **found}, name + MPS, [name])
    return [*section(f"MPS ({daemon.said})", found, [*checks, wrong(found)]), *told(found)]


def memory(folder: str, settings: Settings, _: Outcomes) -> list[str]:
    title = f"{settings.memory_rows:,} texts, memory taken for {settings.hold:g} s"
    if settings.device == "cpu":
        return [f"### {title}", "", "skipped: there is no GPU", ""]
    options = {"folder": folder, "device": settings.device, "rows": settings.memory_rows, "hold": settings.hold}
    outcomes: Outcomes = {"crowded": [run_case(Case(name="crowded", call="gpu_memory:crowded", options=options))]}
    names = ("tokens a batch before, in the middle", "largest batch after")
    before, after = (figures_of(outcomes["crowded"], name) for name in names)
    checks = [
        wrong(outcomes),
        Check(
            label="times that memory ran out",
            values=figures_of(outcomes["crowded"], "out of memory"),
            limit=1,
            at_least=True,
        ),
        Check(
            label="largest batch after, of the usual one before",
            values=[a / b for a, b in zip(after, before, strict=True) if b],
            limit=0.8,
            at_least=True,
            unit="x",
        ),
        Check(
            label="seconds until sizes are back (inf: never)",
            values=figures_of(outcomes["crowded"], "seconds until sizes are back"),
            limit=settings.hold,
            unit=" s",
        ),
    ]
    return [*section(title, outcomes, checks), *told(outcomes)]


def _compared(outcomes: Outcomes, ours: str, others: list[str]) -> list[Check]:
    """Ours beside the others one after the other: whole jobs, and from the first call to the last."""

    def ratios(number: Callable[[Outcome], float]) -> list[float]:
        rounds = zip(outcomes[ours], *[outcomes[name] for name in others], strict=True)
        return [
            sum(map(number, rest)) / number(own) for own, *rest in rounds if not any(each.error for each in (own, *rest))
        ]

    rivals = ", then ".join(others)
    kinds: list[tuple[str, Callable[[Outcome], float]]] = [
        ("whole job", lambda done: done.job),
        ("first call to last", lambda done: done.figures["span"]),
    ]
    return [
        Check(
            label=f"{ours}: times the speed of {rivals}, {kind}", values=ratios(number), limit=1.0, at_least=True, unit="x"
        )
        for kind, number in kinds
    ]


SECTIONS: dict[str, Callable[[str, Settings, Outcomes], list[str]]] = {"jobs": jobs, "mps": under_mps, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description="One GPU for several processes, whole jobs over texts.")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--memory-rows", type=int, default=150_000, help="of the job whose memory is taken (150,000)")
    parser.add_argument("--layers", type=int, default=12, help="of the first encoder; the second has half of them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hold", type=float, default=5.0, help="seconds that the memory is taken for (5)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    wanted = [given.only] if given.only else list(SECTIONS)
    settings = Settings(
        rows=given.rows,
        memory_rows=given.memory_rows,
        layers=given.layers,
        device=given.device,
        hold=given.hold,
        rounds=given.rounds,
    )
    lines: list[str] = []
    outcomes: Outcomes = {}

    def say(more: list[str]) -> None:
        lines.extend(more)
        print("\n".join(more), flush=True)
        if given.markdown:
            given.markdown.write_text("\n".join(lines))

    with tempfile.TemporaryDirectory() as folder:
        long_rows = given.memory_rows if "memory" in wanted and given.device != "cpu" else 0
        options = {"folder": folder, "rows": given.rows, "long_rows": long_rows, "layers": given.layers}
        made = run_case(Case(name="inputs", call=f"{CONTENDERS}:make_all", options={**options, "device": given.device}))
        say([f"input files: {made.error or f'{made.checksum}, made in {made.job:.1f} s'}", ""])
        for name in wanted if not made.error else []:
            say(SECTIONS[name](folder, settings, outcomes))


if __name__ == "__main__":
    main()
