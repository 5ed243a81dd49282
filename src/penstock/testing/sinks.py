"""Does a sink keep its contract?"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.io.sink import Part, Sink
from penstock.io.stored_sink import stored
from penstock.testing.sources import check_same, expect, worker_copy

T = TypeVar("T")

RUN = "check-sink"


def check_sink(
    sink: Sink[T],
    rows_of: Callable[[int], list[T]],
    read_back: Callable[[], Sequence[T]],
    again: Callable[[], Sink[T]] | None = None,
) -> None:
    """Raise AssertionError unless rows become visible whole, once, in order, and only by publish().

    `sink` writes to a place that is empty. `rows_of(n)` makes rows that it can write, other ones for every n.
    `read_back()` returns the rows that a reader of that place sees now, in order; the place may not exist yet. Parts
    are written by a pickled copy of the sink, as in a worker. `again()` makes the sink again, as a later process does that
    resumes a run: then that is checked, too.
    """
    check = _SinkCheck(sink, rows_of, read_back)
    note = sink.prepare(RUN)
    check.sees([], "after prepare()")
    check.aborted_part_leaves_nothing()
    check.empty_part_has_no_token()
    last, retried, first = check.write("00002", 2), check.write_two_attempts("00001", 1), check.write("00000", 0)
    check.sees([], "before anything was published")
    sink.publish(retried)
    check.sees(rows_of(1), "with part 00001 published")
    sink.publish(retried)
    check.sees(rows_of(1), "with part 00001 published twice")
    if again is not None:
        sink = check.goes_on(again(), note, published=[retried], prepared=[last, first])
    sink.publish(last)
    sink.publish(first)
    everything = [row for n in range(3) for row in rows_of(n)]
    check.sees(everything, "with all parts published, the last one before the first")
    sink.finish(RUN, True)
    check.sees(everything, "after finish()")
    check.nothing_is_left_aside()


class _SinkCheck:
    def __init__(self, sink: Sink[Any], rows_of: Callable[[int], list[Any]], read_back: Callable[[], Any]) -> None:
        self.sink = sink
        self.name = type(sink).__name__
        self.rows_of = rows_of
        self.read_back = read_back

    def open(self, name: str, attempt: int = 1) -> Any:
        return worker_copy(self.sink, self.name).open(Part(run=RUN, name=name, attempt=attempt))

    def write(self, name: str, n: int) -> Any:
        writer = self.open(name)
        self.fill(writer, n)
        return self.close(writer, n)

    def write_two_attempts(self, name: str, n: int) -> Any:
        """Two attempts at one part that overlap in time; the token of the second one."""
        slow, quick = self.open(name, 1), self.open(name, 2)
        self.fill(slow, n)
        self.fill(quick, n)
        self.close(slow, n)
        return self.close(quick, n)

    def fill(self, writer: Any, n: int) -> None:
        rows = self.rows_of(n)
        expect(len(rows) > 1, f"rows_of({n}) gave {len(rows)} rows; check_sink needs at least 2")
        writer.write(rows[:1])
        writer.write(rows[1:])

    def close(self, writer: Any, n: int) -> Any:
        token = writer.close()
        expect(token is not None, f"{self.name}: close() returned None for a part with rows; expected a token")
        given = len(self.rows_of(n))
        expect(
            writer.rows_written in (None, given), f"{self.name}: rows_written is {writer.rows_written}; it was given {given}"
        )
        try:
            return pickle.loads(pickle.dumps(token))
        except Exception as exc:
            raise AssertionError(f"{self.name}: the token {token!r} cannot be pickled: {exc}") from exc

    def empty_part_has_no_token(self) -> None:
        token = self.open("00003").close()
        expect(token is None, f"{self.name}: close() returned {token!r} for a part without rows; expected None")

    def goes_on(self, later: Sink[Any], note: Any, published: list[Any], prepared: list[Any]) -> Sink[Any]:
        """The sink of a later process, which knows what the journal does; one part may be published without its knowing."""
        told = json.loads(json.dumps([note, [dict(self.sink.details(token)) for token in published]]))
        left = self.write("00004", 4)
        later.clean(RUN, prepared)
        later.resume(RUN, *told)
        self.sees(self.rows_of(1), "after another process has taken over")
        try:
            later.publish(left)
        except Exception:
            self.sees(self.rows_of(1), "after a part that was cleaned away could not be published")
        else:
            raise AssertionError(f"{self.name}: clean() left a part that was not to be kept")
        later.publish(published[0])
        self.sees(self.rows_of(1), "with part 00001 published again by another process")
        self.sink = later
        return later

    def aborted_part_leaves_nothing(self) -> None:
        before = self.files_aside()
        writer = self.open("00000", 3)
        self.fill(writer, 0)
        writer.abort()
        left = self.files_aside() - before
        expect(not left, f"{self.name}: abort() left {sorted(left)}")
        self.sees([], "after abort()")

    def sees(self, expected: Sequence[Any], when: str) -> None:
        check_same(expected, list(self.read_back()), f"{self.name}, what a reader sees {when}")

    def files_aside(self) -> set[str]:
        folders = stored(self.sink).aside(RUN)
        return {os.path.join(at, name) for folder in folders for at, _, names in os.walk(folder) for name in names}

    def nothing_is_left_aside(self) -> None:
        left = [folder for folder in stored(self.sink).aside(RUN) if os.path.exists(folder)]
        expect(not left, f"{self.name}: finish() left {left}")
