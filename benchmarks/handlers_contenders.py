"""One framework's model over Parquet files: by a plain loop of its own batch calls, and by Penstock.

Every function runs in a fresh process, whose time counts from its start; it imports what it needs, and nothing else.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from handlers_models import ALL, Framework
from workload import COMPRESSION, Stopwatch, outcome

FILES = 4


def make(folder: str, framework: str, rows: int) -> dict[str, Any]:
    """The model, and the rows in files."""
    chosen = ALL[framework]
    chosen.make(Path(folder))
    Path(folder, "rows").mkdir()
    for at in range(FILES):
        columns = chosen.columns(rows // FILES, 10 + at)
        ids = np.arange(rows // FILES) + at * (rows // FILES)
        pq.write_table(pa.table({"id": ids, **columns}), f"{folder}/rows/{at}.parquet")
    return outcome(Stopwatch(), rows, "made")


def loop(folder: str, framework: str, output: str) -> dict[str, Any]:
    """Batches of one file after the other, the model's own call, and files again."""
    chosen, times = ALL[framework], []
    with Stopwatch() as watch:
        call = chosen.call(f"{folder}/model")
        Path(output).mkdir()
        for at in range(FILES):
            writer = None
            for batch in pq.ParquetFile(f"{folder}/rows/{at}.parquet").iter_batches(chosen.batch):
                given = _input(chosen, batch)
                began = time.perf_counter()
                answers = call(given)
                times.append(time.perf_counter() - began)
                table = pa.Table.from_batches([batch]).append_column("answer", _column(answers))
                writer = writer or pq.ParquetWriter(f"{output}/{at}.parquet", table.schema, compression=COMPRESSION)
                writer.write_table(table)
            assert writer is not None
            writer.close()
    done = _read(watch, output)
    return {**done, "figures": {"model_ms": 1000 * float(np.median(times))}}


def penstock(folder: str, framework: str, output: str) -> dict[str, Any]:
    """With the same batch size, and no other setting. Texts are batched as Penstock likes."""
    import penstock as ps

    chosen = ALL[framework]
    size: Any = {} if isinstance(chosen.takes, str) else {"max_batch_size": chosen.batch}
    with Stopwatch() as watch, ps.Pipeline() as p:
        handler = chosen.handler(f"{folder}/model", columns=chosen.takes, output_column="answer", **size)
        rows = p | ps.ReadFromParquet(f"{folder}/rows/*.parquet") | ps.RunInference(handler)
        rows | ps.WriteToParquet(output, compression=COMPRESSION)
    return _read(watch, output)


def _input(chosen: Framework, batch: pa.RecordBatch) -> Any:
    """One matrix of the columns, or the texts."""
    if isinstance(chosen.takes, str):
        return batch.column(chosen.takes).to_pylist()
    return np.stack([batch.column(name).to_numpy() for name in chosen.takes], axis=1)


def _column(answers: Any) -> pa.Array:
    made = np.asarray(answers)
    if made.ndim == 1 or made.shape[1] == 1:
        return pa.array(made.reshape(len(made)))
    return pa.FixedSizeListArray.from_arrays(made.ravel(), made.shape[1])


def _read(watch: Stopwatch, output: str) -> dict[str, Any]:
    """What was written: rows, and a sum of their answers that both must give."""
    table = pq.read_table(output, columns=["id", "answer"])
    answers = table.sort_by("id")["answer"].combine_chunks()
    numbers = answers.flatten() if hasattr(answers.type, "value_type") else answers
    weights = 1 + np.arange(len(numbers)) % 7
    return outcome(watch, table.num_rows, f"{float((numbers.to_numpy() * weights).sum()):.3g}")
