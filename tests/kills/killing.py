"""Kills a run with SIGKILL, again and again, runs it on until it is done, and compares it with a clean run.

python tests/kills/killing.py --kills 1000 [--seed 7] [--job encoder_job.py]      (make torture)

Some kills hit a process at a random moment: the coordinator, a worker, a model host, or all of them at once. The others hit
the coordinator or a worker at its n-th place before or after a durable step (in_every_process/durable_steps.py). No n is
taken twice as the first kill of a run; their order is the seed's. Later kills of a run take one of the first 40. At the end
it is told how many were hit: which splits a worker gets is a matter of chance, so it may not come to the last ones.

When a run is done, its output must be that of the clean run, byte for byte, its counts the same, and nothing may be left: no
process, no file aside, no temporary file, no socket. (Shared memory has no name and goes with the processes that hold it.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))  # where it is run as a script

from kills.in_every_process import durable_steps  # noqa: E402

TARGETS = ("coordinator", "worker", "host", "host", "everything")  # a host is there for a part of the time only
ROLES = ("coordinator", "worker")  # of processes that can be killed at a step
EARLY = 40  # steps that what is left of a run comes to as well
GONE = 20.0  # seconds for what a killed process leaves behind to end itself


class Killing:
    """One job, its clean run, and the kills so far."""

    def __init__(self, job: str, folder: Path, seed: int) -> None:
        self.job = HERE / job
        self.folder = folder
        self.random = random.Random(seed)
        self.mark = f"penstock-kills-{os.getpid()}-{seed}"  # in the environment of all that a run starts
        self.kills: Counter[str] = Counter()
        self.runs = 0
        started = time.monotonic()
        make_inputs(self.job.name, folder / "clean")
        (folder / "steps").mkdir()
        self._start(folder / "clean", counts=folder / "steps").wait()
        self.seconds = time.monotonic() - started
        self.steps = counted_steps(folder / "steps")
        self.left = [(role, number) for role, most in self.steps.items() for number in range(1, most + 1)]
        self.random.shuffle(self.left)  # steps that no run has begun with
        self.hit: set[tuple[str, int]] = set()  # steps at which a process of a new run was killed
        self.expected = tree(folder / "clean" / "out")
        self.counts, self.inferences = totals(json.loads((folder / "clean" / "run" / "manifest.json").read_text()))
        assert all(self.steps.values()), f"the clean run has no steps to be killed at: {self.steps}"
        assert self.inferences, "the clean run has no model"
        assert self.expected, "the clean run wrote nothing"

    def until(self, kills: int) -> None:
        """Run jobs to their end until that many kills have hit."""
        while self.kills.total() < kills:
            self.one_run(most=kills - self.kills.total())

    def one_run(self, most: int) -> None:
        """One job, killed up to `most` times, then left to finish; and all that must hold then."""
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        make_inputs(self.job.name, work)
        last = self.kills.total() + self.random.randint(1, min(most, 25))
        is_new = True
        while True:
            more = self.kills.total() < last
            process = self._start(work, self._step(is_new) if more else None)
            if more and not self.aimed:
                self._kill_sometimes(process, last)
            code = process.wait(timeout=240)
            if self.aimed and self.mark_of_step.exists():
                self.kills[f"{self.aimed[0]}, at a step"] += 1
                self.hit |= {self.aimed} if is_new else set()
            if code == 0:
                break
            assert code == -signal.SIGKILL or more, f"the run failed by itself ({code}):\n{self.log()}"
            is_new = False
        self.runs += 1
        self._check(work)

    def _start(
        self, work: Path, aimed: tuple[str, int] | None = None, counts: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """The job, which dies at a step, or leaves word of how many it came to, if it is told to."""
        self.aimed = aimed
        self.mark_of_step.unlink(missing_ok=True)
        crash_at = f"{aimed[0]}:{aimed[1]}:{self.mark_of_step}" if aimed else ""
        environment = durable_steps.environment(crash_at, str(counts or ""))
        environment |= {"PENSTOCK_KILLS": self.mark, "TMPDIR": str(work / "tmp")}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(
            self.folder / "torch"
        )  # which torch makes among temporary files, and keeps
        with open(self.folder / "log", "wb") as log:
            command = [sys.executable, str(self.job), str(work)]
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    @property
    def mark_of_step(self) -> Path:
        """A file that is there when a process was killed at a step."""
        return self.folder / "mark"

    def _step(self, is_new: bool) -> tuple[str, int] | None:
        """A step to die at: of the coordinator, or of a worker. None for a kill at a random moment."""
        if is_new and self.left and self.random.random() < 0.75:  # 1,000 kills take some 500 of them
            return self.left.pop()
        if self.random.random() < 0.5:
            return None
        role = self.random.choice(["coordinator", "coordinator", "worker"])
        return role, self.random.randint(1, min(EARLY, self.steps[role]))

    def _kill_sometimes(self, process: subprocess.Popen[bytes], last: int) -> None:
        """Until the coordinator has ended, or the last kill has hit: a worker or a host that dies is replaced."""
        while self.kills.total() < last:
            try:
                process.wait(self.random.uniform(0, 0.8 * self.seconds))
                return
            except subprocess.TimeoutExpired:
                pass
            target = self.random.choice(TARGETS)
            found = {process.pid: "coordinator"} if target == "coordinator" else self._processes()
            chosen = [pid for pid, role in found.items() if target in (role, "everything")]
            if target != "everything":
                chosen = self.random.sample(chosen, min(1, len(chosen)))
            hits = [pid for pid in chosen if kill(pid)]
            self.kills[target] += bool(hits)

    def _processes(self) -> dict[int, str]:
        """All that belong to the run, with what they are."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path("/proc", name, "environ").read_bytes()
                command = Path("/proc", name, "cmdline").read_bytes()
                state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"PENSTOCK_KILLS={self.mark}".encode() in environment.split(b"\0") and state != "Z":
                roles = {b"local.worker": "worker", b"models.": "host", b"guardian": "guardian"}
                found[int(name)] = next((role for part, role in roles.items() if part in command), "coordinator")
        return found

    def _check(self, work: Path) -> None:
        assert tree(work / "out") == self.expected, f"the output differs from that of the clean run: {self._differing(work)}"
        manifest = json.loads((work / "run" / "manifest.json").read_text())
        assert manifest["state"] == "finished"
        counts, inferences = totals(manifest)
        assert counts == self.counts, f"counts {counts}, expected {self.counts}"
        assert inferences == self.inferences, f"inferences {inferences}, expected {self.inferences}"
        deadline = time.monotonic() + GONE
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"processes are left: {left}"
        run = manifest["run"]
        hosts = Path("/tmp", f"penstock-{os.geteuid()}")
        assert not list(hosts.glob(f"{run}*")), "a folder of hosts is left"
        assert not os.listdir(work / "tmp"), f"temporary files are left: {os.listdir(work / 'tmp')}"
        assert set(os.listdir(work / "run")) <= {"journal.db", "manifest.json", "lock"}, os.listdir(work / "run")

    def _differing(self, work: Path) -> list[str]:
        found = tree(work / "out")
        return sorted(name for name in found.keys() | self.expected.keys() if found.get(name) != self.expected.get(name))

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def told_steps(self) -> str:
        """How many of the steps of the clean run a process of a new run was killed at."""
        hits = Counter(role for role, _ in self.hit)
        return ", ".join(f"{hits[role]} of the {most} of a {role}" for role, most in self.steps.items())


