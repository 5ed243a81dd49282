"""The way in for whoever runs rows through a model: a step of a pipeline, a function of another engine, a test.

    stream = open_stream(spec, "score", sessions)
    try:
        for block in blocks:
            for made in stream.push(block): ...
        for made in stream.finish(): ...
    finally:
        stream.close()

What is made (Made) are answers or failures, with the positions of their rows.
"""

from __future__ import annotations

from penstock.inference.bundle_stream import InferenceStream
from penstock.inference.fixed_batch_lane import FormingLane
from penstock.inference.guard import Guard
from penstock.inference.lane import Caller, Lane
from penstock.inference.models_by_key import WINDOW
from penstock.inference.preparing import IsolatedPreparer, PrepareHandler, Preparers, ThreadPreparer
from penstock.inference.service_handler import rows_at_once
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.models.place import Surroundings, choose_place

ROWS_AHEAD = 64  # times the rows that a model answers at once: so many may be answered behind one that is not


def open_stream(spec: InferenceSpec, step: str, sessions: ProcessSessions, caller: Caller | None = None) -> InferenceStream:
    """A stream of one bundle's rows, in order, to the model of `spec`, where that lives. `step` is its name in errors and
    metrics. `caller`: the bundle, if its rows pass several models, so that no model waits for rows that another holds."""
    spec = spec.fixed() if sessions.around.deterministic else spec
    caller = caller or Caller()
    lane: Lane = sessions.open(step, spec).join(caller, step, spec.handling, spec.retry)
    if spec.fixed_batches:
        lane = FormingLane(lane, spec)
    guard = Guard(step, spec.handling, spec.handler.model_id())
    around = sessions.around
    preparers = _preparers(spec, guard, sessions, caller)
    return InferenceStream(spec, lane, guard, preparers, _share(spec, around), _window(spec, around))


def _share(spec: InferenceSpec, around: Surroundings) -> int:
    """How many copies of the model each process has to keep busy, where all of them do their share."""
    return -(-choose_place(spec.wishes(), around).copies // max(1, around.workers))


def _window(spec: InferenceSpec, around: Surroundings) -> int:
    """Rows in flight where there are many models: the more may wait, the fewer loads are paid. What waits in front of one
    place is shared out among the streams that lead there."""
    if spec.by_key is None:
        return ROWS_AHEAD * rows_at_once(spec.handler)
    return max(64, WINDOW // around.slots // (around.workers if choose_place(spec.wishes(), around).hosted else 1))


def _preparers(spec: InferenceSpec, guard: Guard, sessions: ProcessSessions, caller: Caller) -> Preparers:
    """Of a step, or of its models: on the caller's thread, or in a process that can be killed."""
    handler, handling, models = spec.handler, spec.handling, spec.by_key
    if not handler.prepares():
        return Preparers(None)
    if handling is None or not handling.isolated:
        if models is None and spec.refresh is not None and not spec.prepares_alike:
            from penstock.inference.version_preparing import VersionPreparer  # few models change, and first runs wait

            changing = VersionPreparer(spec, guard, sessions.tools, sessions.around)
            return Preparers(changing, change=changing.change)
        if models is None:
            return Preparers(ThreadPreparer(handler, sessions.tools, guard))
        return Preparers(
            None, lambda model, own, guard: ThreadPreparer(own, sessions.tools, guard, model) if own.prepares() else None
        )
    prepare = PrepareHandler(handler) if models is None else models.changed(PrepareHandler)
    alone = InferenceSpec.of(prepare, spec.inference_args, handling=handling)
    lane = sessions.open(f"{guard.step} (preparing)", alone).join(caller, guard.step, handling)
    if models is None:
        return Preparers(IsolatedPreparer(lane, guard), lane=lane)
    return Preparers(None, lambda model, own, guard: IsolatedPreparer(lane, guard, model) if own.prepares() else None, lane)
