"""The coordinator: one run, from the splits of the sources to the published output.

      plan + pools                                  workers (this process, or processes of their own)
           |                                             thread: split -> steps -> writers, aside
    +------v-------+   Assign, Start, Stop   +--------+        |
    |  Scheduler   |------------------------>|workers |  Work  v
    |   (pure)     |<---- done / failed / ---| wait() |<------- Done(counts, parts, chunks) | Failed | Died
    +--------------+         died            +--------+
           ^                                     |
           |  chunks for the next stage ---------+--- chunks for collect() ---> rows, in the order of their keys
           |                                     '--- parts (aside) -----------> published when the whole run is done;
                                                        with a journal, when all that a source's split became is done:
                                                        prepared -> published -> done (commits.py), while workers work

The files of a source's split are looked at before it is assigned and when it is done (file_changes.py).

The loop blocks in one place, workers.wait(). Nothing of a split counts before its Done is here: a split that dies, dies
without a trace and runs again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.blocks import rows_of
from penstock.errors import EngineError, NotShippableError, PenstockError, WorkerDiedError
from penstock.observe.metrics import Metrics
from penstock.observe.result import StepCount
from penstock.rows import safe_str
from penstock.run.chunks import Chunk
from penstock.run.file_changes import FileWatch
from penstock.run.plan import Plan
from penstock.run.protocol import Died, Done, Failed, FailedHere, Progress, Ready, Work
from penstock.run.schedule import Assign, Scheduler, StartWorker, StopWorker, Task
from penstock.run.thresholds import Thresholds
from penstock.steps.bundle import FinishedPart, Key
from penstock.steps.stage import Outlet
from penstock.transport.interpreters import describe_exit
from penstock.transport.packing import dump_rows

if TYPE_CHECKING:
    from penstock.journal.commits import Commits

TICK = 0.2  # seconds between two looks at the progress


class Workers(Protocol):
    """Where work is done: in this process, or in others."""

    def start(self, pool: int, worker: int) -> None: ...
    def assign(self, worker: int, work: Work) -> None: ...
    def stop(self, worker: int) -> None: ...
    def wait(self, seconds: float | None) -> list[tuple[int, Any]]: ...


@dataclass(slots=True)
class Tally:
    """What a run has done so far."""

    counts: dict[str, StepCount] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    parts: list[FinishedPart] = field(default_factory=list)
    collected: dict[int, list[tuple[Key, list[Any]]]] = field(default_factory=dict)  # by position in graph.collect
    stage_rows: dict[int, int] = field(default_factory=dict)  # rows in, of splits that are done
    stage_splits: dict[int, int] = field(default_factory=dict)  # that are done, by this process
    running_rows: dict[int, int] = field(default_factory=dict)  # by task
    running_metrics: dict[int, Metrics] = field(default_factory=dict)  # by worker: of splits that are not done
    splits: int = 0


class Coordinator:
    """Drives one run. `watch` is called between events with the tally, at least every TICK if it is given."""

    def __init__(
        self,
        run: str,
        plan: Plan,
        scheduler: Scheduler,
        workers: Workers,
        few_splits: Collection[int],
        tally: Tally,
        files: FileWatch,
        watch: Callable[[Tally, Mapping[int, Task]], None] | None = None,
        commits: Commits | None = None,
    ) -> None:
        self.tally = tally
        self._files = files
        self._run = run
        self._commits = commits
        self._plan = plan
        self._scheduler = scheduler
        self._workers = workers
        self._few_splits = few_splits  # stages whose output is cut finely
        self._watch = watch
        self._thresholds = Thresholds(plan)
        self._running: dict[int, Task] = {}

    def run(self) -> Tally:
        """Until every split is done, or the first error that ends the run."""
        while True:
            for command in self._scheduler.decide(time.monotonic()):
                self._carry_out(command)
            if self._commits is not None:
                self._commits.flush()
            if self._scheduler.finished:
                self._thresholds.check_all(self.tally.counts)
                return self.tally
            for worker, event in self._workers.wait(self._patience()):
                self._handle(worker, event)
            if self._watch is not None:
                self._watch(self.tally, self._running)

    def abandon(self) -> None:
        """The run has failed: let go of what lies between the stages."""
        for payload in self._scheduler.abandon():
            if isinstance(payload, Chunk):
                payload.release()

    def _patience(self) -> float | None:
        deadline = self._scheduler.deadline()
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self._watch is None:
            return patience
        return TICK if patience is None else min(TICK, patience)

    def _carry_out(self, command: StartWorker | StopWorker | Assign) -> None:
        if isinstance(command, StartWorker):
            self._workers.start(command.pool, command.worker)
        elif isinstance(command, StopWorker):
            self._workers.stop(command.worker)
        else:
            self._running[command.task.id] = command.task
            self._workers.assign(command.worker, self._work_of(command.task))

    def _work_of(self, task: Task) -> Work:
        chunk = task.payload if isinstance(task.payload, Chunk) else None
        split = None
        if chunk is None:
            root = self._plan.stages[task.stage].roots[task.root]
            source = root.traits.source
            assert source is not None
            self._files.begin(task.origin, task.payload)
            try:
                split = dump_rows(source.payload(task.payload))
            except Exception as exc:
                raise NotShippableError(
                    f"step {root.label!r}: rows cannot be sent to a worker "
                    f"({type(exc).__name__}: {safe_str(exc)}); create plain data, and make the rest of it in ps.Map(...)"
                ) from exc
        attempt, journaled = task.attempt, self._commits is not None
        if self._commits is not None:
            attempt += self._commits.attempts_before
        spread = task.stage in self._few_splits
        return Work(task.id, task.stage, task.root, self._run, task.key, attempt, split, chunk, spread, journaled)

    def _handle(self, worker: int, event: Any) -> None:
        if isinstance(event, Ready):
            self._scheduler.worker_ready(worker)
        elif isinstance(event, Progress):
            self.tally.running_metrics.setdefault(worker, Metrics()).merge(event.metrics)
            self.tally.running_rows.update(event.rows)
        elif isinstance(event, Done):
            self._done(worker, event)
        elif isinstance(event, (Failed, FailedHere)):
            self._failed(worker, event)
        elif isinstance(event, Died):
            self._died(worker, event)
        else:
            raise EngineError(f"a worker said {event!r}, which nobody expected")

    def _done(self, worker: int, done: Done) -> None:
        task = self._scheduler.task_done(worker, done.task)
        self._forget(task)
        if not isinstance(task.payload, Chunk):
            self._files.end(task.origin)
        self.tally.splits += 1
        self.tally.stage_splits[task.stage] = self.tally.stage_splits.get(task.stage, 0) + 1
        for label, count in done.result.counts.items():
            self.tally.counts.setdefault(label, StepCount()).add(count)
        metrics = self.tally.running_metrics.pop(worker, Metrics())
        metrics.merge(done.metrics)
        metrics.merge(done.result.metrics)
        self.tally.metrics.merge(metrics)
        self._thresholds.check(done.result.counts, self.tally.counts)
        self.tally.stage_rows[task.stage] = self.tally.stage_rows.get(task.stage, 0) + done.result.rows_read
        if self._commits is None:
            self.tally.parts += done.result.parts
        else:
            fed = sum(len(chunks) for outlet, chunks in done.shipped if outlet.kind == "stage")
            self._commits.bundle_done(task, done.result, metrics, fed)
        for outlet, chunks in done.shipped:
            self._receive(outlet, task, chunks)
        if isinstance(task.payload, Chunk):
            task.payload.release()

    def _receive(self, outlet: Outlet, task: Task, chunks: list[Chunk]) -> None:
        for number, chunk in enumerate(chunks):
            key = (*outlet.path, *task.key, number)
            if outlet.kind == "stage":
                self._scheduler.add(outlet.target, 0, key, chunk, chunk.size, task.origin)
            else:
                rows: list[Any] = []
                for block in chunk.read():
                    rows.extend(rows_of(block))
                self.tally.collected.setdefault(outlet.target, []).append((key, rows))
                chunk.release()

    def _failed(self, worker: int, failed: Failed | FailedHere) -> None:
        here = isinstance(failed, FailedHere)
        may_pass = failed.may_pass if isinstance(failed, FailedHere) else failed.error.may_pass
        task = self._running[failed.task]
        self._forget(task)
        if not self._scheduler.task_failed(worker, failed.task, time.monotonic(), may_pass=may_pass):
            error: BaseException = failed.exception if here else failed.error.error()  # type: ignore[union-attr]
            try:
                if not isinstance(task.payload, Chunk):
                    self._files.end(task.origin)  # if its file was changed, that is why it could not be read
            except PenstockError as changed:
                raise changed from error
            raise error

    def _died(self, worker: int, died: Died) -> None:
        how = describe_exit(died.exit_code)
        self.tally.running_metrics.pop(worker, None)
        if self._scheduler.is_starting(worker):
            if not self._scheduler.start_failed(worker, killed=(died.exit_code or 0) < 0):
                raise WorkerDiedError(f"worker processes cannot be started: {how}; what they printed is above")
            return
        fatal = self._scheduler.worker_died(worker, time.monotonic())
        for task in [task for task in self._running.values() if not self._scheduler.is_running(task.id)]:
            self._forget(task)
        if fatal is not None:
            raise self._death_of(fatal, how)

    def _death_of(self, task: Task, how: str) -> WorkerDiedError:
        stage = self._plan.stages[task.stage]
        steps = ", ".join(step.label for step in stage.steps())
        where = "-".join(map(str, task.key))
        return WorkerDiedError(
            f"a worker process died {task.troubles} times while it ran split {where} of stage {stage.index}, alone: {how}\n"
            f"  the stage's steps: {steps}\n"
            "  look for a crash in native code or in load_model(), or a split that needs more memory than there is\n"
            "  if a row does it: .with_exception_handling(use_subprocess=True) on the step, or timeout=60 in place of it, "
            "runs the step in a process of its own, finds the row and sends it to the failures; large_model=True of a "
            "handler finds it too, and the error names it"
        )

    def _forget(self, task: Task) -> None:
        self._running.pop(task.id, None)
        self.tally.running_rows.pop(task.id, None)
