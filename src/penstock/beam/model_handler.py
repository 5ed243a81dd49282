"""The base of handlers, where the import is replaced. It needs nothing of Beam: a model's host does not import it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from penstock.inference import handler
from penstock.inference.handler import ExampleT, ModelT, PredictionT, variables_of


class ModelHandler(handler.ModelHandler[ExampleT, PredictionT, ModelT]):
    """Penstock's ModelHandler with what else Beam's has, for handlers whose base is replaced."""

    def __init__(self, *, batch_bucket_boundaries: Sequence[int] | None = None, **settings: Any) -> None:
        """batch_bucket_boundaries: accepted; rows of like length are found without them (batch_length_fn)."""
        super().__init__(**settings)

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
