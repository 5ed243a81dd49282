"""The local engine: from a graph to a result."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import cloudpickle

from penstock.batching.entry import LOOKAHEAD
from penstock.engines.local.accounting import check_counts, is_counted
from penstock.engines.local.coordinator import Coordinator, Tally
from penstock.engines.local.explain import explain
from penstock.engines.local.garbage import seldom_collected
from penstock.engines.local.inline import InlineWorkers
from penstock.engines.local.pools import SMALL_RUN_ROWS, Machine, Pools, choose_pools, surroundings
from penstock.engines.local.processes import Guardian
from penstock.engines.local.remote import ProcessWorkers
from penstock.engines.local.schedule import Scheduler, Task
from penstock.engines.plan import Plan, Stage, Step, largest_batch, make_plan, measures_length
from penstock.errors import NotShippableError, OutputError
from penstock.inference.transform import RunInference
from penstock.io.sink import Sink, Write
from penstock.io.source import SplitGoal
from penstock.models.rendezvous import end_hosts
from penstock.observe.progress import Progress, StageProgress
from penstock.observe.result import RunResult, StepCount
from penstock.options import RunOptions
from penstock.pipeline.graph import PCollection
from penstock.pipeline.pipeline import Graph
from penstock.rows import safe_str

FILES = 65_536  # open at once, at most
FEW_SPLITS_PER_SLOT = 2
BATCHES_PER_SPLIT = 4  # at least, where rows can be counted: the last batch of a split may be small
SPLITS_PER_SLOT = 8  # so that the last splits to finish leave no core idle for long


class LocalEngine:
    """Runs a pipeline on this machine."""

    def explain(self, graph: Graph, options: RunOptions) -> str:
        plan = make_plan(graph)
        machine = Machine.here()
        return explain(plan, choose_pools(plan, options, machine), surroundings(options, machine))

    def run(self, graph: Graph, options: RunOptions) -> tuple[RunResult, dict[PCollection[Any], list[Any]]]:
        started = time.perf_counter()
        plan = make_plan(graph)
        programs = {stage.index: _program(plan, stage) for stage in plan.stages}
        pools = choose_pools(plan, options, Machine.here())
        scheduler = _scheduler(plan, pools, options)
        run = _Run(secrets.token_hex(8), graph, plan, pools, programs, scheduler, options)
        _raise_file_limit()
        with _terminable(), seldom_collected():
            tally = run.carry_out()
        result = RunResult(
            run=run.id,
            seconds=time.perf_counter() - started,
            counts={node.label: StepCount() for node in graph.nodes if is_counted(node)} | tally.counts,
            metrics=tally.metrics,
            outputs=[sink.describe() for sink in run.sinks.values()],
            splits=tally.splits,
            retries=scheduler.retries,
            worker_deaths=scheduler.deaths,
        )
        return result, {pcoll: _rows(tally, position) for position, pcoll in enumerate(graph.collect)}


@dataclass
class _Run:
    """One run, between the sinks' first and last word."""

    id: str
    graph: Graph
    plan: Plan
    pools: Pools
    programs: Mapping[int, bytes]
    scheduler: Scheduler
    options: RunOptions

    @property
    def sinks(self) -> dict[int, Sink[Any]]:
        return {index: sink for index, (_, sink) in _sinks(self.plan).items()}

    def carry_out(self) -> Tally:
        try:
            for sink in self.sinks.values():
                sink.prepare(self.id)
            tally = self._work()
            check_counts(self.graph, tally.counts)
        except BaseException as exc:
            self._finish(published=False, error=exc)
            raise
        with _uninterrupted():
            self._publish(tally)
            self._finish(published=True)
        return tally

    def _publish(self, tally: Tally) -> None:
        for done, (index, token) in enumerate(tally.parts):
            try:
                self.sinks[index].publish(token)
            except Exception as exc:
                where = ", ".join(folder for sink in self.sinks.values() for folder in sink.aside(self.id))
                raise OutputError(
                    f"{done} of {len(tally.parts)} finished parts were published, then {type(exc).__name__}: {safe_str(exc)}"
                    f"; the others are whole and lie in {where or 'the place aside of each sink'}"
                ) from exc

    def _finish(self, *, published: bool, error: BaseException | None = None) -> None:
        """The sinks' last word. One that fails keeps none of the others from theirs, and hides no earlier error."""
        for sink in self.sinks.values():
            try:
                sink.finish(self.id, published)
            except Exception as exc:
                told = f"{sink.describe()} could not be tidied up: {type(exc).__name__}: {safe_str(exc)}"
                if error is None:
                    error = OutputError(told)
                    error.__cause__ = exc
                else:
                    error.add_note(told)
        if published and error is not None:
            raise error

    def _work(self) -> Tally:
        around = surroundings(self.options, Machine.here(), run=self.id, in_process=self.pools.in_process)
        folders = [folder for sink in self.sinks.values() for folder in sink.aside(self.id)]
        try:
            if self.pools.in_process and (not folders or self.pools.small):
                return self._coordinate(InlineWorkers(self.programs, self.pools.slots, around))
            with Guardian([*folders, around.folder]) as guardian:
                if self.pools.in_process:
                    return self._coordinate(InlineWorkers(self.programs, self.pools.slots, around))
                by_index = {pool.index: pool for pool in self.pools.pools}
                return self._coordinate(ProcessWorkers(self.programs, by_index, guardian, around))
        finally:
            end_hosts(around.folder)

    def _coordinate(self, workers: InlineWorkers | ProcessWorkers) -> Tally:
        wanted = sys.stderr is not None and (sys.stderr.isatty() if self.options.progress is None else self.options.progress)
        progress = Progress(sys.stderr) if wanted else None
        known = self.pools.rows or 0

        def watch(tally: Tally, running: Mapping[int, Task]) -> None:
            assert progress is not None
            progress.show(_stage_lines(self.plan, tally, running, known))

        few = [
            s.index for s in self.plan.stages if 0 < self.scheduler.queued(s.index) < FEW_SPLITS_PER_SLOT * self.pools.slots
        ]
        coordinator = Coordinator(self.id, self.plan, self.scheduler, workers, few, watch if progress else None)
        try:
            tally = coordinator.run()
            if progress is not None:
                progress.finish(_stage_lines(self.plan, tally, {}, known))
            workers.close()
            return tally
        except BaseException:
            workers.kill()
            coordinator.abandon()
            raise


