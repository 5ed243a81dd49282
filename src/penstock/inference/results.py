"""What a model's answer looks like to the steps after it."""

from __future__ import annotations

from typing import Any, NamedTuple


class PredictionResult(NamedTuple):
    """One answer with the example it answers and the model that gave it."""

    example: Any
    inference: Any
    model_id: str | None = None
