"""The models of a step that are loaded in this process."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from penstock.batching.limits import BatchLimits
from penstock.inference.handler import ModelHandler
from penstock.inference.model import ModelCopy
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.slow import SlowCalls
from penstock.models.loading import LoadedModel


class Residents:
    """By name; the only model of a step that has one is called None. Which of many are loaded is decided elsewhere
    (models/residency.py); loads of different models may run at once, in threads."""

    def __init__(
        self, step: str, handler: ModelHandler[Any, Any, Any], *, watched: bool = False, prepared: bool = False
    ) -> None:
        """watched: a thread tells of calls that do not end, of all of them. prepared: as for a ModelCopy."""
        self._step = step
        self._handler = handler
        self._slow = SlowCalls(step) if watched else None
        self._prepared = prepared
        self._copies: dict[Hashable, ModelCopy] = {}

        if not isinstance(handler, ModelsByKey):
            self._copies[None] = self._new(None)  # which threads may ask for at once

    def copy(self, model: Hashable) -> ModelCopy:
        """A model that is loaded, or the only one."""
        return self._copies[model]

    def model_id(self, model: str) -> str | None:
        """Of a model that may not be loaded."""
        try:
            return self._new(model).model_id()
        except Exception:  # its handler cannot be made: the error of its load says why
            return None

    def load(self, model: Hashable) -> LoadedModel:
        """Load it; ModelLoadError if that fails."""
        copy = self._copies[None] if model is None else self._new(model)
        loaded = copy.load()
        assert loaded is not None, "one load for each model"
        self._copies[model] = copy
        return loaded

    def unload(self, model: Hashable) -> None:
        """Let go of it. Nobody uses it."""
        self._copies.pop(model, None)

    def close(self) -> None:
        if self._slow is not None:
            self._slow.close()

    def _new(self, model: Hashable) -> ModelCopy:
        handler = self._handler
        if model is not None:
            assert isinstance(handler, ModelsByKey)
            handler = handler.handler_of(str(model))
        buckets = BatchLimits.of(handler.batch_elements_kwargs(), handler.new_shapes_cost()).size_buckets
        many = model is not None
        return ModelCopy(self._step, handler, buckets, slow=self._slow, prepared=self._prepared, one_of_many=many)
