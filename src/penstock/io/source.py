"""The contract of a source, and the transform that reads one."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from penstock.blocks import Block
from penstock.errors import InputError, UsageError
from penstock.io.files import InputFile, list_files, short_name, without_secrets
from penstock.pipeline.graph import MAIN, PCollection, PTransform
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.traits import Traits, is_ours

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitGoal:
    """How finely a source should cut its input: pieces of about `max_bytes`, and at least `min_splits` if it can.

    A source that knows how many rows it has follows for_rows() instead, so that no split is too small for good batches.
    """

    max_bytes: int = 64 << 20
    min_splits: int = 1
    min_rows: int = 1  # in a split: a few batches of the stage's models
    at_once: int = 1  # splits that can be worked on at a time: these come before min_rows

    def for_rows(self, rows: int) -> SplitGoal:
        """The goal for an input of that many rows."""
        fitting = max(self.at_once, rows // self.min_rows)
        return replace(self, min_splits=max(1, min(self.min_splits, fitting)))

    def target_bytes(self, total: int, least: int = 64 << 10) -> int:
        """How large one split should be when there are `total` bytes in all."""
        return max(least, min(self.max_bytes, -(-total // self.min_splits)))


class Source(Generic[T]):
    """Rows that can be read in pieces. Subclass it to read something new, and run `testing.check_source` on it.

    A source is a small picklable description. It is made in the user's process, copied to the workers, and holds no open
    files.
    """

    gives_columns = False  # whether read() yields pyarrow Tables only

    def splits(self, goal: SplitGoal) -> Sequence[Any]:
        """Cut the input into splits: small picklable things, in the order of their rows. May be empty.

        Called in the user's process, before anything starts. Raise InputError when the input is missing.
        """
        raise NotImplementedError

    def payload(self, split: Any) -> Any:
        """What travels to the worker instead of the split, and is given to read(). In the user's process."""
        return split

    def read(self, split: Any) -> Iterator[Block]:
        """Yield the rows of one split, in order, as non-empty lists of rows or as pyarrow Tables.

        Called in a worker, once for every attempt at the split; it must give the same rows each time. OSErrors count as
        transient: the split is tried again.
        """
        raise NotImplementedError

    def count(self) -> int | None:
        """How many rows there are, if that is known without reading them: exactly, for a run that reads another number
        fails. None: it is not known, or is an estimate."""
        return None

    def byte_size(self) -> int | None:
        """About how many bytes the rows take in memory, uncompressed, if that is known without reading them."""
        return None

    def inputs(self) -> Sequence[InputFile]:
        """The files that it reads, as they are now, by which a resumed run tells whether they are the same; or whatever
        else has a name, a size and a stamp that changes with it. Empty: that cannot be told."""
        return ()

    def among(self, files: Sequence[InputFile]) -> Source[T]:
        """This source with these of its inputs(), which it does not list again: so all that is done with it agrees."""
        return self

    def paths_of(self, split: Any) -> Collection[str]:
        """The names of those of its inputs() that a split reads. Empty: that cannot be told."""
        return ()

    def only(self, paths: Collection[str]) -> Source[T]:
        """This source, cut as if it had only these of its inputs: for files that came after a run was started."""
        raise InputError(
            f"{type(self).__name__} has new inputs, such as {without_secrets(min(paths))}, and no method only(), which "
            "would add them to a run that was started without them; write one, or start over with fresh=True (--fresh)"
        )


class FileSource(Source[T]):
    """Rows of the files that a path, a folder or a glob names."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._files: Sequence[InputFile] | None = None
        self._only: Collection[str] | None = None

    def inputs(self) -> Sequence[InputFile]:
        return list_files(self.pattern) if self._files is None else self._files

    def among(self, files: Sequence[InputFile]) -> FileSource[T]:
        other = copy.copy(self)
        other._files = files
        return other

    def only(self, paths: Collection[str]) -> FileSource[T]:
        other = copy.copy(self)
        other._only = frozenset(paths)
        return other

    def paths(self) -> list[str]:
        """What it was asked for, and the files that were found."""
        return [self.pattern, *(file.path for file in self._files or ())]

    def is_wanted(self, file: str) -> bool:
        """Whether the file is among those that only() has left."""
        return self._only is None or file in self._only


class Read(PTransform[Pipeline, PCollection[T]]):
    """The rows of a source."""

    def __init__(self, source: Source[T]) -> None:
        if not isinstance(source, Source):
            raise UsageError(f"Read({source!r}): expected a ps.Source")
        self.source = source

    def traits(self) -> Traits:
        return Traits(source=self.source, columns=self.source.gives_columns and is_ours(self.source))

    def expand(self, pcoll: Pipeline) -> PCollection[T]:
        if not isinstance(pcoll, Pipeline):
            raise UsageError(f"{self.default_label()} starts a pipeline: write pipeline | ..., not a PCollection | ...")
        return pcoll.add(self, ()).outputs[MAIN]

    def default_label(self) -> str:
        return f"Read({type(self.source).__name__})"


class ReadFiles(Read[T]):
    """The rows of files."""

    source: FileSource[T]

    def default_label(self) -> str:
        return f"{type(self).__name__}({short_name(self.source.pattern)})"
