"""Pools of workers: one for each set of resource hints, sized by the hints and the machine. Pure but for Machine.here()."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import UsageError
from penstock.inference.handler import variables_of
from penstock.io.files import hiding_secrets
from penstock.io.source import FileSource, Source
from penstock.models.memory import visible_gpus
from penstock.models.place import Surroundings, choose_place
from penstock.models.rendezvous import own_run_folder
from penstock.options import RunOptions
from penstock.pipeline.hints import ResourceHints
from penstock.run.plan import Plan
from penstock.run.schedule import PoolSize

SMALL_RUN_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share out: this computer, or one node of several that are alike."""

    cores: int
    ram: int  # bytes
    gpus: tuple[str, ...] = ()  # by the names that CUDA_VISIBLE_DEVICES takes

    @classmethod
    def here(cls) -> Machine:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        quota, _, period = _cgroup("cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
        limit = _cgroup("memory.max")
        return cls(cores, min(ram, int(limit)) if limit.isdigit() else ram, visible_gpus())


def _cgroup(name: str) -> str:
    """A limit that a container puts on its processes."""
    try:
        with open(f"/sys/fs/cgroup/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that are alike, and the stages that they run."""

    index: int
    hints: ResourceHints
    stages: Sequence[int]
    size: PoolSize
    cores: int  # threads that a worker's frameworks may use
    why: str
    variables: Mapping[str, str] = field(default_factory=dict)  # of its models, for the environment of its workers


@dataclass(frozen=True, slots=True)
class Pools:
    """How a run is spread over the machine: in the user's process, or over pools of worker processes."""

    in_process: bool
    why: str
    pools: Sequence[Pool]
    rows: int | None = None  # at the sources, if that is known beforehand
    small: bool = False  # few rows: not worth a process

    def of_stage(self, stage: int) -> Pool:
        return next(pool for pool in self.pools if stage in pool.stages)

    @property
    def slots(self) -> int:
        """How many splits can run at a time."""
        return sum(pool.size.workers * pool.size.slots for pool in self.pools)


def surroundings(
    options: RunOptions, machine: Machine, workers: int = 1, run: str | None = None, in_process: bool = False
) -> Surroundings:
    """What a process of this run knows about it."""
    return Surroundings(
        folder=own_run_folder(run) if run else "",
        workers=workers,
        cores=machine.cores,
        element_timeout=options.element_timeout,
        load_timeout=options.load_timeout,
        gpus=machine.gpus,
        in_process=in_process,
        seed=options.split_seed,
    )


def count_rows(sources: Iterable[Source[Any]]) -> int | None:
    """How many rows the sources have, if all of them know it."""
    counts = []
    for source in sources:
        with hiding_secrets(source.paths() if isinstance(source, FileSource) else ()):
            counts.append(source.count())
    return None if None in counts else sum(count or 0 for count in counts)


def choose_pools(plan: Plan, options: RunOptions, machine: Machine, rows: int | None) -> Pools:
    """Decide from the plan, the user's options, the machine and the number of rows at the sources alone."""
    return replace(_choose(plan, options, machine, rows), rows=rows)


def _choose(plan: Plan, options: RunOptions, machine: Machine, known: int | None) -> Pools:
    if options.workers == 0:
        return _in_process(plan, options, "workers=0")
    if options.workers is None and known is not None and known <= SMALL_RUN_ROWS:
        why = f"{known} rows at the sources: at most {SMALL_RUN_ROWS} run in this process"
        return replace(_in_process(plan, options, why), small=True)
    by_hints: dict[ResourceHints, list[int]] = {}
    for stage in plan.stages:
        by_hints.setdefault(stage.hints, []).append(stage.index)
    pools = [
        replace(
            _pool(i, hints, stages, options, machine), variables=_variables(plan, stages, surroundings(options, machine))
        )
        for i, (hints, stages) in enumerate(by_hints.items())
    ]
    size = "of unknown size" if known is None else f"of {known} rows"
    return Pools(False, f"workers={options.workers}" if options.workers else f"input {size}", pools)


def _in_process(plan: Plan, options: RunOptions, why: str) -> Pools:
    size = PoolSize(1, options.threads_per_worker)
    stages = [stage.index for stage in plan.stages]
    return Pools(True, why, [Pool(0, ResourceHints(), stages, size, 1, "this process")])


def _variables(plan: Plan, stages: Sequence[int], around: Surroundings) -> dict[str, str]:
    """What the models of these stages want in the environment, before a worker imports anything."""
    found: dict[str, tuple[str, str]] = {}
    for step in (step for stage in plan.stages if stage.index in stages for step in stage.steps()):
        model = step.traits.model
        if model is None or choose_place(model.wishes(), around).hosted:
            continue
        for name, value in variables_of(model.handler).items():
            other, said = found.setdefault(name, (step.label, value))
            if said != value:
                raise UsageError(
                    f"steps {other!r} and {step.label!r} want {name}={said!r} and {value!r} in the environment of the same "
                    "worker processes; give one of the models a process of its own with large_model=True"
                )
    return {name: value for name, (_, value) in found.items()}


def _pool(index: int, hints: ResourceHints, stages: Sequence[int], options: RunOptions, machine: Machine) -> Pool:
    if options.workers is not None:
        workers, why = options.workers, f"workers={options.workers}"
    else:
        limits = {f"{machine.cores} cores": machine.cores}
        if hints.cpus is not None:
            limits[f"{machine.cores} cores, {hints.cpus} for each"] = machine.cores // hints.cpus
        if hints.min_ram is not None:
            limits[f"{machine.ram / 1e9:.3g}GB of memory, {hints.min_ram / 1e9:.3g}GB for each"] = (
                machine.ram // hints.min_ram
            )
        if hints.accelerator is not None:
            limits[f"one worker for accelerator={hints.accelerator}"] = 1
        why, workers = min(limits.items(), key=lambda item: item[1])
        workers = max(1, workers)
    cores = hints.cpus or max(1, machine.cores // workers)
    return Pool(index, hints, stages, PoolSize(workers, options.threads_per_worker), cores, why)
