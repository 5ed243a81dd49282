"""Runs that are killed with SIGKILL, again and again, and run on until they are done. `make torture` does 1,000 kills."""

from __future__ import annotations

import os

import pytest

from kills.killing import Killing

SEED = int(os.environ.get("PENSTOCK_KILLS_SEED", "20261115"))


@pytest.mark.timeout(900)
def test_kills_leave_the_output_of_a_clean_run(tmp_path):
    killing = Killing("job.py", tmp_path, SEED)
    killing.until(56)
    print(f"seed {SEED}: {dict(killing.kills)}, {killing.runs} runs")
    assert killing.kills.total() >= 56


@pytest.mark.timeout(900)
def test_the_real_encoder_gives_the_same_bytes_after_every_kill(tmp_path):
    killing = Killing("encoder_job.py", tmp_path, SEED)
    killing.until(4)
    print(f"seed {SEED}: {dict(killing.kills)}, {killing.runs} runs")
    assert killing.kills.total() >= 4
