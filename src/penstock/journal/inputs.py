"""What the sources of a run read: listed once, so that all that is done with it agrees, and without the run's own files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from penstock.errors import InputError, MissingInputError
from penstock.io.files import InputFile, list_files, place_of, real_folder
from penstock.journal.identity import Identity
from penstock.journal.journal import Journal
from penstock.journal.run_dir import is_of_run_dir
from penstock.run.file_changes import Input
from penstock.run.plan import Plan

GONE = "gone"  # the role of inputs that are not there any more, which the user has accepted


def list_inputs(plan: Plan, run_dir: str, written: Collection[str], *, may_be_gone: bool = False) -> list[Input]:
    """The sources in the order of the plan, with their files but for those in run_dir that are the run's, and those that
    were `written` by it. Raises InputError where nothing is left, unless it `may_be_gone`."""
    real_folder.cache_clear()
    found, folder = [], os.path.realpath(run_dir)
    for _, _, step, source in plan.sources():
        try:
            every = source.inputs()
        except MissingInputError:
            if not may_be_gone:
                raise
            every = ()
        files = [file for file in every if not ((place := place_of(file.path)) in written or is_of_run_dir(place, folder))]
        if every and not files and not may_be_gone:
            raise InputError(f"step {step.label!r}: has no files but those that this run has written; check its path")
        found.append(Input(step.label, source.among(files), files))
    return found


def written_by(journal: Journal) -> set[str]:
    """The files that a run has published, may have published when it was killed, or has taken over from an earlier one."""
    parts = [*journal.splits.parts(), *(journal.fact("earlier") or ())]
    return {place_of(part["path"]) for part in parts if "path" in part}


def model_files(identity: Identity) -> list[tuple[str, str, InputFile]]:
    """The files of the models that are there, as the journal keeps them."""
    found = []
    for step, paths in identity.model_files.items():
        for path in paths:
            with contextlib.suppress(MissingInputError):  # whoever loads the model will say so
                found += [("model", step, file) for file in list_files(path)]
    return found
