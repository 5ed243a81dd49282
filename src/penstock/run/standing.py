"""Where a run stands, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.models.activity import LOADS
from penstock.observe.metrics import Metrics
from penstock.observe.pace import share_done
from penstock.observe.progress import StageProgress
from penstock.observe.result import StepCount
from penstock.run.outcomes import Tally
from penstock.run.schedule import Task
from penstock.run.setup import Setup
from penstock.steps.stage import Stage

LOADED = "load_model_latency_milli_secs"  # measured when a model was loaded


class Standing:
    """How far the stages have come, against what there was to do when this process took the run up."""

    def __init__(self, setup: Setup, tally: Tally) -> None:
        self._stages = setup.job.plan.stages
        self._known = setup.pools.rows or 0
        self._in_process = setup.pools.in_process
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
        at_work = {number: tally.running_rows.get(number, 0) for number, task in running.items() if task.stage == index}
        before, ended = self._before.get(index, 0), tally.stage_rows.get(index, 0)
        rows = ended + sum(at_work.values())
        models = list(dict.fromkeys(step.label for step, _ in stage.models()))
        sizes = [metrics.distribution("inference_request_batch_size", step=label) for label in models]
        batch = sum(size.sum for size in sizes) / n if (n := sum(size.count for size in sizes)) else None
        from_source = any(root.transform is not None for root in stage.roots)
        name = " > ".join(models or dict.fromkeys(step.label for step in steps))
        failed = sum(tally.counts.get(label, StepCount()).rows_failed for label in {step.label for step in steps})
        of = self._known if from_source and self._known else None
        share = self._share(index, ended - before, at_work) if from_source else None
        state = "" if rows > before else self._waits_for(models, metrics, bool(at_work), from_source)
        return StageProgress(f"stage {index}: {name}", rows, of, batch, failed, before, share, state)

    def _share(self, stage: int, ended: int, at_work: Mapping[int, int]) -> float | None:
        return share_done(self._splits[stage], self._tally.stage_splits.get(stage, 0), ended, at_work.values())

    def _waits_for(self, models: list[str], metrics: Metrics, is_at_work: bool, from_source: bool) -> str:
        """What a stage does before its first row is done."""
        if not is_at_work:
            return "starting" if from_source else "waiting for rows"
        if self._in_process:
            return "loading the model" if LOADS.mark().running else ""
        loaded = {
            key.step for key in [*metrics.distributions, *metrics.models] if key.name in LOADED or key in metrics.models
        }
        return "loading the model" if models and not loaded.intersection(models) else ""
