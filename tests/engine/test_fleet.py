"""The coordinator over fleets: scripted ones, for what hardly ever happens, and the real ones, for what they promise."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock as ps
from penstock.engines.local.inline import InlineFleet
from penstock.errors import EngineError, StepError, TransientError, WorkerDiedError
from penstock.models.place import Surroundings
from penstock.observe.metrics import MetricKey, Metrics
from penstock.run.coordinator import Coordinator
from penstock.run.fleet import Died, Done, Failed, FleetSpec, Lost, Ready, WorkerProgress
from penstock.run.outcomes import Tally
from penstock.run.outputs import AtTheEnd
from penstock.run.schedule import ATTEMPTS
from penstock.run.setup import Job, lay_out, list_inputs, set_up
from penstock.steps.bundle import BundleResult
from penstock.transport.reports import ErrorReport


class Scripted:
    """A fleet that tells what a list says, each of the worker that was started last."""

    def __init__(self, script):
        self.script = script
        self.worker = -1
        self.works = False

    def start(self, pool, worker):
        self.worker = worker
        self.script.insert(0, Ready())

    def assign(self, worker, work):
        self.works = True

    def stop(self, worker): ...

    def wait(self, seconds):
        """A worker without work says nothing: the split that failed waits for its next try."""
        if not self.works and not isinstance(self.script[0], Ready):
            threading.Event().wait(seconds)
            return []
        event = self.script.pop(0)
        self.works = self.works and isinstance(event, WorkerProgress)
        return [(self.worker, event)]


DONE = Done(0, BundleResult(rows_read=3), [])


def set_up_for(workers):
    p = ps.Pipeline(workers=workers)
    p | ps.Create([1, 2, 3]) | ps.Map(str)
    job = Job(p.graph(), p.options, ps.LocalEngine())
    return job, set_up(job, lay_out(job, list_inputs(job.plan))[0])


def coordinate(script, watch=None, tally=None):
    _, setup = set_up_for(workers=1)
    Coordinator(setup, Scripted(script), AtTheEnd("run", {}, list_inputs(setup.job.plan)), tally or Tally(), watch).run()
    return setup.scheduler


def test_rows_of_a_split_that_died_are_forgotten():
    tally, seen = Tally(), []

    def watch():
        seen.append((dict(tally.running_rows), tally.stage_rows.get(0, 0)))

    coordinate([WorkerProgress({0: 2}), Died("killed"), WorkerProgress({0: 1}), DONE], watch, tally)
    assert seen == [({}, 0), ({0: 2}, 0), ({}, 0), ({}, 0), ({0: 1}, 0), ({}, 3)]


def test_deaths_that_may_be_the_works_fault_end_the_run():
    with pytest.raises(WorkerDiedError, match=f"died {ATTEMPTS} times while it ran split 0 of stage 0, alone: a signal"):
        coordinate([Died("a signal") for _ in range(ATTEMPTS)])


def test_blameless_deaths_cost_the_work_nothing():
    scheduler = coordinate([*(Died("a node was taken away", blameless=True) for _ in range(3 * ATTEMPTS)), DONE])
    assert scheduler.deaths == scheduler.retries == 3 * ATTEMPTS


def test_an_error_is_raised_as_it_was_whether_it_travelled_or_not():
    error = StepError("of a step")
    with pytest.raises(StepError) as here:
        coordinate([Failed(0, ErrorReport.here(error))])
    assert here.value is error
    with pytest.raises(StepError, match="of a step") as travelled:
        coordinate([Failed(0, ErrorReport.of(error))])
    assert travelled.value is not error


@pytest.mark.parametrize("report", [ErrorReport.here, ErrorReport.of])
def test_trouble_that_may_pass_is_tried_again(report):
    assert coordinate([Failed(0, report(TransientError("a disk"))), DONE]).retries == 1


def test_a_message_that_makes_no_sense_ends_the_run():
    with pytest.raises(EngineError, match="unexpected message from a worker"):
        coordinate(["hello"])


def test_what_a_failed_attempt_measured_counts_with_the_next_one():
    key, metrics, tally = MetricKey("Map", "", "batches"), Metrics(), Tally()
    metrics.count(key, 2)
    coordinate([WorkerProgress({0: 1}, metrics), Failed(0, ErrorReport.here(TransientError("a disk"))), DONE], tally=tally)
    assert tally.metrics.counters == {key: 2}


@pytest.mark.parametrize("workers", [0, 1])
def test_wake_is_heard_from_another_thread_before_a_wait_and_after_the_end(workers):
    job, setup = set_up_for(workers)
    spec = FleetSpec(programs=job.programs(), pools=setup.pools, around=job.surroundings(setup.pools, "fleet"))
    with ps.LocalEngine().fleet(spec) as fleet:
        fleet.wake()
        assert fleet.wait(None) == []
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(fleet.wait, None)
            fleet.wake()
            assert waiting.result() == []
        fleet.close()
    fleet.wake()


# Rows that are lost between stages.


class Losing:
    """A fleet that loses what stages read, as a node that dies does: once for each pair of a stage and a key."""

    def __init__(self, fleet, stages, inputs):
        self.fleet, self.stages, self.inputs = fleet, stages, inputs
        self.lost = []
        self.seen = set()

    def __getattr__(self, name):
        return getattr(self.fleet, name)

    def assign(self, worker, work):
        where = work.stage, work.key
        if work.stage in self.stages and where not in self.seen:
            self.seen.add(where)
            self.lost.append((worker, Lost(work.task, self.inputs)))
            if self.inputs:
                work.payload.release()
        else:
            self.fleet.assign(worker, work)

    def wait(self, seconds):
        return [self.lost.pop()] if self.lost else self.fleet.wait(seconds)


class LosingEngine(ps.LocalEngine):
    def __init__(self, stages, inputs=True):
        self.stages, self.inputs = stages, inputs

    @contextlib.contextmanager
    def fleet(self, spec):
        with super().fleet(spec) as fleet:
            yield Losing(fleet, self.stages, self.inputs)


def three_stages(engine, workers, made=lambda row: [row, -row]):
    p = ps.Pipeline(engine=engine, workers=workers)
    first = p | ps.Create(range(1, 2000)) | ps.FlatMap(made) | "1" >> ps.Reshuffle() | "first" >> ps.Map(str)
    rows = (first | "2" >> ps.Reshuffle() | "second" >> ps.Map(int)).collect()
    return rows, p.result


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stages", [[1], [2], [1, 2]])
def test_rows_that_are_lost_are_made_again_and_counted_once(workers, stages):
    """Those of the last stage by two others: what they had read was released."""
    rows, result = three_stages(LosingEngine(stages), workers)
    assert rows == [sign * row for row in range(1, 2000) for sign in (1, -1)]
    assert result.counts == three_stages(ps.LocalEngine(), workers)[1].counts
    assert result.retries > 0


def test_what_a_split_made_is_lost_before_anybody_had_it():
    rows, result = three_stages(LosingEngine([0, 1], inputs=False), 0)
    assert rows == [sign * row for row in range(1, 2000) for sign in (1, -1)]
    assert result.retries > 0


def test_a_step_that_makes_other_rows_each_time_cannot_make_lost_ones_again():
    times: list[int] = []
    with pytest.raises(EngineError, match="were lost with a node.* made others when they ran again"):
        three_stages(LosingEngine([1]), 0, made=lambda row: times.append(row) or [row] * (len(times) // 1999 + 1))


def test_killing_threads_waits_for_no_work_that_one_of_them_took(monkeypatch):
    class TakenByAnother(queue.SimpleQueue):
        def empty(self):  # whoever looks finds something, and it is gone when it is taken
            return False

    monkeypatch.setattr(queue, "SimpleQueue", TakenByAnother)
    fleet = InlineFleet({}, 2, Surroundings())
    killing = threading.Thread(target=fleet.kill, daemon=True)
    killing.start()
    killing.join(10)
    assert not killing.is_alive()
