"""Handlers whose model lives in a process of its own: the answers are those of the same model in the user's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from test_refresh_frameworks import KINDS

PLACED = ["scikit-learn", "pytorch", "images", "ONNX, texts"]  # others have a test of their own
COLUMNS: Any = {"scikit-learn": ("x",), "pytorch": ("x",)}  # else the one column


def plain(example: Any) -> Any:
    """An example as a column holds it."""
    return example if isinstance(example, (str, bytes)) else float(example[0])


@pytest.mark.parametrize("kind", PLACED)
def test_rows_and_columns_in_a_host(kind: str, tmp_path: Path) -> None:
    save, handler_of, example_of = KINDS[kind]
    save(tmp_path / "model", 1)
    examples = [example_of(row) for row in range(1, 8)]
    values = [plain(example) for example in examples]
    pq.write_table(pa.table({"id": range(7), "x": values}), tmp_path / "rows.parquet")
    with ps.Pipeline(workers=0) as p:
        here = (p | ps.Create(examples) | ps.RunInference(handler_of(str(tmp_path / "model")))).collect()
    hosted = handler_of(str(tmp_path / "model"), large_model=True)
    columns = handler_of(str(tmp_path / "model"), large_model=True, output_column="y", columns=COLUMNS.get(kind, "x"))
    with ps.Pipeline(workers=1) as p:
        rows = p | ps.Create(list(enumerate(examples))) | ps.RunInference(ps.KeyedModelHandler(hosted))
        (
            rows
            | ps.Map(lambda row: {"id": row[0], "y": np.asarray(row[1].inference).ravel().tolist()})
            | "rows" >> ps.WriteToParquet(str(tmp_path / "of-rows"))
        )
        table = p | ps.ReadFromParquet(str(tmp_path / "rows.parquet")) | "columns" >> ps.RunInference(columns)
        table | "table" >> ps.WriteToParquet(str(tmp_path / "of-columns"))
    expected = [pytest.approx(np.asarray(answer.inference, float).ravel().tolist(), abs=1e-4) for answer in here]
    for folder in ("of-rows", "of-columns"):
        seen = pq.read_table(tmp_path / folder).sort_by("id")["y"].to_pylist()
        assert [np.ravel(each).tolist() for each in seen] == expected, folder
