"""Rows that are in memory already: Create."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from penstock.blocks import Block, fitting_rows
from penstock.errors import UsageError
from penstock.io.source import Read, Source, SplitGoal
from penstock.rows import many, shorten

T = TypeVar("T")


class MemorySource(Source[T]):
    """The rows of a sequence. A worker gets the rows of one split; the source that is copied there carries none."""

    def __init__(self, rows: Sequence[T]) -> None:
        self.rows: Sequence[T] | None = rows

    def splits(self, goal: SplitGoal) -> Sequence[range]:
        count = len(self._own_rows())
        size = max(1, -(-count // goal.for_rows(count).min_splits))
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def payload(self, split: range) -> Sequence[T]:
        return self._own_rows()[split.start : split.stop]

    def read(self, split: Sequence[T]) -> Iterator[Block]:
        size = fitting_rows(list(split[:16]))
        for start in range(0, len(split), size):
            yield list(split[start : start + size])

    def count(self) -> int | None:
        return None if self.rows is None else len(self.rows)

    def _own_rows(self) -> Sequence[T]:
        assert self.rows is not None, "only the user's own copy of a MemorySource has rows"
        return self.rows

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": None}


class Create(Read[T]):
    """Rows from a list, a range, an array or any other iterable in memory."""

    def __init__(self, values: Iterable[T]) -> None:
        if hasattr(values, "columns") or getattr(values, "ndim", 1) == 0:
            raise UsageError(f"Create({type(values).__name__}): expected rows; of a frame, Create(frame.to_dict('records'))")
        try:
            iter(many(values, "Create()"))
        except TypeError as exc:
            told = shorten(values)
            raise UsageError(
                f"Create({told}): expected an iterable of rows, such as a list; for one row: Create([row])"
            ) from exc
        rows: Sequence[T]
        if isinstance(values, (list, tuple, range)) or hasattr(values, "__array__"):
            rows = values  # type: ignore[assignment]  # arrays slice like sequences
        else:
            rows = list(values)
        super().__init__(MemorySource(rows))

    def default_label(self) -> str:
        return "Create"
