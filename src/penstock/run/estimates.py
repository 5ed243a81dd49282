"""What asking a service would take, from a sample of the rows: for explain(), which runs nothing."""

from __future__ import annotations

from itertools import islice
from typing import Any

from penstock.blocks import row_count, rows_of, slice_rows
from penstock.inference.service_handler import ServiceHandler
from penstock.inference.spec import InferenceSpec
from penstock.io.source import Source, SplitGoal
from penstock.rows import safe_str
from penstock.run.plan import Plan
from penstock.steps.stage import Step

SAMPLE = 100  # rows


def estimates(plan: Plan) -> list[str]:
    """A line for each step that asks a service. Only rows that come from a source as they are can be looked at."""
    models = {step.label: spec for stage in plan.stages for step, spec in stage.models()}
    asking = {label: spec for label, spec in models.items() if isinstance(spec.handler, ServiceHandler)}
    told: dict[str, str] = {}
    for _, _, root, source in plan.sources():
        for label in [end.label for ends in root.next.values() for end in ends if isinstance(end, Step)]:
            if label in asking:
                told[label] = _of_step(asking[label], source)
    return [f"  step {label!r}: {told.get(label, 'no estimate, because other steps come before it')}" for label in asking]


def _of_step(spec: InferenceSpec, source: Source[Any]) -> str:
    assert isinstance(spec.handler, ServiceHandler)
    rows = source.count()
    if rows is None:
        return "no estimate, because the number of rows is not known"
    if not spec.path.plain:
        return "no estimate, because keys or functions come before the model"
    try:
        sample = _sample(spec, source)
        told = spec.handler.estimate(sample, rows, spec.inference_args) if sample else None
    except Exception as exc:  # of the user's functions, over rows that fail
        return f"no estimate: {type(exc).__name__}: {safe_str(exc)}"
    return "no estimate" if told is None else f"{told} (from a sample of {len(sample)} of {rows:,} rows)"


def _sample(spec: InferenceSpec, source: Source[Any]) -> list[Any]:
    """The first rows, as the model is given them."""
    splits = source.splits(SplitGoal())
    examples: list[Any] = []
    for split in islice(splits, 1):
        for block in islice(source.read(source.payload(split)), 1):
            first = slice_rows(block, 0, min(SAMPLE, row_count(block)))
            columns = spec.handler.input_columns()
            if columns is not None and not isinstance(first, list):
                examples += spec.handler.examples_of(first.select(list(columns)))
            else:
                examples += rows_of(first)
    return examples
