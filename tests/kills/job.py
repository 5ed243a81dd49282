"""A run with everything that a kill can hit: two sources, branches, stages, a model in a host, one of columns, failures,
four outputs.

python job.py <folder>: reads <folder>/in, writes <folder>/out, keeps its journal in <folder>/run.
"""

import os
import sys
import time

import numpy as np

import penstock as ps


class Slow(ps.ModelHandler):
    """Answers that do not depend on batches; some rows are poison. One call takes long enough to be killed in."""

    def load_model(self):
        return 3

    def run_inference(self, batch, model, inference_args=None):
        time.sleep(0.005)
        for row in batch:
            if row["n"] % 97 == 0:
                raise ValueError(f"poison {row['n'] % 2}")
        return [ps.PredictionResult(row, row["n"] * model) for row in batch]


class Vectors(ps.ModelHandler):
    """Answers a column of numbers with vectors, and says which rows are poison."""

    def load_model(self):
        return np.arange(4, dtype=np.float32)

    def takes_columns(self):
        return "numpy"

    def run_inference_columns(self, columns, model, inference_args=None):
        bad = {int(at): ValueError("poison") for at in np.flatnonzero(columns["n"] % 89 == 0)}
        vectors = np.outer(columns["n"], model)
        if bad:
            raise ps.BadRowsError(bad, vectors)
        return vectors


def answer(result):
    return {"id": result.example["id"], "answer": result.inference, "odd": result.example["n"] % 2}


def dead_letter(failed):
    row, failure = failed
    return {"id": row["id"], "kind": failure.kind, "message": failure.message}


def build(folder, **options):
    p = ps.Pipeline(run_dir=os.path.join(folder, "run"), **options)
    first = p | "first" >> ps.ReadFromJsonl(os.path.join(folder, "in", "a-*.jsonl"))
    second = p | "second" >> ps.ReadFromParquet(os.path.join(folder, "in", "b.parquet"))
    rows = (first, second) | ps.Flatten()
    good, bad = rows | "Score" >> ps.RunInference(Slow(max_batch_size=16, large_model=True)).with_exception_handling()
    answers = good | "answer" >> ps.Map(answer)
    answers | "all" >> ps.WriteToParquet(os.path.join(folder, "out", "all"))
    odd = answers | "odd" >> ps.Filter(lambda row: row["odd"]) | ps.Reshuffle() | "name" >> ps.Map(lambda row: row["id"])
    odd | "names" >> ps.WriteToText(os.path.join(folder, "out", "names"))
    columns, _ = (
        second
        | "Vectors"
        >> ps.RunInference(Vectors(columns="n", output_column="vector", max_batch_size=64)).with_exception_handling()
    )
    columns | "columns" >> ps.WriteToParquet(os.path.join(folder, "out", "columns"))
    bad.failed_inferences | "letter" >> ps.Map(dead_letter) | "dead" >> ps.WriteToJsonl(os.path.join(folder, "out", "dead"))
    return p


if __name__ == "__main__":
    build(sys.argv[1], workers=2, load_timeout=60.0).run()
