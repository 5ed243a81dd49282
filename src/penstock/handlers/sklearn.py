"""Handlers for scikit-learn models, over rows or over whole Arrow tables.

rows or a table -> one matrix (NumPy) or frame (pandas) -> model.predict -> an array of answers, or a dict of them
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from penstock.answers import leave_out, make_room
from penstock.errors import BadRowsError, MissingPackageError, PredictionCountError
from penstock.handlers.number_columns import check_names
from penstock.handlers.sklearn_data import (
    check_numbers,
    frame_of_rows,
    frame_of_table,
    matrix_of_rows,
    matrix_of_table,
    rows_not_finite,
)
from penstock.handlers.sklearn_loading import ModelFileType, check_trust, load_estimator
from penstock.handlers.sklearn_threads import is_thread_safe
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import checked_path
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
NOT_FINITE = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)  # in what a model says of rows that it refuses
MOST_KINDS_TRIED = 64  # of rows with NaN or infinity, before a search by halves is cheaper

ExampleT = TypeVar("ExampleT")
InferenceArgs: TypeAlias = Mapping[str, Any] | None
InferenceFn: TypeAlias = "Callable[[BaseEstimator, Any, InferenceArgs], Any]"


def _predict(model: BaseEstimator, data: Any, inference_args: InferenceArgs = None) -> Any:
    return model.predict(data, **(inference_args or {}))


class _SklearnModelHandler(ModelHandler[ExampleT, PredictionResult, "BaseEstimator"], Generic[ExampleT]):
    """What both handlers share: all but how rows and tables become the model's input."""

    wraps_answers = True

    def __init__(
        self,
        model_uri: str,
        model_file_type: ModelFileType = ModelFileType.SKOPS,
        *,
        trusted: bool = False,
        inference_fn: InferenceFn | None = None,
        columns: str | Sequence[str] | None = None,
        output_column: str | None = None,
        output_prefix: str | None = None,
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
        output_column, output_prefix: what the columns of the answers are called; a prefix is for dicts of answers.
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
            output_column=output_column,
            output_prefix=output_prefix,
        )
        check_trust(model_uri, model_file_type, trusted)
        self._model_uri = model_uri
        self._model_file_type = model_file_type
        self._trusted = trusted
        self._inference_fn = inference_fn or _predict

    def load_model(self) -> BaseEstimator:
        return load_estimator(self._model_uri, self._model_file_type, self._trusted)

    def run_inference(self, batch: Sequence[ExampleT], model: BaseEstimator, inference_args: InferenceArgs = None) -> Any:
        return self._run(self._data_of_rows(batch), len(batch), model, inference_args)

    def _run(self, data: Any, rows: int, model: BaseEstimator, inference_args: InferenceArgs) -> Any:
        return _answers(self._inference_fn(model, data, inference_args), rows)

    def _data_of_rows(self, rows: Sequence[ExampleT]) -> Any:
        raise NotImplementedError

    def _data_of_table(self, table: pa.Table) -> Any:
        raise NotImplementedError

    def examples_of(self, table: pa.Table) -> Sequence[Any]:
        """Dicts, also where columns= is one name."""
        rows: list[Any] = table.to_pylist()
        return rows

    def takes_columns(self) -> bool:
        return True

    def check_columns(self, schema: pa.Schema) -> None:
        check_names(self.input_columns(), schema.names)

    def run_inference_columns(self, table: pa.Table, model: BaseEstimator, inference_args: InferenceArgs = None) -> Any:
        check_names(self.input_columns(), table.column_names)
        return self._run(self._data_of_table(table), table.num_rows, model, inference_args)

    def is_native(self) -> bool:
        return type(self).__module__ == __name__ and self._inference_fn is _predict

    def is_thread_safe(self, model: BaseEstimator) -> bool:
        return self.is_native() and is_thread_safe(model)

    def model_id(self) -> str:
        return without_secrets(str(self._model_uri))

    def model_files(self) -> Sequence[str]:
        return (str(self._model_uri),)

    def update_model_path(self, model_path: str) -> None:
        """Another file of the same type, trusted like the first."""
        self._model_uri = checked_path(model_path)

    def get_metrics_namespace(self) -> str:
        return "Penstock_Sklearn"


class SklearnModelHandlerNumpy(_SklearnModelHandler["np.ndarray[Any, Any] | Mapping[str, Any]"]):
    """Examples are 1-D arrays, or dicts of numbers. The model gets one matrix with a row for each; None becomes NaN."""

    def _data_of_rows(self, rows: Sequence[np.ndarray[Any, Any] | Mapping[str, Any]]) -> np.ndarray[Any, Any]:
        return matrix_of_rows(rows, self.input_columns())

    def _data_of_table(self, table: pa.Table) -> np.ndarray[Any, Any]:
        return matrix_of_table(table, self.input_columns())

    def _run(self, data: Any, rows: int, model: BaseEstimator, inference_args: InferenceArgs) -> Any:
        try:
            return super()._run(data, rows, model, inference_args)
        except ValueError as exc:
            if self.retry_safe and rows > 1 and NOT_FINITE.search(str(exc)):
                self._raise_for_not_finite(data, model, inference_args)
            raise

    def _raise_for_not_finite(self, matrix: Any, model: BaseEstimator, inference_args: InferenceArgs) -> None:
        """BadRowsError for the rows whose NaN or infinity the model refuses. Whether it does can depend on the column, so
        that one row of each kind is tried alone: if it is refused, all of its kind are."""
        kinds = rows_not_finite(matrix)
        if len(kinds) > MOST_KINDS_TRIED:
            return
        bad: dict[int, Exception] = {}
        for rows in kinds:
            try:
                self._inference_fn(model, matrix[rows[:1]], inference_args)
            except ValueError as alone:
                if NOT_FINITE.search(str(alone)):
                    alone.__context__ = None  # the same error, of the whole batch
                    bad |= dict.fromkeys(rows, alone)
        if bad:
            raise BadRowsError(bad, self._values_without(bad, matrix, model, inference_args))

    def _values_without(
        self, bad: Mapping[int, Any], matrix: Any, model: BaseEstimator, inference_args: InferenceArgs
    ) -> Any:
        """The answers to all rows but the bad ones; None if those are refused, too, or there are none."""
        good = leave_out(matrix, bad)
        with contextlib.suppress(ValueError):
            if len(good):
                return make_room(super()._run(good, len(good), model, inference_args), len(matrix), bad)
        return None

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


def _answers(output: Any, rows: int) -> Any:
    """What the model returned, if it is exactly one answer per row: a sequence, or a dict of arrays. A dict of anything else
    becomes one dict per row."""
    if isinstance(output, Mapping) and output:
        parts = {name: _answers(part, rows) for name, part in output.items()}
        if all(hasattr(part, "dtype") for part in parts.values()):
            return parts
        return [dict(zip(parts, answers, strict=True)) for answers in zip(*map(_as_rows, parts.values()), strict=True)]
    if hasattr(output, "to_numpy"):  # a frame would be iterated by column
        output = output.to_numpy()
    count = len(output) if hasattr(output, "__len__") else 0
    if count != rows:
        raise PredictionCountError(
            f"the model returned {count} answers ({type(output).__name__}) for {rows} rows; it must return one per "
            "row, in the same order: see inference_fn"
        )
    return output


def _as_rows(answers: Any) -> Any:
    if not isinstance(answers, dict):
        return answers
    return [dict(zip(answers, row, strict=True)) for row in zip(*answers.values(), strict=True)]
