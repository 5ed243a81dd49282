"""Handlers for scikit-learn models, over rows or over whole Arrow tables.

rows or a table -> one matrix (NumPy) or frame (pandas) -> model.predict -> an array of answers, or a dict of them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack

from penstock.errors import UsageError
from penstock.handlers.catalog import check_installed, check_versions
from penstock.handlers.sklearn_loading import ModelFileType, Trust, check_trust, load_estimator
from penstock.handlers.sklearn_threads import is_thread_safe
from penstock.handlers.tabular import InferenceArgs, OfArrays, OfFrames, TabularModelHandler
from penstock.inference.handler_settings import HandlerSettings

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

# Found, not imported: describing a model needs none of it, and the processes that load the model import it anyway.
check_installed("sklearn")

__all__ = ["ModelFileType", "SklearnModelHandlerNumpy", "SklearnModelHandlerPandas"]

METHODS = ("predict", "predict_proba", "decision_function", "transform", "score_samples")

ExampleT = TypeVar("ExampleT")
InferenceFn: TypeAlias = "Callable[[BaseEstimator, Any, InferenceArgs], Any]"


class _SklearnModelHandler(TabularModelHandler[ExampleT]):
    """What both handlers share: all but how rows and tables become the model's input."""

    def __init__(
        self,
        model_uri: str,
        model_file_type: ModelFileType = ModelFileType.SKOPS,
        *,
        trusted: Trust = False,
        inference_fn: InferenceFn | None = None,
        method: str = "predict",
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe a model in a file.

        trusted: you trust the file to run code. Pickle and joblib files need it; skops files need it for types that
        skops does not know to be safe, or a list of these types: ["numpy.dtype"], which imputers hold.
        method: what is called: "predict", "predict_proba", "decision_function", "transform", "score_samples" or any other
        method of the model that gives one answer for each row. inference_args are arguments of it.
        inference_fn(model, data, inference_args): called instead; it gives one answer per row of data.
        columns: the features, in order, where rows have names (dicts, tables, frames); None takes all of them.
        output_column, output_prefix: what the columns of the answers are called; a prefix is for dicts of answers.
        """
        super().__init__(model_uri, settings)
        check_trust(model_uri, model_file_type, trusted)
        self._model_file_type = model_file_type
        self._trusted = trusted if isinstance(trusted, bool) else tuple(trusted)
        self._inference_fn = inference_fn
        self._method = _checked_method(method, inference_fn)

    def load_model(self) -> BaseEstimator:
        check_versions("sklearn")
        model = load_estimator(self._model_uri, self._model_file_type, self._trusted)
        if self._inference_fn is None and not hasattr(model, self._method):
            has = [name for name in METHODS if hasattr(model, name)]
            raise UsageError(
                f"method={self._method!r}: the {type(model).__name__} in {self.model_id()!r} has no such method; it has "
                f"{', '.join(has) or 'none of ' + ', '.join(METHODS)}"
            )
        return model

    def _call(self, model: BaseEstimator, data: Any, inference_args: InferenceArgs) -> Any:
        if self._inference_fn is not None:
            return self._inference_fn(model, data, inference_args)
        made = getattr(model, self._method)(data, **(inference_args or {}))
        return made.toarray() if hasattr(made, "toarray") else made  # a sparse matrix has no rows to give out

    def is_native(self) -> bool:
        return type(self).__module__ == __name__ and self._inference_fn is None

    def is_thread_safe(self, model: BaseEstimator) -> bool:
        return self.is_native() and is_thread_safe(model)

    def get_metrics_namespace(self) -> str:
        return "Penstock_Sklearn"


def _checked_method(method: object, inference_fn: object) -> str:
    if not isinstance(method, str) or not method.isidentifier():
        raise UsageError(f"method={method!r}: expected the name of a method, such as 'predict_proba'")
    if inference_fn is not None and method != "predict":
        raise UsageError(f"method={method!r} and inference_fn= both say what is called; give one of them")
    return method


class SklearnModelHandlerNumpy(_SklearnModelHandler[Any], OfArrays):
    """Examples are 1-D arrays, or dicts of numbers. The model gets one matrix with a row for each; None becomes NaN."""


class SklearnModelHandlerPandas(_SklearnModelHandler[Any], OfFrames):
    """Examples are frames of one row, Series or dicts. The model gets one frame with a row for each."""
