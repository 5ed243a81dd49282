"""One run on this machine, from the sinks' first word to their last."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from penstock.engines.local.inline import InlineWorkers
from penstock.engines.local.processes import Guardian
from penstock.engines.local.worker_processes import ProcessWorkers
from penstock.io.sink import Sink
from penstock.models.rendezvous import end_hosts
from penstock.observe.metrics import Metrics
from penstock.observe.progress import Progress, StageProgress
from penstock.observe.result import RunResult, StepCount
from penstock.observe.summary import rows_read
from penstock.options import RunOptions
from penstock.pipeline.pipeline import Graph
from penstock.run.accounting import check_counts, check_read
from penstock.run.coordinator import Coordinator, Tally
from penstock.run.garbage import seldom_collected
from penstock.run.outputs import Outputs
from penstock.run.plan import Plan
from penstock.run.pools import Machine, Pools, surroundings
from penstock.run.schedule import Scheduler, Task

FILES = 65_536  # open at once, at most
PATIENCE = 10.0  # seconds for a clean-up, in which nobody interrupts it


@dataclass(kw_only=True)
class Run:
    """What one process does of a run: all of it, or what is left."""

    id: str
    graph: Graph
    plan: Plan
    pools: Pools
    programs: Mapping[int, bytes]
    scheduler: Scheduler
    few: Collection[int]  # stages that have few splits
    options: RunOptions
    session: str = ""  # tells the processes of one run apart, where there may be several

    @property
    def sinks(self) -> dict[int, Sink[Any]]:
        return sinks_of(self.plan)

    def carry_out(self, outputs: Outputs) -> tuple[RunResult, Tally]:
        started = time.perf_counter()
        _raise_file_limit()
        is_publishing = False
        with stoppable(), seldom_collected():
            try:
                tally = outputs.begin()
                before, rows_before = tally.splits, rows_read(tally.counts)
                self._work(outputs, tally)
                check_counts(self.graph, tally.counts)
                outputs.check(tally)
                check_read(self.plan, tally.counts, self.pools.rows)
                with _uninterrupted():
                    is_publishing = True
                    outputs.publish(tally)
            except BaseException as exc:
                if not is_publishing:
                    outputs.abandon(exc)
                raise
        return self.result(tally, before, time.perf_counter() - started, rows_before=rows_before), tally

    def result(
        self, tally: Tally, before: int = 0, seconds: float = 0.0, *, rows_before: int = 0, was_finished: bool = False
    ) -> RunResult:
        """`before`: splits that earlier processes have done; `rows_before`: the rows of the sources in them."""
        return RunResult(
            run=self.id,
            seconds=seconds,
            counts={node.label: StepCount() for node in self.graph.nodes if node.traits.is_counted} | tally.counts,
            metrics=tally.metrics,
            outputs=[sink.describe() for sink in self.sinks.values()],
            splits=tally.splits,
            splits_before=before,
            rows_before=rows_read(tally.counts) if was_finished else rows_before,
            retries=self.scheduler.retries,
            worker_deaths=self.scheduler.deaths,
            was_finished=was_finished,
        )

    def _work(self, outputs: Outputs, tally: Tally) -> None:
        around = surroundings(self.options, Machine.here(), run=self.id + self.session, in_process=self.pools.in_process)
        folders = outputs.folders()
        try:
            if self.pools.in_process and (not folders or self.pools.small):
                self._coordinate(InlineWorkers(self.programs, self.pools.slots, around), outputs, tally)
                return
            with Guardian([*folders, around.folder]) as guardian:
                if self.pools.in_process:
                    self._coordinate(InlineWorkers(self.programs, self.pools.slots, around), outputs, tally)
                    return
                by_index = {pool.index: pool for pool in self.pools.pools}
                self._coordinate(ProcessWorkers(self.programs, by_index, guardian, around), outputs, tally)
        finally:
            end_hosts(around.folder)

    def _coordinate(self, workers: InlineWorkers | ProcessWorkers, outputs: Outputs, tally: Tally) -> None:
        wanted = sys.stderr is not None and (sys.stderr.isatty() if self.options.progress is None else self.options.progress)
        progress = Progress(sys.stderr) if wanted else None
        known = self.pools.rows or 0
        before = dict(tally.stage_rows)
        splits = {stage.index: self.scheduler.queued(stage.index) for stage in self.plan.stages}

        def lines(running: Mapping[int, Task]) -> list[StageProgress]:
            return _stage_lines(self.plan, tally, running, known, before, splits)

        def watch(tally: Tally, running: Mapping[int, Task]) -> None:
            assert progress is not None
            progress.show(lines(running))

        shown = watch if progress else None
        coordinator = Coordinator(
            self.id, self.plan, self.scheduler, workers, self.few, tally, outputs.files, shown, outputs.commits
        )
        try:
            coordinator.run()
            if progress is not None:
                progress.finish(lines({}))
            workers.close()
        except BaseException:
            workers.kill()
            coordinator.abandon()
            raise


def labelled_sinks(plan: Plan) -> dict[int, tuple[str, Sink[Any]]]:
    """The sinks of a plan, each with its step's label, by node."""
    return {index: (node.label, sink) for index, node in plan.sinks.items() if (sink := node.traits.sink) is not None}


