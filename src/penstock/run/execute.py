"""Splits at work on one thread, in a worker process or in the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.inference.session import Sessions
from penstock.run.protocol import Work
from penstock.seeding import seeded
from penstock.steps.bundle import Assignment, BundleResult, Shipment, StageRunner, load_copy
from penstock.steps.stage import Outlet


class Executor:
    """Runs splits one after another, with its own copies of the stages. Used by one thread."""

    def __init__(self, programs: Mapping[int, bytes], sessions: Sessions) -> None:
        self.work: Work | None = None  # what runs now: for progress, read from another thread
        self._programs = programs
        self._sessions = sessions
        self._runners: dict[int, StageRunner] = {}

    @property
    def rows_done(self) -> int:
        work = self.work
        runner = self._runners.get(work.stage) if work else None
        return runner.rows_done if runner else 0

    def run(self, work: Work, ship: Callable[[Outlet], Shipment]) -> BundleResult:
        """Run one split. After an error the stage is copied anew: its steps may be in any state."""
        self.work = work
        try:
            seed = self._sessions.around.seed
            with seeded(seed, "setup", work.stage):
                runner = self._runner(work.stage)
            blocks = () if work.chunk is None else work.chunk.read()
            assignment = Assignment(work.run, work.key, work.attempt, work.root, work.split, blocks, work.journaled)
            with seeded(seed, work.stage, work.root, work.key):
                return runner.run(assignment, ship)
        except BaseException:
            self._drop(work.stage)
            raise
        finally:
            self.work = None

    def close(self) -> None:
        for stage in list(self._runners):
            self._drop(stage)

    def _runner(self, stage: int) -> StageRunner:
        if stage not in self._runners:
            program, sinks = load_copy(self._programs[stage], "output")
            self._runners[stage] = StageRunner(program, sinks, self._sessions)
        return self._runners[stage]

    def _drop(self, stage: int) -> None:
        runner = self._runners.pop(stage, None)
        if runner is not None:
            runner.close()
