"""What only sinks need that find their parts again in a store of files or tables. Sinks of users need none of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from penstock.io.sink import Sink

T = TypeVar("T")


class StoredSink(Sink[T]):
    """A sink that knows its parts again, aside and published. All methods are called in the user's process."""

    def keep_in(self, folder: str) -> None:
        """Called first of all if the run has a journal: what must outlive this process may be kept in that folder, which
        may not be there yet."""

    def start_over(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Called before prepare() when an earlier run is forgotten, with the details() of what that has published: these
        parts may be replaced. Raise OutputError when they cannot be."""

    def unify(self, tokens: Sequence[Any]) -> Sequence[Any]:
        """Called before parts are published, and with all of them before the run ends: return them as they are to be, in the
        same order. Raise OutputError if they do not go together, or not with those of earlier calls. A part that is
        returned with another token is published, or published again, by that one."""
        return tokens

    def missing(self, published: Sequence[Mapping[str, Any]], prepared: Sequence[Any] = ()) -> Sequence[str]:
        """Which parts are gone: of those that were published, by their details(), and of those that are to be, by their
        tokens."""
        return ()

    def replaced(self) -> Collection[str]:
        """The files of an earlier output, after prepare() or resume(): they stay in place until the whole run is done, and
        are replaced then."""
        return ()

    def aside(self, run: str) -> Sequence[str]:
        """Local folders that hold this run's unpublished parts, to be removed if this process is killed. Those without the
        run's id in their path are left alone."""
        return ()


_NOTHING_STORED: StoredSink[Any] = StoredSink()


def stored(sink: Sink[Any]) -> StoredSink[Any]:
    """The sink, to be asked for what it has stored; of one that cannot tell, one that has stored nothing."""
    return sink if isinstance(sink, StoredSink) else _NOTHING_STORED
