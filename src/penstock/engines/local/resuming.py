"""Whether a run that goes on is the run that was begun: its pipeline, code, handlers, models and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.engines.identity import Change, Identity, changes
from penstock.engines.local.journal import Journal
from penstock.engines.plan import Plan, Step
from penstock.errors import InputError, RunChangedError
from penstock.io.digests import sha256_of
from penstock.io.files import InputFile, list_files
from penstock.io.source import Read
from penstock.options import CHANGES, RunOptions

MOST_TOLD = 8  # changes that the error names


def check_same_run(journal: Journal, identity: Identity, plan: Plan, options: RunOptions) -> None:
    """Raise RunChangedError unless all is as it was, or the user accepts what is not: then that is what counts now."""
    before = Identity.from_json(journal.fact("identity"))
    found = changes(before, identity)
    found += (
        _changed_order(journal, plan)
        + _changed_options(journal, options)
        + _changed_inputs(journal, plan)
        + _changed_models(journal, identity)
    )
    refused = [change for change in found if change.kind not in options.accept_changes]
    if refused:
        raise RunChangedError(_told(journal, refused))
    if found:
        _accept(journal, identity, plan, options)


def find_new_files(journal: Journal, plan: Plan) -> Iterator[tuple[int, Step, Read[Any], list[InputFile]]]:
    """The files that sources have now and had not when the run was begun, without those that the run has written."""
    known = journal.files("input")
    written = {part.get("path") for parts in journal.published().values() for part in parts}
    for position, (_, _, step, read) in enumerate(plan.sources()):
        now = outside(read.source.inputs(), journal.folder)
        new = [file for file in now if file.path not in known.get(step.label, {}) and file.path not in written]
        if new:
            yield position, step, read, new


def outside(files: Sequence[InputFile], folder: str) -> list[InputFile]:
    """The files that are not below a folder: those of the run itself are no input."""
    return [file for file in files if not file.path.startswith(f"{folder}/")]


def order_of(plan: Plan) -> dict[str, list[str]]:
    """The order of sources and sinks, by which the journal knows them."""
    sources = [f"{type(read.source).__name__} {step.label}" for _, _, step, read in plan.sources()]
    return {"sources": sources, "sinks": [node.label for node in plan.sinks.values()]}


def fixed_by(options: RunOptions) -> dict[str, Any]:
    """The options that decide on answers, and must stay."""
    return {"deterministic": options.deterministic, "seed": options.seed or 0}


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


def _changed_inputs(journal: Journal, plan: Plan) -> list[Change]:
    known = journal.files("input")
    now = {step.label: read.source.inputs() for _, _, step, read in plan.sources()}
    return [
        Change("inputs", f"step {label!r}: {what}")
        for label, files in known.items()
        for what in _differences(files, now.get(label, ()))
    ]


def _changed_models(journal: Journal, identity: Identity) -> list[Change]:
    known = journal.files("model")
    now: dict[str, list[InputFile]] = {}
    for _, step, file in model_files(identity):
        now.setdefault(step, []).append(file)
    found = []
    for step in {**known, **now}:
        before, after = known.get(step, {}), now.get(step, [])
        found += [Change("models", f"step {step!r}: {what}") for what in _differences(before, after)]
        found += [Change("models", f"step {step!r}: {f.path} is new") for f in after if f.path not in before]
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


def _accept(journal: Journal, identity: Identity, plan: Plan, options: RunOptions) -> None:
    journal.set_facts({"identity": identity.as_json(), "fixed": fixed_by(options)})
    known = journal.files("input")
    inputs = [
        ("input", step.label, file, None)
        for _, _, step, read in plan.sources()
        for file in read.source.inputs()
        if file.path in known.get(step.label, {})
    ]
    journal.replace_files([*inputs, *((role, step, file, None) for role, step, file in model_files(identity))])


def _told(journal: Journal, refused: Sequence[Change]) -> str:
    kinds = dict.fromkeys(change.kind for change in refused)
    lines = [f"the run in {journal.folder} was begun with something else, so it does not go on:"]
    lines += [f"  {change.kind}: {change.text}" for change in refused[:MOST_TOLD]]
    if len(refused) > MOST_TOLD:
        lines.append(f"  and {len(refused) - MOST_TOLD} more changes")
    lines.append("put back what it was; or start over with fresh=True (--fresh)")
    if set(kinds) <= set(CHANGES):
        flags = " ".join(f"--accept-change {kind}" for kind in kinds)
        lines[-1] += (
            f"; or, if output that is partly of before and partly of now will do, go on with "
            f"accept_changes={tuple(kinds)!r} ({flags})"
        )
        if "inputs" in kinds:
            lines[-1] += "; files stay cut as they were, so what was added at the end of one is not read"
    return "\n".join(lines)
