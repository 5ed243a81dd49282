"""One Parquet output has one schema: parts that differ in nulls are made alike, others are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import penstock as ps
from kills.in_every_process import durable_steps
from penstock.cli import main
from penstock.errors import OutputError, StepError

LINES = 4000  # of five bytes: several splits
LATE = 3500  # the row from which on the values come


def late_text(line: str) -> dict[str, Any]:
    """Columns without a value, without a field and not there at all, until a late row."""
    if int(line) < LATE:
        return {"id": int(line), "text": None, "nested": {"a": 1}, "list": []}
    return {"id": int(line), "text": line, "nested": {"a": None, "b": "x"}, "list": ["y"], "new": 0.5}


def late_fraction(line: str) -> dict[str, Any]:
    return {"id": int(line), "x": 1 if int(line) < LATE else 1.5}


def run(folder: Path, function: Any, **options: Any) -> None:
    (folder / "in.txt").write_text("".join(f"{n:04}\n" for n in range(LINES)))
    with ps.Pipeline(**options) as p:
        p | ps.ReadFromText(folder / "in.txt") | ps.Map(function) | ps.WriteToParquet(folder / "out")


def check(folder: Path) -> None:
    """Every reader of the folder finds all rows, with all of their values."""
    parts = sorted((folder / "out").glob("part-*"))
    assert len(parts) > 1
    assert len({frozenset(zip(s.names, map(str, s.types), strict=True)) for s in map(pq.read_schema, parts)}) == 1
    nothing = {"text": None, "nested": {"a": 1, "b": None}, "list": [], "new": None}
    expected = [nothing | {"id": n} for n in range(LATE)]
    expected += [{**late_text(f"{n:04}"), "id": n} for n in range(LATE, LINES)]
    with ps.Pipeline(workers=0) as p:
        assert (p | ps.ReadFromParquet(folder / "out")).collect() == expected
    assert ds.dataset(folder / "out").to_table().to_pylist() == expected
    frame = pd.read_parquet(folder / "out")
    assert (frame["text"].notna().sum(), frame["new"].sum()) == (LINES - LATE, 0.5 * (LINES - LATE))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("journaled", [False, True])
def test_a_column_may_be_empty_in_some_parts(tmp_path: Path, workers: int, journaled: bool) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path / "run"} if journaled else {}
    run(tmp_path, late_text, workers=workers, **options)
    check(tmp_path)


def test_an_output_of_two_types_is_refused_whole(tmp_path: Path) -> None:
    message = (
        r"out: column 'x' is int64 in part-00000\.parquet and double in part-0000\d\.parquet, and one output has "
        r"one schema: pass schema=pyarrow\.schema\(\.\.\.\) with a type that holds all of its values$"
    )
    with pytest.raises(OutputError, match=message):
        run(tmp_path, late_fraction, workers=0)
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_refuses_another_type_than_it_has_published(tmp_path: Path) -> None:
    def stopped(line: str) -> dict[str, Any]:
        if int(line) >= LATE and not (tmp_path / "go").exists():
            raise ValueError("stopped")
        return late_fraction(line)

    with pytest.raises(StepError, match="stopped"):
        run(tmp_path, stopped, workers=0, run_dir=tmp_path / "run")
    (tmp_path / "go").touch()
    for _ in range(2):
        with pytest.raises(
            OutputError, match=r"'x' is int64 in .* and double in .*, and start over with fresh=True"
        ) as error:
            run(tmp_path, stopped, workers=0, run_dir=tmp_path / "run")
        assert "what was done is kept" in error.value.__notes__[0]
    types = {str(pq.read_schema(part).field("x").type) for part in (tmp_path / "out").glob("part-*")}
    assert types == {"int64"}


JOB = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from test_parquet_schema import late_text, run
run(Path(sys.argv[2]), late_text, workers=0, run_dir=Path(sys.argv[2], "run"))
"""


def start(folder: Path, **environment: str) -> int:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", JOB, str(Path(__file__).parent), str(folder)]
    return subprocess.run(
        command, env={**durable_steps.environment(), **environment}, check=False, capture_output=True
    ).returncode


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_while_it_makes_parts_alike_goes_on(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    assert start(tmp_path / "clean", PENSTOCK_CRASH_COUNTS=str(counts)) == 0
    places = max(path.stat().st_size for path in counts.iterdir())
    clean = {part.name: part.read_bytes() for part in (tmp_path / "clean" / "out").iterdir()}
    for place in range(places - 41, places - 1, 8):  # the last ones: parts are rewritten, noted, renamed and done
        folder = tmp_path / str(place)
        assert start(folder, PENSTOCK_CRASH_AT=f"coordinator:{place}:{tmp_path}/mark{place}") == -9
        assert start(folder) == 0
        assert {part.name: part.read_bytes() for part in (folder / "out").iterdir()} == clean
        check(folder)
        assert main(["verify", str(folder / "run")]) == 0
