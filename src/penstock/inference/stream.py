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

from penstock.inference.forming import FormingLane
from penstock.inference.handling import HandlingStream
from penstock.inference.lane import Caller, Lane
from penstock.inference.plain_stream import InferenceStream
from penstock.inference.session import Sessions
from penstock.inference.spec import InferenceSpec


def open_stream(spec: InferenceSpec, step: str, sessions: Sessions, caller: Caller | None = None) -> InferenceStream:
    """A stream of one bundle's rows, in order, to the model of `spec`, where that lives. `step` is its name in errors and
    metrics. `caller`: the bundle, if its rows pass several models, so that no model waits for rows that another holds."""
    spec = spec.fixed() if sessions.around.deterministic else spec
    session = sessions.open(step, spec)
    lane: Lane = session.join(caller or Caller(), step, spec.handling, spec.retry)
    if spec.fixed_batches:
        lane = FormingLane(lane, spec)
    return InferenceStream(spec, lane) if spec.handling is None else HandlingStream(spec, lane)
