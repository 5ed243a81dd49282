"""A pipeline of Apache Beam with Penstock's RunInference: lines of measurements in, the kind of each flower out.

Lines that are no measurements go to a file of their own. Options that are not named here are Beam's, such as --runner.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

from penstock.beam import PredictionResult, RunInference
from penstock.handlers.sklearn import SklearnModelHandlerNumpy


def measurements(line: str) -> np.ndarray[Any, Any]:
    return np.array([float(value) for value in line.split(",")])


def as_json(result: PredictionResult) -> str:
    return json.dumps({"measurements": result.example.tolist(), "species": str(result.inference)})


def dead_letter(line: str, error: tuple[type[BaseException], str, list[str]]) -> str:
    return json.dumps({"line": line, "error": error[1]})


def build(pipeline: beam.Pipeline, source: str, model: str, output: str) -> None:
    """Two sets of files: answers at `output`, dead letters at `output`-failed."""
    handler = SklearnModelHandlerNumpy(model).with_preprocess_fn(measurements)
    lines = pipeline | beam.io.ReadFromText(source)
    answers, failures = lines | "Classify" >> RunInference(handler).with_exception_handling()
    answers | "As JSON" >> beam.Map(as_json) | "Write" >> beam.io.WriteToText(output, ".jsonl")
    failed = (failures.failed_preprocessing[0], failures.failed_inferences) | beam.Flatten()
    letters = failed | "Dead letters" >> beam.MapTuple(dead_letter)
    letters | "Write failed" >> beam.io.WriteToText(f"{output}-failed", ".jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", required=True, help="text files of four numbers a line, with commas between them")
    parser.add_argument("--model", required=True, help="the model of make_model.py: a path that every worker can read")
    parser.add_argument("--output", required=True, help="what the names of the files of answers begin with")
    own, rest = parser.parse_known_args()
    with beam.Pipeline(options=PipelineOptions(rest)) as pipeline:
        build(pipeline, own.input, own.model, own.output)


if __name__ == "__main__":
    main()
