"""One run, from the sinks' first word to their last: the handle that whoever started it holds."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import StoppedError, UsageError
from penstock.models.place import LOAD_TIMEOUT, Surroundings
from penstock.observe.progress import PlainProgress, Progress, StageProgress, shown
from penstock.observe.result import RunResult, StepCount
from penstock.observe.summary import models, rows_read, summary, warnings
from penstock.options import RunOptions
from penstock.pipeline.graph import PCollection
from penstock.pipeline.pipeline import Graph, engine_override
from penstock.run.accounting import check_counts, check_read
from penstock.run.coordinator import Coordinator
from penstock.run.fleet import Fleet, FleetSpec
from penstock.run.garbage import seldom_collected
from penstock.run.outcomes import Tally
from penstock.run.outputs import AtTheEnd, RunOutputs
from penstock.run.pools import Pools, unlimited_loads
from penstock.run.setup import Job, Layout, Setup, lay_out, list_inputs, set_up
from penstock.run.signals import stoppable, uninterrupted
from penstock.run.standing import Standing
from penstock.run.throttling import Throttling

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Begun:
    """A run that this process may carry out, or that an earlier one has finished."""

    layout: Layout
    outputs: RunOutputs | Tally  # where the output goes; of a finished run, what was done


Begin = Callable[[Job], AbstractContextManager[Begun]]  # around all that this process does of a run


@contextlib.contextmanager
def unjournaled(job: Job) -> Iterator[Begun]:
    """A run that is remembered nowhere."""
    inputs = list_inputs(job.plan)
    layout, _ = lay_out(job, inputs)
    yield Begun(layout, AtTheEnd(layout.run, job.labelled_sinks(), inputs))


class Run:
    """A run that was started. wait() does the work, on the thread that calls it; any other may call stop() and progress(),
    before, while and after that."""

    def __init__(self, job: Job, begin: Begin = unjournaled) -> None:
        self.rows: Mapping[PCollection[Any], list[Any]] = {}
        self._job = job
        self._begin = begin
        self._programs = job.programs()
        self._is_reported = engine_override.get() is not None  # by the command line, with what there is to warn of
        self._waited = self._stopped = False
        # Each is set once, by the thread that is in wait(), and read by others without a lock.
        self._coordinator: Coordinator | None = None  # from when bundles run on
        self._standing: Standing | None = None

    def wait(self) -> RunResult:
        if self._waited:
            raise UsageError("wait() was called before, and it does the work of the run: keep what it returned")
        self._waited = True
        with stoppable(), self._begin(self._job) as begun:
            setup = set_up(self._job, begun.layout)
            if isinstance(begun.outputs, Tally):
                result = _result(setup, begun.outputs, before=begun.outputs.bundles, was_finished=True)
            else:
                result = self._carry_out(setup, begun.outputs)
        if not self._is_reported:
            self._report(result)
        return result

    def _report(self, result: RunResult) -> None:
        """The last words, on stderr. What collect() runs needs none: its rows are there."""
        for warning in warnings(result):
            logger.warning(warning)
        options = self._job.options
        if options.progress is not False and sys.stderr is not None and not self._job.graph.collect:
            told = [summary(result, options.run_dir), *models(result)]
            with contextlib.suppress(OSError, ValueError):  # it is closed, or nobody reads it
                sys.stderr.write("".join(f"penstock: {line}\n" for line in told))

    def stop(self) -> None:
        # wait() looks at _stopped after it has set _coordinator: whichever comes first, one of both sees the other.
        self._stopped = True
        if self._coordinator is not None:
            self._coordinator.stop()

    def progress(self) -> list[StageProgress]:
        coordinator, standing = self._coordinator, self._standing
        if coordinator is None or standing is None:
            return []
        with coordinator.lock:  # wait() gives it back while it waits for the fleet
            return standing.now(coordinator.running)

    def _carry_out(self, setup: Setup, outputs: RunOutputs) -> RunResult:
        started = time.perf_counter()
        is_publishing = False
        with seldom_collected():
            try:
                tally = outputs.begin()
                before, rows_before = tally.bundles, rows_read(tally.counts)
                self._work(setup, outputs, tally)
                check_counts(self._job.graph, tally.counts)
                outputs.check()
                check_read(self._job.plan, tally.counts, setup.pools.rows)
                with uninterrupted():
                    is_publishing = True
                    outputs.publish(tally.counts)
            except BaseException as exc:
                # Else parts may be visible already: nothing is removed then, and the error says where the others are.
                if not is_publishing:
                    outputs.abandon(exc)
                raise
        self.rows = {pcoll: _collected(tally, position) for position, pcoll in enumerate(self._job.graph.collect)}
        return _result(setup, tally, before, time.perf_counter() - started, rows_before=rows_before)

    def _work(self, setup: Setup, outputs: RunOutputs, tally: Tally) -> None:
        layout, pools = setup.layout, setup.pools
        around = replace(self._job.surroundings(pools, layout.run + layout.session), run=layout.run)
        self._warn_of_loads(pools, around)
        changes = bool(self._job.graph.branches)
        spec = FleetSpec(
            programs=self._programs,
            pools=pools,
            around=around,
            folders=outputs.folders(),
            shared=outputs.shared(),
            changes=changes,
            throttling=Throttling(setup.pools_of_steps()),
        )
        with self._job.site.fleet(spec) as fleet:
            if not changes:
                self._coordinate(setup, fleet, outputs, tally, spec.throttling)
            else:
                self._refresh(setup, fleet, outputs, tally, spec)

    def _refresh(self, setup: Setup, fleet: Fleet, outputs: RunOutputs, tally: Tally, spec: FleetSpec) -> None:
        """The work, and models that change meanwhile."""
        from penstock.run.refreshing import ModelRefresh  # which other runs need not load

        refresh = ModelRefresh(self._job.graph, spec.around, self._rows_of_branch, self.stop)
        try:
            with refresh:
                self._coordinate(
                    setup, fleet, outputs, tally, spec.throttling, lambda: outputs.refreshed(refresh.take_events())
                )
        except StoppedError as exc:
            if refresh.error is not None:
                raise refresh.error from exc
            raise
        finally:  # after `with refresh`, which has read all that workers have reported
            outputs.refreshed(refresh.take_events())
        refresh.count_in(tally.metrics)

    def _warn_of_loads(self, pools: Pools, around: Surroundings) -> None:
        """A limit that somebody has set, and that ends no load."""
        limit = self._job.options.load_timeout
        for label in unlimited_loads(self._job.plan, pools, around) if limit < LOAD_TIMEOUT else ():
            logger.warning(
                "step %r: load_timeout=%g does not limit its model, which is loaded in %s; "
                "with large_model=True it has a process of its own, which can be killed",
                label,
                limit,
                "this process" if pools.in_process else "the workers",
            )

    def _rows_of_branch(self, graph: Graph) -> list[Any]:
        """What a branch of the pipeline gives that is run beside the run, in this process."""
        run = Run(Job(graph, RunOptions(workers=0, progress=False), self._job.site))
        run.wait()
        return [row for rows in run.rows.values() for row in rows]

    def _coordinate(
        self,
        setup: Setup,
        fleet: Fleet,
        outputs: RunOutputs,
        tally: Tally,
        throttling: Throttling,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._standing = Standing(setup, tally)
        self._coordinator = coordinator = Coordinator(setup, fleet, outputs, tally, watch, throttling)
        if self._stopped:
            coordinator.stop()
        try:
            with shown(_painter(self._job.options.progress), self.progress):
                coordinator.run()
            fleet.close()  # workers tear down their steps; after an error they are killed
        except BaseException:
            fleet.kill()
            coordinator.abandon()  # after the workers: they read what lies between the stages
            raise


def _painter(wanted: bool | None) -> Progress | PlainProgress | None:
    if wanted is False or sys.stderr is None or sys.stderr.closed:
        return None
    return Progress(sys.stderr) if sys.stderr.isatty() else PlainProgress(sys.stderr)


def _result(
    setup: Setup, tally: Tally, before: int, seconds: float = 0.0, *, rows_before: int = 0, was_finished: bool = False
) -> RunResult:
    """`before`: splits that earlier processes have done; `rows_before`: the rows of the sources in them."""
    job, scheduler = setup.job, setup.scheduler
    return RunResult(
        run=setup.layout.run,
        seconds=seconds,
        counts={node.label: StepCount() for node in job.graph.nodes if node.traits.is_counted} | tally.counts,
        metrics=tally.metrics,
        outputs=[sink.describe() for sink in job.sinks.values()],
        splits=tally.bundles,
        splits_before=before,
        rows_before=rows_read(tally.counts) if was_finished else rows_before,
        retries=scheduler.retries,
        worker_deaths=scheduler.deaths,
        was_finished=was_finished,
    )


def _collected(tally: Tally, position: int) -> list[Any]:
    rows: list[Any] = []
    for _, blocks in sorted(tally.collected.get(position, []), key=lambda item: item[0]):
        for block in blocks:
            rows.extend(block)
    return rows
