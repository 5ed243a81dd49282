"""Where a run stands, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.observe.metrics import Metrics
from penstock.observe.progress import StageProgress
from penstock.observe.result import StepCount
from penstock.run.outcomes import Tally
from penstock.run.schedule import Task
from penstock.run.setup import Setup
from penstock.steps.stage import Stage


class Standing:
    """How far the stages have come, against what there was to do when this process took the run up."""

    def __init__(self, setup: Setup, tally: Tally) -> None:
        self._stages = setup.job.plan.stages
        self._known = setup.pools.rows or 0
        self._tally = tally
        self._before = dict(tally.stage_rows)  # rows of each stage that earlier processes have done
        self._splits = {stage.index: setup.scheduler.queued(stage.index) for stage in self._stages}  # of those at a source

    def now(self, running: Mapping[int, Task]) -> list[StageProgress]:
        metrics = Metrics()
        for some in (self._tally.metrics, *self._tally.running_metrics.values()):
            metrics.merge(some)
        return [self._of(stage, running, metrics) for stage in self._stages]

    def _of(self, stage: Stage, running: Mapping[int, Task], metrics: Metrics) -> StageProgress:
        tally, index, steps = self._tally, stage.index, stage.steps()
        rows = tally.stage_rows.get(index, 0)
        rows += sum(tally.running_rows.get(number, 0) for number, task in running.items() if task.stage == index)
        models = list(dict.fromkeys(step.label for step in steps if step.traits.model is not None))
        sizes = [metrics.distribution("inference_request_batch_size", step=label) for label in models]
        batch = sum(size.sum for size in sizes) / n if (n := sum(size.count for size in sizes)) else None
        from_source = any(root.transform is not None for root in stage.roots)
        name = " > ".join(models or dict.fromkeys(step.label for step in steps))
        failed = sum(tally.counts.get(label, StepCount()).rows_failed for label in {step.label for step in steps})
        of = self._known if from_source and self._known else None
        share = tally.stage_splits.get(index, 0) / n if from_source and (n := self._splits[index]) else None
        return StageProgress(f"stage {index}: {name}", rows, of, batch, failed, self._before.get(index, 0), share)
