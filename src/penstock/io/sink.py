"""The contract of a sink, and the transform that writes to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.blocks import Block
from penstock.errors import UsageError
from penstock.pipeline.graph import PCollection, PTransform

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which piece of the output a writer makes: one per split. Names sort in the order of the rows."""

    run: str  # one run's id
    name: str  # such as "00012": the same in every attempt and every rerun
    attempt: int  # attempts at one part may overlap in time: each writes aside under a name of its own


class Writer(Generic[T]):
    """One part being written aside, in a worker, by one thread."""

    def write(self, block: Block) -> None:
        """Add rows: a list, or a pyarrow Table."""
        raise NotImplementedError

    def close(self) -> Any:
        """Finish the part durably, still aside, and return a small picklable token for publish(); None if it is empty."""
        raise NotImplementedError

    def abort(self) -> None:
        """Throw away what was written aside. Called instead of close() when the split failed."""
        raise NotImplementedError


class Sink(Generic[T]):
    """Where rows go. Subclass it to write something new, and run `testing.check_sink` on it.

    Nothing that a writer does is visible to readers. publish() makes one part visible, whole, and may be repeated.
    """

    def prepare(self, run: str) -> None:
        """Check, before anything starts, that this can be written. Raise OutputError when it cannot. User's process."""

    def open(self, part: Part) -> Writer[T]:
        """Start one part aside. In a worker."""
        raise NotImplementedError

    def publish(self, token: Any) -> None:
        """Make a part visible under its final name; doing it twice leaves one result. User's process."""
        raise NotImplementedError

    def finish(self, run: str, published: bool) -> None:
        """Remove what this run left aside; `published` tells whether the run succeeded. User's process."""

    def aside(self, run: str) -> Sequence[str]:
        """Local folders that hold this run's unpublished parts, to be removed if this process is killed."""
        return ()

    def describe(self) -> str:
        """Where the rows go, for messages: a path, a table."""
        return type(self).__name__


class Write(PTransform[PCollection[T], None]):
    """Write every row to a sink."""

    def __init__(self, sink: Sink[T]) -> None:
        if not isinstance(sink, Sink):
            raise UsageError(f"Write({sink!r}): expected a ps.Sink")
        self.sink = sink

    def expand(self, pcoll: PCollection[T]) -> None:
        if not isinstance(pcoll, PCollection):
            raise UsageError(f"{self.default_label()} needs one PCollection on its left, not {type(pcoll).__name__}")
        pcoll.pipeline.add(self, [pcoll], tags=())

    def default_label(self) -> str:
        return f"Write({type(self.sink).__name__})"
