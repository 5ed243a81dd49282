"""How a pipeline would run, in words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from penstock.batching.full_batches import Aiming
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.service_handler import ServiceHandler, rows_at_once
from penstock.inference.sessions import is_measured
from penstock.inference.spec import InferenceSpec
from penstock.models.memory import DEVICE_SHARE, file_bytes
from penstock.models.place import Place, Surroundings, Wishes, choose_place
from penstock.pipeline.traits import is_ours
from penstock.run.estimates import estimates
from penstock.run.plan import Plan
from penstock.run.pools import Pool, Pools, RunSize
from penstock.run.setup import Job
from penstock.run.splits import cut, split_goals
from penstock.steps.stage import Outlet, Step

TURNS = "turns columns into rows, and makes a Python object of each"

WHOLE = "one split, so one worker does all of this stage: ps.Reshuffle() after it shares its rows among all"
SAMPLED = 100  # files of models, to see how large they are


def explain(job: Job, size: RunSize, *, sample: bool = False) -> str:
    """Stages, pools, where models live, when output becomes visible, and why, if the run is so large. sample: look at some
    rows, to say what asking services would take."""
    plan, pools = job.plan, job.pools(size)
    around = job.surroundings(pools)
    lines = [f"runs {_where(pools)} ({pools.why})"]
    if pools.short:
        lines.append(f"  a crash of native code ends this process; workers={pools.slots} gives worker processes instead")
    if job.journaled:
        lines.append("can be resumed: output becomes visible split by split (run_dir)")
        lines += [
            f"  step {label!r}: its handler names no files in model_files(), so a model that has changed is not noticed"
            for label in _without_model_files(plan)
        ]
    for pool in pools.pools:
        lines.append(_pool_line(pool, pools.in_process))
    if sample and (estimated := estimates(plan)):
        lines += ["requests to services:", *estimated]
    drawing = Drawing(plan, _has_columns(plan), whole=_whole_inputs(job, pools))
    for stage in plan.stages:
        lines += ["", f"stage {stage.index} in pool {pools.of_stage(stage.index).index} ({stage.why})"]
        here = replace(around, workers=pools.of_stage(stage.index).size.workers)
        for root in stage.roots:
            source = root.traits.source if root.transform is not None else None
            gives = drawing.forms.get(stage.index) if source is None else "columns" if source.gives_columns else "rows"
            lines += _tree(drawing, root, 1, here, gives)
    return "\n".join(lines)


def _without_model_files(plan: Plan) -> list[str]:
    return [step.label for stage in plan.stages for step, spec in stage.models() if not spec.handler.model_files()]


def _where(pools: Pools) -> str:
    if pools.short:
        return "in threads of this process"
    return "in this process" if pools.in_process else "in worker processes"


def _pool_line(pool: Pool, in_process: bool) -> str:
    threads = f"{pool.size.slots} thread{'s' if pool.size.slots > 1 else ''}"
    if in_process:
        return f"pool 0: this process, {threads}"
    least = min(pool.size.least, pool.size.workers)
    bounds = "up to " if not least else f"{least} to " if least < pool.size.workers else ""
    workers = f"{bounds}{pool.size.workers} worker{'s' if pool.size.workers > 1 else ''}, {threads} each"
    return f"pool {pool.index}: {workers}, frameworks on {pool.cores} core(s) ({pool.why}; resource hints: {pool.hints})"


@dataclass(frozen=True, slots=True)
class Drawing:
    """What the branches of one plan have in common."""

    plan: Plan
    has_columns: bool  # else every step takes rows, which is not worth a word
    whole: Collection[str]  # sources, by their labels, that make one split while there are workers for several
    forms: dict[int, str | None] = field(default_factory=dict)  # what comes into each stage: "rows", "columns" or "both"

    def enter(self, stage: int, made: str | None) -> None:
        """A branch ends at this stage; others may have, in another form."""
        before = self.forms.setdefault(stage, made)
        if made != before:
            self.forms[stage] = "both" if made is not None and before is not None else None


def _whole_inputs(job: Job, pools: Pools) -> set[str]:
    goals = split_goals(job.plan, pools, journaled=job.journaled)
    sources = enumerate(zip(job.plan.sources(), goals, strict=True))
    return {
        root.label
        for i, ((stage, _, root, source), goal) in sources
        if not pools.in_process and goal.at_once > 1 and stage.models() and len(cut(source, i, goal)) == 1
    }


def _has_columns(plan: Plan) -> bool:
    steps = [step.traits for stage in plan.stages for step in stage.steps()]
    return any(each.takes == "columns" or (each.source is not None and each.source.gives_columns) for each in steps)


def _tree(drawing: Drawing, step: Step, depth: int, around: Surroundings, given: str | None) -> list[str]:
    """A step and what follows. `given`: what comes in, or what a root gives."""
    label = step.label if step.transform is not None else f"rows of {step.label}"
    details = _details(step, around)
    if step.transform is None or step.traits.source is not None:
        details += ["gives columns"] if given == "columns" else []
        details += [WHOLE] if step.label in drawing.whole else []
    else:
        details += _conversion(step, given) if drawing.has_columns else []
        given = _form_after(step, given)
    lines = [f"{'  ' * depth}{label}{': ' * bool(details)}{', '.join(details)}"]
    for tag, nexts in step.next.items():
        made = "rows" if tag in step.traits.failures else given
        for end in nexts:
            if isinstance(end, Step):
                lines += _tree(drawing, end, depth + 1, around, made)
            else:
                if end.kind == "stage":
                    drawing.enter(end.target, made)
                outlet = f"{_outlet(drawing.plan, end, made)}{f' (output {tag!r})' if tag else ''}"
                lines.append(f"{'  ' * (depth + 1)}-> {outlet}")
    return lines


def _form_after(step: Step, given: str | None) -> str | None:
    """Whether rows or columns come out of a step, or both; None: that is not known."""
    traits = step.traits
    if traits.takes == "rows" or given is None:
        return "rows" if traits.takes == "rows" else given
    model = traits.model
    stays = traits.takes == "either" or (model is not None and given != "columns" and model.handler.input_columns() is None)
    return given if stays else "columns"


def _conversion(step: Step, given: str | None) -> list[str]:
    """What a step takes, and what to change where columns are turned into rows."""
    takes = step.traits.takes
    if takes == "rows":
        return [f"{TURNS}{_advice(step)}"] if given in ("columns", "both") else ["takes rows"]
    if given == "rows" and _form_after(step, given) == "columns":
        return ["turns rows into columns"]
    if takes == "columns" and given == "rows":
        return ["takes rows"]
    return [f"takes columns{_of_examples(step)}"] if takes == "columns" and given is not None else []


def _of_examples(step: Step) -> str:
    """What is said of a model that is given the values of a column one by one. Those of ours that are, need it."""
    handler = None if step.traits.model is None else step.traits.model.handler
    if handler is None or handler.takes_columns() or handler.prepares() or is_ours(handler):
        return ""
    return ", and makes a Python object of each row's input: takes_columns() on the handler would give it arrays"


def _advice(step: Step) -> str:
    model = step.traits.model
    if model is None:
        other = step.traits.in_columns
        return f": {other} would keep them" if other else ""
    if not model.path.plain:
        return ": so do keys, pre- and postprocess functions and with_no_batching()"
    return ": columns= on the handler would keep them"


def _details(step: Step, around: Surroundings) -> list[str]:
    model = step.traits.model
    if model is None:
        return []
    spec = model.fixed() if around.deterministic else model
    limits = spec.limits
    place = choose_place(spec.wishes(), around)
    parts = [
        place.describe(around.in_process) if spec.by_key is None else _many_models(spec.by_key, spec.wishes(), place, around)
    ]
    if isinstance(spec.handler, ServiceHandler):
        parts += spec.handler.describe_requests()
    if spec.path.prebatched:
        parts.append("rows are batches already")
    elif not rows_at_once(spec.handler) or place.hosted:
        parts.append(_batches(spec))
        if limits.max_weight is not None:
            parts.append(f"weight at most {limits.max_weight}")
        if limits.max_wait is not None:
            parts.append(f"no row waits over {limits.max_wait} s for its batch")
    if spec.refresh is not None:
        parts.append(spec.refresh.describe())
    if is_measured(spec, around):
        parts.append("the first copy is measured: one host for all, if one for each does not fit into memory")
    return parts


def _many_models(models: ModelsByKey, wishes: Wishes, place: Place, around: Surroundings) -> str:
    """Where they are, what they may take there, and how many that could be."""
    where = f"in {place.copies} process{'es' if place.copies > 1 else ''} of a host ({place.why})" if place.hosted else ""
    where = where or ("in this process" if around.in_process else "in each worker process")
    budget = models.budget_or_default(around.default_budgets).shared(1 if place.hosted else around.workers)
    assert budget.bytes is not None
    on_gpu = wishes.accelerator == "gpu" and bool(around.gpus if wishes.gpus is None else wishes.gpus)
    limits = [budget.models * place.copies] if budget.models is not None else []
    if budget.by_default and on_gpu:
        most = f"{DEVICE_SHARE / budget.steps:.0%} of the memory that is free on "
        most += "each GPU" if place.copies > 1 else "its GPU"
    else:
        most = f"{budget.bytes / 1e9:.3g} GB" + (" on each GPU" if len(place.devices) > 1 else "")
        limits += _models_in(models, budget.bytes * max(1, len(place.devices)))
    return f"{models.describe()}, {where}, at most {most} at once{_about(limits, models.known_models())}"


def _models_in(models: ModelsByKey, size: int) -> list[int]:
    """How many models take so many bytes, by the files of some of them; nothing, where there are no files to go by."""
    files = models.model_files()
    known = file_bytes(lambda: files[:SAMPLED])
    count = models.known_models()
    if known is None or count is None:
        return []
    in_all = known * len(files) / len(files[:SAMPLED])
    return [int(size * count / max(1, in_all))]


def _about(limits: list[int], count: int | None) -> str:
    if not limits:
        return ""
    return f", all {count:,} of them" if count is not None and min(limits) >= count else f", about {min(limits):,} of them"


def _batches(spec: InferenceSpec) -> str:
    limits = spec.limits
    if spec.fixed_batches:
        return f"deterministic: {_fixed_batches(spec)} inside a split"
    if spec.handler.measures_length():
        budget = "found while running" if limits.max_padded_cost is None else f"at most {limits.max_padded_cost}"
        return f"batches of rows of like length out of {limits.lookahead_rows or 'many'}, padded cost {budget}"
    if limits.max_size is None:
        return "batches of a size that is found while running"
    return f"batches of at most {limits.max_size} rows"


def _fixed_batches(spec: InferenceSpec) -> str:
    by_length = spec.handler.measures_length()
    aim = Aiming(spec.limits, by_length).aim()
    if not by_length:
        return f"batches of {aim.rows} rows"
    return f"batches of rows of like length out of {aim.lookahead}, padded cost at most {aim.cost},"


def _outlet(plan: Plan, outlet: Outlet, made: str | None) -> str:
    if outlet.kind == "stage":
        return f"stage {outlet.target}"
    if outlet.kind == "collect":
        return "collected"
    node = plan.sinks[outlet.target]
    sink = node.traits.sink
    assert sink is not None
    weak = "" if sink.delivery == "exactly once" else f" ({sink.delivery}, if the run is resumed)"
    turned = (
        f" ({TURNS}; ps.WriteToParquet and ps.WriteToSql take columns)"
        if made in ("columns", "both") and node.traits.takes == "rows"
        else ""
    )
    return f"{node.label} -> {sink.describe()}{weak}{turned}"
