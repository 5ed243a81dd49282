"""Run cases in fresh processes, in rounds, and watch their memory.

As a program it is the fresh process: python measure.py MODULE:FUNCTION OPTIONS RESULT_FILE
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "PENSTOCK_BENCHMARK_CASE"  # an environment variable that tells all processes of one case, reparented ones too
STARTED = "PENSTOCK_BENCHMARK_STARTED"  # when the process of the case was started
SAMPLE_EVERY = 0.02  # seconds between looks at memory: the shortest case that is watched runs for a quarter of one
TIME_LIMIT = 300.0  # seconds for one case


@dataclass(frozen=True, kw_only=True)
class Case:
    """One function of rivals.py, ours.py or workload.py, with its arguments."""

    name: str
    call: str  # "module:function"
    options: dict[str, Any] = field(default_factory=dict)
    watch_memory: bool = False  # off where time is compared: looking costs some


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of a case. With an error, the rest means nothing."""

    seconds: float = 0.0
    rows: int = 0
    checksum: Any = None
    peak_bytes: int = 0
    job: float = 0.0  # seconds from the start of its process, imports included, to the end of the work
    cpu: float = 0.0  # seconds of all cores, from the start of its process
    figures: dict[str, float] = field(default_factory=dict)  # what else a case has measured, by name
    words: list[str] = field(default_factory=list)  # what else it has to say
    error: str | None = None


def run_rounds(cases: Sequence[Case], rounds: int) -> dict[str, list[Outcome]]:
    """Run every case once per round, each round starting with another one, so that noise hits all alike."""
    outcomes: dict[str, list[Outcome]] = {case.name: [] for case in cases}
    for number in range(rounds):
        start = number % len(cases)
        for case in [*cases[start:], *cases[:start]]:
            done = run_case(case)
            outcomes[case.name].append(done)
            what = done.error or f"{done.seconds:.3f} s ({done.job:.3f} s with imports), {done.rows:,} rows, {done.checksum}"
            print(f"  round {number + 1}: {case.name}: {what}", file=sys.stderr, flush=True)
    return outcomes


def run_case(case: Case) -> Outcome:
    """Run a case in a process of its own, with a temporary folder of its own; leave no process and no file behind."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {MARK: mark, "TMPDIR": scratch, STARTED: str(time.time())}
        result, log = Path(scratch, "result.json"), Path(scratch, "log")
        command = [sys.executable, __file__, case.call, json.dumps(case.options), str(result)]
        with log.open("w") as output:
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
            try:
                peak = _wait(process, mark if case.watch_memory else None)
                if process.poll() is None:
                    return Outcome(error=f"not done after {TIME_LIMIT:g} s")
            finally:
                _kill_all(mark)
                process.wait()
        if process.returncode == 0 and result.exists():
            return Outcome(peak_bytes=peak, **json.loads(result.read_text()))
        lines = log.read_text(errors="replace").strip().splitlines()
        return Outcome(error=f"exit code {process.returncode}: {lines[-1][:300] if lines else 'nothing printed'}")


def _wait(process: subprocess.Popen[bytes], watched: str | None) -> int:
    """Wait for the end of a process, or the time limit; return the peak of its memory when it is watched."""
    deadline = time.monotonic() + TIME_LIMIT
    peak = 0
    while (left := deadline - time.monotonic()) > 0:
        try:
            process.wait(SAMPLE_EVERY if watched else left)
            break
        except subprocess.TimeoutExpired:
            if watched:
                peak = max(peak, sum(map(proportional_bytes, marked(watched))))
    return peak


def marked(mark: str) -> list[Path]:
    """The /proc folders of the processes that carry this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder)
        except OSError:  # it ended, or belongs to somebody else
            continue
    return found


def proportional_bytes(folder: Path) -> int:
    """A process's memory, with what it shares counted in shares (PSS), so that a sum counts nothing twice."""
    try:
        match = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def _kill_all(mark: str) -> None:
    while left := marked(mark):
        for folder in left:
            try:
                os.kill(int(folder.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _child(call: str, options: str, result: str) -> None:
    module, function = call.split(":")
    done = getattr(importlib.import_module(module), function)(**json.loads(options))
    Path(result).write_text(json.dumps(done))


if __name__ == "__main__":
    _child(*sys.argv[1:])
