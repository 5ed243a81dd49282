"""The coordinator: one run, from the splits of the sources to the published output.

       setup                                        fleet (this process, processes, or a cluster's workers)
           |                                             thread: split -> steps -> writers, aside (execute.py)
    +------v-------+   Assign, Start, Stop   +--------+        |
    |  Scheduler   |------------------------>| fleet  |  Work  v
    |   (pure)     |<---- done / failed / ---| wait() |<------- Done(counts, parts, payloads) | Failed | Died, ...
    +--------------+         died            +--------+
           ^                                     |
           |  payloads for the next stage -------+--- payloads for collect() --> rows, in the order of their keys
           |                                     '--- parts (aside) -----------> outputs: visible when the whole run is done;
                                                        with a journal, when all that a source's split became is done:
                                                        prepared -> published -> done (commits.py), while workers work

The files of a source's split are looked at before it is assigned and when it is done (file_changes.py). New versions of
models are watched for by a thread beside this loop (refreshing.py); what became of them goes to the outputs between events.

The loop blocks in one place, fleet.wait(). Nothing of a split counts before its Done is here: a split that dies, dies
without a trace and runs again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock.blocks import rows_of
from penstock.errors import EngineError, NotShippableError, PenstockError, StoppedError, WorkerDiedError
from penstock.observe.metrics import Metrics
from penstock.rows import safe_str
from penstock.run.fleet import Died, Done, Event, Failed, Fleet, Lost, Payload, Ready, Resized, Starved, Work, WorkerProgress
from penstock.run.losses import Losses, key_of
from penstock.run.outcomes import SplitResult, Tally
from penstock.run.outputs import RunOutputs
from penstock.run.schedule import Assign, StartWorker, StopWorker, Task
from penstock.run.setup import Setup
from penstock.run.thresholds import Thresholds
from penstock.run.throttling import Throttling
from penstock.steps.stage import Outlet
from penstock.transport.packing import dump_rows

TICK = 0.2  # seconds between two looks at the progress


class Coordinator:
    """Drives one run. `watch` is called between events, at least every TICK if it is given.

    `lock` guards the tally and `running`: this thread holds it but for wait(), so that others may look.
    """

    def __init__(
        self,
        setup: Setup,
        fleet: Fleet,
        outputs: RunOutputs,
        tally: Tally,
        watch: Callable[[], None] | None = None,
        throttling: Throttling | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.tally = tally
        self.running: dict[int, Task] = {}  # assigned to a worker that lives, by id
        # All that follows is used by the thread that is in run(): no lock. It owns the payloads between stages as well, and
        # releases each once: when the task that reads it is done, or in abandon().
        self._layout = setup.layout
        self._job = setup.job
        self._plan = setup.job.plan
        self._scheduler = setup.scheduler
        self._fleet = fleet
        self._outputs = outputs
        self._watch = watch
        self._thresholds = Thresholds(self._plan)
        self._throttling = throttling or Throttling()
        self._losses = Losses(self._scheduler)
        self._stopped = False  # set by any thread, read by run(): no lock

    def run(self) -> None:
        """Until every split is done, or the first error that ends the run."""
        while True:
            with self.lock:
                if self._step():
                    return
            events = self._fleet.wait(self._patience())  # without the lock: the one place where this thread blocks
            with self.lock:
                for worker, event in events:
                    self._handle(worker, event)
            if self._watch is not None:
                self._watch()

    def stop(self) -> None:
        """End the run, with StoppedError from run(). Called from any thread."""
        self._stopped = True  # before wake(): run() looks at it before each wait
        self._fleet.wake()

    def abandon(self) -> None:
        """The run has failed: let go of what lies between the stages."""
        for task in self._scheduler.abandon():
            self._release(task)

    def _step(self) -> bool:
        """Hand out work, and commit what is complete. Whether all is done."""
        now = time.monotonic()
        self._scheduler.hold(self._throttling.pools(now))
        for command in [] if self._stopped else self._scheduler.decide(now):
            self._carry_out(command)
        self._outputs.flush()  # after work was handed out: workers are busy while this thread commits
        if self._scheduler.finished:
            self._thresholds.check_all(self.tally.counts)
            return True
        if self._stopped:
            raise StoppedError("the run was stopped")
        return False

    def _patience(self) -> float | None:
        deadline = self._scheduler.deadline()
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self._watch is None:
            return patience
        return TICK if patience is None else min(TICK, patience)

    def _carry_out(self, command: StartWorker | StopWorker | Assign) -> None:
        if isinstance(command, StartWorker):
            self._fleet.start(command.pool, command.worker)
        elif isinstance(command, StopWorker):
            self._fleet.stop(command.worker)
        else:
            self.running[command.task.id] = command.task
            self._fleet.assign(command.worker, self._work_of(command.task))

    def _work_of(self, task: Task) -> Work:
        return Work(
            self._layout.run,
            task.key,
            self._outputs.attempts_before + task.attempt,
            task.root,
            task=task.id,
            stage=task.stage,
            split=self._split_of(task),
            payload=self._payload_of(task),
            spread=task.stage in self._layout.few,
            journaled=self._job.journaled,
        )

    def _payload_of(self, task: Task) -> Payload | None:
        """What another stage made for a task; None for a split of a source."""
        root = self._plan.stages[task.stage].roots[task.root]
        payload: Payload | None = task.payload if root.traits.source is None else None
        return payload

    def _split_of(self, task: Task) -> bytes | None:
        root = self._plan.stages[task.stage].roots[task.root]
        if (source := root.traits.source) is None:
            return None
        self._outputs.files.begin(task.origin, task.payload)
        try:
            return dump_rows(source.payload(task.payload))
        except Exception as exc:
            raise NotShippableError(
                f"step {root.label!r}: rows cannot be sent to a worker "
                f"({type(exc).__name__}: {safe_str(exc)}); create plain data, and make the rest of it in ps.Map(...)"
            ) from exc

    def _handle(self, worker: int, event: Event) -> None:
        if isinstance(event, Ready):
            self._scheduler.worker_ready(worker, event.place)
        elif isinstance(event, WorkerProgress):
            self.tally.running_metrics.setdefault(worker, Metrics()).merge(event.metrics)
            self._throttling.seen(event.metrics, time.monotonic())
            self.tally.running_rows.update(event.rows)
        elif isinstance(event, Done):
            self._done(worker, event)
        elif isinstance(event, Failed):
            self._failed(worker, event)
        elif isinstance(event, Lost):
            self._lost(worker, event)
        elif isinstance(event, Died):
            self._died(worker, event)
        elif isinstance(event, Resized):
            self._scheduler.resize(event.pool, event.workers)
        elif isinstance(event, Starved):
            self._scheduler.starved.add(event.pool)
        else:
            raise EngineError(f"unexpected message from a worker: {event!r} (a bug in Penstock)")

    def _done(self, worker: int, done: Done) -> None:
        task = self._scheduler.task_done(worker, done.task, leaks=done.leaks)
        self._forget(task)
        self._was_read(task)  # before anything of it counts: raises if its file was changed while it was read
        if self._losses.made_again(task, done):
            self._release(task)
            return
        self.tally.stage_splits[task.stage] = self.tally.stage_splits.get(task.stage, 0) + 1
        metrics = self.tally.running_metrics.pop(worker, Metrics())
        metrics.merge(done.metrics)
        metrics.merge(done.result.metrics)
        self._throttling.seen(done.metrics, time.monotonic())
        made = SplitResult(done.result.counts, metrics, {task.stage: done.result.rows_read}, 1)
        self.tally.add(made)
        self._thresholds.check(made.counts, self.tally.counts)
        fed = sum(len(payloads) for outlet, payloads in done.shipped if outlet.kind == "stage")
        # With the number of bundles that it leads to: else its split would look complete before they have run.
        self._outputs.bundle_done(task, made, done.result.parts, fed)
        for outlet, payloads in done.shipped:
            self._receive(outlet, task, payloads)
        self._release(task)

    def _receive(self, outlet: Outlet, task: Task, payloads: Sequence[Payload]) -> None:
        for number, payload in enumerate(payloads):
            key = key_of(outlet, task, number)
            if outlet.kind == "stage":
                where = {"origin": task.origin, "maker": task, "locality": payload.locality}
                self._scheduler.add(outlet.target, 0, key, payload, payload.size, **where)
            else:
                blocks = [rows_of(block) for block in payload.read()]
                self.tally.collected.setdefault(outlet.target, []).append((key, blocks))
                payload.release()

    def _failed(self, worker: int, failed: Failed) -> None:
        task = self.running[failed.task]
        self._forget(task)
        may_pass, leaks = failed.error.may_pass, failed.leaks
        if not self._scheduler.task_failed(worker, failed.task, time.monotonic(), may_pass=may_pass, leaks=leaks):
            error = failed.error.error()
            try:
                self._was_read(task)  # if its file was changed, that is why it could not be read
            except PenstockError as changed:
                raise changed from error
            raise error

    def _lost(self, worker: int, lost: Lost) -> None:
        task = self._scheduler.task_lost(worker, lost.task)
        self._forget(task)
        # Without its input there is nothing to run: what made it runs first, and gives this task its rows again.
        if lost.was_input and self._payload_of(task) is not None:
            self._losses.make_again(task)
        else:
            self._scheduler.again(task)

    def _died(self, worker: int, died: Died) -> None:
        # What it has measured since its last Done is of splits that run again, and are measured again.
        self.tally.running_metrics.pop(worker, None)
        if self._scheduler.is_starting(worker):
            if not self._scheduler.start_failed(worker, killed=died.killed, blameless=died.blameless):
                raise WorkerDiedError(f"worker processes cannot be started: {died.how}; what they printed is above")
            return
        fatal = self._scheduler.worker_died(worker, time.monotonic(), blameless=died.blameless)
        # Those that it held: worker_died() has queued them again, or given up on one.
        for task in [task for task in self.running.values() if not self._scheduler.is_running(task.id)]:
            self._forget(task)
        if fatal is not None:
            raise self._death_of(fatal, died)

    def _death_of(self, task: Task, died: Died) -> WorkerDiedError:
        stage = self._plan.stages[task.stage]
        steps = ", ".join(step.label for step in stage.steps())
        where = "-".join(map(str, task.key))
        return WorkerDiedError(
            f"a worker process died {task.troubles} times while it ran split {where} of stage {stage.index}, alone: "
            f"{died.how}\n"
            f"  the stage's steps: {steps}\n"
            "  look for a crash in native code or in load_model(), or a split that needs more memory than there is\n"
            f"{_short_of_memory(bool(stage.models())) if 'SIGKILL' in died.how else ''}"
            "  if a single row causes this, use .with_exception_handling(use_subprocess=True) on the step, or timeout=60 "
            "instead: it runs the step in a process of its own, finds the row and sends it to the failures; large_model=True"
            " of a handler finds it, too, and the error names it"
        )

    def _forget(self, task: Task) -> None:
        self.running.pop(task.id, None)
        self.tally.running_rows.pop(task.id, None)

    def _was_read(self, task: Task) -> None:
        if self._payload_of(task) is None:
            self._outputs.files.end(task.origin)

    def _release(self, task: Task) -> None:
        if (payload := self._payload_of(task)) is not None:
            payload.release()


def _short_of_memory(has_model: bool) -> str:
    one_copy = ", or large_model=True on the model's handler: one copy of it for all workers" if has_model else ""
    return f"  SIGKILL is how the system ends a process when memory runs out: use fewer workers (workers=1){one_copy}\n"
