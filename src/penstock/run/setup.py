"""Setting a run up: from a graph and the place to run it to a schedule. The same with a journal and without."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import cloudpickle

from penstock.errors import NotShippableError
from penstock.io.sink import Sink
from penstock.io.source import SplitGoal
from penstock.models.place import Surroundings
from penstock.options import RunOptions
from penstock.pipeline.pipeline import Graph
from penstock.rows import safe_str
from penstock.run.file_changes import Input
from penstock.run.fleet import Site
from penstock.run.outcomes import SplitId
from penstock.run.plan import Plan, default_budgets, make_plan
from penstock.run.pools import Machine, Pools, RunSize, choose_pools, run_size, surroundings
from penstock.run.schedule import Scheduler
from penstock.run.splits import cut, few_splits, make_scheduler, split_goals
from penstock.steps.stage import Stage, Step
from penstock.transport.packing import dump_step


@dataclass(frozen=True)
class Job:
    """What is to be run, how, and where."""

    graph: Graph
    options: RunOptions
    site: Site

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.graph)

    @cached_property
    def machine(self) -> Machine:
        return self.site.machine()

    @property
    def journaled(self) -> bool:
        return self.options.run_dir is not None

    @property
    def sinks(self) -> dict[int, Sink[Any]]:
        """By node."""
        return {index: sink for index, (_, sink) in self.labelled_sinks().items()}

    def labelled_sinks(self) -> dict[int, tuple[str, Sink[Any]]]:
        """The sinks, each with its step's label, by node."""
        nodes = self.plan.sinks.items()
        return {index: (node.label, sink) for index, node in nodes if (sink := node.traits.sink) is not None}

    def pools(self, size: RunSize) -> Pools:
        """How the run is spread, if it is so large."""
        return choose_pools(self.plan, self.options, self.machine, size)

    def surroundings(self, pools: Pools, run: str | None = None) -> Surroundings:
        budgets = max(1, default_budgets(self.plan))
        return replace(surroundings(self.options, self.machine, pools, run), default_budgets=budgets)

    def programs(self) -> dict[int, bytes]:
        """The stages as they are copied to every thread that runs them. What cannot be copied is found before anything
        starts."""
        if "__mp_main__" in sys.modules:  # the user's script, in a process that multiprocessing spawned: no worker has it
            cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
        return {stage.index: self._program(stage) for stage in self.plan.stages}

    def _program(self, stage: Stage) -> bytes:
        """Every step is pickled by itself, so that an object which two steps were given is two objects there."""
        program: bytes = cloudpickle.dumps((stage.with_transforms(_pickled_step), self.labelled_sinks()), protocol=5)
        return program


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is cut. Whoever takes the run up later must find it as it was."""

    run: str  # its id
    size: RunSize
    few: Sequence[int]  # stages that have few splits
    splits: Sequence[tuple[SplitId, Any]]  # that are to be done
    session: str = ""  # tells the processes of one run apart, where there may be several


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that is ready to be carried out."""

    job: Job
    layout: Layout
    pools: Pools
    scheduler: Scheduler

    def pools_of_steps(self) -> dict[str, int]:
        """The number of the pool that runs each step, by its label."""
        stages = self.job.plan.stages
        return {step.label: self.pools.of_stage(stage.index).index for stage in stages for step in stage.steps()}


def lay_out(job: Job, inputs: Sequence[Input]) -> tuple[Layout, list[SplitGoal]]:
    """Cut a new run; also how finely each source is cut."""
    size = run_size(job.plan, (each.source for each in inputs))
    pools = job.pools(size)
    goals = split_goals(job.plan, pools, journaled=job.journaled)
    splits = [split for i, each in enumerate(inputs) for split in cut(each.source, i, goals[i])]
    few = few_splits(job.plan, pools, job.options, splits)
    return Layout(run=os.urandom(8).hex(), size=size, few=few, splits=splits), goals


def set_up(job: Job, layout: Layout) -> Setup:
    pools = job.pools(layout.size)
    scheduler = make_scheduler(job.plan, pools, job.options, layout.splits)
    return Setup(job=job, layout=layout, pools=pools, scheduler=scheduler)


def list_inputs(plan: Plan) -> list[Input]:
    """The sources of a plan, each with its files listed once."""
    found = [(step.label, source, source.inputs()) for _, _, step, source in plan.sources()]
    return [Input(label, source.among(files), files) for label, source, files in found]


def _pickled_step(step: Step) -> bytes:
    try:
        return dump_step(step.transform)
    except Exception as exc:
        raise NotShippableError(
            f"step {step.label!r} cannot be copied to a worker ({type(exc).__name__}: {safe_str(exc)})\n"
            "  something that its function or handler refers to (an open file, a lock, a connection, a generator) "
            "cannot be pickled: make it inside the function, in DoFn.setup(), or in load_model()"
        ) from exc
