"""Models behind HTTP: how near to a limit, and what Penstock costs beside a bare loop of asyncio and httpx.

    pip install 'penstock[remote]'
    python benchmarks/remote.py [--quick] [--only in-flight|limit] [--rounds N] [--markdown FILE]

The server is a process of this machine that answers after a set time. `in flight`: client and server have a core each.
`limit`: four worker processes against a server that refuses what is over its rate, with Retry-After; the handler is told the
rate, or has to find it. Nothing is asserted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from measure import Case, run_rounds
from report import Check, Outcomes, section, speedup

BARE, MANY, OURS = "bare loop of asyncio and httpx", "bare loop, 50 clients of 4 connections", "Penstock"
SPARED = "the same, without the search for sniffio"  # see remote/http.py
TOLD, FOUND = "Penstock, told the limit", "Penstock, has to find it"


def in_flight(rows: int, rounds: int) -> list[str]:
    options = {"rows": rows, "in_flight": 200, "delay": 0.1}
    cases = [
        Case(name=BARE, call="remote_contenders:bare_loop", options=options),
        Case(name=MANY, call="remote_contenders:bare_loop", options={**options, "clients": 50}),
        Case(name=SPARED, call="remote_contenders:bare_loop", options={**options, "clients": 50, "spared": True}),
        Case(name=OURS, call="remote_contenders:penstock", options=options),
    ]
    outcomes = run_rounds(cases, rounds)
    checks = [speedup(outcomes, OURS, other, at_least=0.9) for other in (BARE, MANY, SPARED)]
    return section(f"{rows:,} requests of 100 ms, 200 in flight, one core", outcomes, checks)


def limit(rows: int, rounds: int) -> list[str]:
    options = {"rows": rows, "rate": 50.0, "workers": 4}
    cases = [
        Case(name=TOLD, call="remote_contenders:limited", options={**options, "told": True}),
        Case(name=FOUND, call="remote_contenders:limited", options={**options, "told": False}),
    ]
    outcomes = run_rounds(cases, rounds)
    checks = [check for name in (TOLD, FOUND) for check in _of_limit(outcomes, name)]
    return section(f"{rows:,} rows from 4 processes, a server that takes 50 requests a second", outcomes, checks)


def _of_limit(outcomes: Outcomes, name: str) -> list[Check]:
    good = [done for done in outcomes[name] if not done.error]
    values = {figure: [done.figures[figure] for done in good] for figure in ("of the limit", "refused after 5 s")}
    return [
        Check(label=f"{name}: requests/s, of the limit", values=values["of the limit"], limit=0.9, at_least=True, unit="x"),
        Check(label=f"{name}: share refused after 5 s", values=values["refused after 5 s"], limit=0.02),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, one round")
    parser.add_argument("--only", choices=["in-flight", "limit"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    rows, rounds = (500, 1) if arguments.quick else (2000, arguments.rounds)
    parts = {"in-flight": in_flight, "limit": limit}
    lines = [line for name, part in parts.items() if arguments.only in (None, name) for line in part(rows, rounds)]
    print("\n".join(lines))
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
