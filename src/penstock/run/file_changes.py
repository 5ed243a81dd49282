"""Whether files are still what a run took them for: on resume, at its end, and around the reading of each split."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from penstock.errors import InputError
from penstock.io.digests import sha256_of
from penstock.io.files import InputFile, look_again, without_secrets
from penstock.io.source import Source
from penstock.run.outcomes import SplitId

Compare: TypeAlias = Callable[[str, InputFile, InputFile | None], None]  # of a step: a file as it was, and as it is now


@dataclass(frozen=True, slots=True)
class Input:
    """A source of the plan with the files that it has now."""

    step: str
    source: Source[Any]
    files: Sequence[InputFile]


def differences(before: Mapping[str, tuple[InputFile, str | None]], after: Sequence[InputFile]) -> Iterator[tuple[str, str]]:
    """What has become of the files that there were, by path. One that was only touched or copied is the same, by its
    digest."""
    now = {file.path: file for file in after}
    for path, (file, digest) in before.items():
        shown = without_secrets(path)
        if path not in now:
            yield path, f"{shown} is gone"
        elif now[path].size != file.size:
            yield path, f"{shown} had a size of {file.size:,} and has {now[path].size:,} now"
        elif now[path].modified != file.modified and (digest is None or _digest_of(path) != digest):
            yield path, f"{shown} was written again, at {_shown(now[path].modified)} instead of {_shown(file.modified)}"


def refuse_changed(step: str, file: InputFile, now: InputFile | None) -> None:
    """Raise InputError if a file is not what it was."""
    for _, what in differences({file.path: (file, None)}, () if now is None else (now,)):
        raise InputError(
            f"step {step!r}: {what}: it was changed while this run was reading it, so nothing was published; leave the file "
            "alone until the run is done, and run it again"
        )


class FileWatch:
    """Looks at the local files of a split before and after it is read: what was read of a file that somebody replaces must
    not count, also if it is put back. `compare` raises if a file that looks different is not the same."""

    def __init__(self, inputs: Sequence[Input], compare: Compare = refuse_changed) -> None:
        self._inputs = inputs
        self._compare = compare
        self._listed = [{file.path: file for file in each.files} for each in inputs]
        self._reading: dict[SplitId, Collection[str]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # of local files, when they were first looked at: see _replaced()
        self._untold: set[int] = set()  # sources that do not say which files a split reads

    def begin(self, split: SplitId, payload: Any) -> None:
        self._reading[split] = paths = self._inputs[split.source].source.paths_of(payload)
        if not paths:
            self._untold.add(split.source)
        self._check(split)

    def end(self, split: SplitId) -> None:
        self._check(split)
        del self._reading[split]

    def finish(self) -> None:
        """All splits are done: look at the files of sources that did not say which of them a split reads."""
        for position in self._untold:
            each = self._inputs[position]
            now = {file.path: file for file in each.source.inputs()}
            for file in each.files:
                if os.path.isfile(file.path) and now.get(file.path) != file:
                    self._compare(each.step, file, now.get(file.path))

    def _check(self, split: SplitId) -> None:
        listed = self._listed[split.source]
        for path in self._reading[split]:
            file = listed.get(path)
            if file is None:
                continue
            now = look_again(file)
            since = None if now is None else self._replaced(path)
            seen = now if now is None or since is None else replace(now, modified=since)
            if seen != file:
                self._compare(self._inputs[split.source].step, file, seen)
                assert now is not None
                listed[path] = now

    def _replaced(self, path: str) -> str | None:
        """When another file took the place of a local one, if that has happened since the last look: it may have the same
        size and date. Some file systems give out numbers anew, and chmod is a change: so both must differ."""
        try:
            found = os.stat(path)
        except OSError:  # of another store, or gone
            return None
        now = found.st_ino, found.st_ctime_ns
        before = self._places.setdefault(path, now)
        if now[0] == before[0] or now[1] == before[1]:
            return None
        self._places[path] = now
        return str(found.st_ctime)


def _digest_of(path: str) -> str | None:
    try:
        return sha256_of(path)
    except InputError:
        return None


def _shown(stamp: str) -> str:
    """A time of a local file for people; what other stores have in its place as it is."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(stamp)))
    except (ValueError, OverflowError):
        return stamp
