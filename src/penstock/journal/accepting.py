"""Changes that the user accepts: from here on, what there is now counts.

What is done stays as it is. Of inputs that have changed, those of which nothing is done are cut anew, after all others;
what was still to be read of those that are gone is dropped. A file of which a part is done cannot be another one now.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import RunChangedError
from penstock.io.files import InputFile, without_secrets
from penstock.io.source import SplitGoal
from penstock.journal.identity import Change, Identity
from penstock.journal.inputs import GONE, model_files
from penstock.journal.journal import Journal
from penstock.run.file_changes import Input, differences
from penstock.run.outcomes import SplitId
from penstock.run.splits import cut


@dataclass
class _Cut:
    """What becomes of the splits of one source."""

    removed: list[SplitId] = field(default_factory=list)
    added: list[tuple[SplitId, Any]] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)  # files that are gone, and of which nothing was done


def accept(
    journal: Journal, identity: Identity, inputs: Sequence[Input], facts: dict[str, Any], found: Sequence[Change]
) -> None:
    """Put what was found into the journal, in one transaction. Raises RunChangedError where that cannot be."""
    goals = [SplitGoal(**goal) for goal in journal.fact("goals")]
    cuts = [_cut_anew(journal, position, each, goals[position]) for position, each in enumerate(inputs)]
    facts = {
        **facts,
        "identity": identity.as_json(),
        "accepted": _accepted(journal, found),
        "changed_while_read": None,
    }
    if any(each.removed or each.added for each in cuts):
        facts["rows"] = None
    journal.accept(
        facts,
        _files(journal, identity, inputs, cuts),
        [split for each in cuts for split in each.removed],
        [split for each in cuts for split in each.added],
    )


def remember_accepted(journal: Journal, found: Sequence[Change]) -> None:
    """Note what was accepted of a run that is finished, and of which nothing changes."""
    if found:
        journal.set_facts({"accepted": _accepted(journal, found)})


def _accepted(journal: Journal, found: Sequence[Change]) -> list[dict[str, Any]]:
    """All that was ever accepted, and now this."""
    now = [{"at": time.time(), "kind": change.kind, "what": change.text} for change in found]
    return [*(journal.fact("accepted") or ()), *now]


def _cut_anew(journal: Journal, position: int, each: Input, goal: SplitGoal) -> _Cut:
    known = journal.files("input").get(each.step, {})
    changed = {path for path, _ in differences(known, each.files)}
    if not changed:
        return _Cut()
    now = {file.path for file in each.files}
    splits = [
        (split, is_open, set(each.source.paths_of(payload))) for split, is_open, payload in journal.splits.of(position)
    ]
    if splits and not any(paths for _, _, paths in splits):
        return _Cut()  # whose splits they are cannot be told
    done = {path for _, is_open, paths in splits if not is_open for path in paths}
    removed: list[SplitId] = []
    again = changed - done  # to be read from the beginning
    stale = set(changed)  # whose open splits cannot stay; files that share one with these follow
    while more := [(split, paths) for split, is_open, paths in splits if is_open and split not in removed and paths & stale]:
        for split, paths in more:
            removed.append(split)
            stale |= paths
            again |= paths
    again &= now
    if unfit := sorted(again & done):
        raise RunChangedError(
            f"{without_secrets(unfit[0])} has changed, or shares a split with a file that has, after a part of it was done: "
            "the rest would not fit; restore it, or start over with fresh=True (--fresh)"
        )
    added = cut(each.source.only(again), position, goal, journal.splits.next_number(position)) if again else []
    return _Cut(removed, added, changed - now - done)


def _files(
    journal: Journal, identity: Identity, inputs: Sequence[Input], cuts: Sequence[_Cut]
) -> list[tuple[str, str, InputFile, str | None]]:
    """The files of the run as they are now. Digests of those that are as they were stay; inputs that are gone stay known if
    a part of them was done, so that they are no new ones if they come back."""
    files: list[tuple[str, str, InputFile, str | None]] = []
    known = journal.files("input")
    for each, its in zip(inputs, cuts, strict=True):
        now = {file.path: file for file in each.files}
        for path, (file, digest) in known.get(each.step, {}).items():
            still = now.get(path)
            if still is not None:
                files.append(("input", each.step, still, _kept(still, file, digest)))
            elif path not in its.forgotten:
                files.append((GONE, each.step, file, digest))
    for step, before in journal.files(GONE).items():
        files += [(GONE, step, file, digest) for file, digest in before.values()]
    models = journal.files("model")
    for role, step, file in model_files(identity):
        files.append((role, step, file, _kept(file, *models.get(step, {}).get(file.path, (file, None)))))
    return files


def _kept(file: InputFile, before: InputFile, digest: str | None) -> str | None:
    return digest if (file.size, file.modified) == (before.size, before.modified) else None
