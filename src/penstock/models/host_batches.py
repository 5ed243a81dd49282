"""What a host passes around: submissions of rows, batches of them, and which rows are still to be answered. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock.batching.entry import Aim, Entry, Span, rows_in
from penstock.models.fronts import Fronts

if TYPE_CHECKING:
    from penstock.models.hunt import Hunt

Lane: TypeAlias = tuple[int, int]  # the client, and a lane of its own


class Submission(NamedTuple):
    """Rows that a client submitted together: what the front carries."""

    number: int
    client: int
    lane: int
    ticket: int
    content: Any  # the broker's own


@dataclass(eq=False)
class HostBatch:
    number: int
    spans: list[Span[Submission]]
    aim: Aim | None = None  # that it was cut for; None: it runs again, and teaches nothing about sizes
    deaths: int = 0  # of processes that held this batch alone
    crowd_deaths: int = 0  # of processes that ran many others beside it
    suspect: bool = False  # a process died with it: it now runs alone
    started: float | None = None
    hunt: Hunt | None = None  # that this is a part of
    fresh: bool = False  # it needs a process that has run nothing: another had not enough memory for it
    final: bool = False  # a row that did not fit alone, and runs in such a process: what comes of that counts

    @property
    def rows(self) -> int:
        return rows_in(self.spans)

    @property
    def model(self) -> Any:
        """Of many, the one that it is for."""
        return self.spans[0].entry.model


def first_fresh(batches: Iterable[HostBatch]) -> HostBatch | None:
    """The first of them that needs a fresh process."""
    return next((batch for batch in batches if batch.fresh), None)


@dataclass(eq=False)
class Copy:
    """A process that holds the model, or some of many; or will."""

    at_once: int  # batches that run at the same time: where they take turns, one
    state: str = "absent"  # starting, ready; late (it did not load in time) or killed, until it is gone
    since: float = 0.0
    failed_loads: int = 0
    runs: int = 0  # batches that its process was given
    batches: list[HostBatch] = field(default_factory=list)  # those that run, oldest first, and one that waits behind them
    loads: dict[Any, float] = field(default_factory=dict)  # of many models, those that are being loaded, since when
    leaks: str = ""  # why it is to be started anew as soon as it is idle

    @property
    def has_place(self) -> bool:
        """Whether a batch would run at once. Where batches take turns, it would only if there is none."""
        return self.state == "ready" and len(self.batches) < self.at_once and not self.holds_a_suspect

    @property
    def holds_a_suspect(self) -> bool:
        return any(batch.suspect for batch in self.batches)

    def begin(self, now: float) -> None:
        """The first batches run. Where they take turns, the second is not at it before the first is over."""
        if self.state == "ready":  # what a killed process still holds runs no more
            for batch in self.batches[: self.at_once]:
                if batch.started is None:
                    batch.started = now

    def pop(self, number: int) -> HostBatch | None:
        batch = next((batch for batch in self.batches if batch.number == number), None)
        if batch is not None:
            self.batches.remove(batch)
        return batch


class Submissions:
    """The submissions of all lanes of a host, until they are answered. A lane waits until one of them is."""

    def __init__(self, fronts: Fronts, add: Callable[[Entry[Submission], Lane, float], None]) -> None:
        """add: where rows go first."""
        self._fronts = fronts
        self._add = add
        self._waits_for: dict[Lane, int | None] = {}  # a submission; None: the lane says itself when it goes on
        self._left: dict[int, int] = {}  # rows of a submission that are not answered
        self._of: dict[Lane, set[int]] = {}  # of a lane, those that are not answered

    def submitted(self, entry: Entry[Submission], now: float) -> None:
        lane = entry.item.client, entry.item.lane
        self._left[entry.item.number] = self._left.get(entry.item.number, 0) + entry.stop - entry.start
        self._of.setdefault(lane, set()).add(entry.item.number)
        self._add(entry, lane, now)

    def waits(self, lane: Lane, submission: int | None) -> None:
        """The lane adds nothing until the rows of this submission are answered; or, for None, until it goes on."""
        if lane in self._fronts.lanes and (submission is None or submission in self._left):
            self._waits_for[lane] = submission
            self._fronts.waits(lane)

    def goes(self, lane: Lane) -> None:
        self._waits_for.pop(lane, None)
        self._fronts.goes(lane)

    def close(self, lane: Lane) -> bool:
        """What it has submitted, nobody wants any more: what waits is forgotten; what runs, runs for nobody. Whether there
        was any."""
        self._waits_for.pop(lane, None)
        self._fronts.closed(lane)
        numbers = self._of.pop(lane, ())
        for number in numbers:
            self._left.pop(number, None)
        return bool(numbers)

    def is_left(self, submission: int) -> bool:
        """Whether some rows of a submission are still to be answered."""
        return submission in self._left

    def are_wanted(self, spans: Iterable[Span[Submission]]) -> bool:
        """Whether some of these rows are."""
        return any(span.entry.item.number in self._left for span in spans)

    def settle(self, spans: Iterable[Span[Submission]]) -> None:
        """These rows are answered, or have failed."""
        for entry, start, stop in spans:
            number, lane = entry.item.number, (entry.item.client, entry.item.lane)
            left = self._left.get(number)
            if left is None:
                continue  # nobody wants it any more
            self._left[number] = left - (stop - start)
            if not self._left[number]:
                del self._left[number]
                self._of[lane].discard(number)
                if self._waits_for.get(lane) == number:
                    self.goes(lane)
