"""An encoder the size of BERT-base, texts for it, and whether vectors are right. All of it runs in the fresh processes.

A folder holds the model in `model`, the texts in `texts`, and the vectors of some rows by plain encode().
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workload import Stopwatch, outcome

if TYPE_CHECKING:
    import numpy as np

SHORTEST, LONGEST, MEAN, SPREAD = 8, 512, 77, 0.8  # tokens; SPREAD is the sigma of the log-normal
VOCABULARY, WIDTH, FILES = 30_522, 768, 16
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SAMPLE = 256  # rows whose vectors are compared
CLOSE = 0.25  # how far a vector may be from encode()'s, in distances between two rows: bf16 has three digits
EXPECTED = "expected.npz"


def make(folder: str, rows: int, layers: int, device: str, seed: int = 12) -> dict[str, Any]:
    """All of it, seeded; `seed` is that of the weights."""
    with Stopwatch() as watch:
        words = make_words()
        save_model(Path(folder, "model"), words, layers, device, seed)
        lengths = save_texts(Path(folder, "texts"), words, rows)
        save_expected(folder, rows, device)
    return outcome(watch, rows, f"{lengths.mean():.1f} tokens on average")


def make_words() -> list[str]:
    """One token each."""
    consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
    syllables = [first + second for first in consonants for second in vowels]
    triples = (first + second + third for first in syllables for second in syllables for third in syllables)
    return [next(triples) for _ in range(VOCABULARY - len(SPECIAL))]


def save_model(folder: Path, words: list[str], layers: int, device: str, seed: int = 12) -> None:
    """Random weights, mean pooling; in bf16 for a GPU, float32 for the CPU."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(seed)
    config = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, max_position_embeddings=LONGEST)
    plain = folder.with_name("bert")
    BertModel(config).to(dtype_of(device)).save_pretrained(plain)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    BertTokenizerFast(vocab=vocabulary, model_max_length=LONGEST).save_pretrained(plain)
    encoder = Transformer(str(plain), max_seq_length=LONGEST)
    SentenceTransformer(modules=[encoder, Pooling(WIDTH)], device="cpu").to(dtype_of(device)).save(str(folder))


def dtype_of(device: str) -> Any:
    import torch

    return torch.float32 if device == "cpu" else torch.bfloat16


def save_texts(folder: Path, words: list[str], rows: int) -> np.ndarray[Any, Any]:
    """Parquet files of ids and texts; returns the tokens of each."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    random = np.random.default_rng(75)
    lengths = random.lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, rows).round().clip(SHORTEST, LONGEST).astype(int)
    ends = np.concatenate([[0], (lengths - 2).cumsum()]).astype(np.int32)  # [CLS] and [SEP] come on top
    drawn = pa.array(words).take(pa.array(random.integers(0, len(words), ends[-1])))
    texts = pc.binary_join(pa.ListArray.from_arrays(ends, drawn), " ")
    table = pa.table({"id": np.arange(rows), "text": texts})
    folder.mkdir()
    size = -(-rows // FILES)
    for number in range(FILES):
        pq.write_table(table[number * size : (number + 1) * size], folder / f"part-{number:02d}.parquet")
    return lengths  # type: ignore[no-any-return]


def save_expected(folder: str, rows: int, device: str) -> None:
    import numpy as np
    import pyarrow.parquet as pq

    ids = np.unique(np.linspace(0, rows - 1, SAMPLE).astype(int))
    texts = pq.read_table(Path(folder, "texts"))["text"].take(ids).to_pylist()
    vectors = load(folder, device).encode(texts, batch_size=32, show_progress_bar=False)
    np.savez(Path(folder, EXPECTED), ids=ids, vectors=vectors, texts=np.array(texts))


def load(folder: str, device: str) -> Any:
    """The encoder as a rival loads it: with the floats that it was saved in."""
    from sentence_transformers import SentenceTransformer

    options = {"local_files_only": True, "model_kwargs": {"dtype": dtype_of(device)}}
    return SentenceTransformer(str(Path(folder, "model")), device=device, **options).eval()


def checked(watch: Stopwatch, folder: str, output: str, column: str = "vector", **more: Any) -> dict[str, Any]:
    """Read back what a contender wrote. Wrong are rows that are missing or there twice; of the sample also those whose text
    has changed, or whose vector, in this column, is not close to that of plain encode()."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    expected = np.load(Path(folder, EXPECTED))
    rows = pq.read_table(Path(folder, "texts"), columns=["id"]).num_rows
    made = pq.read_table(output)
    ids = made["id"].to_numpy()
    lost = max(rows, len(ids)) - len(np.unique(ids))
    order = np.argsort(ids)
    found = made.take(order[np.searchsorted(ids, expected["ids"], sorter=order).clip(0, len(ids) - 1)])
    vectors = pc.list_flatten(found[column]).to_numpy().reshape(-1, WIDTH)
    off = np.linalg.norm(vectors - expected["vectors"], axis=1) / _distance(expected["vectors"])
    right = (off <= CLOSE) & (np.array(found["text"].to_pylist()) == expected["texts"])
    wrong = lost + int((~right).sum())
    return {**outcome(watch, len(ids), f"{wrong} rows wrong"), **more} | {
        "figures": {**more.get("figures", {}), "off": float(off.max())}
    }


def _distance(vectors: np.ndarray[Any, Any]) -> float:
    """Between the vectors of two rows, in the middle."""
    import numpy as np

    return float(np.median(np.linalg.norm(vectors[1:] - vectors[:-1], axis=1)))
