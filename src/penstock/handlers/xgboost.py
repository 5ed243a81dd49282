"""Handlers for XGBoost models, over rows or over whole Arrow tables: one predict() for a batch.

rows or a table -> one matrix, frame or sparse matrix -> predict() -> an array of answers
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, Unpack

from penstock.errors import UsageError
from penstock.handlers.boosted_trees import BoostedTreesHandler, Features, OfTypedFrames
from penstock.handlers.catalog import check_installed
from penstock.handlers.tabular import InferenceArgs, OfArrays
from penstock.handlers.tabular_data import matrix_of_rows
from penstock.handlers.tabular_sparse import OfSparse
from penstock.inference.handler_settings import HandlerSettings

check_installed("xgboost")

__all__ = [
    "XGBoostModelHandlerDatatable",
    "XGBoostModelHandlerNumpy",
    "XGBoostModelHandlerPandas",
    "XGBoostModelHandlerSciPy",
    "default_xgboost_inference_fn",
]

ExampleT = TypeVar("ExampleT")
XGBoostInferenceFn: TypeAlias = Callable[[Any, Any, InferenceArgs], Any]


def default_xgboost_inference_fn(batch: Any, model: Any, inference_args: InferenceArgs = None) -> Any:
    """model.predict(batch, **inference_args), where the batch is one matrix or frame with a row for each example."""
    import xgboost

    if not isinstance(model, xgboost.Booster):
        return model.predict(batch, **(inference_args or {}))
    names = None if hasattr(batch, "columns") else model.feature_names
    data = xgboost.DMatrix(batch, feature_names=names, enable_categorical=True)
    return model.predict(data, **(inference_args or {}))


class _XGBoostModelHandler(BoostedTreesHandler[ExampleT]):
    """What all four share: all but how rows and tables become the model's input."""

    _family = "xgboost"

    def __init__(
        self,
        model_class: Callable[[], Any],
        model_state: str,
        inference_fn: XGBoostInferenceFn = default_xgboost_inference_fn,
        *,
        trusted: bool = False,
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe a model in a file that save_model() wrote, as JSON or UBJSON.

        model_class: xgboost.Booster, or one with scikit-learn's face, such as xgboost.XGBClassifier; or a function that
            gives one.
        inference_fn(batch, model, inference_args): gives one answer per row of the batch, which is one matrix or frame.
        trusted: you trust the file to run code: pickled models need it.
        columns: the features, where rows have names; None takes all of them. They are matched by name where the model was
            trained with names, else they are in its order.
        """
        super().__init__(model_state, trusted, settings)
        if not callable(model_class):
            raise UsageError(f"model_class={model_class!r}: expected a class such as xgboost.XGBClassifier")
        self._model_class = model_class
        self._inference_fn = inference_fn

    def _read(self, content: bytes) -> Any:
        model = self._model_class()
        model.load_model(bytearray(content))
        return model

    def _is_model(self, loaded: Any) -> bool:
        import xgboost

        return isinstance(loaded, (xgboost.Booster, xgboost.XGBModel))

    def _expected(self) -> str:
        name = getattr(self._model_class, "__name__", str(self._model_class))
        return f"a model for {name}, saved by model.save_model('model.json') or '.ubj'"

    def _call(self, model: Any, data: Any, inference_args: InferenceArgs) -> Any:
        return self._inference_fn(data, model, inference_args)

    def _features(self, model: Any) -> Features:
        booster = _booster_of(model)
        return Features(booster.num_features(), booster.feature_names)

    def is_native(self) -> bool:
        return type(self).__module__ == __name__ and self._inference_fn is default_xgboost_inference_fn

    def is_thread_safe(self, model: Any) -> bool:
        """Trees are; linear models are not."""
        config = json.loads(_booster_of(model).save_config())
        return self.is_native() and config["learner"]["gradient_booster"]["name"] in ("gbtree", "dart")

    def get_metrics_namespace(self) -> str:
        return "Penstock_XGBoost"


class XGBoostModelHandlerNumpy(_XGBoostModelHandler[Any], OfArrays):
    """Examples are 1-D arrays, matrices of one row, or dicts of numbers. The model gets one matrix with a row for each; None
    becomes NaN, which XGBoost takes for missing."""

    def _data_of_rows(self, rows: Sequence[Any]) -> Any:
        return matrix_of_rows(_flat(rows), self.input_columns())


class XGBoostModelHandlerPandas(_XGBoostModelHandler[Any], OfTypedFrames):
    """Examples are frames of one row, Series or dicts. The model gets one frame with a row for each. Categories are matched
    by what they are called."""

    def _call(self, model: Any, data: Any, inference_args: InferenceArgs) -> Any:
        _check_categories(data)
        return super()._call(model, data, inference_args)


class XGBoostModelHandlerSciPy(OfSparse, _XGBoostModelHandler[Any]):
    """Examples are sparse SciPy matrices of one row. The model gets one CSR matrix with a row for each; what a row does not
    have is missing. columns=["positions", "values"] names two columns of lists."""


class XGBoostModelHandlerDatatable(XGBoostModelHandlerNumpy):
    """Examples are datatable frames of one row. The model gets one matrix with a row for each, because XGBoost no longer
    takes datatable's frames itself; missing values become NaN. Dicts and tables are taken, too."""

    def _data_of_rows(self, rows: Sequence[Any]) -> Any:
        return super()._data_of_rows([_row_of_frame(row) for row in rows])


def _booster_of(model: Any) -> Any:
    return model.get_booster() if hasattr(model, "get_booster") else model


def _flat(rows: Sequence[Any]) -> Sequence[Any]:
    """Matrices of one row as 1-D arrays; all else as it is."""
    return [row[0] if getattr(row, "ndim", 1) == 2 and len(row) == 1 else row for row in rows]


def _row_of_frame(row: Any) -> Any:
    if not hasattr(row, "names") or not hasattr(row, "to_numpy"):
        return row
    import numpy as np

    made = row.to_numpy()
    if not isinstance(made, np.ma.MaskedArray):
        return made
    masked: Any = made.astype(float)
    return masked.filled(np.nan)


def _check_categories(frame: Any) -> None:
    import xgboost

    version = tuple(map(int, xgboost.__version__.split(".")[:2]))
    names = [name for name, kind in frame.dtypes.items() if getattr(kind, "categories", None) is not None]
    if names and version < (3, 1):
        raise UsageError(
            f"the columns {names} hold categories, which XGBoost {xgboost.__version__} takes by their number in each batch, "
            "so that answers would depend on the batch; install xgboost>=3.1, or encode them as numbers"
        )