def counted_steps(folder: Path) -> dict[str, int]:
    """How many steps the coordinator of a run has come to, and that one of its workers which has come to most."""
    return {role: max((path.stat().st_size for path in folder.glob(f"{role}-*")), default=0) for role in ROLES}


def totals(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """The counts of a run by step, and how many rows its models have answered."""
    by_step = manifest["metrics"].items()
    return manifest["counts"], {step: found["num_inferences"] for step, found in by_step if "num_inferences" in found}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def make_inputs(job: str, folder: Path) -> None:
    (folder / "in").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "out").mkdir()
    if job == "job.py":
        import pyarrow as pa
        import pyarrow.parquet as pq

        for part in range(4):
            rows = [{"id": f"a{part}-{n}", "n": n} for n in range(300)]
            (folder / "in" / f"a-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = pa.table({"id": [f"b{n}" for n in range(900)], "n": list(range(900))})
        pq.write_table(table, folder / "in" / "b.parquet", row_group_size=300)
    else:
        words = ["a", "film", "that", "one", "would", "like", "to", "see", "again", "for", "its", "music", "and", "light"]
        texts = [" ".join(words[n % 7 : n % 7 + 2 + n % 11] * (1 + n % 3)) for n in range(1300)]  # 256 in a split
        (folder / "in" / "texts.txt").write_text("".join(f"{n} {text}\n" for n, text in enumerate(texts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument("--job", default="job.py")
    arguments = parser.parse_args()
    print(f"{arguments.job}: {arguments.kills} kills, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-kills-") as folder:
        killing = Killing(arguments.job, Path(folder), arguments.seed)
        while killing.kills.total() < arguments.kills:
            killing.one_run(most=arguments.kills - killing.kills.total())
            print(f"  {killing.kills.total()} kills, {killing.runs} runs done, all as the clean run", flush=True)
        by_kind = ", ".join(f"{n} {kind}" for kind, n in sorted(killing.kills.items()))
        print(f"{killing.kills.total()} kills ({by_kind}), {killing.runs} runs, seed {arguments.seed}: all as the clean run")
        print(f"steps of a new run that were hit: {killing.told_steps()}")


if __name__ == "__main__":
    main()
