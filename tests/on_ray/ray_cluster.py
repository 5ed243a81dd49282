"""A Ray cluster of three nodes on one machine, and programs for it that run in processes of their own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import penstock as ps

FAST = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
ROWS = 100_000


def started():
    """The cluster: a head, a node with much memory, one with an accelerator, as their resources say."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": FAST})
    cluster.add_node(num_cpus=2, resources={"ram_node": 2})
    cluster.add_node(num_cpus=2, resources={"accel_node": 2})
    return cluster


def doubled(line: str) -> str:
    return str(int(line) * 2)


def wait_until(holds: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def held(line: str, folder: str) -> str:
    """The second half of the numbers waits for a word."""
    if int(line) >= ROWS // 2:
        wait_until(Path(folder, "go").exists, "the second half may go on", 200)
    return line


def resumable(folder: str) -> ps.Pipeline:
    """It is in the middle, for as long as there is no `go` in the folder."""
    p = ps.Pipeline(engine="ray", run_dir=os.path.join(folder, "run"))
    numbers = p | ps.ReadFromText(os.path.join(folder, "in/*.txt")) | ps.Map(held, folder) | ps.Map(doubled)
    numbers | ps.Reshuffle() | ps.WriteToText(os.path.join(folder, "out"))
    return p


def write_numbers(folder: Path, rows: int = ROWS, files: int = 20) -> None:
    (folder / "in").mkdir()
    for at in range(files):
        size = rows // files
        (folder / "in" / f"{at:02d}.txt").write_text("".join(f"{number}\n" for number in range(at * size, (at + 1) * size)))


def written(folder: Path) -> list[int]:
    return [int(line) for path in sorted((folder / "out").glob("part-*")) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    resumable(sys.argv[1]).run()
