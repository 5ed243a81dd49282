"""CUDA's multi-process service (MPS): its daemon, for as long as a `with` block runs, where it can be had."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

CONTROL = "nvidia-cuda-mps-control"
LIMIT = 60.0  # seconds for each step of the start
TRIAL = "import torch; print(int(torch.ones(8, device='cuda').sum()))"


class Daemon(NamedTuple):
    """Whether processes that are started now share the GPU through MPS."""

    runs: bool
    said: str  # why not, or by which server


@contextlib.contextmanager
def mps() -> Iterator[Daemon]:
    """Start the daemon, in folders of its own, and try a small program under it. What this process starts in the block is a
    client of it."""
    if shutil.which(CONTROL) is None:
        yield Daemon(False, f"there is no {CONTROL} on this machine")
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as pipes, tempfile.TemporaryDirectory() as logs:
        folders = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": logs}
        os.environ.update(folders)
        try:
            yield _start()
        finally:
            _say("quit")
            for name in folders:
                del os.environ[name]


def _start() -> Daemon:
    try:
        _checked([CONTROL, "-d"])
        _checked([sys.executable, "-c", TRIAL])
        servers = _say("get_server_list")
    except (subprocess.SubprocessError, OSError) as error:
        return Daemon(False, str(error))
    return Daemon(bool(servers), f"server {servers}" if servers else "a program ran, but not through a server of MPS")


def _checked(command: list[str]) -> None:
    """Output goes to a file: the daemon would keep a pipe open."""
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=LIMIT, check=False)
        output.seek(0)
        if done.returncode != 0:
            said = output.read().strip().splitlines()
            raise OSError(f"{command[0]}: exit code {done.returncode}: {said[-1] if said else 'nothing printed'}")


def _say(what: str) -> str:
    """To the daemon; what it answers, on one line. Nothing where there is none."""
    try:
        done = subprocess.run([CONTROL], input=f"{what}\n", capture_output=True, text=True, timeout=LIMIT, check=False)
    except (subprocess.SubprocessError, OSError):
        return ""
    return " ".join(done.stdout.split()) if done.returncode == 0 else ""
