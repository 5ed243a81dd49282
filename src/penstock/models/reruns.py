"""The batches of a host that are to run again, because their process died, hung or had no memory left, and the hunts for the
rows that are to blame. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.batching.entry import Span
from penstock.failures import CRASHED
from penstock.models.commands import BreakBatch, Command
from penstock.models.host_batches import HostBatch, Submissions
from penstock.models.hunt import Hunt, Steps
from penstock.models.keyed_models import Refusal
from penstock.models.uses import of_key

ATTEMPTS = 4  # of a single row whose process dies, alone in it
HUNT_AFTER = 2  # deaths of a process that held one batch: the first may have come from outside
CROWD = 8  # batches: where more run at once, a first death of their process makes none of them run alone


class Reruns:
    """`waiting`: the batches, the next one first. `numbers`: of batches."""

    def __init__(
        self, waiting: deque[HostBatch], submissions: Submissions, numbers: Iterator[int], *, retry_safe: bool
    ) -> None:
        self.waiting = waiting
        self._submissions = submissions
        self._numbers = numbers
        self._retry_safe = retry_safe

    def forget_unwanted(self) -> list[Command]:
        """Those of which nobody wants a row any more."""
        dropped = [batch for batch in self.waiting if not self._submissions.are_wanted(batch.spans)]
        for batch in dropped:
            self.waiting.remove(batch)
        hunts = [batch.hunt for batch in dropped if batch.hunt is not None]
        return [command for hunt in hunts for command in self.follow(hunt.known())]

    def lost(self, batches: list[HostBatch], ran: list[HostBatch], how: str, *, alone: bool) -> list[Command]:
        """Their process died, in which these `ran`; alone: one did, and no model was loading beside it."""
        commands: list[Command] = []
        for batch in reversed(batches):
            batch.aim = batch.started = None
            if batch in ran:
                batch.crowd_deaths += len(ran) > CROWD
                batch.suspect |= len(ran) <= CROWD or batch.crowd_deaths >= HUNT_AFTER
                batch.deaths += alone
            if not self._submissions.are_wanted(batch.spans) and batch.hunt is None:
                continue
            if batch not in ran or (not alone and self._retry_safe) or self._is_to_run_again(batch):
                self.waiting.appendleft(batch)
            else:
                commands += self.failed(batch, CRASHED, f"{process_of(batch)} died with these rows: {how}")
        return commands

    def failed(self, batch: HostBatch, kind: str, how: str) -> list[Command]:
        """A batch has killed its process, or hangs: find the rows that do it."""
        if batch.hunt is not None:
            return self.follow(batch.hunt.died(kind, how))
        if batch.rows == 1 or not self._retry_safe:
            return self.follow([BreakBatch(batch, kind, how)])
        return self.follow(self.hunt(batch, kind, how))

    def hunt(self, batch: HostBatch, kind: str, how: str) -> Steps:
        return Hunt(batch.spans, kind, how, self._numbers, self._submissions.is_left).begin()

    def follow(self, steps: Steps) -> list[Command]:
        """What a hunt says: parts run before anything else; rows that nobody will answer are settled."""
        commands: list[Command] = []
        for step in steps:
            if isinstance(step, HostBatch):
                self.waiting.appendleft(step)
            else:
                self._submissions.settle(step.batch.spans)
                commands.append(step)
        return commands

    def refused(self, refusal: Refusal) -> list[Command]:
        """Rows whose model will never be there: those that wait for it, and those that were to run again."""
        commands: list[Command] = []
        spans = [Span(entry, entry.start, entry.stop) for entry in refusal.entries]
        batches = [HostBatch(0, spans)] if spans else []
        while (batch := next((batch for batch in self.waiting if batch.model == refusal.model), None)) is not None:
            self.waiting.remove(batch)
            batches.append(batch)
            commands += [] if batch.hunt is None else self.follow(batch.hunt.known())
        kind, what, error = refusal.kind, refusal.message, refusal.error
        broken: Steps = [BreakBatch(batch, kind, what, error, together=False) for batch in batches]
        return [*commands, *self.follow(broken)]

    def outlook(self) -> str:
        """What becomes of the rows whose process is gone, for people."""
        batch = next((batch for batch in self.waiting if batch.suspect), None)
        if batch is None:
            return ""
        if batch.hunt is None or batch.rows == 1:
            return f"; {rows_told(batch.rows)} that it held run{'s' if batch.rows == 1 else ''} again, alone"
        return f"; looking for the row that is to blame, among {batch.rows}"

    def _is_to_run_again(self, batch: HostBatch) -> bool:
        """Whether a batch whose process died gets another try as it is."""
        if not self._retry_safe or batch.hunt is not None:
            return False
        return batch.deaths < (HUNT_AFTER if batch.rows > 1 else ATTEMPTS)


def process_of(batch: HostBatch) -> str:
    return "the process" if batch.model is None else f"the process of {of_key(batch.model)}"


def rows_told(rows: int) -> str:
    return "a row" if rows == 1 else f"{rows} rows"
