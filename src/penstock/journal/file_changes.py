"""Whether files are still what a run took them for: when it goes on, when it ends, and around the reading of each split."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import InputError, RunChangedError
from penstock.io.digests import sha256_of
from penstock.io.files import InputFile, look_again
from penstock.journal.inputs import Input
from penstock.journal.journal import Journal
from penstock.run.outcomes import SplitId


def differences(before: Mapping[str, tuple[InputFile, str | None]], after: Sequence[InputFile]) -> Iterator[tuple[str, str]]:
    """What has become of the files that there were, by path. One that was only touched or copied is the same, by its
    digest."""
    now = {file.path: file for file in after}
    for path, (file, digest) in before.items():
        if path not in now:
            yield path, f"{path} is gone"
        elif now[path].size != file.size:
            yield path, f"{path} had a size of {file.size:,} and has {now[path].size:,} now"
        elif now[path].modified != file.modified and (digest is None or _digest_of(path) != digest):
            yield path, f"{path} was written again, at {_shown(now[path].modified)} instead of {_shown(file.modified)}"


class FileWatch:
    """Looks at the local files of a split before and after it is read: what was read of a file that somebody replaces must
    not count, also if it is put back."""

    def __init__(self, journal: Journal, inputs: Sequence[Input]) -> None:
        self._journal = journal
        self._inputs = inputs
        self._listed = [{file.path: file for file in each.files} for each in inputs]
        self._reading: dict[SplitId, Collection[str]] = {}

    def begin(self, split: SplitId, payload: Any) -> None:
        self._reading[split] = self._inputs[split.source].source.paths_of(payload)
        self._check(split)

    def end(self, split: SplitId) -> None:
        self._check(split)
        del self._reading[split]

    def _check(self, split: SplitId) -> None:
        listed = self._listed[split.source]
        for path in self._reading[split]:
            file = listed.get(path)
            now = None if file is None else look_again(file)
            if now is None or now != file:
                self._compare(self._inputs[split.source].step, path, now)
                assert now is not None
                listed[path] = now

    def _compare(self, step: str, path: str, now: InputFile | None) -> None:
        before = {path: self._journal.files("input")[step][path]}
        for _, what in differences(before, () if now is None else (now,)):
            raise RunChangedError(
                f"an input was changed while the run in {self._journal.folder} was reading it: step {step!r}: {what}\n"
                "put back what it was and run the same command again: what was read of it since does not count; or start "
                "over with fresh=True (--fresh)"
            )


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
