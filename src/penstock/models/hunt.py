"""The hunt for the rows of a batch that kill their process, hang it, or fill its memory. Pure: it says which part of the
batch runs next, alone, and is told what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from penstock.batching.entry import Entry, Span
from penstock.batching.isolation import Blame, isolate
from penstock.failures import OUT_OF_MEMORY, TIMED_OUT
from penstock.models.commands import BreakBatch
from penstock.models.host_batches import HostBatch, Submission

Steps: TypeAlias = list[HostBatch | BreakBatch]  # rows that nobody will answer, and the part that runs next
Row: TypeAlias = tuple[Entry[Submission], int]


class Hunt:
    """One batch's. `numbers`: for the batches that its parts are. `is_left`: whether rows of a submission are wanted."""

    def __init__(
        self, spans: Sequence[Span[Submission]], kind: str, how: str, numbers: Iterator[int], is_left: Callable[[int], bool]
    ) -> None:
        self.rows = rows_of(spans)
        self._kind = kind
        self._numbers = numbers
        self._is_left = is_left
        self._search = isolate(len(self.rows), how, lambda _: self._kind == OUT_OF_MEMORY)
        self._unknown = set(range(len(self.rows)))
        self._restarts = 1
        self._found = 0
        self._fruitful = False  # whether rows were answered since the last restart
        self._asked: tuple[int, int] = (0, len(self.rows))  # the part that runs now
        self._running: list[int] = []  # its rows, without those that are known
        self._confirming: tuple[int, int] | None = None  # what is blamed, while it runs once more

    def begin(self) -> Steps:
        return self._go_on(None)

    def known(self, failed: int = 0) -> Steps:
        """The rows of the part that ran are answered, so many of them by failures; or nobody wants them any more."""
        self._found += failed
        self._unknown.difference_update(range(*self._asked))
        self._fruitful = True
        return self._go_on(None)

    def died(self, kind: str, how: str) -> Steps:
        """The part killed its process, or hung."""
        self._restarts += 1
        self._kind = kind
        return self._go_on(how)

    def answered_but(self, left: Iterable[int]) -> list[Span[Submission]]:
        """The rows of the part that were answered, before its process had no memory left for these."""
        rows = set(left)
        known = [row for at, row in enumerate(self._running) if at not in rows]
        self._unknown.difference_update(known)
        self._restarts += not (known or self._fruitful)  # while rows are answered it leads somewhere
        self._fruitful = False
        return self._spans(known)

    def exhausted(self, how: str) -> Steps:
        """The part filled the memory of its process."""
        self._kind = OUT_OF_MEMORY
        return self._go_on(how)

    def _go_on(self, how: str | None) -> Steps:
        """`how` the part failed that ran; None: it was answered."""
        if self._restarts > (len(self.rows).bit_length() + 3) * (self._found + 1):
            self._search.close()
            return self._broken(sorted(self._unknown), how or "")  # what is not known to be good fails together
        steps: Steps = []
        if self._confirming is not None:
            (start, stop), self._confirming = self._confirming, None
            if how is not None:
                steps += self._blamed(start, stop, how)
            how = None
        return steps + self._next_part(how)

    def _next_part(self, reply: str | None) -> Steps:
        steps: Steps = []
        while True:
            try:
                step = self._search.send(reply)
            except StopIteration:
                return steps
            reply = None
            start, stop = self._asked = step.start, step.stop
            rows = [n for n in range(start, stop) if n in self._unknown and self._is_left(self.rows[n][0].item.number)]
            if not rows:
                continue  # they are answered, or nobody wants them
            if isinstance(step, Blame) and self._kind == TIMED_OUT:
                steps += self._blamed(start, stop, step.error)
                continue
            if isinstance(step, Blame):  # once more: what killed its process may have come from outside
                self._confirming = start, stop
            final = self._kind == OUT_OF_MEMORY and isinstance(step, Blame)
            fresh = self._kind == OUT_OF_MEMORY and (final or not self._fruitful)
            self._running = rows
            number = next(self._numbers)
            return [*steps, HostBatch(number, self._spans(rows), suspect=True, hunt=self, fresh=fresh, final=final)]

    def _blamed(self, start: int, stop: int, how: str) -> Steps:
        self._found += 1
        return self._broken(range(start, stop), how)

    def _broken(self, rows: Iterable[int], how: str) -> Steps:
        left = [row for row in rows if row in self._unknown]
        self._unknown.difference_update(left)
        return [BreakBatch(HostBatch(next(self._numbers), self._spans(left)), self._kind, how)] if left else []

    def _spans(self, rows: Iterable[int]) -> list[Span[Submission]]:
        return spans_of(self.rows[row] for row in rows)


def rows_of(spans: Iterable[Span[Submission]]) -> list[Row]:
    """Each row by itself: its entry, and its place there."""
    return [(entry, at) for entry, start, stop in spans for at in range(start, stop)]


def spans_of(rows: Iterable[Row]) -> list[Span[Submission]]:
    """These rows, neighbours together."""
    spans: list[Span[Submission]] = []
    for entry, at in rows:
        if spans and spans[-1].entry is entry and spans[-1].stop == at:
            spans[-1] = Span(entry, spans[-1].start, at + 1)
        else:
            spans.append(Span(entry, at, at + 1))
    return spans
