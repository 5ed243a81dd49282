"""What handlers of models over tables share (scikit-learn, XGBoost, LightGBM): all but the model.

rows or a table -> one matrix (NumPy) or frame (pandas) -> one call of the model -> an array of answers, or a dict of them
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from penstock.answers import make_room
from penstock.errors import BadRowsError, UsageError
from penstock.handlers.array_answers import answers_of, tuples_by_number
from penstock.handlers.number_columns import check_names
from penstock.handlers.tabular_data import (
    check_numbers,
    frame_of_rows,
    frame_of_table,
    matrix_of_rows,
    matrix_of_table,
    rows_not_finite,
    without_rows_in_place,
)
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import checked_path
from penstock.inference.handler_settings import HandlerSettings
from penstock.io.files import without_secrets
from penstock.rows import PredictionResult

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

DEFAULT_MAX_BATCH_SIZE = 8192  # rows: a call of predict() costs far more than a row
NOT_FINITE = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)  # in what a model says of rows that it refuses
MOST_KINDS_TRIED = 64  # of rows with NaN or infinity, before a search by halves is cheaper

ExampleT = TypeVar("ExampleT")
InferenceArgs: TypeAlias = Mapping[str, Any] | None


class TabularModelHandler(ModelHandler[ExampleT, PredictionResult, Any], Generic[ExampleT]):
    """A model in one file. Families say how it is loaded and called; subclasses how rows and tables become its input."""

    wraps_answers = True

    def __init__(self, model_uri: str, settings: HandlerSettings) -> None:
        if settings.get("max_batch_size") is None:
            least = settings.get("min_batch_size")
            settings = {**settings, "max_batch_size": max(DEFAULT_MAX_BATCH_SIZE, least if isinstance(least, int) else 0)}
        super().__init__(**settings)
        if not isinstance(model_uri, (str, os.PathLike)):
            seen = f"{type(self).__name__}(a {type(model_uri).__name__})"
            raise UsageError(f"{seen}: expected the path of a saved model; save the model first, and pass its path")
        self._model_uri = model_uri

    def _call(self, model: Any, data: Any, inference_args: InferenceArgs) -> Any:
        """What the model says of a matrix or frame, with the rows first."""
        raise NotImplementedError

    def run_inference(self, batch: Sequence[ExampleT], model: Any, inference_args: InferenceArgs = None) -> Any:
        order = self._order(batch[0], model)
        return self._answered(lambda: _arranged(self._data_of_rows(batch), order), len(batch), model, inference_args)

    def _order(self, named: Any, model: Any) -> Sequence[int] | None:
        """Where each feature of the model is among the columns of a table or of a first row; None: as they come."""
        return None

    def _answered(self, make_data: Callable[[], Any], rows: int, model: Any, inference_args: InferenceArgs) -> Any:
        """make_data: gives the model's input. The model may change what it is called with."""
        return self._run(make_data(), rows, model, inference_args)

    def _run(self, data: Any, rows: int, model: Any, inference_args: InferenceArgs) -> Any:
        return answers_of(self._call(model, data, inference_args), rows)

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

    def run_inference_columns(self, table: pa.Table, model: Any, inference_args: InferenceArgs = None) -> Any:
        check_names(self.input_columns(), table.column_names)
        order = self._order(table, model)
        answers = self._answered(lambda: _arranged(self._data_of_table(table), order), table.num_rows, model, inference_args)
        return tuples_by_number(answers)

    def model_id(self) -> str:
        return without_secrets(str(self._model_uri))

    def model_files(self) -> Sequence[str]:
        return (str(self._model_uri),)

    def update_model_path(self, model_path: str) -> None:
        """Another file of the same type, trusted like the first."""
        self._model_uri = checked_path(model_path)


def _arranged(data: Any, order: Sequence[int] | None) -> Any:
    """A matrix or frame with its columns in this order."""
    if order is None:
        return data
    return data.iloc[:, order] if hasattr(data, "iloc") else data[:, order]


class OfArrays(TabularModelHandler["np.ndarray[Any, Any] | Mapping[str, Any]"]):
    """Examples are 1-D arrays, or dicts of numbers. The model gets one matrix with a row for each; None becomes NaN."""

    def _data_of_rows(self, rows: Sequence[np.ndarray[Any, Any] | Mapping[str, Any]]) -> np.ndarray[Any, Any]:
        return matrix_of_rows(rows, self.input_columns())

    def _data_of_table(self, table: pa.Table) -> np.ndarray[Any, Any]:
        return matrix_of_table(table, self.input_columns())

    def _answered(self, make_data: Callable[[], Any], rows: int, model: Any, inference_args: InferenceArgs) -> Any:
        try:
            return super()._answered(make_data, rows, model, inference_args)
        except ValueError as exc:  # of XGBoost's, too
            if self.retry_safe and rows > 1 and NOT_FINITE.search(str(exc)):
                self._raise_for_not_finite(make_data(), model, inference_args)
            raise

    def _raise_for_not_finite(self, matrix: Any, model: Any, inference_args: InferenceArgs) -> None:
        """BadRowsError for the rows whose NaN or infinity the model refuses. Whether it does can depend on the column, so
        that one row of each kind is tried alone: if it is refused, all of its kind are."""
        kinds = rows_not_finite(matrix)
        if len(kinds) > MOST_KINDS_TRIED:
            return
        bad: dict[int, Exception] = {}
        for rows in kinds:
            try:
                self._call(model, matrix[rows[:1]], inference_args)
            except ValueError as alone:
                if NOT_FINITE.search(str(alone)):
                    alone.__context__ = None  # the same error, of the whole batch
                    bad |= dict.fromkeys(rows, alone)
        if bad:
            raise BadRowsError(bad, self._values_without(bad, matrix, model, inference_args))

    def _values_without(self, bad: Mapping[int, Any], matrix: Any, model: Any, inference_args: InferenceArgs) -> Any:
        """The answers to all rows but the bad ones; None if those are refused, too, or there are none."""
        good = without_rows_in_place(matrix, bad)
        with contextlib.suppress(ValueError):
            if len(good):
                return make_room(self._run(good, len(good), model, inference_args), len(matrix), bad)
        return None

    def changes_rows(self) -> bool:
        """Not where only the model sees them, as a matrix that was made for it."""
        return not self.is_native()

    def check_columns(self, schema: pa.Schema) -> None:
        super().check_columns(schema)
        check_numbers(schema, self.input_columns())

    def get_num_bytes(self, batch: Sequence[np.ndarray[Any, Any] | Mapping[str, Any]]) -> int:
        return self._data_of_rows(batch).nbytes


class OfFrames(TabularModelHandler["pd.DataFrame | pd.Series[Any] | Mapping[str, Any]"]):
    """Examples are frames of one row, Series or dicts. The model gets one frame with a row for each."""

    def _data_of_rows(self, rows: Sequence[pd.DataFrame | pd.Series[Any] | Mapping[str, Any]]) -> pd.DataFrame:
        return frame_of_rows(rows, self.input_columns())

    def _data_of_table(self, table: pa.Table) -> pd.DataFrame:
        return frame_of_table(table, self.input_columns())

    def get_num_bytes(self, batch: Sequence[pd.DataFrame | pd.Series[Any] | Mapping[str, Any]]) -> int:
        return int(self._data_of_rows(batch).memory_usage(index=False, deep=True).sum())
