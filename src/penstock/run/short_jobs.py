"""Short jobs: columns all the way, little input, and no Python of the user's. Pure.

In threads of the user's process they are done before worker processes would have imported the models' frameworks. What asks
for a process (a timeout, a copy for all, variables, a device), or for the run to be kept or repeated, gets one as ever.
"""

from __future__ import annotations

from penstock.inference.handler import variables_of
from penstock.inference.spec import InferenceSpec
from penstock.models.place import Surroundings, choose_place
from penstock.options import RunOptions
from penstock.pipeline.hints import NO_HINTS
from penstock.run.plan import Plan

SHORT_JOB_BYTES = 256 * 10**6
SHORT_JOB_MODEL_BYTES = 10**7  # a larger one may take so long for a row that all cores are worth waiting for


def fits_threads(size: int | None, model_size: int | None) -> bool:
    """Whether a run over so many bytes, with models of so many, is short. None: that is not known."""
    return size is not None and size <= SHORT_JOB_BYTES and model_size is not None and model_size <= SHORT_JOB_MODEL_BYTES


def suits_threads(plan: Plan, options: RunOptions, around: Surroundings) -> bool:
    """Whether a run may be in threads of the user's process, if it is short. `around`: what it would know there."""
    if options.workers is not None or options.run_dir is not None or options.deterministic:
        return False
    steps = [step.traits for stage in plan.stages for step in stage.steps() if step.transform is not None]
    traits = [*steps, *(node.traits for node in plan.sinks.values())]
    return (
        all(stage.hints == NO_HINTS for stage in plan.stages)
        and all(each.columns for each in traits)
        and not any(_wants_process(each.model, around) for each in traits if each.model is not None)
    )


def _wants_process(spec: InferenceSpec, around: Surroundings) -> bool:
    wishes = spec.wishes()
    on_device = wishes.accelerator is not None
    return on_device or bool(variables_of(spec.handler)) or choose_place(wishes, around).hosted
