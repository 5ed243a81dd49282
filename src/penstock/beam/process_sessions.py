"""The sessions of a worker process of Beam's: one set for each pipeline, shared by all its threads and steps."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from penstock.beam.metrics import StepMetrics
from penstock.inference.bundle_stream import InferenceStream
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.models.folder_use import FolderUse
from penstock.models.host_address import await_hosts, run_folder
from penstock.models.memory import usable_cores, visible_gpus
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

_lock = threading.Lock()  # guards the dict and the counts; never held while sessions close, which may take seconds
in_use: dict[str, PipelineSessions] = {}  # by pipeline
_left: queue.SimpleQueue[tuple[float, Hold]] = queue.SimpleQueue()  # by users that have gone: when to release what they had
_releasing: list[threading.Thread] = []  # the thread that releases them: a daemon, which ends with the process


@dataclass(kw_only=True, eq=False)
class PipelineSessions:
    """Of one pipeline in this process. Its users are steps, each copied for a thread, that were set up and not torn down."""

    run: str
    sessions: ProcessSessions
    folder: FolderUse
    users: int = 0
    metrics: StepMetrics = field(default_factory=StepMetrics)
    own: threading.local = field(default_factory=threading.local)

    def caller(self) -> Caller:
        """Of this thread: a bundle runs on one thread, and several models may be on its way."""
        found: Caller | None = getattr(self.own, "caller", None)
        if found is None:
            found = self.own.caller = Caller()
        return found


@dataclass
class Hold:
    """What one user has of them."""

    held: PipelineSessions
    stream: InferenceStream | None = None  # of the bundle at hand

    def abandon(self) -> None:
        """Of a bundle that has ended, or has failed: what is in flight, nobody wants."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def release(self, after: float = 0.0) -> None:
        """after: seconds, for a user that comes until then. It is not waited for."""
        self.abandon()
        if after:
            _left.put((time.monotonic() + after, self))
        else:
            _closed(self.held)


def opened(run: str, user: Any, workers: int = 1) -> tuple[Hold, weakref.finalize[..., Any]]:
    """Those of a pipeline, with one more user, and what is to be detached when that is torn down. Runners that drop one
    whose bundle failed may never do so: then it counts as gone when nothing refers to it."""
    with _lock:
        if run not in in_use:
            in_use[run] = _made(run, workers)
        in_use[run].users += 1
        hold = Hold(in_use[run])
    # Users may be collected anywhere, also by a thread that holds locks: the queue needs none.
    finalizer = weakref.finalize(user, _left.put, (0.0, hold))
    finalizer.atexit = False
    return hold, finalizer


def _release_left() -> None:
    """In order: one that is due later holds up those behind it, for as long as its user may come back."""
    while True:
        due, hold = _left.get()
        time.sleep(max(0.0, due - time.monotonic()))
        hold.release()


def _made(run: str, workers: int) -> PipelineSessions:
    """Called under the lock, so that one thread is started."""
    if not _releasing:
        _releasing.append(threading.Thread(target=_release_left, daemon=True, name="penstock-beam-release"))
        _releasing[0].start()
    folder = FolderUse(run_folder(run))
    around = Surroundings(folder=folder.folder, workers=workers, cores=usable_cores(), gpus=visible_gpus())
    return PipelineSessions(run=run, sessions=ProcessSessions(Metrics(), around), folder=folder)


def _closed(held: PipelineSessions) -> None:
    """One user less; the last one ends them, and waits for nothing. Beam may never say so: then they end with the
    process."""
    with _lock:
        held.users -= 1
        if held.users:
            return
        del in_use[held.run]  # before they are closed, without the lock: nobody finds sessions that are closing
    held.sessions.close(wait=False)
    # On a thread of its own: hosts end when their last client has gone, which may be another process.
    threading.Thread(target=_leave, args=(held.folder,), daemon=True).start()


def _leave(used: FolderUse) -> None:
    """When the hosts that this process has started are gone."""
    await_hosts(used.folder)
    used.leave()
