"""The models of a step that are loaded in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.batching.limits import BatchLimits
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_copies import at_path
from penstock.inference.model import ModelCopy
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.refresh import Refreshing
from penstock.inference.service_handler import RunPlace, ServiceHandler
from penstock.inference.slow import SlowCalls
from penstock.models.loading import LoadedModel
from penstock.models.versions import ORIGINAL, Version

# Imported where models change: a first run waits for every import.
if TYPE_CHECKING:
    from penstock.inference.refreshed_model import RefreshedModel
    from penstock.inference.refresher import Refresher

Resident: TypeAlias = "ModelCopy | RefreshedModel"


class Residents:
    """By name; the only model of a step that has one is called None. Which of many are loaded is decided elsewhere
    (models/residency.py); loads of different models may run at once, in threads."""

    def __init__(
        self,
        step: str,
        handler: ModelHandler[Any, Any, Any],
        *,
        watched: bool = False,
        prepared: bool = False,
        refreshing: Refreshing | None = None,
        resized: Callable[[str, int], None] | None = None,
        place: RunPlace | None = None,
    ) -> None:
        """watched: a thread tells of calls that do not end, of all of them. prepared: as for a ModelCopy. refreshing: models
        may be replaced while they are used; resized() is told of it. place: the run, for handlers that ask."""
        self._step = step
        self._handler = handler
        self._slow = SlowCalls(step) if watched else None
        self._prepared = prepared
        self._place = place
        self._refreshing = refreshing
        self._refresher = None if refreshing is None else _refresher(refreshing, resized)
        self._copies: dict[Hashable, Resident] = {}

        if not isinstance(handler, ModelsByKey):
            self._copies[None] = self._new(None)  # which threads may ask for at once

    def copy(self, model: Hashable) -> Resident:
        """A model that is loaded, or the only one."""
        return self._copies[model]

    def model_id(self, model: str) -> str | None:
        """Of a model that may not be loaded."""
        try:
            return self._copy(model, ORIGINAL).model_id()
        except Exception:  # its handler cannot be made: the error of its load says why
            return None

    def load(self, model: Hashable) -> LoadedModel:
        """Load it; ModelLoadError if that fails."""
        copy = self._copies[None] if model is None else self._new(model)
        loaded = copy.load()
        assert loaded is not None, "one load for each model"
        self._copies[model] = copy
        return loaded

    def is_out_of_memory(self, model: Hashable, error: BaseException) -> bool:
        """Whether a load has failed because there was no memory for it."""
        handler = self._handler
        try:
            own = handler.handler_of(str(model)) if isinstance(handler, ModelsByKey) else handler
            return own.is_out_of_memory(error.__cause__ or error)
        except Exception:  # of a handler that cannot be made, or an error that cannot be read
            return False

    def unload(self, model: Hashable) -> None:
        """Let go of it. Nobody uses it."""
        self._copies.pop(model, None)
        if self._refresher is not None:
            self._refresher.remove(str(model))

    def take_counts(self) -> dict[str, int]:
        """What handlers have counted by themselves since the last time."""
        total: Counter[str] = Counter()
        for handler, model in self._services():
            total.update(handler.take_counts(model))
        return dict(total)

    def _services(self) -> Iterator[tuple[ServiceHandler[Any, Any, Any], Any]]:
        for copy in list(self._copies.values()):
            if isinstance(copy, ModelCopy) and isinstance(copy.handler, ServiceHandler) and copy.loaded is not None:
                yield copy.handler, copy.loaded.model

    def give_up(self, error: BaseException) -> None:
        """Nobody waits for what was not asked yet."""
        for handler, model in self._services():
            handler.give_up(model, error)

    def close(self) -> None:
        for handler, model in self._services():
            handler.close_model(model)
        if self._refresher is not None:
            self._refresher.close()
        if self._slow is not None:
            self._slow.close()

    def _new(self, model: Hashable) -> Resident:
        if self._refreshing is None or self._refresher is None:
            return self._copy(model, ORIGINAL)
        from penstock.inference.refreshed_model import RefreshedModel

        name = "" if model is None else str(model)
        return RefreshedModel(name, lambda version: self._copy(model, version), self._refreshing, self._refresher)

    def _copy(self, model: Hashable, version: Version) -> ModelCopy:
        """A version of a model, which is not loaded."""
        handler = self._handler
        if model is not None:
            assert isinstance(handler, ModelsByKey)
            handler = handler.handler_of(str(model))
        if version.path:
            handler = at_path(handler, version.path)
        if self._place is not None and isinstance(handler, ServiceHandler):
            handler.enter_run(self._place)
        buckets = BatchLimits.of(handler.batch_elements_kwargs(), handler.new_shapes_cost()).size_buckets
        many = model is not None or self._refreshing is not None
        how = {"slow": self._slow, "prepared": self._prepared, "one_of_many": many, "model_id": version.model_id}
        return ModelCopy(self._step, handler, buckets, **how)  # type: ignore[arg-type]


def counts_of(copy: Resident) -> Mapping[str, int]:
    """What the handler of a model has counted by itself since the last time."""
    if not isinstance(copy, ModelCopy) or not isinstance(copy.handler, ServiceHandler) or copy.loaded is None:
        return {}
    return copy.handler.take_counts(copy.loaded.model)


def _refresher(refreshing: Refreshing, resized: Callable[[str, int], None] | None) -> Refresher:
    from penstock.inference.refresher import Refresher

    return Refresher(refreshing, resized)