def sinks_of(plan: Plan) -> dict[int, Sink[Any]]:
    """The sinks of a plan, by node."""
    return {index: sink for index, (_, sink) in labelled_sinks(plan).items()}


def _stage_lines(
    plan: Plan,
    tally: Tally,
    running: Mapping[int, Task],
    known: int,
    before: Mapping[int, int],  # rows of each stage that earlier processes have done
    splits: Mapping[int, int],  # of each stage that this process has to do, where the stage is at a source
) -> list[StageProgress]:
    lines = []
    metrics = Metrics()
    for some in (tally.metrics, *tally.running_metrics.values()):
        metrics.merge(some)
    for stage in plan.stages:
        rows = tally.stage_rows.get(stage.index, 0)
        rows += sum(tally.running_rows.get(number, 0) for number, task in running.items() if task.stage == stage.index)
        steps = stage.steps()
        models = list(dict.fromkeys(step.label for step in steps if step.traits.model is not None))
        sizes = [metrics.distribution("inference_request_batch_size", step=label) for label in models]
        batch = sum(size.sum for size in sizes) / n if (n := sum(size.count for size in sizes)) else None
        from_source = any(root.transform is not None for root in stage.roots)
        name = " > ".join(models or dict.fromkeys(step.label for step in steps))
        failed = sum(tally.counts.get(label, StepCount()).rows_failed for label in {step.label for step in steps})
        of = known if from_source and known else None
        share = tally.stage_splits.get(stage.index, 0) / n if from_source and (n := splits[stage.index]) else None
        before_it = before.get(stage.index, 0)
        lines.append(StageProgress(f"stage {stage.index}: {name}", rows, of, batch, failed, before_it, share))
    return lines


def _raise_file_limit() -> None:
    """What waits between stages are open files: as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM wait: the renames that make the output visible are done together."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for each in came:
            signal.raise_signal(each)


class _Terminated(KeyboardInterrupt):
    """SIGTERM arrived: unwind, clean up, and die of it. Like Ctrl-C it is nobody's error, and passes through every step."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM, if nobody else handles them, unwind the run once; then SIGTERM ends the process and says
    what is kept of the run.

    More of them change nothing while the run is cleaned up: an interrupt at any of its steps would leave processes and
    folders behind. After PATIENCE the next one counts again, for a clean-up that hangs, or code that swallowed the first.
    """
    kinds = {signal.SIGINT: (signal.default_int_handler, KeyboardInterrupt), signal.SIGTERM: (signal.SIG_DFL, _Terminated)}
    ours = {number: before for number, (before, _) in kinds.items() if signal.getsignal(number) == before}
    if threading.current_thread() is not threading.main_thread() or not ours:
        yield
        return
    deaf_until, is_ended = 0.0, False  # only the main thread, in which signals are handled, has to do with them

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal deaf_until, is_ended
        is_ended = is_ended or number == signal.SIGTERM
        if time.monotonic() >= deaf_until:
            deaf_until = time.monotonic() + PATIENCE
            raise kinds[signal.Signals(number)][1]

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    except _Terminated as exc:
        with contextlib.suppress(Exception):  # nobody may be listening any more
            sys.stderr.write("; ".join(["penstock: stopped", *getattr(exc, "__notes__", ())]) + "\n")
            sys.stderr.flush()
        raise
    finally:
        for number in reversed(ours):  # Ctrl-C last: it may strike at once
            signal.signal(number, ours[number])
            if number == signal.SIGTERM and is_ended:
                os.kill(os.getpid(), signal.SIGTERM)
