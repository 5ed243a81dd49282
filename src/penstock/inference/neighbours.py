"""Plain models of several steps on one GPU: they share a place there, and so its memory (models/residency.py)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from penstock.inference.handler import concurrent_batches, variables_of
from penstock.inference.spec import InferenceSpec


def with_neighbours(steps: Mapping[str, InferenceSpec]) -> dict[str, InferenceSpec]:
    """The steps whose models share a place, with those of all that do, by the keys of their sessions. Models that have a
    process of their own for another reason stay there; which GPUs there are is not known yet."""
    places: dict[Hashable, dict[str, InferenceSpec]] = {}
    alike = {label: alike for label, spec in steps.items() if (alike := _alike(spec)) is not None}
    for label, place in alike.items():
        places.setdefault(place, {}).setdefault(steps[label].session_key(label), steps[label])
    return {
        label: replace(steps[label], neighbours=places[place]) for label, place in alike.items() if len(places[place]) > 1
    }


def _alike(spec: InferenceSpec) -> Hashable | None:
    """Equal for models that one process can hold; None: it has one of its own."""
    handler, handling = spec.handler, spec.handling
    is_plain = spec.by_key is None and not handler.share_model_across_processes() and not variables_of(handler)
    if not is_plain or handler.accelerator() != "gpu" or (handling is not None and handling.isolated):
        return None
    return concurrent_batches(handler), handler.prepares_ahead(), handler.retry_safe
