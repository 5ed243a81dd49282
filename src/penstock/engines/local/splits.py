"""How the sources of a run are cut into splits."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from penstock.batching.entry import LOOKAHEAD
from penstock.engines.local.outcomes import SplitId
from penstock.engines.local.pools import SMALL_RUN_ROWS, Pools
from penstock.engines.local.schedule import Scheduler
from penstock.engines.plan import Plan, Stage, largest_batch, measures_length
from penstock.io.source import Source, SplitGoal
from penstock.options import RunOptions

FEW_SPLITS_PER_SLOT = 2
BATCHES_PER_SPLIT = 4  # at least, where rows can be counted: the last batch of a split may be small
BATCHES_PER_COMMIT = 1  # the same where splits are committed: what was not is lost when a process dies
SPLITS_PER_SLOT = 8  # at least, so that the last splits to finish leave no core idle for long
COMMITS_PER_SLOT = 64  # the same where splits are committed: a process that dies loses at most that share of the work


def split_goals(plan: Plan, pools: Pools, *, journaled: bool = False) -> list[SplitGoal]:
    """How finely each source is cut."""
    batches, splits = (BATCHES_PER_COMMIT, COMMITS_PER_SLOT) if journaled else (BATCHES_PER_SPLIT, SPLITS_PER_SLOT)
    return [_goal(stage, pools, batches, splits) for stage, _, _, _ in plan.sources()]


def _goal(stage: Stage, pools: Pools, batches: int, splits: int) -> SplitGoal:
    slots = pools.of_stage(stage.index).size
    at_once = slots.workers * slots.slots
    rows = max(batches * largest_batch(stage), SMALL_RUN_ROWS if pools.in_process else 1)
    if at_once == 1 and measures_length(stage):
        rows = max(rows, LOOKAHEAD[1])  # nothing is gained by small splits, and much by many rows to choose from
    return SplitGoal(min_splits=splits * at_once, min_rows=rows, at_once=at_once)


def cut(source: Source[Any], position: int, goal: SplitGoal, first: int = 0) -> list[tuple[SplitId, Any]]:
    """The splits of a source, numbered from `first`."""
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
