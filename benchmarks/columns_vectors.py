"""Texts to vectors by a model that costs next to nothing: what reading, calling and writing cost, in Penstock and by hand.

Every function runs in a fresh process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from columns_models import as_lists
from workload import Stopwatch, outcome

FILES, WIDTH, DISTINCT = 8, 384, 4_096
WORDS = [
    "river",
    "stone",
    "cloud",
    "house",
    "green",
    "paper",
    "music",
    "bread",
    "seven",
    "ladder",
    "of",
    "and",
    "the",
    "winter",
]
GROUP_ROWS = (32 << 20) // (4 * WIDTH + 64)  # in a row group of the loop: as many as Penstock writes, see the checksums


def make(folder: str, rows: int) -> dict[str, Any]:
    """Texts of 3 to 12 words, with an id."""
    random = np.random.default_rng(384)
    size = -(-rows // FILES)
    Path(folder, "texts").mkdir()
    with Stopwatch() as watch:
        for number in range(FILES):
            ids = np.arange(number * size, min((number + 1) * size, rows))
            ends = np.concatenate([[0], random.integers(3, 13, len(ids)).cumsum()]).astype(np.int32)
            words = pa.array(WORDS).take(pa.array(random.integers(0, len(WORDS), ends[-1])))
            texts = pc.binary_join(pa.ListArray.from_arrays(ends, words), " ")
            pq.write_table(pa.table({"id": ids, "text": texts}), Path(folder, "texts", f"part-{number}.parquet"))
    return outcome(watch, rows, None)


def load() -> np.ndarray[Any, Any]:
    """The model: vectors of which each text has one."""
    return np.random.default_rng(7).normal(size=(DISTINCT, WIDTH)).astype(np.float32)


def encode(texts: Any, model: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """By the length of a text and how often it has the letter e."""
    lengths, letters = pc.binary_length(texts).to_numpy(), pc.count_substring(texts, "e").to_numpy()
    return model[(67 * lengths + 13 * letters) % DISTINCT]  # type: ignore[no-any-return]


def penstock(folder: str, workers: int) -> dict[str, Any]:
    import penstock as ps

    class Encoder(ps.ModelHandler[str, Any, Any]):
        def load_model(self) -> np.ndarray[Any, Any]:
            return load()

        def model_id(self) -> str:
            return "lengths and letters"

        def takes_columns(self) -> bool:
            return True

        def run_inference_columns(self, table: pa.Table, model: Any, inference_args: Any = None) -> Any:
            return encode(table["text"], model)

        def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
            raise NotImplementedError("only columns come here")

    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch, ps.Pipeline(workers=workers) as p:
            texts = p | ps.ReadFromParquet(f"{folder}/texts/*.parquet")
            texts | ps.RunInference(Encoder(columns="text")) | ps.WriteToParquet(output)
        return _checked(watch, output)


def loop(folder: str) -> dict[str, Any]:
    """The same by hand: one file at a time, with the row groups, compression, dictionaries and statistics of
    WriteToParquet."""
    with tempfile.TemporaryDirectory() as output:
        with Stopwatch() as watch:
            model = load()
            for path in sorted(Path(folder, "texts").iterdir()):
                _convert(path, Path(output, path.name), model)
        return _checked(watch, output)


def _convert(source: Path, target: Path, model: np.ndarray[Any, Any]) -> None:
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("inference", pa.list_(pa.float32(), WIDTH))])
    options = {"compression": "zstd", "use_dictionary": ["id", "text"], "write_statistics": ["id", "text"]}
    with pa.OSFile(str(target), "wb") as sink, pq.ParquetWriter(sink, schema, **options) as file:
        for batch in pq.ParquetFile(source).iter_batches(GROUP_ROWS):
            texts, vectors = batch["text"], as_lists(encode(batch["text"], model))
            file.write_table(pa.table([batch["id"], texts, vectors], schema), GROUP_ROWS)


def _checked(watch: Stopwatch, output: str) -> dict[str, Any]:
    """Wrong are rows with another vector than their text's, and ids that are not there once. One group in memory at a
    time: all of them are gigabytes."""
    model, ids, right, groups = load(), [], 0, 0
    for path in sorted(Path(output).glob("*.parquet")):
        file = pq.ParquetFile(path)
        groups += file.num_row_groups
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            vectors = pc.list_flatten(table["inference"]).to_numpy().reshape(-1, WIDTH)
            right += int((vectors == encode(table["text"], model)).all(axis=1).sum())
            ids.append(table["id"].to_numpy())
    found = np.concatenate(ids)
    wrong = len(found) - right + len(found) - len(np.unique(found)) + int(found.max()) + 1 - len(np.unique(found))
    return outcome(watch, len(found), f"{wrong} rows wrong, {groups} row groups")
