"""Runs with a journal and without, on any site."""

from __future__ import annotations

import os

from penstock.errors import UsageError
from penstock.io.stored_sink import stored
from penstock.options import ASIDE, RunOptions
from penstock.pipeline.pipeline import Graph
from penstock.run.file_changes import Input
from penstock.run.fleet import Site
from penstock.run.pools import run_size
from penstock.run.run import Run
from penstock.run.setup import Job, list_inputs


def start_run(graph: Graph, options: RunOptions, site: Site) -> Run:
    """A run of the graph on this site; with `run_dir`, of what is left of it."""
    job = Job(graph, options, site)
    _check_refresh(job)
    if not job.journaled:
        return Run(job)
    if graph.collect:
        raise UsageError(
            "collect() keeps its rows in memory, so it cannot be resumed: write to a sink, or leave out run_dir"
        )
    from penstock.journal.journaled import journaled  # SQLite, which other runs need not load

    for sink in job.sinks.values():
        stored(sink).keep_in(os.path.join(str(options.run_dir), ASIDE))
    return Run(job, journaled)


def explain_run(graph: Graph, options: RunOptions, site: Site) -> str:
    from penstock.run.explain import explain  # which runs need not load

    job = Job(graph, options, site)
    _check_refresh(job)
    return explain(job, run_size(job.plan, (each.source for each in _inputs(job))), sample=True)


def _check_refresh(job: Job) -> None:
    if job.options.deterministic and job.graph.branches:
        steps = ", ".join(repr(node.label) for node in job.graph.branches)
        raise UsageError(
            f"deterministic=True, and a model that changes during the run (step {steps}), exclude each other: leave out "
            "one of the two"
        )


def _inputs(job: Job) -> list[Input]:
    if not job.journaled:
        return list_inputs(job.plan)
    from penstock.journal.inputs import list_inputs as list_others

    return list_others(job.plan, str(job.options.run_dir), ())
