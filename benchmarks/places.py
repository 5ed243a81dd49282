"""What a model costs in a place of its own: one copy for all processes, several, and one that has to be killed.

    pip install 'penstock[bench]'
    python benchmarks/places.py [--quick] [--only SECTION] [--rounds N] [--markdown FILE]

Every case runs in a fresh process. Memory is that of all processes of a case together, what they share counted once.
Ratios and differences are taken within a round; their median is held against the target. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Case, Outcome, run_rounds
from places_runs import AT_A_TIME, LOAD_SECONDS, TIMEOUT
from report import Check, cost, section, speedup

GB = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much to run."""

    busy_rows: int = 300
    rounds: int = 3


def memory(settings: Settings) -> list[str]:
    """One copy for all workers, and one in each."""
    tiny, shared, default = "large_model, tiny", "large_model, 1 GB", "default, 1 GB"
    place = {"large_model": True}
    cases = [
        Case(name=tiny, call="places_runs:memory", options={"size": 1_000, **place}, watch_memory=True),
        Case(name=shared, call="places_runs:memory", options={"size": GB, **place}, watch_memory=True),
        Case(name=default, call="places_runs:memory", options={"size": GB}, watch_memory=True),
    ]
    outcomes = run_rounds(cases, settings.rounds)
    more = _differences(outcomes[shared], outcomes[tiny], _gigabytes)
    all_copies = [_gigabytes(done) for done in outcomes[default] if not done.error]
    checks = [
        Check(label=f"{shared}: peak memory above {tiny}", values=more, limit=1.15, unit=" GB"),
        Check(label=f"{default}: peak memory", values=all_copies, limit=4, at_least=True, unit=" GB"),
    ]
    return section("Memory of a model of 1 GB, 4 worker processes", outcomes, checks)


def _gigabytes(done: Outcome) -> float:
    return done.peak_bytes / GB


def _differences(these: Sequence[Outcome], others: Sequence[Outcome], number: Callable[[Outcome], float]) -> list[float]:
    rounds = zip(these, others, strict=True)
    return [number(a) - number(b) for a, b in rounds if not a.error and not b.error]


def _case(name: str, call: str, **options: Any) -> Case:
    return Case(name=name, call=call, options=options)


def trip(settings: Settings) -> list[str]:
    """To the model and back; also with both ends reading every value, as memory that is mapped late costs only then."""
    return [line for read in (False, True) for line in _trip(settings, read)]


def _trip(settings: Settings, read: bool) -> list[str]:
    host, memcpy, rivals = "Penstock host", "memcpy", ("Beam, list of arrays", "Beam, one array")
    cases = [
        _case(host, "places_contenders:penstock_trips", read=read),
        _case(memcpy, "places_contenders:memcpy_trips", read=read),
        _case(rivals[0], "places_contenders:beam_trips", read=read, stacked=False),
        _case(rivals[1], "places_contenders:beam_trips", read=read, stacked=True),
    ]
    outcomes = run_rounds(cases, settings.rounds)
    checks = [*[speedup(outcomes, host, rival, at_least=5) for rival in rivals], cost(outcomes, host, memcpy, at_most=3)]
    title = "64 x 3 x 224 x 224 float32 there and back, seconds for one batch"
    return section(f"{title}, all of it read at both ends" if read else title, outcomes, checks)


def crowd(settings: Settings) -> list[str]:
    """Batches form at the model, from single rows of all processes."""
    host, beam = "Penstock, large_model", "Beam, as with large_model"
    cases = [_case(host, "places_contenders:penstock_crowd"), _case(beam, "places_contenders:beam_crowd")]
    outcomes = run_rounds(cases, settings.rounds)
    title = "Single rows from 8 threads in each of 4 processes, a model that takes 10 ms a call"
    return section(title, outcomes, [speedup(outcomes, host, beam, at_least=10)])


def copies(settings: Settings) -> list[str]:
    """Two copies on two cores. The bare loops say whether the machine had two to give."""
    one, two, bare_one, bare_two = "large_model", "model_copies=2", "one bare loop", "two bare loops"
    cases = [
        _case(bare_one, "places_runs:bare_loops", rows=settings.busy_rows, processes=1),
        _case(bare_two, "places_runs:bare_loops", rows=settings.busy_rows, processes=2),
        _case(one, "places_runs:copies", rows=settings.busy_rows, large_model=True),
        _case(two, "places_runs:copies", rows=settings.busy_rows, model_copies=2),
    ]
    outcomes = run_rounds(cases, settings.rounds)
    title = f"Copies of a model that takes 20 ms of a core for each row, {settings.busy_rows} rows"
    checks = [speedup(outcomes, two, one, at_least=1.8), speedup(outcomes, bare_two, bare_one, at_least=1.8)]
    return section(title, outcomes, checks)


def hang(settings: Settings) -> list[str]:
    """A row on which the model never returns, and lets no other thread of its process run. With one copy, all other rows
    wait until the model is loaded again; with one for each worker, as a timeout alone asks for, only its own."""
    places: dict[str, dict[str, Any]] = {"one copy": {"large_model": True}, "a copy for each worker": {}}
    rows = {"no row hangs": None, "one row hangs": 500}
    cases = [
        _case(f"{copies}, {what}", "places_runs:hang", bad_row=bad_row, **place)
        for copies, place in places.items()
        for what, bad_row in rows.items()
    ]
    outcomes = run_rounds(cases, settings.rounds)
    checks = []
    for copies in places:
        well, hanging = (outcomes[f"{copies}, {what}"] for what in rows)
        both = [(a, b) for a, b in zip(hanging, well, strict=True) if not a.error and not b.error]
        lost = [(a.seconds - b.seconds) / _hangs(a) for a, b in both]
        unanswered = _differences(well, hanging, lambda done: done.rows)
        checks += [
            Check(label=f"{copies}: time lost for each kill", values=lost, limit=TIMEOUT + LOAD_SECONDS + 2, unit=" s"),
            Check(label=f"{copies}: rows without an answer", values=unanswered, limit=AT_A_TIME),
        ]
    return section("One row of 1,000 hangs in C, timeout 2 s, the model loads for 1 s, batches of 10", outcomes, checks)


def _hangs(done: Outcome) -> int:
    """How often a process had to be killed: the guilty row is searched for."""
    found = re.search(r"(\d+) hangs", str(done.checksum))
    return max(1, int(found[1])) if found else 1


SECTIONS: dict[str, Callable[[Settings], list[str]]] = {
    "memory": memory,
    "trip": trip,
    "crowd": crowd,
    "copies": copies,
    "hang": hang,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Models in a place of their own, beside Beam's shared models.")
    parser.add_argument("--quick", action="store_true", help="one round: to see that all of it runs")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--rounds", type=int, help="how often each case runs (3)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    given = parser.parse_args()
    default = Settings(busy_rows=100, rounds=1) if given.quick else Settings()
    settings = Settings(busy_rows=default.busy_rows, rounds=given.rounds or default.rounds)
    lines = []
    for name in [given.only] if given.only else SECTIONS:
        lines += (found := SECTIONS[name](settings))
        print("\n".join(found), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
