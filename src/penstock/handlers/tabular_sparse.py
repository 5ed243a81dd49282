"""Sparse rows for models over tables: SciPy matrices of one row, or two columns of lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.errors import BadRowsError, MissingPackageError, RowError, UsageError
from penstock.handlers.number_columns import check_names, is_number, table_of_records
from penstock.handlers.tabular import InferenceArgs, TabularModelHandler

if TYPE_CHECKING:
    import scipy.sparse

Sparse: TypeAlias = "scipy.sparse.csr_matrix | Mapping[str, Any]"


class OfSparse(TabularModelHandler[Sparse]):
    """Examples are SciPy matrices of one row; the model gets one CSR matrix with a row for each.

    columns=["positions", "values"]: two columns of lists, which features a row has and their values, from 0. What a row does
    not have is missing, or zero, as the model takes it: XGBoost takes it for missing.
    """

    def _width(self, model: Any) -> int:
        """How many features the model takes."""
        raise NotImplementedError

    def _run(self, data: Any, rows: int, model: Any, inference_args: InferenceArgs) -> Any:
        if data.shape[1] < self._width(model) and self._columns is not None:  # of lists, the last features need not be there
            data.resize((rows, self._width(model)))
        return super()._run(data, rows, model, inference_args)

    def _data_of_rows(self, rows: Sequence[Any]) -> Any:
        sparse = _scipy_sparse()
        if isinstance(rows[0], Mapping):
            return self._data_of_table(table_of_records(rows, self._pair()))
        shapes = {tuple(row.shape) if sparse.issparse(row) else type(row).__name__ for row in rows}
        if len(shapes) > 1 or not isinstance(shape := next(iter(shapes)), tuple) or shape[0] != 1:
            seen = ", ".join(sorted(map(str, shapes)))
            raise RowError(f"the rows of one batch must be sparse SciPy matrices of one row and one width, but saw {seen}")
        return sparse.vstack(rows, format="csr")

    def _data_of_table(self, table: pa.Table) -> Any:
        names = self._pair()
        places, values = (table.column(name).combine_chunks() for name in names)
        _refuse_uneven(places, values, names)
        lengths = places.value_lengths().to_numpy(zero_copy_only=False)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        flat = places.flatten().to_numpy(zero_copy_only=False)
        if len(flat) and flat.min() < 0:
            raise RowError(f"column {names[0]!r} has the position {flat.min()}; positions count from 0")
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
            if not hasattr(kind, "value_type") or not test(kind.value_type):
                word = "whole numbers" if test is pa.types.is_integer else "numbers"
                raise UsageError(f"column {name!r} holds {kind}; expected lists of {word}")

    def get_num_bytes(self, batch: Sequence[Sparse]) -> int:
        data = self._data_of_rows(batch)
        return int(data.data.nbytes + data.indices.nbytes + data.indptr.nbytes)


def _refuse_uneven(places: pa.Array, values: pa.Array, names: Sequence[str]) -> None:
    """BadRowsError for rows that are null, or that have another number of values than of positions."""
    one, other = (each.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False) for each in (places, values))
    bad = np.flatnonzero((one != other) | (one < 0))
    if len(bad):
        told = f"columns {names[0]!r} and {names[1]!r} must be lists of one length in each row, but saw"
        raise BadRowsError({int(at): RowError(f"{told} {places[at].as_py()} and {values[at].as_py()}") for at in bad})


def _scipy_sparse() -> Any:
    try:
        import scipy.sparse
    except ModuleNotFoundError as exc:
        raise MissingPackageError("scipy", "xgboost") from exc
    return scipy.sparse
