"""A run that is killed in the middle, and resumed: every row is in the output exactly once.

It needs Penstock alone: python examples/resume_after_kill.py

The command starts itself again as the job, which kills its own process at one row, as a machine that is taken away would.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import penstock as ps

ROWS = 2000


class Doubler(ps.ModelHandler[int, int, None]):
    """A model that stands for a slow one."""

    def load_model(self) -> None:
        return None

    def run_inference(self, batch: list[int], model: None, inference_args: object = None) -> list[int]:
        return [2 * row for row in batch]


def die_once(row: int, mark: str) -> int:
    """The first time that it sees this row, the process is killed with all that it holds."""
    if row == ROWS // 2 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def job(folder: Path) -> None:
    """With run_dir, what is done is in a journal; the same command again resumes from there."""
    with ps.Pipeline(run_dir=folder / "run", workers=0) as pipeline:
        rows = pipeline | ps.Create(range(ROWS)) | ps.Map(die_once, str(folder / "killed"))
        rows | ps.RunInference(Doubler()) | ps.WriteToText(folder / "doubled")
    assert pipeline.result is not None
    print(f"{pipeline.result.splits_before} of {pipeline.result.splits} splits were done before the kill")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="folder (default: %(default)s)")
    parser.add_argument("--job", action="store_true", help="be the job that is killed")
    args = parser.parse_args()
    if args.job:
        job(args.output)
        return
    args.output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--output", str(args.output), "--job"]
    for attempt in ("first", "second"):
        code = subprocess.run(command, check=False).returncode
        print(
            f"the {attempt} process ended with {'signal SIGKILL' if code == -signal.SIGKILL else f'code {code}'}", flush=True
        )
    lines = [line for part in sorted((args.output / "doubled").iterdir()) for line in part.read_text().split()]
    print(f"{len(lines)} rows, {'as expected' if lines == [str(2 * n) for n in range(ROWS)] else 'wrong'}")


if __name__ == "__main__":
    main()
