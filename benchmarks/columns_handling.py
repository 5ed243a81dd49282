"""Penstock's jobs over columns with and without exception handling, and with rows that fail.

Every function runs in a fresh process. Rows that fail are written to Parquet files of their own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from columns_contenders import handler_of
from columns_inputs import FILES, bad_rows, checked
from workload import COLUMNS, Stopwatch, load_classifier, outcome

import penstock as ps
import penstock.engines.local.inline  # what runs a pipeline is imported with the first run: imports are not on the clock


def run(kind: str, source: str, handling: bool) -> dict[str, Any]:
    """Texts or images, with no setting."""
    with tempfile.TemporaryDirectory() as folder:
        output, failed = Path(folder, "good"), Path(folder, "failed")
        with Stopwatch() as watch, ps.Pipeline() as p:
            _convert(p, source, handler_of(kind), output, failed if handling else None)
        return checked(watch, kind, Path(source), output, failed_values(failed, "id"))


def _convert(p: ps.Pipeline, source: str, handler: Any, output: Path, failed: Path | None) -> None:
    """`failed`: where rows that fail go. There is no function of the user's: it would change where the job runs."""
    rows, step = p | ps.ReadFromParquet(f"{source}/*.parquet"), ps.RunInference(handler)
    if failed is None:
        rows | step | ps.WriteToParquet(output)
        return
    good, failures = rows | step.with_exception_handling()
    good | ps.WriteToParquet(output)
    failures.failed_inferences | ps.WriteToParquet(failed)


def failed_values(folder: Path, column: str) -> list[Any]:
    """The values of a column in the rows that failed."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    tables = [pq.read_table(path, columns=["row"]) for path in sorted(folder.glob("*.parquet"))]
    return [value for table in tables for value in pc.struct_field(table["row"], column).to_pylist()]


# Twenty float columns and a classifier: the job of overhead.py.


def spoil(folder: str) -> dict[str, Any]:
    """The input files again, with NaN in the first column of some rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path(folder, "bad").mkdir()
    with Stopwatch() as watch:
        for path in sorted(Path(folder, "input").iterdir()):
            file = pq.ParquetFile(path)
            table = file.read()
            values = table[COLUMNS[0]].to_numpy().copy()
            values[bad_rows(len(values))] = np.nan
            group_rows = file.metadata.row_group(0).num_rows
            pq.write_table(table.set_column(0, COLUMNS[0], pa.array(values)), Path(folder, "bad", path.name), group_rows)
    return outcome(watch, FILES * len(values), None)


def classify(source: str, model_path: str, handling: bool, workers: int | None) -> dict[str, Any]:
    if workers == 0:
        import sklearn.linear_model  # noqa: F401  # as in overhead.py: what this process imports is not on the clock

    from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy

    handler = SklearnModelHandlerNumpy(
        model_uri=model_path,
        model_file_type=ModelFileType.PICKLE,
        trusted=True,
        columns=COLUMNS,
        max_batch_size=65_536,
    )
    with tempfile.TemporaryDirectory() as folder:
        output, failed = Path(folder, "good"), Path(folder, "failed")
        with Stopwatch() as watch, ps.Pipeline(workers=workers) as p:
            _convert(p, source, handler, output, failed if handling else None)
        return _checked(watch, source, model_path, output, failed_values(failed, COLUMNS[0]))


def _checked(watch: Stopwatch, source: str, model_path: str, output: Path, failed: list[float]) -> dict[str, Any]:
    """Wrong are rows with another answer than the model's, and those that are missing in both outputs."""
    import numpy as np
    import pyarrow.parquet as pq

    made = pq.read_table(output, columns=[*COLUMNS, "inference"])
    expected = load_classifier(model_path).predict(np.column_stack([made[name].to_numpy() for name in COLUMNS]))
    right = int((made["inference"].to_numpy() == expected).sum())
    nan = int(np.isnan(failed).sum())
    given = sum(pq.ParquetFile(path).metadata.num_rows for path in Path(source).iterdir())
    wrong = given - right - nan + len(failed) - nan
    return outcome(watch, made.num_rows, f"{wrong} rows wrong, {len(failed)} failed")
