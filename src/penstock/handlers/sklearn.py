"""Handlers for scikit-learn models, over rows or over whole Arrow tables.

rows or a table -> one matrix (NumPy) or frame (pandas) -> model.predict -> one answer per row
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from penstock.errors import MissingPackageError, PredictionCountError
from penstock.handlers.sklearn_data import (
    check_names,
    check_numbers,
    frame_of_rows,
    frame_of_table,
    matrix_of_rows,
    matrix_of_table,
)
from penstock.handlers.sklearn_loading import ModelFileType, check_trust, load_estimator
from penstock.handlers.sklearn_threads import is_thread_safe
from penstock.inference.handler import ModelHandler
from penstock.io.files import without_secrets
from penstock.rows import PredictionResult

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from sklearn.base import BaseEstimator

# Found, not imported: describing a model needs none of it, and the processes that load the model import it anyway.
if importlib.util.find_spec("sklearn") is None:
    raise MissingPackageError("scikit-learn", "sklearn")

__all__ = ["ModelFileType", "SklearnModelHandlerNumpy", "SklearnModelHandlerPandas"]

DEFAULT_MAX_BATCH_SIZE = 8192  # rows: a call of predict() costs far more than a row

ExampleT = TypeVar("ExampleT")
InferenceArgs: TypeAlias = Mapping[str, Any] | None
InferenceFn: TypeAlias = "Callable[[BaseEstimator, Any, InferenceArgs], Any]"


def _predict(model: BaseEstimator, data: Any, inference_args: InferenceArgs = None) -> Any:
    return model.predict(data, **(inference_args or {}))


class _SklearnModelHandler(ModelHandler[ExampleT, PredictionResult, "BaseEstimator"], Generic[ExampleT]):
    """What both handlers share: all but how rows and tables become the model's input."""

    def __init__(
        self,
        model_uri: str,
        model_file_type: ModelFileType = ModelFileType.SKOPS,
        *,
        trusted: bool = False,
        inference_fn: InferenceFn | None = None,
        columns: Sequence[str] | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_batch_duration_secs: float | None = None,
        max_batch_weight: int | None = None,
        element_size_fn: Callable[[ExampleT], int] | None = None,
        env_vars: Mapping[str, str] | None = None,
        large_model: bool = False,
        model_copies: int | None = None,
    ) -> None:
        """Describe a model in a file.

        trusted: you trust the file to run code. Pickle and joblib files need it; skops files need it for types that
        skops does not know to be safe.
        inference_fn(model, data, inference_args): gives one answer per row of data; None calls model.predict(data).
        columns: the features, in order, where rows have names (dicts, tables, frames); None takes all of them.
        """
        if max_batch_size is None:
            least = min_batch_size if isinstance(min_batch_size, int) else 0
            max_batch_size = max(DEFAULT_MAX_BATCH_SIZE, least)
        super().__init__(
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_batch_duration_secs=max_batch_duration_secs,
            max_batch_weight=max_batch_weight,
            element_size_fn=element_size_fn,
            env_vars=env_vars,
            large_model=large_model,
            model_copies=model_copies,
            columns=columns,
        )
        check_trust(model_uri, model_file_type, trusted)
        self._model_uri = model_uri
        self._model_file_type = model_file_type
        self._trusted = trusted
        self._inference_fn = inference_fn or _predict

    def load_model(self) -> BaseEstimator:
        return load_estimator(self._model_uri, self._model_file_type, self._trusted)

    def run_inference(
        self, batch: Sequence[ExampleT], model: BaseEstimator, inference_args: InferenceArgs = None
    ) -> Iterable[PredictionResult]:
        data = self._data_of_rows(batch)
        answers = _answers(self._inference_fn(model, data, inference_args), len(batch))
        model_id = self.model_id()
        return [PredictionResult(example, answer, model_id) for example, answer in zip(batch, answers, strict=True)]

    def _data_of_rows(self, rows: Sequence[ExampleT]) -> Any:
        raise NotImplementedError

    def _data_of_table(self, table: pa.Table) -> Any:
        raise NotImplementedError

    def takes_columns(self) -> bool:
        return True

    def check_columns(self, schema: pa.Schema) -> None:
        check_names(self.input_columns(), schema.names)

    def run_inference_columns(self, table: pa.Table, model: BaseEstimator, inference_args: InferenceArgs = None) -> Any:
        check_names(self.input_columns(), table.column_names)
        data = self._data_of_table(table)
        return _as_column(_answers(self._inference_fn(model, data, inference_args), table.num_rows))

    def is_native(self) -> bool:
        return type(self).__module__ == __name__ and self._inference_fn is _predict

    def is_thread_safe(self, model: BaseEstimator) -> bool:
        return self.is_native() and is_thread_safe(model)

    def model_id(self) -> str:
        return without_secrets(str(self._model_uri))

    def model_files(self) -> Sequence[str]:
        return (str(self._model_uri),)

    def get_metrics_namespace(self) -> str:
        return "Penstock_Sklearn"


