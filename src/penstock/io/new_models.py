"""Which models of a listing are new, and whole. Pure: the listing and the time go in, what is new comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class ModelState(NamedTuple):
    """A model as it lies in its store: a file, or a folder with all that is in it. Times are seconds as of time.time()."""

    stamp: str  # changes when the model does
    size: int | None  # bytes; None: the store does not say
    modified: float  # when it was last written, by its own account
    touched: float  # when anything about it was last changed; infinite where the store does not say
    finished: bool  # whether it looks as if nothing writes it any more
    inode: int | None = None  # of the file or folder; None: the store has none, and what is finished there is whole


class Age(NamedTuple):
    """How new a model is: by the look that first saw it as it is. Only among those of one look the times decide, then the
    names: clocks are set back, and copies may have the times of their originals."""

    look: int
    modified: float
    path: str


class NewModels:
    """Tells, look by look, the newest model; of several keys, the newest of each.

    A model that is still being written is left for later: it must be finished, and not have been written where it is; or
    untouched for longer than the interval; or the same at two looks in a row. One that is empty never comes.
    """

    def __init__(self, interval: float, key_of: Callable[[str], str | None]) -> None:
        self._interval = interval
        self._key_of = key_of
        self._looks = 0
        self._unsure: list[float] = []  # when models were touched that would have been told, if they were whole
        self._seen: dict[str, tuple[str, Age]] = {}  # at the last look: each model's stamp and age
        self._inodes: dict[str, int | None] = {}  # at the look before
        self._done: dict[str, str] = {}  # stamps of models that were told or passed over; also of vanished ones
        self._told: dict[str | None, Age] = {}  # the last one of each key

    def look(self, listing: Mapping[str, ModelState], now: float) -> list[tuple[str | None, str]]:
        """Keys and paths of models that are new, or changed, and newer than what was told of their key; the newest last.

        A model that vanished and comes back as it was is not new. One that changes back to what it was, is.
        """
        self._looks += 1
        self._seen = {path: (state.stamp, self._age(path, state)) for path, state in listing.items()}
        ready = [path for path, state in listing.items() if self._is_open(path, state) and self._is_whole(path, state, now)]
        self._inodes = {path: state.inode for path, state in listing.items()}
        newest: dict[str | None, Age] = {}
        for age in sorted(self._seen[path][1] for path in ready):
            self._done[age.path] = listing[age.path].stamp
            newest[self._key_of(age.path)] = age
        new = {key: age for key, age in newest.items() if key not in self._told or age > self._told[key]}
        self._told.update(new)
        self._unsure = [listing[path].touched for path in listing if self._may_come(path, listing[path])]
        return sorted(((key, age.path) for key, age in new.items()), key=lambda pair: new[pair[0]])

    def settled_in(self, now: float) -> float:
        """Seconds until the models that may still be written were as they are for an interval; 0: there are none."""
        return max((min(self._interval, max(0.0, touched + self._interval - now)) for touched in self._unsure), default=0.0)

    def _may_come(self, path: str, state: ModelState) -> bool:
        told, age = self._told.get(self._key_of(path)), self._seen[path][1]
        return state.size != 0 and self._is_open(path, state) and (told is None or age > told)

    def _age(self, path: str, state: ModelState) -> Age:
        stamp, age = self._seen.get(path, ("", None))
        return age if age is not None and stamp == state.stamp else Age(self._looks, state.modified, path)

    def _is_open(self, path: str, state: ModelState) -> bool:
        return self._done.get(path) != state.stamp

    def _is_whole(self, path: str, state: ModelState, now: float) -> bool:
        if state.size == 0:
            return False
        was_written_here = state.inode is not None and self._inodes.get(path) == state.inode
        seen_before = self._seen[path][1].look < self._looks
        return (state.finished and not was_written_here) or seen_before or now - state.touched > self._interval
