"""The local engine: from a graph to a result."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from typing import Any

import cloudpickle

from penstock.engines.local.run import Run, labelled_sinks, sinks_of
from penstock.errors import NotShippableError
from penstock.observe.result import RunResult
from penstock.observe.summary import warnings
from penstock.options import ASIDE, RunOptions
from penstock.pipeline.graph import PCollection
from penstock.pipeline.pipeline import Graph, engine_override
from penstock.rows import safe_str
from penstock.run.coordinator import Tally
from penstock.run.explain import explain
from penstock.run.file_changes import Input
from penstock.run.outputs import AtTheEnd
from penstock.run.plan import Plan, make_plan
from penstock.run.pools import Machine, choose_pools, count_rows, surroundings
from penstock.run.splits import cut, few_splits, make_scheduler, split_goals
from penstock.steps.stage import Stage, Step
from penstock.transport.packing import dump_step

logger = logging.getLogger(__name__)


class LocalEngine:
    """Runs a pipeline on this machine."""

    def explain(self, graph: Graph, options: RunOptions) -> str:
        plan = make_plan(graph)
        machine = Machine.here()
        pools = choose_pools(plan, options, machine, count_rows(each.source for each in _inputs(plan, options)))
        return explain(plan, pools, surroundings(options, machine), journaled=options.run_dir is not None)

    def run(self, graph: Graph, options: RunOptions) -> tuple[RunResult, dict[PCollection[Any], list[Any]]]:
        result, rows = self._run(graph, options)
        if engine_override.get() is None:  # the command line says it itself
            for warning in warnings(result):
                logger.warning(warning)
        return result, rows

    def _run(self, graph: Graph, options: RunOptions) -> tuple[RunResult, dict[PCollection[Any], list[Any]]]:
        plan = make_plan(graph)
        if options.run_dir is not None:
            for sink in sinks_of(plan).values():
                sink.keep_in(os.path.join(str(options.run_dir), ASIDE))
        if "__mp_main__" in sys.modules:  # the user's script, in a process that multiprocessing spawned: no worker has it
            cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
        programs = {stage.index: _program(plan, stage) for stage in plan.stages}
        if options.run_dir is not None:
            from penstock.engines.local.journaled import run_journaled  # SQLite, which other runs need not load

            return run_journaled(graph, plan, programs, options), {}
        inputs = _inputs(plan, options)
        pools = choose_pools(plan, options, Machine.here(), count_rows(each.source for each in inputs))
        goals = split_goals(plan, pools)
        splits = [split for i, each in enumerate(inputs) for split in cut(each.source, i, goals[i])]
        run = Run(
            id=secrets.token_hex(8),
            graph=graph,
            plan=plan,
            pools=pools,
            programs=programs,
            scheduler=make_scheduler(plan, pools, options, splits),
            few=few_splits(plan, pools, options, splits),
            options=options,
        )
        result, tally = run.carry_out(AtTheEnd(run.id, labelled_sinks(plan), inputs))
        return result, {pcoll: _rows(tally, position) for position, pcoll in enumerate(graph.collect)}


def _inputs(plan: Plan, options: RunOptions) -> list[Input]:
    """The sources of a plan, each with its inputs listed once."""
    if options.run_dir is not None:
        from penstock.journal.inputs import list_inputs

        return list_inputs(plan, str(options.run_dir), ())
    found = [(step.label, source, source.inputs()) for _, _, step, source in plan.sources()]
    return [Input(label, source.among(files), files) for label, source, files in found]


def _program(plan: Plan, stage: Stage) -> bytes:
    """A stage as it is copied to every thread that runs it. What cannot be copied is found before anything starts.

    Every step is pickled by itself, so that an object which two steps were given is two objects there.
    """
    program: bytes = cloudpickle.dumps((stage.with_transforms(_pickled_step), labelled_sinks(plan)), protocol=5)
    return program


def _pickled_step(step: Step) -> bytes:
    try:
        return dump_step(step.transform)
    except Exception as exc:
        raise NotShippableError(
            f"step {step.label!r} cannot be copied to a worker ({type(exc).__name__}: {safe_str(exc)})\n"
            "  something that its function or handler refers to (an open file, a lock, a connection, a generator) "
            "cannot be pickled: make it inside the function, in DoFn.setup(), or in load_model()"
        ) from exc


def _rows(tally: Tally, position: int) -> list[Any]:
    rows: list[Any] = []
    for _, some in sorted(tally.collected.get(position, []), key=lambda item: item[0]):
        rows.extend(some)
    return rows
