"""Model hosts: rules that a review found broken once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import penstock as ps
from penstock.errors import EngineError, ModelCrashError, UsageError
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions, is_measured
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.models.host_address import run_folder
from penstock.models.place import Place, Surroundings, Wishes, choose_place
from penstock.observe.metrics import Metrics


class Slow(ps.ModelHandler):
    """Each call takes a while, however many rows it has."""

    def __init__(self, seconds=0.0, bad=(), **settings):
        super().__init__(**settings)
        self.seconds = seconds
        self.bad = bad

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        time.sleep(self.seconds)
        if any(row in self.bad for row in batch):
            raise ValueError("bad")
        return list(batch)


def test_the_timeout_is_for_one_call_not_for_all_that_finding_bad_rows_takes():
    handler = Slow(0.3, bad=(3, 20, 41), max_batch_size=64)
    step = ps.RunInference(handler).with_exception_handling(timeout=2)
    _, failures = ps.Pipeline(workers=0) | ps.Create(range(64)) | step
    assert [(row, failure.kind) for row, failure in failures.failed_inferences.collect()] == [
        (3, "raised"),
        (20, "raised"),
        (41, "raised"),
    ]


class PerRow(Slow):
    def run_inference(self, batch, model, inference_args=None):
        time.sleep(0.002 * len(batch))
        return list(batch)


def test_the_search_for_a_size_stays_under_the_timeout():
    pipeline = ps.Pipeline(workers=0, element_timeout=1)
    assert (pipeline | ps.Create(range(3000)) | ps.RunInference(PerRow())).collect() == list(range(3000))
    assert pipeline.result is not None
    assert pipeline.result.metrics.counter("model_restarts") == 0
    assert pipeline.result.metrics.distribution("inference_request_batch_size").max < 500


def test_steps_that_share_a_model_share_its_deadline():
    rows = ps.Pipeline() | ps.Create(range(3))
    rows | "one" >> ps.RunInference(Slow(), model_identifier="m")
    rows | "two" >> ps.RunInference(Slow(), model_identifier="m").with_exception_handling(timeout=1)
    with pytest.raises(UsageError, match="'one' and 'two' share the model 'm', but not their timeout="):
        rows.pipeline.run()


class Ends(Slow):
    """Tells how a child ended that was asked to."""

    def run_inference(self, batch, model, inference_args=None):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        child.terminate()
        return [child.wait(20)] * len(batch)


def test_children_of_a_model_can_be_terminated():
    assert (ps.Pipeline(workers=0) | ps.Create([1]) | ps.RunInference(Ends(large_model=True))).collect() == [-signal.SIGTERM]


def test_a_session_that_is_closed_starts_no_host(tmp_path):
    sessions = ProcessSessions(Metrics(), Surroundings(folder=run_folder(f"closed-{time.monotonic_ns()}")))
    session = sessions.open("step", InferenceSpec.of(Slow(large_model=True)))
    lane = session.join(Caller())
    sessions.close()
    with pytest.raises(EngineError, match="the run has ended"):
        lane.submit(Ticket([1]))
    with pytest.raises(EngineError, match="the run has ended"):
        sessions.open("other", InferenceSpec.of(Slow()))


class Once(Slow):
    """Its rows must not be called twice; the first call ends the broker."""

    retry_safe = False

    def run_inference(self, batch, model, inference_args=None):
        import os
        import signal

        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


def test_rows_that_must_not_be_called_twice_are_not_when_the_host_dies():
    with pytest.raises(ModelCrashError, match="must not be called again"):
        (ps.Pipeline(workers=0) | ps.Create([1]) | ps.RunInference(Once(large_model=True))).collect()


# Where a model lives.

GPUS = ("0", "1", "2")


@pytest.mark.parametrize(
    ("wishes", "around", "expected"),
    [
        (Wishes(accelerator="gpu"), Surroundings(gpus=GPUS, workers=4), (True, 3, GPUS)),
        (Wishes(accelerator="gpu"), Surroundings(gpus=GPUS, workers=1), (True, 3, GPUS)),
        (Wishes(accelerator="gpu"), Surroundings(gpus=GPUS, workers=1, in_process=True), (False, 1, ())),
        (Wishes(accelerator="gpu"), Surroundings(gpus=(), workers=4), (False, 1, ())),
        (Wishes(accelerator="gpu", shared=True), Surroundings(gpus=GPUS, in_process=True), (True, 3, GPUS)),
        (Wishes(accelerator="gpu", shared=True, copies=2), Surroundings(gpus=GPUS, workers=4), (True, 2, GPUS)),
        (Wishes(accelerator="gpu", gpus=("1",)), Surroundings(gpus=GPUS, workers=4), (True, 1, ("1",))),
        (Wishes(accelerator="cuda:1"), Surroundings(gpus=GPUS, workers=4), (True, 1, ())),
        (Wishes(accelerator="gpu"), Surroundings(gpus=("0",), workers=1, spread=True), (True, 1, ("0",))),
        (Wishes(timeout=3), Surroundings(workers=4), (True, 4, ())),
        (Wishes(timeout=3), Surroundings(workers=1, spread=True), (True, 1, ())),
        (Wishes(), Surroundings(workers=4, element_timeout=3), (True, 4, ())),
        (Wishes(isolated=True), Surroundings(workers=2), (True, 2, ())),
        (Wishes(shared=True, timeout=3), Surroundings(workers=4), (True, 1, ())),
        (Wishes(), Surroundings(workers=4), (False, 1, ())),
    ],
)
def test_places(wishes, around, expected):
    place: Place = choose_place(wishes, around)
    assert (place.hosted, place.copies, place.devices) == expected


def test_only_what_nobody_has_placed_is_measured():
    assert is_measured(InferenceSpec.of(Slow()), Surroundings(workers=4))
    assert not is_measured(InferenceSpec.of(Slow()), Surroundings(workers=1))
    assert not is_measured(InferenceSpec.of(Slow(large_model=True)), Surroundings(workers=4))
