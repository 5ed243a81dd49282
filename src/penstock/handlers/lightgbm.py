"""Handlers for LightGBM models, over rows or over whole Arrow tables: one predict() for a batch.

rows or a table -> one matrix, frame or sparse matrix -> predict() -> an array of answers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, Unpack

from penstock.handlers.boosted_trees import BoostedTreesHandler, Features, OfTypedFrames
from penstock.handlers.catalog import check_installed
from penstock.handlers.tabular import InferenceArgs, OfArrays
from penstock.handlers.tabular_sparse import OfSparse
from penstock.handlers.threads import thread_share
from penstock.inference.handler_settings import HandlerSettings

check_installed("lightgbm")

__all__ = ["LightGBMModelHandlerNumpy", "LightGBMModelHandlerPandas", "LightGBMModelHandlerSciPy"]

ExampleT = TypeVar("ExampleT")
LightGBMInferenceFn: TypeAlias = Callable[[Any, Any, InferenceArgs], Any]


def _predict(model: Any, data: Any, inference_args: InferenceArgs = None) -> Any:
    """With this process's share of the cores: a model file may say how many threads it was trained with."""
    share = thread_share()
    threads = {} if share is None else {"num_threads": share}
    return model.predict(data, **{**threads, **(inference_args or {})})


class _LightGBMModelHandler(BoostedTreesHandler[ExampleT]):
    """What all three share: all but how rows and tables become the model's input."""

    _family = "lightgbm"

    def __init__(
        self,
        model_uri: str,
        *,
        inference_fn: LightGBMInferenceFn | None = None,
        trusted: bool = False,
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe a model in a text file that booster.save_model() wrote; it is loaded as a lightgbm.Booster.

        inference_fn(model, data, inference_args): gives one answer per row of data; None calls model.predict(data), which of
            a Booster gives probabilities, not classes.
        trusted: you trust the file to run code: pickled models need it, such as those of lightgbm.LGBMClassifier.
        columns: the features, where rows have names; None takes all of them. They are matched by name where the model was
            trained with names, else they are in its order.
        """
        super().__init__(model_uri, trusted, settings)
        self._inference_fn = inference_fn or _predict

    def _read(self, content: bytes) -> Any:
        import lightgbm

        return lightgbm.Booster(model_str=content.decode())

    def _is_model(self, loaded: Any) -> bool:
        import lightgbm

        return isinstance(loaded, (lightgbm.Booster, lightgbm.LGBMModel))

    def _expected(self) -> str:
        return "a LightGBM model, saved by booster.save_model('model.txt') (of LGBMClassifier: model.booster_.save_model)"

    def _call(self, model: Any, data: Any, inference_args: InferenceArgs) -> Any:
        return self._inference_fn(model, data, inference_args)

    def _features(self, model: Any) -> Features:
        booster = getattr(model, "booster_", model)
        names = booster.feature_name()
        trained_without = names == [f"Column_{at}" for at in range(len(names))]
        return Features(booster.num_feature(), None if trained_without else names)

    def is_native(self) -> bool:
        return type(self).__module__ == __name__ and self._inference_fn is _predict

    def is_thread_safe(self, model: Any) -> bool:
        return self.is_native()

    def get_metrics_namespace(self) -> str:
        return "Penstock_LightGBM"


class LightGBMModelHandlerNumpy(_LightGBMModelHandler[Any], OfArrays):
    """Examples are 1-D arrays, or dicts of numbers. The model gets one matrix with a row for each; None becomes NaN, which
    LightGBM takes for missing."""


class LightGBMModelHandlerPandas(_LightGBMModelHandler[Any], OfTypedFrames):
    """Examples are frames of one row, Series or dicts. The model gets one frame with a row for each. Categories are matched
    by what they are called."""


class LightGBMModelHandlerSciPy(OfSparse, _LightGBMModelHandler[Any]):
    """Examples are sparse SciPy matrices of one row. The model gets one CSR matrix with a row for each; what a row does not
    have is 0. columns=["positions", "values"] names two columns of lists."""
