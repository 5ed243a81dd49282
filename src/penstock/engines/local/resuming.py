"""Whether a run that goes on is the run that was begun: its pipeline, code, handlers, models and inputs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.engines.identity import Change, Identity, changes
from penstock.engines.local.inputs import Input
from penstock.engines.local.journal import Journal
from penstock.engines.plan import Plan
from penstock.errors import InputError, RunChangedError
from penstock.io.digests import sha256_of
from penstock.io.files import InputFile, list_files
from penstock.options import CHANGES, RunOptions

MOST_TOLD = 8  # changes that the error names
GONE = "gone"  # the role of inputs that are not there any more, which the user has accepted


def check_same_run(journal: Journal, identity: Identity, plan: Plan, inputs: Sequence[Input], options: RunOptions) -> None:
    """Raise RunChangedError unless all is as it was, or the user accepts what is not: then that is what counts now."""
    before = Identity.from_json(journal.fact("identity"))
    found = changes(before, identity)
    found += (
        _changed_order(journal, plan)
        + _changed_options(journal, options)
        + _changed_inputs(journal, inputs)
        + _changed_models(journal, identity)
    )
    refused = [change for change in found if change.kind not in options.accept_changes]
    if refused:
        raise RunChangedError(_told(journal, refused))
    if found and (not journal.fact("finished") or any(find_new_files(journal, inputs))):
        _accept(journal, identity, inputs, options, found)


def check_still_same(journal: Journal, identity: Identity, inputs: Sequence[Input]) -> None:
    """Raise RunChangedError if a file was changed while the run was reading it."""
    if found := _changed_inputs(journal, inputs) + _changed_models(journal, identity, or_new=False):
        raise RunChangedError(
            f"files were changed while the run in {journal.folder} was reading them:\n"
            + "\n".join(_listed(found))
            + "\nstart over with fresh=True (--fresh), and leave them alone until it is done; or, if they hold the same as "
            f"before, {_acceptance(found)}"
        )


def find_new_files(journal: Journal, inputs: Sequence[Input]) -> Iterator[tuple[int, list[InputFile]]]:
    """By the position of their source, the files that there are now and were not when the run was begun."""
    known, gone = journal.files("input"), journal.files(GONE)
    for position, each in enumerate(inputs):
        before = known.get(each.step, {}).keys() | gone.get(each.step, {}).keys()
        if new := [file for file in each.files if file.path not in before]:
            yield position, new


def order_of(plan: Plan) -> dict[str, list[str]]:
    """The order of sources and sinks, by which the journal knows them."""
    sources = [f"{type(read.source).__name__} {step.label}" for _, _, step, read in plan.sources()]
    return {"sources": sources, "sinks": [node.label for node in plan.sinks.values()]}


def fixed_by(options: RunOptions) -> dict[str, Any]:
    """The options that decide on answers, and must stay."""
    return {"deterministic": options.deterministic, "seed": (options.seed or 0) if options.deterministic else None}


def model_files(identity: Identity) -> list[tuple[str, str, InputFile]]:
    """The files of the models, as the journal keeps them."""
    return [
        ("model", step, file) for step, paths in identity.model_files.items() for path in paths for file in list_files(path)
    ]


def _changed_order(journal: Journal, plan: Plan) -> list[Change]:
    before, now = journal.fact("order"), order_of(plan)
    return [
        Change("pipeline", f"the {kind} are written in another order: {', '.join(now[kind])}")
        for kind in now
        if before[kind] != now[kind] and sorted(before[kind]) == sorted(now[kind])
    ]


def _changed_options(journal: Journal, options: RunOptions) -> list[Change]:
    before = journal.fact("fixed")
    now = fixed_by(options)
    return [Change("code", f"{name} was {before[name]} and is {now[name]}") for name in now if before[name] != now[name]]


def _changed_inputs(journal: Journal, inputs: Sequence[Input]) -> list[Change]:
    known = journal.files("input")
    now = {each.step: each.files for each in inputs}
    return [
        Change("inputs", f"step {label!r}: {what}")
        for label, files in known.items()
        for what in _differences(files, now.get(label, ()))
    ]


def _changed_models(journal: Journal, identity: Identity, *, or_new: bool = True) -> list[Change]:
    """What has become of the files of models; those that are new may have been made by whoever loaded the model."""
    known = journal.files("model")
    now: dict[str, list[InputFile]] = {}
    for _, step, file in model_files(identity):
        now.setdefault(step, []).append(file)
    found = []
    for step in {**known, **now}:
        before, after = known.get(step, {}), now.get(step, [])
        found += [Change("models", f"step {step!r}: {what}") for what in _differences(before, after)]
        new = [file.path for file in after if file.path not in before] if or_new else []
        found += [Change("models", f"step {step!r}: {path} is new") for path in new]
    return found


def _differences(before: dict[str, tuple[InputFile, str | None]], after: Sequence[InputFile]) -> Iterator[str]:
    """What has become of the files that there were. One that was only touched or copied is the same, by its digest."""
    now = {file.path: file for file in after}
    for path, (file, digest) in before.items():
        if path not in now:
            yield f"{path} is gone"
        elif now[path].size != file.size:
            yield f"{path} had a size of {file.size:,} and has {now[path].size:,} now"
        elif now[path].modified != file.modified and (digest is None or _digest_of(path) != digest):
            yield f"{path} was written again, at {now[path].modified} instead of {file.modified}"


def _digest_of(path: str) -> str | None:
    try:
        return sha256_of(path)
    except InputError:
        return None


def _accept(
    journal: Journal, identity: Identity, inputs: Sequence[Input], options: RunOptions, found: Sequence[Change]
) -> None:
    """What there is now counts from here on. Digests of files that are as they were stay; inputs that are gone stay known,
    so that they are no new ones if they come back."""
    accepted = [{"at": time.time(), "kind": change.kind, "what": change.text} for change in found]
    known = {role: journal.files(role) for role in ("input", "model")}
    now = {(each.step, file.path): file for each in inputs for file in each.files}
    files = []
    for step, before in known["input"].items():
        for path, (file, digest) in before.items():
            still = now.get((step, path))
            files.append((GONE, step, file, digest) if still is None else ("input", step, still, _kept(still, file, digest)))
    for step, before in journal.files(GONE).items():
        files += [(GONE, step, file, digest) for file, digest in before.values()]
    for role, step, file in model_files(identity):
        files.append((role, step, file, _kept(file, *known["model"].get(step, {}).get(file.path, (file, None)))))
    facts = {"identity": identity.as_json(), "fixed": fixed_by(options)}
    journal.set_facts({**facts, "accepted": [*(journal.fact("accepted") or ()), *accepted]})
    journal.replace_files(files)


def _kept(file: InputFile, before: InputFile, digest: str | None) -> str | None:
    return digest if (file.size, file.modified) == (before.size, before.modified) else None


def _listed(found: Sequence[Change]) -> list[str]:
    lines = [f"  {change.kind}: {change.text}" for change in found[:MOST_TOLD]]
    more = len(found) - MOST_TOLD
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _told(journal: Journal, refused: Sequence[Change]) -> str:
    kinds = {change.kind for change in refused}
    lines = [f"the run in {journal.folder} was begun with something else, so it does not go on:"]
    lines += _listed(refused)
    lines.append("put back what it was; or start over with fresh=True (--fresh)")
    if kinds <= set(CHANGES):
        lines[-1] += f"; or, if output that is partly of before and partly of now will do, {_acceptance(refused)}"
        if "inputs" in kinds:
            lines[-1] += "; files stay cut as they were, so what was added at the end of one is not read"
    return "\n".join(lines)


def _acceptance(found: Sequence[Change]) -> str:
    kinds = dict.fromkeys(change.kind for change in found)
    flags = " ".join(f"--accept-change {kind}" for kind in kinds)
    return f"go on with accept_changes={tuple(kinds)!r} ({flags})"