class SklearnModelHandlerNumpy(_SklearnModelHandler["np.ndarray[Any, Any] | Mapping[str, Any]"]):
    """Examples are 1-D arrays, or dicts of numbers. The model gets one matrix with a row for each; None becomes NaN."""

    def _data_of_rows(self, rows: Sequence[np.ndarray[Any, Any] | Mapping[str, Any]]) -> np.ndarray[Any, Any]:
        return matrix_of_rows(rows, self.input_columns())

    def _data_of_table(self, table: pa.Table) -> np.ndarray[Any, Any]:
        return matrix_of_table(table, self.input_columns())

    def check_columns(self, schema: pa.Schema) -> None:
        super().check_columns(schema)
        check_numbers(schema, self.input_columns())

    def get_num_bytes(self, batch: Sequence[np.ndarray[Any, Any] | Mapping[str, Any]]) -> int:
        return self._data_of_rows(batch).nbytes


class SklearnModelHandlerPandas(_SklearnModelHandler["pd.DataFrame | pd.Series[Any] | Mapping[str, Any]"]):
    """Examples are frames of one row, Series or dicts. The model gets one frame with a row for each."""

    def _data_of_rows(self, rows: Sequence[pd.DataFrame | pd.Series[Any] | Mapping[str, Any]]) -> pd.DataFrame:
        return frame_of_rows(rows, self.input_columns())

    def _data_of_table(self, table: pa.Table) -> pd.DataFrame:
        return frame_of_table(table, self.input_columns())

    def get_num_bytes(self, batch: Sequence[pd.DataFrame | pd.Series[Any] | Mapping[str, Any]]) -> int:
        return int(self._data_of_rows(batch).memory_usage(index=False, deep=True).sum())


def _answers(output: Any, rows: int) -> Sequence[Any]:
    """What the model returned as exactly one answer per row; a dict of answers becomes one dict per row."""
    if isinstance(output, Mapping) and output:
        parts = [_answers(part, rows) for part in output.values()]
        return [dict(zip(output, answers, strict=True)) for answers in zip(*parts, strict=True)]
    if hasattr(output, "to_numpy"):  # a frame would be iterated by column
        output = output.to_numpy()
    count = len(output) if hasattr(output, "__len__") else 0
    if count != rows:
        raise PredictionCountError(
            f"the model returned {count} answers ({type(output).__name__}) for {rows} rows; it must return one per "
            "row, in the same order: see inference_fn"
        )
    return output  # type: ignore[no-any-return]


def _as_column(answers: Any) -> Any:
    """Answers that fit into one Arrow column: a matrix becomes a column of lists of fixed size."""
    dimensions = getattr(answers, "ndim", 1)
    if dimensions != 2:
        return answers if dimensions < 2 else answers.tolist()
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(answers.ravel()), answers.shape[1])
