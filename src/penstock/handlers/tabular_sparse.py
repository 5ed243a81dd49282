"""Sparse rows for models over tables: SciPy matrices of one row, or two columns of lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.errors import BadRowsError, RowError, UsageError
from penstock.handlers.boosted_trees import BoostedTreesHandler
from penstock.handlers.catalog import imported
from penstock.handlers.number_columns import check_names, is_number, table_of_records
from penstock.handlers.tabular import InferenceArgs
from penstock.io.arrow_types import is_list

if TYPE_CHECKING:
    import scipy.sparse

Sparse: TypeAlias = "scipy.sparse.csr_matrix | Mapping[str, Any]"


class OfSparse(BoostedTreesHandler[Sparse]):
    """Examples are SciPy matrices of one row; the model gets one CSR matrix with a row for each.

    columns=["positions", "values"]: two columns of lists, which features a row has and their values, from 0. What a row does
    not have is missing, or zero, as the model takes it: XGBoost takes it for missing.
    """

    def run_inference(self, batch: Sequence[Sparse], model: Any, inference_args: InferenceArgs = None) -> Any:
        if not _are_records(batch):
            self._check_rows(batch, self._features(model).count)
        return super().run_inference(batch, model, inference_args)

    def _check_rows(self, rows: Sequence[Any], width: int) -> None:
        """BadRowsError for those that are no sparse matrix of one row with so many features."""
        seen = [tuple(row.shape) if _scipy_sparse().issparse(row) else type(row).__name__ for row in rows]
        told = f"{self.model_id()!r} takes sparse SciPy matrices of the shape (1, {width}), but the row is"
        bad: dict[int, Exception] = {at: RowError(f"{told} {each}") for at, each in enumerate(seen) if each != (1, width)}
        if bad:
            raise BadRowsError(bad)

    def _order(self, named: Any, model: Any) -> None:
        """The columns are no features."""

    def _run(self, data: Any, rows: int, model: Any, inference_args: InferenceArgs) -> Any:
        width = self._features(model).count
        if self._columns is not None and data.shape[1] != width:  # of lists, the last features need not be there
            told = f"the model in {self.model_id()!r} takes {width} features, but the row has the position"
            _refuse(data.indices >= width, data.indptr, lambda at: f"{told} {data.indices[at]}; positions count from 0")
            data.resize((rows, width))
        return super()._run(data, rows, model, inference_args)

    def _data_of_rows(self, rows: Sequence[Any]) -> Any:
        if _are_records(rows):
            return self._data_of_table(table_of_records(rows, self._pair()))
        return _scipy_sparse().vstack(rows, format="csr")

    def _data_of_table(self, table: pa.Table) -> Any:
        names = self._pair()
        for name in names:
            if not _holds_lists(kind := table.schema.field(name).type, is_number):
                raise RowError(f"column {name!r} holds {kind}; expected lists of numbers")
        places, values = (table.column(name).combine_chunks() for name in names)
        _refuse_uneven(places, values, names)
        lengths = places.value_lengths().to_numpy(zero_copy_only=False)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        flat = _positions(places.flatten(), starts, names[0])
        width = int(flat.max()) + 1 if len(flat) else 1
        numbers = values.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False)
        return _scipy_sparse().csr_matrix((numbers, flat, starts), shape=(table.num_rows, width))

    def _pair(self) -> tuple[str, str]:
        names = self.input_columns()
        if names is None or len(names) != 2:
            raise UsageError(
                f"columns={self._columns!r}: of sparse rows, name the two columns of lists, as in "
                'columns=["positions", "values"]; for one column a feature use the handler for NumPy'
            )
        return names[0], names[1]

    def check_columns(self, schema: pa.Schema) -> None:
        names = self._pair()
        check_names(names, schema.names)
        for name, test in zip(names, (pa.types.is_integer, is_number), strict=True):
            kind = schema.field(schema.names.index(name)).type
            if not _holds_lists(kind, test):
                word = "whole numbers" if test is pa.types.is_integer else "numbers"
                raise UsageError(f"column {name!r} holds {kind}; expected lists of {word}")

    def get_num_bytes(self, batch: Sequence[Sparse]) -> int:
        data = self._data_of_rows(batch)
        return int(data.data.nbytes + data.indices.nbytes + data.indptr.nbytes)


def _are_records(rows: Sequence[Any]) -> bool:
    return any(isinstance(row, Mapping) for row in rows)


def _holds_lists(kind: pa.DataType, of: Callable[[pa.DataType], bool]) -> bool:
    return is_list(kind) and of(kind.value_type)


def _positions(flat: pa.Array, starts: Any, name: str) -> Any:
    """The positions of all rows. BadRowsError for rows with one that is none. Whole numbers beside floats or nulls, in rows
    of Python's numbers, have come as floats."""
    numbers = flat.to_numpy(zero_copy_only=False)
    if len(numbers):
        told = f"in column {name!r} of this row are positions, which are whole numbers from 0, but saw"
        _refuse(~((numbers >= 0) & (numbers == np.floor(numbers))), starts, lambda at: f"{told} {flat[at].as_py()}")
    return numbers.astype(np.int64)


def _refuse(wrong: Any, starts: Any, message: Callable[[int], str]) -> None:
    """BadRowsError for the rows that have a wrong position; message(at): says of the one at this place what it is."""
    found = np.flatnonzero(wrong)
    rows = np.searchsorted(starts, found, side="right") - 1
    if len(found):
        raise BadRowsError({int(row): RowError(message(int(at))) for row, at in zip(rows[::-1], found[::-1], strict=True)})


def _refuse_uneven(places: pa.Array, values: pa.Array, names: Sequence[str]) -> None:
    """BadRowsError for rows that are null, or that have another number of values than of positions."""
    one, other = (each.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False) for each in (places, values))
    bad = np.flatnonzero((one != other) | (one < 0))
    if len(bad):
        told = f"columns {names[0]!r} and {names[1]!r} must be lists of one length in each row, but saw"
        raise BadRowsError({int(at): RowError(f"{told} {places[at].as_py()} and {values[at].as_py()}") for at in bad})


def _scipy_sparse() -> Any:
    return imported("scipy.sparse", "scipy", "xgboost")
