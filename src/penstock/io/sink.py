"""The contract of a sink, and the transform that writes to one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.blocks import Block
from penstock.errors import UsageError
from penstock.pipeline.graph import PCollection, PTransform
from penstock.pipeline.traits import Traits, is_ours
from penstock.pipeline.unused import Unapplied

T = TypeVar("T")

FIVE_DIGITS = 100_000
APPLIED_TWICE = (
    "If it is one step that was applied twice, as by running a notebook cell again before the pipeline has run: a pipeline "
    "remembers all that was applied to it, so make it in the same cell, p = ps.Pipeline()"
)


def part_name(numbers: Iterable[int]) -> str:
    """The name of a part by its place among all, such as "00012" or "00001-00004".

    Names sort as text in the order of the numbers, however many there are: those of more than five digits begin with a
    letter, which sorts after all digits and tells how many there are (99999, a100000, ..., a999999, b1000000).
    """
    return "-".join(f"{n:05d}" if n < FIVE_DIGITS else f"{chr(ord('a') + len(str(n)) - 6)}{n}" for n in numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which piece of the output a writer makes: one per split. Names sort in the order of the rows."""

    run: str  # one run's id
    name: str  # such as "00012", by part_name(): the same in every attempt and every rerun
    attempt: int  # attempts at one part may overlap in time: each writes aside under a name of its own
    journaled: bool = False  # the run can be resumed: what is aside must outlive a power cut, and is digested


class Writer(Generic[T]):
    """One part being written aside, in a worker, by one thread."""

    rows_written: int | None = (
        None  # in the part, after close(): a run fails if they are not those it was given; None: not counted
    )

    def write(self, block: Block) -> None:
        """Add rows: a list, or a pyarrow Table."""
        raise NotImplementedError

    def close(self) -> Any:
        """Finish the part durably, still aside, and return a small picklable token for publish(); None if it is empty."""
        raise NotImplementedError

    def abort(self) -> None:
        """Throw away what was written aside. Called instead of close() when the split failed."""


class Sink(Generic[T]):
    """Where rows go. Subclass it to write something new, and run `testing.check_sink` on it.

    Nothing that a writer does is visible to readers. publish() makes one part visible, whole, and may be repeated.

    A run: prepare() or resume(); then open() and the writer's methods in workers; publish(), each part as its split is done
    if the run has a journal, else all of them at the end; finish(). All but open() are called in the user's process.
    open() and publish() are enough, with write() and close() of the writer.
    """

    takes_columns = False  # whether its writers take pyarrow Tables as they are, and make no rows of them
    delivery = "exactly once"  # or "at least once": publish() cannot be repeated, so a resumed run may write rows twice

    def prepare(self, run: str) -> Any:
        """Check, before anything starts, that this can be written. Raise OutputError when it cannot.

        Returns what resume() will need to know of the place as it was: a small JSON value, or None.
        """
        return None

    def resume(self, run: str, note: Any, published: Sequence[Mapping[str, Any]]) -> None:
        """Called instead of prepare() when an earlier process has started the run: with what prepare() returned there, and
        the details() of the parts that are published already."""

    def open(self, part: Part) -> Writer[T]:
        """Start one part aside. In a worker."""
        raise NotImplementedError

    def publish(self, token: Any) -> None:
        """Make a part visible under its final name; doing it twice, also in two processes, leaves one result."""
        raise NotImplementedError

    def details(self, token: Any) -> Mapping[str, Any]:
        """A part for the manifest, in JSON: of a file its path, bytes and xxh128. Never a secret."""
        return {}

    def clean(self, run: str, keep: Collection[Any] = ()) -> None:
        """Remove unpublished files of the run, except the parts with these tokens. Called when a run stops or is resumed."""

    def finish(self, run: str, published: bool) -> None:
        """The run is over and will not be resumed: remove all that is aside. `published` tells whether it succeeded."""

    def describe(self) -> str:
        """Where the rows go, for messages: a path, a table. Never a secret."""
        return type(self).__name__


class Write(PTransform[PCollection[T], None]):
    """Write every row to a sink."""

    def __init__(self, sink: Sink[T]) -> None:
        if not isinstance(sink, Sink):
            raise UsageError(f"Write({sink!r}): expected a ps.Sink")
        self.sink = sink
        self._unapplied = Unapplied(type(self).__name__)

    def traits(self) -> Traits:
        return Traits(
            sink=self.sink,
            takes="either" if self.sink.takes_columns else "rows",
            columns=self.sink.takes_columns and is_ours(self.sink),
        )

    def expand(self, pcoll: PCollection[T]) -> None:
        self._unapplied.applied()
        if not isinstance(pcoll, PCollection):
            raise UsageError(f"{self.default_label()} needs one PCollection on its left, not {type(pcoll).__name__}")
        pcoll.pipeline.add(self, [pcoll], tags=())

    def default_label(self) -> str:
        return f"Write({type(self.sink).__name__})"
