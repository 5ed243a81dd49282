"""The sessions of a worker process of Beam's: one set for each pipeline, shared by all its threads and steps."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from penstock.beam.metrics import StepMetrics
from penstock.inference.lane import Caller
from penstock.inference.session import Sessions
from penstock.models.memory import visible_gpus
from penstock.models.place import Surroundings
from penstock.models.rendezvous import run_folder
from penstock.observe.metrics import Metrics

_lock = threading.Lock()  # guards the pipelines
_pipelines: dict[str, PipelineSessions] = {}


@dataclass
class PipelineSessions:
    """Of one pipeline in this process."""

    run: str
    sessions: Sessions
    metrics: StepMetrics = field(default_factory=StepMetrics)
    users: int = 0  # steps, each copied for a thread, that were set up and not torn down
    own: threading.local = field(default_factory=threading.local)

    def caller(self) -> Caller:
        """Of this thread: a bundle runs on one thread, and several models may be on its way."""
        found: Caller | None = getattr(self.own, "caller", None)
        if found is None:
            found = self.own.caller = Caller()
        return found


def opened(run: str) -> PipelineSessions:
    """Those of a pipeline, with one more user."""
    with _lock:
        found = _pipelines.get(run)
        if found is None:
            cores = os.cpu_count() or 1
            around = Surroundings(folder=run_folder(run), cores=cores, gpus=visible_gpus())
            found = _pipelines[run] = PipelineSessions(run, Sessions(Metrics(), around))
        found.users += 1
        return found


def closed(held: PipelineSessions) -> None:
    """One user less; the last one ends them. Beam may never say so: then they end with the process."""
    with _lock:
        held.users -= 1
        if held.users or _pipelines.get(held.run) is not held:
            return
        del _pipelines[held.run]
    held.sessions.close(wait=False)
