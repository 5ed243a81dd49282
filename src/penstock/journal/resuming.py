"""Whether a run that is resumed is the run that was started: its pipeline, code, handlers, models and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import RunChangedError
from penstock.io.files import InputFile, without_secrets
from penstock.journal.accepting import accept, remember_accepted
from penstock.journal.digests import Digests
from penstock.journal.identity import Change, Identity, changes
from penstock.journal.inputs import GONE, model_files
from penstock.journal.journal import Journal
from penstock.options import CHANGES, RunOptions
from penstock.run.file_changes import Input, differences
from penstock.run.plan import Plan

MOST_TOLD = 8  # changes that the error names


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
    found += [change for told in journal.fact("changed_while_read") or () if (change := Change(*told)) not in found]
    is_finished = journal.fact("finished") and not any(find_new_files(journal, inputs))
    known = _accepted_before(journal) if is_finished else set()
    refused = [change for change in found if change.kind not in options.accept_changes and change not in known]
    if refused:
        raise RunChangedError(_told(journal, refused))
    if is_finished:
        remember_accepted(journal, [change for change in found if change not in known])
    elif found:
        accept(journal, identity, inputs, {"fixed": fixed_by(options)}, found)


def _accepted_before(journal: Journal) -> set[Change]:
    """What was accepted of a finished run: nothing of it is read again, so the same change need not be accepted twice."""
    return {Change(each["kind"], each["what"]) for each in journal.fact("accepted") or ()}


def check_still_same(journal: Journal, identity: Identity, inputs: Sequence[Input]) -> None:
    """Raise RunChangedError if a file was changed while the run was reading it."""
    if found := _changed_inputs(journal, inputs) + _changed_models(journal, identity, or_new=False):
        told = [(change.kind, f"{change.text}, while the run was working") for change in found]
        journal.set_facts({"changed_while_read": told})
        raise RunChangedError(
            f"files were changed while the run in {journal.folder} was reading them:\n"
            + "\n".join(_listed(found))
            + "\nstart over with fresh=True (--fresh), and leave them alone until it is done; or, if they hold the same as "
            f"before, {_acceptance(found)}"
        )


def refuse_changed_input(journal: Journal, digests: Digests, step: str, file: InputFile, now: InputFile | None) -> None:
    """Raise RunChangedError if a file of which a split was being read is another one now, by its digest too."""
    digests.store()
    before = {file.path: journal.files("input")[step][file.path]}
    for _, what in differences(before, () if now is None else (now,)):
        raise RunChangedError(
            f"an input was changed while the run in {journal.folder} was reading it: step {step!r}: {what}\n"
            "restore it and run the same command again: what was read of it since does not count; or start "
            "over with fresh=True (--fresh)"
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
    sources = [f"{type(source).__name__} {step.label}" for _, _, step, source in plan.sources()]
    return {"sources": sources, "sinks": [node.label for node in plan.sinks.values()]}


def fixed_by(options: RunOptions) -> dict[str, Any]:
    """The options that decide on answers, and must stay."""
    return {"deterministic": options.deterministic, "seed": options.split_seed}


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
        for _, what in differences(files, now.get(label, ()))
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
        found += [Change("models", f"step {step!r}: {what}") for _, what in differences(before, after)]
        new = [file.path for file in after if file.path not in before] if or_new else []
        found += [Change("models", f"step {step!r}: {without_secrets(path)} is new") for path in new]
    return found


def _listed(found: Sequence[Change]) -> list[str]:
    lines = [f"  {change.kind}: {change.text}" for change in found[:MOST_TOLD]]
    more = len(found) - MOST_TOLD
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _told(journal: Journal, refused: Sequence[Change]) -> str:
    kinds = {change.kind for change in refused}
    lines = [f"cannot resume the run in {journal.folder}: it was started with something else:"]
    lines += _listed(refused)
    lines.append("restore what has changed; or start over with fresh=True (--fresh)")
    if kinds <= set(CHANGES):
        lines[-1] += f"; or, if mixing old and new results is acceptable, {_acceptance(refused)}"
        if "inputs" in kinds:
            lines[-1] += "; files that were done stay as they were read, others are read as they are now, after all the rest"
    return "\n".join(lines)


def _acceptance(found: Sequence[Change]) -> str:
    kinds = dict.fromkeys(change.kind for change in found)
    flags = " ".join(f"--accept-change {kind}" for kind in kinds)
    return f"resume with accept_changes={tuple(kinds)!r} ({flags})"
