"""A run for people: how it stands, also while it runs; and whether its output is still what it wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from penstock.errors import InputError, UsageError
from penstock.io.digests import xxh128_of
from penstock.io.files import store_of
from penstock.journal.file import NAME
from penstock.journal.journal import Journal
from penstock.journal.manifest import make_manifest, read_manifest
from penstock.journal.run_dir import is_held

MOST_PROBLEMS = 20  # that verify() names
GO_ON = "run the same command again (without --fresh) to resume"


def status(folder: str) -> str:
    """How the run in this folder stands."""
    if not os.path.exists(os.path.join(folder, NAME)):
        raise UsageError(f"{folder}: no run was started there; expected the run_dir of a run")
    journal = Journal.open(os.path.abspath(folder), read_only=True)
    try:
        manifest = make_manifest(journal)
        errors = [session["error"] for session in journal.sessions()]
    finally:
        journal.close()
    return "\n".join(_lines(manifest, folder, errors[-1] if errors else None, held=is_held(folder)))


def _lines(manifest: dict[str, Any], folder: str, error: str | None, *, held: bool) -> Iterator[str]:
    sessions, splits = manifest["sessions"], manifest["splits"]
    state = manifest["state"]
    if held:
        state = f"running, in process {sessions[-1]['process'] if sessions else 'unknown'}"
    elif state != "finished":
        state = f"{_ended(state)}; {GO_ON}"
    yield f"run {manifest['run']} in {folder}: {state}"
    share = splits["done"] / splits["all"] if splits["all"] else 1.0
    waiting = f"; {splits['prepared']:,} more are written and wait to be published" if splits["prepared"] else ""
    yield f"  splits    {splits['done']:,} of {splits['all']:,} done ({share:.1%}){waiting}"
    seconds = manifest["seconds"]  # 0 if all were killed
    took = f", {seconds:,.1f} s in those that ended" if seconds else ""
    yield f"  started   {manifest['created']}, {len(sessions)} process(es){took}"
    if error and not held:
        yield f"  error     {error.splitlines()[1]}"  # the message: the journal, unlike the manifest, is for its owner alone
    if manifest["counts"]:
        yield "  rows      in, out and failed, of splits that are done" + (" or wait" if waiting else "")
        width = max(map(len, manifest["counts"]))
        for label, count in manifest["counts"].items():
            yield f"    {label:<{width}}  {count['rows_in']:>12,} {count['rows_out']:>12,} {count['rows_failed']:>9,}"
    for label, kinds in manifest["failures"].items():
        yield f"  failures  {label}: " + ", ".join(f"{rows:,} {kind}" for kind, rows in kinds.items())
    for output in manifest["outputs"]:
        parts = output["parts"]
        size = sum(part.get("bytes", 0) for part in parts)
        yield f"  output    {output['sink']}: {len(parts):,} part(s)" + (f", {size:,} bytes" if size else "")
    for change in manifest["accepted_changes"]:
        yield f"  accepted  {change['at']}, {change['kind']}: {change['what']}"
    files = len(manifest["inputs"]), len(manifest["models"])
    yield f"  inputs    {files[0]:,} file(s); models {files[1]:,} file(s)"


def _ended(state: str) -> str:
    """How the last process ended: one that was killed could not tell."""
    return "died" if state == "running" else f"was {state}" if state == "stopped" else state


def verify(folder: str) -> tuple[list[str], int, list[str]]:
    """Compare the files of the output with the manifest: what is wrong with them, how many there are, and what else there
    is, which was not looked at: how to reach it is known only to the run itself."""
    manifest = read_manifest(folder)
    if is_held(folder):
        raise UsageError(f"{folder}: a process is working on the run; wait until it is done, then verify")
    if manifest["state"] != "finished":
        raise UsageError(f"{folder}: the run {_ended(manifest['state'])}; {GO_ON}, and verify when it is done")
    problems: list[str] = []
    checked = 0
    unseen: list[str] = []
    for output in manifest["outputs"]:
        files = [part for part in output["parts"] if "path" in part]
        checked += len(files)
        problems += filter(None, map(_problem, files))
        problems += _strangers(output)
        if others := len(output["parts"]) - len(files):
            unseen.append(f"{output['sink']}: {others:,} part(s) that are not files were not checked")
    return problems[:MOST_PROBLEMS] + _rest(problems), checked, unseen


def _problem(part: dict[str, Any]) -> str | None:
    path = part["path"]
    fs, inner = store_of(path, InputError)
    try:
        if not fs.exists(inner):
            return f"{path}: is gone"
        expected = part.get("bytes"), part.get("xxh128")  # a sink of the user's own may not tell them
        if expected[0] is not None and (size := fs.size(inner)) != expected[0]:
            return f"{path}: has {size:,} bytes, expected {expected[0]:,}"
        if expected[1] is not None and xxh128_of(path) != expected[1]:
            return f"{path}: its bytes have changed (xxh128)"
    except (OSError, InputError) as exc:
        return f"{path}: cannot be read: {exc}"
    return None


def _strangers(output: dict[str, Any]) -> list[str]:
    """Part files in the folder of an output that the run did not write."""
    own = {part["path"] for part in output["parts"] if "path" in part}
    suffixes = {os.path.splitext(path)[1] for path in own}
    found = []
    for folder in sorted({path.rpartition("/")[0] for path in own}):
        fs, inner = store_of(folder, InputError)
        for path in fs.ls(inner, detail=False) if fs.exists(inner) else ():
            name = path.rsplit("/", 1)[-1]
            if name.startswith("part-") and os.path.splitext(name)[1] in suffixes and f"{folder}/{name}" not in own:
                found.append(f"{folder}/{name}: was not written by this run")
    return found


def _rest(problems: list[str]) -> list[str]:
    more = len(problems) - MOST_PROBLEMS
    return [f"and {more} more"] if more > 0 else []
