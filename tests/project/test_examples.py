"""The examples run as they are. That of Beam, and those with a large model, have tests of their own: see test_docs.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ELSEWHERE = {"embed_texts", "label_reviews"}
PRINTED = {
    "score_csv": [
        "Score 566 566 0",
        "7: could not convert string to float: 'n/a'",
        "300: could not convert string to float: '12,5'",
    ],
    "classify_images": ["6 of 60 images could not be read", "6 of them have an answer now", "60 of 60 colours are right"],
    "model_per_customer": ["Price 4,000 4,000", "19 35.0 665.0", "20 36.0 36.0", "21 37.0 37.0"],
    "resume_after_kill": [
        "the first process ended with signal SIGKILL",
        "1 of 2 splits were done before",
        "2000 rows, as expected",
    ],
}


def test_every_example_is_run_by_some_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, *ELSEWHERE}
    assert len([*EXAMPLES.rglob("*.py")]) >= 6


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_should(name, tmp_path):
    command = [sys.executable, EXAMPLES / f"{name}.py", "--output", tmp_path / "out"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    for expected in PRINTED[name]:
        assert expected in printed, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
