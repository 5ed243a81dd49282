"""The coordinator over fleets: scripted ones, for what hardly ever happens, and the real ones, for what they promise."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock as ps
from penstock.errors import EngineError, StepError, TransientError, WorkerDiedError
from penstock.observe.metrics import MetricKey, Metrics
from penstock.run.coordinator import Coordinator
from penstock.run.fleet import Died, Done, Failed, FleetSpec, Progress, Ready
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
        self.works = self.works and isinstance(event, Progress)
        return [(self.worker, event)]


DONE = Done(0, BundleResult(rows_read=3), [])


def set_up_for(workers):
    p = ps.Pipeline(workers=workers)
    p | ps.Create([1, 2, 3]) | ps.Map(str)
    job = Job(p._whole_graph(), p.options, ps.LocalEngine())
    return job, set_up(job, lay_out(job, list_inputs(job.plan))[0])


def coordinate(script, watch=None, tally=None):
    _, setup = set_up_for(workers=1)
    Coordinator(setup, Scripted(script), AtTheEnd("run", {}, list_inputs(setup.job.plan)), tally or Tally(), watch).run()
    return setup.scheduler


def test_rows_of_a_split_that_died_are_forgotten():
    tally, seen = Tally(), []

    def watch():
        seen.append((dict(tally.running_rows), tally.stage_rows.get(0, 0)))

    coordinate([Progress({0: 2}), Died("killed"), Progress({0: 1}), DONE], watch, tally)
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
    coordinate([Progress({0: 1}, metrics), Failed(0, ErrorReport.here(TransientError("a disk"))), DONE], tally=tally)
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
