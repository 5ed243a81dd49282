"""Running programs on Beam's runners, and what comes out of them."""

from __future__ import annotations

import pickle
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.transforms import window

RUNNERS = {
    "process": (FnApiRunner, []),
    "threads": (FnApiRunner, ["--direct_running_mode=multi_threading", "--direct_num_workers=3"]),
    "processes": (FnApiRunner, ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]),
    "portable": (PortableRunner, ["--job_endpoint=embed", "--environment_type=LOOPBACK"]),
    "bundles": (BundleBasedDirectRunner, []),
}


class Outcome(dict):
    """What outputs hold, by name: (value, timestamp, window), sorted. And the metrics of the pipeline."""

    metrics = None

    def values_of(self, name="answers"):
        return [value for value, _, _ in self[name]]


def run(program, base, folder, runner="process", more=()):
    """The outputs of a program, whatever process they were made in."""
    kind, options = RUNNERS[runner]
    pipeline = beam.Pipeline(runner=kind(), options=PipelineOptions([*options, *more]))
    outputs = program(base, pipeline, folder)
    for name, each in outputs.items():
        keep(each, name, f"{folder}/{name}.pickle")
    result = pipeline.run()
    result.wait_until_finish()
    outcome = Outcome()
    for name in outputs:
        path = Path(folder) / f"{name}.pickle"
        found = pickle.loads(path.read_bytes()) if path.exists() else []
        outcome[name] = sorted(found, key=repr)
    outcome.metrics = result.metrics()
    return outcome


def keep(pcoll, name, path):
    (
        pcoll
        | f"Reify {name}" >> beam.ParDo(Reify())
        | f"Global {name}" >> beam.WindowInto(window.GlobalWindows())
        | f"Key {name}" >> beam.Map(lambda each: (None, each))
        | f"Group {name}" >> beam.GroupByKey()
        | f"Write {name}" >> beam.Map(write, path)
    )


class Reify(beam.DoFn):
    def process(self, element, timestamp=beam.DoFn.TimestampParam, own=beam.DoFn.WindowParam):
        where = None if isinstance(own, window.GlobalWindow) else (int(own.start), int(own.end))
        yield plain_value(element), float(timestamp), where


def plain_value(value):
    """Named tuples of Beam's and of Penstock's are different types with the same fields."""
    return tuple(map(plain_value, value)) if isinstance(value, tuple) else value


def write(grouped, path):
    Path(path).write_bytes(pickle.dumps(list(grouped[1])))


def counters(outcome):
    """By namespace and name, of all steps."""
    found = {}
    for each in outcome.metrics.query()["counters"]:
        key = each.key.metric.namespace, each.key.metric.name
        found[key] = found.get(key, 0) + each.committed
    return found


def distributions(outcome):
    return {
        (each.key.metric.namespace, each.key.metric.name): each.committed
        for each in outcome.metrics.query()["distributions"]
    }
