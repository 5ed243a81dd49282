"""Pools of workers: one for each set of resource hints, sized by the hints and the machine. Pure but for Machine.here()."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.errors import UsageError
from penstock.inference.handler import variables_of
from penstock.inference.service_handler import ServiceHandler
from penstock.io.files import hiding_secrets
from penstock.io.source import FileSource, Source
from penstock.models.cgroups import memory_limits
from penstock.models.host_address import own_run_folder
from penstock.models.memory import file_bytes, usable_cores, visible_gpus
from penstock.models.place import Surroundings, choose_place
from penstock.options import RunOptions
from penstock.pipeline.hints import ACCELERATOR_TYPE, ResourceHints, cluster_needs
from penstock.run.plan import Plan, feeds_device
from penstock.run.schedule import PoolSize
from penstock.run.short_jobs import SHORT_JOB_BYTES, fits_threads, suits_threads
from penstock.steps.stage import Stage

SMALL_RUN_ROWS = 1000
AHEAD_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share out: this computer, or one node of several that are alike."""

    cores: int
    ram: int  # bytes
    gpus: tuple[str, ...] = ()  # by the names that CUDA_VISIBLE_DEVICES takes
    resources: Mapping[str, float] | None = None  # of a whole cluster, by name; None: it is this computer

    @classmethod
    def here(cls) -> Machine:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(usable_cores(), min([ram, *(limit.bytes for limit in memory_limits())]), visible_gpus())


class RunSize(NamedTuple):
    """How large a run is, as far as that is known beforehand."""

    rows: int | None  # at the sources
    bytes: int | None = None  # of these, in memory, about
    model_bytes: int | None = None  # of the files of models that could be called in threads of the user's process


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
    ahead: bool = False  # a worker begins a split while the last one's rows are at a device
    hosted: bool = False  # it needs hosts of models beside its workers
    on_device: bool = False  # and these need an accelerator
    most: int | None = None  # workers, by the user's own number; None: as many as there is room for


@dataclass(frozen=True, slots=True)
class Pools:
    """How a run is spread over the machine: in the user's process, or over pools of worker processes."""

    in_process: bool
    why: str
    pools: Sequence[Pool]
    rows: int | None = None  # at the sources, if that is known beforehand
    small: bool = False  # few rows: not worth a process
    short: bool = False  # a short job, in threads of the user's process

    def of_stage(self, stage: int) -> Pool:
        return next(pool for pool in self.pools if stage in pool.stages)

    @property
    def slots(self) -> int:
        """How many splits can run at a time."""
        return sum(pool.size.workers * pool.size.slots for pool in self.pools)


def surroundings(options: RunOptions, machine: Machine, pools: Pools | None = None, run: str | None = None) -> Surroundings:
    """What a process of this run knows about it, but for the number of its neighbours and of their threads."""
    return Surroundings(
        folder=own_run_folder(run) if run else "",
        slots=pools.slots if pools is not None and pools.in_process else 1,
        cores=machine.cores,
        threads=pools.slots if pools is not None and pools.short else 1,
        element_timeout=options.element_timeout,
        load_timeout=options.load_timeout,
        gpus=machine.gpus,
        in_process=pools is not None and pools.in_process,
        seed=options.split_seed,
        run_dir=str(options.run_dir or ""),
    )


def run_size(plan: Plan, sources: Iterable[Source[Any]]) -> RunSize:
    """What the sources of a plan say, with the files that they have found. What one does not know is not known of all."""
    rows, sizes = [], []
    for source in sources:
        with hiding_secrets(source.paths() if isinstance(source, FileSource) else ()):
            rows.append(source.count())
            sizes.append(source.byte_size())
    steps = [each for stage in plan.stages for each in stage.models()]
    models = [file_bytes(spec.handler.model_files) for step, spec in steps if step.traits.columns]
    return RunSize(_sum(rows), _sum(sizes), _sum(models))


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def choose_pools(plan: Plan, options: RunOptions, machine: Machine, size: RunSize) -> Pools:
    """Decide from the plan, the user's options, the machine and the size of the run alone."""
    return replace(_choose(plan, options, machine, size), rows=size.rows)


def _choose(plan: Plan, options: RunOptions, machine: Machine, size: RunSize) -> Pools:
    here = _in_process(plan, options.threads_per_worker)
    if options.most_workers == 0:
        return replace(here, why="workers=0")
    known = size.rows
    is_here = machine.resources is None
    if is_here and options.workers is None and known is not None and known <= SMALL_RUN_ROWS:
        return replace(here, small=True, why=f"{known} rows at the sources: at most {SMALL_RUN_ROWS} run in this process")
    suits = is_here and suits_threads(plan, options, surroundings(options, machine, here))
    if suits and fits_threads(size.bytes, size.model_bytes):
        return _short(plan, options, machine, size)
    by_hints: dict[ResourceHints, list[int]] = {}
    for stage in plan.stages:
        by_hints.setdefault(stage.hints, []).append(stage.index)
    around = surroundings(options, machine)
    pools = [_complete(_pool(i, *each, options, machine), plan, around) for i, each in enumerate(by_hints.items())]
    told = "of unknown size" if known is None else f"of {known} rows"
    return Pools(False, f"workers={options.workers}" if options.workers else f"input {told}", pools)


