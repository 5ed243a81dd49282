"""How the sources of a run are cut into splits."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.batching.entry import LOOKAHEAD
from penstock.io.files import hiding_secrets
from penstock.io.source import FileSource, Source, SplitGoal
from penstock.options import RunOptions
from penstock.run.outcomes import SplitId
from penstock.run.plan import Plan, in_flight, largest_batch, measures_length, waits_for_device, window
from penstock.run.pools import SMALL_RUN_ROWS, Pools
from penstock.run.schedule import Scheduler
from penstock.steps.stage import Stage

FEW_SPLITS_PER_SLOT = 2
FLOWS = 16  # times the rows that a service is asked for at once: at the end of a split fewer and fewer are
WAITING_ROWS = 98_304  # of all slots together, in front of a device: rows of like length are found among many


class Fineness(NamedTuple):
    """How small splits may get, and how large they should not be."""

    splits: int  # for each slot, at least: so that the last ones to finish leave no core idle for long
    batches: int  # in a split, at least: its last one may be small
    to_choose_from: int  # rows in a split, at least, where one slot has rows of like length to find


AT_ONCE = Fineness(splits=8, batches=4, to_choose_from=LOOKAHEAD[1])
COMMITTED = Fineness(splits=64, batches=1, to_choose_from=16_384)  # what was not committed is lost when a process dies


def split_goals(plan: Plan, pools: Pools, *, journaled: bool = False) -> list[SplitGoal]:
    """How finely each source is cut."""
    return [_goal(stage, pools, COMMITTED if journaled else AT_ONCE) for stage, _, _, _ in plan.sources()]


def _goal(stage: Stage, pools: Pools, fineness: Fineness) -> SplitGoal:
    slots = pools.of_stage(stage.index).size
    at_once = slots.workers * slots.slots
    rows = max(fineness.batches * largest_batch(stage), SMALL_RUN_ROWS if pools.in_process else 1)
    rows = max(rows, fineness.batches * window(stage) // at_once)
    rows = max(rows, FLOWS * in_flight(stage))
    if waits_for_device(stage):
        rows = max(rows, WAITING_ROWS // at_once)
    if at_once == 1 and measures_length(stage):
        rows = max(rows, fineness.to_choose_from)  # there is nobody to share with, and like lengths are found among many
    return SplitGoal(min_splits=fineness.splits * at_once, min_rows=rows, at_once=at_once)


def cut(source: Source[Any], position: int, goal: SplitGoal, first: int = 0) -> list[tuple[SplitId, Any]]:
    """The splits of a source, numbered from `first`."""
    with hiding_secrets(source.paths() if isinstance(source, FileSource) else ()):
        return [(SplitId(position, first + i), split) for i, split in enumerate(source.splits(goal))]


def make_scheduler(plan: Plan, pools: Pools, options: RunOptions, splits: Iterable[tuple[SplitId, Any]]) -> Scheduler:
    """A scheduler that knows these splits."""
    stages = [(pools.of_stage(stage.index).index, sorted(stage.feeds)) for stage in plan.stages]
    sizes = {pool.index: pool.size for pool in pools.pools}
    scheduler = Scheduler(stages, sizes, bundle_attempts=options.bundle_attempts)
    sources = plan.sources()
    for split, payload in splits:
        stage, root, _, _ = sources[split.source]
        scheduler.add(stage.index, root, (split.number,), payload, origin=split)
    return scheduler


def few_splits(plan: Plan, pools: Pools, options: RunOptions, splits: Iterable[tuple[SplitId, Any]]) -> list[int]:
    """The stages that have too few splits to occupy all workers: what they make for others is cut finely. In a
    deterministic run all do: how rows are cut must not depend on the workers."""
    sources = plan.sources()
    counts: dict[int, int] = {}
    for split, _ in splits:
        stage = sources[split.source][0].index
        counts[stage] = counts.get(stage, 0) + 1
    many = sys.maxsize if options.deterministic else FEW_SPLITS_PER_SLOT * pools.slots
    return [stage for stage, count in counts.items() if count < many]
