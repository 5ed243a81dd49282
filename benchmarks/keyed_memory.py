"""How much memory models take: the processes of a case are looked at from a process beside them, while they run.

As a program it is that process: python keyed_memory.py MARK FILE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

from keyed_inputs import LOADED, own_bytes
from measure import MARK, SAMPLE_EVERY, marked, proportional_bytes


class Sample(NamedTuple):
    """The memory of all processes at one time."""

    time: float
    shared_out: int  # bytes of all of them, what they share counted once (PSS)
    own: dict[str, int]  # bytes that are not of files and not shared (RssAnon), by process


class Watched:
    """Counts the loads in its `with` block, in whatever process, and looks at the memory if it is asked to."""

    def __init__(self, memory: bool) -> None:
        self._memory = memory
        self._folder = Path(tempfile.mkdtemp())

    def __enter__(self) -> Watched:
        os.environ[LOADED] = str(self._folder / "loads")
        self._samples = self._folder / "samples"
        if self._memory:
            command = [sys.executable, __file__, os.environ[MARK], str(self._samples)]
            self._process = subprocess.Popen(command)
            while not (self._samples.exists() and self._samples.stat().st_size):
                time.sleep(SAMPLE_EVERY)
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ[LOADED]
        if self._memory:
            self._process.terminate()
            self._process.wait()

    def figures(self) -> dict[str, float]:
        """The number of loads; and the most that models took: `own` of the processes that load them, each beyond what it
        had before its first load, and `all` of all processes, beyond what they had before the first load of any."""
        loads = [line.split() for line in (self._folder / "loads").read_text().splitlines()]
        if not self._memory:
            return {"loads": len(loads)}
        before = {process: int(size) for process, _, size in reversed(loads)}
        samples = [Sample(*json.loads(line)) for line in self._samples.read_text().split("\n")[:-1]]
        first = min(float(at) for _, at, _ in loads)
        return {"loads": len(loads), "own": _most_own(samples, before), "all": _most_of_all(samples, first)}


def _most_own(samples: list[Sample], before: dict[str, int]) -> int:
    return max(sum(each.own.get(process, size) - size for process, size in before.items()) for each in samples)


def _most_of_all(samples: list[Sample], first: float) -> int:
    before = [each.shared_out for each in samples if each.time < first]
    return max(each.shared_out for each in samples) - before[-1]


def _look(mark: str) -> Sample:
    """Now. Its time is that of the end of the look: what counts as before a load has nothing of it."""
    folders = [folder for folder in marked(mark) if folder.name != str(os.getpid())]
    own = {folder.name: own_bytes(folder) for folder in folders}
    shared_out = sum(map(proportional_bytes, folders))
    return Sample(time.time(), shared_out, own)


def watch(mark: str, path: str) -> NoReturn:
    """Write a sample every 20 ms, until this process is terminated; the last line may be half."""
    with open(path, "x", buffering=1) as file:
        while True:
            file.write(json.dumps(_look(mark)) + "\n")
            time.sleep(SAMPLE_EVERY)


if __name__ == "__main__":
    watch(*sys.argv[1:])
