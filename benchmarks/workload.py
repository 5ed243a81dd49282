"""The work that every contender does, and the clock that times it. All of it runs in the fresh processes."""

from __future__ import annotations

import os
import pickle
import resource
import time
from pathlib import Path
from typing import Any

COLUMNS = [f"x{number}" for number in range(20)]
FILES, GROUPS_PER_FILE = 4, 2
MODEL_FILE = "{kind}.pickle"
COMPRESSION = "snappy"  # of all output: the default of Daft and Ray, not of Penstock


class Stopwatch:
    """Seconds spent in its `with` block, and from the start of this process to the end of it. `cpu` is what the cores have
    spent until then, on this process and on those that it started and that have ended."""

    seconds = 0.0
    job = 0.0
    cpu = 0.0

    def __enter__(self) -> Stopwatch:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self.job = time.time() - float(os.environ.get("PENSTOCK_BENCHMARK_STARTED", time.time()))
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        self.cpu = sum(each.ru_utime + each.ru_stime for each in used)


def outcome(watch: Stopwatch, rows: int, checksum: Any) -> dict[str, Any]:
    """What a case reports. Contenders whose rows or checksums differ did not do the same work."""
    return {"seconds": watch.seconds, "job": watch.job, "cpu": watch.cpu, "rows": rows, "checksum": checksum}


# Three cheap functions of one row.


def add_seven(row: int) -> int:
    return row + 7


def double(row: int) -> int:
    return row * 2


def drop_three(row: int) -> int:
    return row - 3


FUNCTIONS = (add_seven, double, drop_three)


def answer(batch: list[int]) -> list[int]:
    """The model: it returns its batch."""
    return batch


def bare_loop(rows: int, batch_size: int) -> dict[str, Any]:
    """What one would write without any library."""
    first, second, third = FUNCTIONS
    with Stopwatch() as watch:
        answers: list[int] = []
        batch: list[int] = []
        for row in range(rows):
            batch.append(third(second(first(row))))
            if len(batch) == batch_size:
                answers.extend(answer(batch))
                batch = []
        answers.extend(answer(batch))
        total = sum(answers)
    return outcome(watch, len(answers), total)


# Twenty float columns and a classifier.


def make_tables(folder: str, rows: int, kinds: list[str]) -> dict[str, Any]:
    """Write the input files and one pickled classifier of each kind; report what the right answers are."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(20)
    weights = random.normal(size=len(COLUMNS))
    Path(folder, "input").mkdir()
    with Stopwatch() as watch:
        per_file = rows // FILES
        for number in range(FILES):
            values = random.normal(size=(per_file, len(COLUMNS))).astype(np.float32)
            table = pa.table({name: values[:, column] for column, name in enumerate(COLUMNS)})
            path = Path(folder, "input", f"part-{number}.parquet")
            pq.write_table(table, path, row_group_size=-(-per_file // GROUPS_PER_FILE))
        for kind in kinds:
            model = _classifier(kind).fit(values[:20_000], (values[:20_000] @ weights > 0).astype(int))
            Path(folder, MODEL_FILE.format(kind=kind)).write_bytes(pickle.dumps(model))
    return outcome(watch, per_file * FILES, None)


def _classifier(kind: str) -> Any:
    if kind == "logistic regression":
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression()
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(max_iter=30, random_state=20)


def load_classifier(path: str) -> Any:
    return pickle.loads(Path(path).read_bytes())


def check_output(watch: Stopwatch, folder: str, model_path: str) -> dict[str, Any]:
    """Read back what a contender wrote. The checksum counts the rows whose answer is that of the model."""
    import numpy as np
    import pyarrow.parquet as pq

    table = pq.read_table(folder, columns=[*COLUMNS, "inference"])
    expected = load_classifier(model_path).predict(np.column_stack([table[name].to_numpy() for name in COLUMNS]))
    right = int((table["inference"].to_numpy() == expected).sum())
    return outcome(watch, table.num_rows, f"{right} right, {int(expected.sum())} ones")
