"""The base of handlers, where the import is replaced. It needs nothing of Beam: a model's host does not import it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.inference import handler
from penstock.inference.handler import ExampleT, ModelT, PredictionT, variables_of


class ModelHandler(handler.ModelHandler[ExampleT, PredictionT, ModelT]):
    """Penstock's ModelHandler with what else Beam's has, for handlers whose base is replaced."""

    def __init__(self, *, batch_bucket_boundaries: Sequence[int] | None = None, **settings: Any) -> None:
        """batch_bucket_boundaries: accepted; rows of like length are found without them (batch_length_fn)."""
        super().__init__(**settings)

    def update_model_path(self, model_path: str | None = None) -> None:
        """To be defined where the model changes, or there is one for each key: load_model() then loads what is there."""
        if model_path is not None:
            super().update_model_path(model_path)

    def update_model_paths(self, model: ModelT, model_paths: Any = None) -> None:
        """Never called: update_model_path() is, on a copy of the handler for each new version."""

    def should_skip_batching(self) -> bool:
        """Whether rows are batches already (with_no_batching()). Asked while the pipeline is built."""
        return self._no_batching

    def set_environment_vars(self) -> None:
        """Set the handler's env_vars in this process: the one that will hold the model, before load_model()."""
        os.environ.update(variables_of(self))

    def override_metrics(self, metrics_namespace: str = "") -> bool:
        """True: the handler counts by itself, and nothing else is reported. Asked once in each worker process of Beam's."""
        return False

    def should_garbage_collect_on_timeout(self) -> bool:
        """True: a process whose model took too long is ended, with the model."""
        return True


class OfKeyedModelHandler(ModelHandler[Any, Any, Any]):
    """What Beam's handlers of rows with keys say of themselves: the same as the handler inside, unless a subclass of the
    user's own says otherwise."""

    unkeyed: handler.ModelHandler[Any, Any, Any]

    def update_model_path(self, model_path: str | None = None) -> None:
        if model_path is not None:
            self.unkeyed.update_model_path(model_path)

    def set_environment_vars(self) -> None:
        if set_variables := getattr(self.unkeyed, "set_environment_vars", None):
            set_variables()

    def override_metrics(self, metrics_namespace: str = "") -> bool:
        overrides = getattr(self.unkeyed, "override_metrics", None)
        return overrides is not None and bool(overrides(metrics_namespace))

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        return self.unkeyed.batch_elements_kwargs()

    def get_resource_hints(self) -> Mapping[str, Any]:
        return self.unkeyed.get_resource_hints()

    def get_metrics_namespace(self) -> str:
        return self.unkeyed.get_metrics_namespace()
