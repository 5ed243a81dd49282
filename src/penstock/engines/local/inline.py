"""The fleet that is the user's own process: the specification that worker processes must match."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping

from penstock.inference.sessions import ProcessSessions
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics
from penstock.run.chunks import packed_or_kept
from penstock.run.execute import SplitRunner
from penstock.run.fleet import Event, Ready, Work, WorkerProgress
from penstock.transport.reports import ErrorReport


class InlineFleet:
    """One worker that is this process. With one thread, a split runs inside wait(), on the caller's thread."""

    def __init__(self, programs: Mapping[int, bytes], threads: int, around: Surroundings) -> None:
        self._sessions = ProcessSessions(Metrics(), around)
        self._runners = [SplitRunner(programs, self._sessions, packed_or_kept, ErrorReport.here) for _ in range(threads)]
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # from the coordinator; None: a thread ends
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: somebody called wake()
        self._worker = 0  # its number; the coordinator's thread's own
        # Daemons: one that is in the user's code when a run is killed must not keep the process.
        self._threads = [threading.Thread(target=self._serve, args=[e], daemon=True) for e in self._runners if threads > 1]
        for thread in self._threads:
            thread.start()

    def start(self, pool: int, worker: int) -> None:
        self._worker = worker
        self._events.put(Ready())

    def assign(self, worker: int, work: Work) -> None:
        self._work.put(work)

    def stop(self, worker: int) -> None: ...

    def wake(self) -> None:
        self._events.put(None)

    def wait(self, seconds: float | None) -> list[tuple[int, Event]]:
        event = self._next(seconds)
        return [] if event is None else [(self._worker, event)]

    def close(self) -> None:
        self._end_threads()
        for thread in self._threads:
            thread.join()
        self._sessions.close()  # last: the threads use its models

    def kill(self) -> None:
        """A thread that is in a user's code cannot be ended; it ends after its split."""
        with contextlib.suppress(queue.Empty):  # to look first would not do: a thread may take the last one, and get() waits
            while True:
                self._work.get_nowait()
        self._end_threads()
        self._sessions.close(wait=False)

    def _next(self, seconds: float | None) -> Event | None:
        # Events first: a stop() that was asked for during the last split is seen before the next one runs.
        if not self._threads and self._events.empty() and not self._work.empty():
            work = self._work.get()
            assert work is not None
            return self._runners[0].run(work)
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:  # the threads write work and rows_done, and are not waited for
            rows = {work.task: e.rows_done for e in self._runners if (work := e.work) is not None}
            return WorkerProgress(rows) if rows else None

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        if not self._threads:  # else each closes its own runner: steps are torn down on the thread that ran them
            for runner in self._runners:
                runner.close()

    def _serve(self, runner: SplitRunner) -> None:
        while (work := self._work.get()) is not None:
            self._events.put(runner.run(work))
        runner.close()
