"""What the sources of a run read: listed once, so that all that is done with it agrees, and without the run's own files."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from penstock.engines.local.journal import Journal
from penstock.engines.local.run_dir import is_of_run_dir
from penstock.engines.plan import Plan
from penstock.errors import InputError
from penstock.io.files import InputFile, is_local, store_of, without_secrets
from penstock.io.source import Source


@dataclass(frozen=True, slots=True)
class Input:
    """A source of the plan with the files that it has now."""

    step: str
    source: Source[Any]
    files: list[InputFile]


def list_inputs(plan: Plan, run_dir: str, written: Collection[str], *, may_be_gone: bool = False) -> list[Input]:
    """The sources in the order of the plan, with their files but for those in run_dir that are the run's, and those that
    were `written` by it. Raises InputError where nothing is left, unless it `may_be_gone`."""
    _real.cache_clear()
    found, folder = [], os.path.realpath(run_dir)
    for _, _, step, read in plan.sources():
        try:
            every = read.source.inputs()
        except InputError:
            if not may_be_gone:
                raise
            every = ()
        files = [file for file in every if not ((place := _place(file.path)) in written or is_of_run_dir(place, folder))]
        if every and not files and not may_be_gone:
            raise InputError(f"step {step.label!r}: has no files but those that this run has written; check its path")
        found.append(Input(step.label, read.source.among(files), files))
    return found


def written_by(journal: Journal) -> set[str]:
    """The files that a run has published, may have published when it was killed, or has taken over from an earlier one."""
    parts = [*journal.parts(), *(journal.fact("earlier") or ())]
    return {_place(part["path"]) for part in parts if "path" in part}


def _place(path: str) -> str:
    """One name for a file, however it was spelled."""
    if "://" not in path:
        return _local_place(path)
    fs, inner = store_of(path, InputError)
    return _local_place(inner) if is_local(fs) else without_secrets(fs.unstrip_protocol(inner))


def _local_place(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(_real(folder), name)


@functools.lru_cache(1024)
def _real(folder: str) -> str:
    return os.path.realpath(folder)