def _program(plan: Plan, stage: Stage) -> bytes:
    """A stage as it is copied to every thread that runs it. What cannot be copied is found before anything starts.

    Every step is pickled by itself, so that an object which two steps were given is two objects there.
    """
    program: bytes = cloudpickle.dumps((stage.with_transforms(_pickled_step), _sinks(plan)), protocol=5)
    return program


def _pickled_step(step: Step) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(step.transform, protocol=5)
    except Exception as exc:
        raise NotShippableError(
            f"step {step.label!r} cannot be copied to a worker ({type(exc).__name__}: {safe_str(exc)})\n"
            "  something that its function or handler refers to (an open file, a lock, a connection, a generator) "
            "cannot be pickled: make it inside the function, in DoFn.setup(), or in load_model()"
        ) from exc
    return data


def _sinks(plan: Plan) -> dict[int, tuple[str, Sink[Any]]]:
    found = {}
    for index, node in plan.sinks.items():
        assert isinstance(node.transform, Write)
        found[index] = (node.label, node.transform.sink)
    return found


def _scheduler(plan: Plan, pools: Pools, options: RunOptions) -> Scheduler:
    """A scheduler that knows every split of every source."""
    stages = [(pools.of_stage(stage.index).index, sorted(stage.feeds)) for stage in plan.stages]
    sizes = {pool.index: pool.size for pool in pools.pools}
    scheduler = Scheduler(stages, sizes, bundle_attempts=options.bundle_attempts)
    for stage, root, _, read in plan.sources():
        slots = pools.of_stage(stage.index).size
        at_once = slots.workers * slots.slots
        rows = max(BATCHES_PER_SPLIT * largest_batch(stage), SMALL_RUN_ROWS if pools.in_process else 1)
        if at_once == 1 and measures_length(stage):
            rows = max(rows, LOOKAHEAD[1])  # nothing is gained by small splits, and much by many rows to choose from
        goal = SplitGoal(min_splits=SPLITS_PER_SLOT * at_once, min_rows=rows, at_once=at_once)
        for number, split in enumerate(read.source.splits(goal)):
            scheduler.add(stage.index, root, (number,), split)
    return scheduler


def _rows(tally: Tally, position: int) -> list[Any]:
    rows: list[Any] = []
    for _, some in sorted(tally.collected.get(position, []), key=lambda item: item[0]):
        rows.extend(some)
    return rows


def _stage_lines(plan: Plan, tally: Tally, running: Mapping[int, Task], known: int) -> list[StageProgress]:
    lines = []
    for stage in plan.stages:
        rows = tally.stage_rows.get(stage.index, 0)
        rows += sum(tally.running_rows.get(number, 0) for number, task in running.items() if task.stage == stage.index)
        steps = stage.steps()
        models = list(dict.fromkeys(step.label for step in steps if isinstance(step.transform, RunInference)))
        sizes = [tally.metrics.distribution("inference_request_batch_size", step=label) for label in models]
        batch = sum(size.sum for size in sizes) / n if (n := sum(size.count for size in sizes)) else None
        from_source = any(root.transform is not None for root in stage.roots)
        name = " > ".join(models or dict.fromkeys(step.label for step in steps))
        failed = sum(tally.counts.get(label, StepCount()).rows_failed for label in {step.label for step in steps})
        of = known if from_source and known else None
        lines.append(StageProgress(f"stage {stage.index}: {name}", rows, of, batch, failed))
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


class _Terminated(BaseException):
    """SIGTERM arrived: unwind, clean up, and die of it."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM cleans up before it ends the process, if nobody else handles it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the clean-up is not to be interrupted
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
