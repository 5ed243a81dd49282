"""Splits at work on one thread, in a worker of any fleet: what is run, what leaves, and what is said of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.inference.sessions import ProcessSessions
from penstock.rows import let_through
from penstock.run.fleet import Done, Failed, Payload, Work
from penstock.seeding import seeded
from penstock.steps.bundle import BundleResult, Shipment, StageRunner, load_copy
from penstock.steps.stage import Outlet
from penstock.transport.reports import ErrorReport


class Shipping(Shipment, Protocol):
    """How a kind of payload is made."""

    def seal(self) -> Sequence[Payload]:
        """The bundle is done: what was added. From here on it is the caller's to release."""

    def discard(self) -> None:
        """The bundle has failed, before or after seal(): release what was made."""


class SplitRunner:
    """Runs splits one after another, with its own copies of the stages. Used by one thread.

    `ship` makes the way out of a bundle, `report` what is said of an error: how both leave this process is the fleet's.
    """

    def __init__(
        self,
        programs: Mapping[int, bytes],
        sessions: ProcessSessions,
        ship: Callable[[Work, Outlet], Shipping],
        report: Callable[[BaseException], ErrorReport] = ErrorReport.of,
    ) -> None:
        self.work: Work | None = None  # what runs now: for progress, read from another thread
        self._programs = programs
        self._sessions = sessions
        self._ship = ship
        self._report = report
        self._runners: dict[int, StageRunner] = {}  # by stage; this thread's own, but for rows_done

    @property
    def rows_done(self) -> int:
        """For progress, from any thread: each field is read once, since the other thread may end the split meanwhile."""
        work = self.work
        runner = self._runners.get(work.stage) if work else None
        return runner.rows_done if runner else 0

    def run(self, work: Work) -> Done | Failed:
        """Run one split. After an error nothing of it is left, and the stage is copied anew: its steps may be in any state.

        What ends the whole run is raised: Ctrl-C and SIGTERM, which come to the main thread only.
        """
        shipments: list[tuple[Outlet, Shipping]] = []

        def ship(outlet: Outlet) -> Shipping:
            shipments.append((outlet, self._ship(work, outlet)))
            return shipments[-1][1]

        self.work = work
        try:
            with self._sessions.turn:
                result = self._run(work, ship)
            # Sealed when all of it is there: from here on the caller releases what was made, unless discard() does.
            shipped = [(outlet, shipment.seal()) for outlet, shipment in shipments]
            return Done(work.task, result, shipped, self._sessions.drain_metrics(), self._sessions.leaks)
        except BaseException as exc:
            for _, shipment in shipments:
                shipment.discard()
            self._drop(work.stage)
            if threading.current_thread() is threading.main_thread():
                let_through(exc)
            return Failed(work.task, self._report(exc), self._sessions.leaks)
        finally:
            self.work = None

    def close(self) -> None:
        for stage in list(self._runners):
            self._drop(stage)

    def _run(self, work: Work, ship: Callable[[Outlet], Shipment]) -> BundleResult:
        seed = self._sessions.around.seed
        with seeded(seed, "setup", work.stage):
            runner = self._runner(work.stage)
        blocks = () if work.payload is None else work.payload.read()
        with seeded(seed, work.stage, work.root, work.key):
            return runner.run(work, ship, blocks)

    def _runner(self, stage: int) -> StageRunner:
        if stage not in self._runners:
            program, sinks = load_copy(self._programs[stage], "output")
            self._runners[stage] = StageRunner(program, sinks, self._sessions)
        return self._runners[stage]

    def _drop(self, stage: int) -> None:
        runner = self._runners.pop(stage, None)
        if runner is not None:
            runner.close()