def _in_process(plan: Plan, threads: int) -> Pools:
    stages = [stage.index for stage in plan.stages]
    return Pools(True, "", [Pool(0, ResourceHints(), stages, PoolSize(1, threads), 1, "this process")])


def _short(plan: Plan, options: RunOptions, machine: Machine, size: RunSize) -> Pools:
    """A thread for each core."""
    threads = max(machine.cores, options.threads_per_worker)
    limit = f"at most {SHORT_JOB_BYTES // 10**6} MB need no worker processes"
    why = f"{(size.bytes or 0) / 1e6:.3g} MB at the sources, and every step takes columns: {limit}"
    return replace(_in_process(plan, threads), short=True, why=why)


def _complete(pool: Pool, plan: Plan, around: Surroundings) -> Pool:
    """With what the models of its stages say. Where workers feed a device, each has two splits at a time: one is read and
    prepared while the rows of the other are answered. Its threads take turns: no two run the user's code at once."""
    stages = [stage for stage in plan.stages if stage.index in pool.stages]
    near = replace(around, workers=pool.size.workers)
    places = [choose_place(spec.wishes(), near) for stage in stages for _, spec in stage.models()]
    ahead = pool.size.slots == 1 and not near.deterministic and feeds_device(stages, near)
    return replace(
        pool,
        size=replace(pool.size, slots=AHEAD_SLOTS) if ahead else pool.size,
        ahead=ahead,
        variables=_variables(stages, around),
        hosted=any(place.hosted for place in places),
        on_device=any(place.hosted and bool(place.devices) for place in places),
    )


def unlimited_loads(plan: Plan, pools: Pools, around: Surroundings) -> list[str]:
    """Steps whose models load where nothing can end that: a worker has other work, too."""
    found: dict[str, None] = {}
    for pool in pools.pools:
        near = replace(around, workers=pool.size.workers)
        for step, spec in (each for stage in plan.stages if stage.index in pool.stages for each in stage.models()):
            is_limited = spec.refresh is not None or isinstance(spec.handler, ServiceHandler)
            if not is_limited and not choose_place(spec.wishes(), near).hosted:
                found[step.label] = None
    return list(found)


def _variables(stages: Sequence[Stage], around: Surroundings) -> dict[str, str]:
    """What the models of these stages want in the environment, before a worker imports anything."""
    found: dict[str, tuple[str, str]] = {}
    for step, spec in (each for stage in stages for each in stage.models()):
        if choose_place(spec.wishes(), around).hosted:
            continue
        for name, value in variables_of(spec.handler).items():
            other, said = found.setdefault(name, (step.label, value))
            if said != value:
                raise UsageError(
                    f"steps {other!r} and {step.label!r} want {name}={said!r} and {value!r} in the environment of the same "
                    "worker processes; give one of the models a process of its own with large_model=True"
                )
    return {name: value for name, (_, value) in found.items()}


def _pool(index: int, hints: ResourceHints, stages: Sequence[int], options: RunOptions, machine: Machine) -> Pool:
    workers, why = room_for(hints, options.most_workers, machine)
    is_here = machine.resources is None  # else Ray gives a worker what is asked for it, on a node that is not known yet
    cores = hints.cpus or (max(1, machine.cores // workers) if is_here else 1)
    size = PoolSize(workers, options.threads_per_worker, options.least_workers)
    return Pool(index, hints, stages, size, cores, why, most=options.most_workers)


def room_for(hints: ResourceHints, most: int | None, machine: Machine) -> tuple[int, str]:
    """How many workers a pool has on this machine, and why. On a cluster `most`, the user's own number, is a maximum."""
    if most is not None and machine.resources is None:
        return most, f"workers={most}"
    limits = {f"{machine.cores} cores": machine.cores}
    if hints.cpus is not None:
        limits[f"{machine.cores} cores, {hints.cpus} for each"] = machine.cores // hints.cpus
    if hints.min_ram is not None:
        limits[f"{machine.ram / 1e9:.3g}GB of memory, {hints.min_ram / 1e9:.3g}GB for each"] = machine.ram // hints.min_ram
    if hints.accelerator is not None and machine.resources is None:
        limits[f"one worker for accelerator={hints.accelerator}"] = 1
    if machine.resources is not None:
        limits |= _cluster_limits(cluster_needs(hints), machine.resources)
    why, workers = min(limits.items(), key=lambda item: item[1])
    if most is not None and most <= workers:
        return most, f"workers={most}"
    return max(1, workers), why if most is None else f"{why}, of workers={most}"


def _cluster_limits(needs: Mapping[str, float], resources: Mapping[str, float]) -> dict[str, int]:
    """How many workers fit by what a cluster has besides cores and memory."""
    counted = {name: (resources.get(name, 0), each) for name, each in needs.items() if not name.startswith(ACCELERATOR_TYPE)}
    return {f"{there:g} of {name}, {each:g} for each": int(there / each) for name, (there, each) in counted.items()}
