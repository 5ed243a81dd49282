"""Work in the user's own process: the specification that worker processes must match."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

from penstock.inference.session import Sessions
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics
from penstock.rows import let_through
from penstock.run.chunks import Cutter, KeptShipment, PackedShipment
from penstock.run.execute import Executor
from penstock.run.protocol import Done, FailedHere, Progress, Ready, Work
from penstock.steps.stage import Outlet
from penstock.transport.reports import as_penstock_error


class InlineWorkers:
    """One worker that is this process. With one thread, a split runs inside wait(), on the caller's thread."""

    def __init__(self, programs: Mapping[int, bytes], threads: int, around: Surroundings) -> None:
        self._sessions = Sessions(Metrics(), around)
        self._executors = [Executor(programs, self._sessions) for _ in range(threads)]
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._worker = 0
        self._threads = [threading.Thread(target=self._serve, args=[e], daemon=True) for e in self._executors if threads > 1]
        for thread in self._threads:
            thread.start()

    def start(self, pool: int, worker: int) -> None:
        self._worker = worker
        self._events.put((worker, Ready()))

    def assign(self, worker: int, work: Work) -> None:
        self._work.put(work)

    def stop(self, worker: int) -> None: ...

    def wait(self, seconds: float | None) -> list[tuple[int, Any]]:
        if not self._threads and self._events.empty() and not self._work.empty():
            work = self._work.get()
            assert work is not None
            return [(self._worker, self._run(self._executors[0], work))]
        try:
            return [self._events.get(timeout=seconds)]
        except queue.Empty:
            rows = {work.task: e.rows_done for e in self._executors if (work := e.work) is not None}
            return [(self._worker, Progress(rows))] if rows else []

    def close(self) -> None:
        self._end_threads()
        for thread in self._threads:
            thread.join()
        self._sessions.close()

    def kill(self) -> None:
        """Nothing more is begun. A thread that is in a user's code cannot be ended; it ends after its split."""
        while not self._work.empty():
            self._work.get()
        self._end_threads()
        self._sessions.close(wait=False)

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        if not self._threads:
            for executor in self._executors:
                executor.close()

    def _serve(self, executor: Executor) -> None:
        while (work := self._work.get()) is not None:
            try:
                event = self._run(executor, work)
            except BaseException as exc:
                event = FailedHere(work.task, exc)
            self._events.put((self._worker, event))
        executor.close()

    def _run(self, executor: Executor, work: Work) -> Any:
        shipments: list[tuple[Outlet, KeptShipment | PackedShipment]] = []

        def ship(outlet: Outlet) -> KeptShipment | PackedShipment:
            """Rows for another stage are packed here too: a step that changes rows in place changes its own copies."""
            packed = outlet.kind == "stage"
            shipment = PackedShipment(outlet.after, Cutter(work.spread)) if packed else KeptShipment()
            shipments.append((outlet, shipment))
            return shipment

        try:
            result = executor.run(work, ship)
            for _, shipment in shipments:
                if isinstance(shipment, PackedShipment):
                    shipment.seal()
                    shipment.keep()
        except BaseException as exc:
            for _, shipment in shipments:
                if isinstance(shipment, PackedShipment):
                    shipment.discard()
            let_through(exc)  # Ctrl-C, or the end of the run
            return FailedHere(work.task, as_penstock_error(exc))
        shipped = [(outlet, shipment.chunks) for outlet, shipment in shipments]
        return Done(work.task, result, shipped, self._sessions.drain_metrics())
