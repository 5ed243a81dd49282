"""What handlers of models of arrays share (ONNX, TensorFlow, JAX): all but the model.

rows or columns -> one NumPy array, or one for each input -> the model -> one array of answers, or one for each output
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.blocks import byte_size
from penstock.errors import UsageError
from penstock.handlers.array_answers import ModelOutputs, answers_of, column_answers_of
from penstock.handlers.array_columns import check_types
from penstock.handlers.array_inputs import FLOATS, Inputs, InputSpec, column_input, stacked, stacked_by_name
from penstock.handlers.number_columns import check_names, table_of_records
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import checked_path
from penstock.inference.handler_settings import HandlerSettings
from penstock.io.files import without_secrets
from penstock.rows import PredictionResult

if TYPE_CHECKING:
    import pyarrow as pa

InferenceArgs: TypeAlias = Mapping[str, Any] | None
InferenceFn: TypeAlias = Callable[[Any, Sequence[Any], InferenceArgs], Any]


class ArrayModelHandler(ModelHandler[Any, PredictionResult, Any]):
    """A model at one path. Families say how it is loaded, which inputs it has, and how it is called."""

    wraps_answers = True

    def __init__(self, model_uri: str, inference_fn: InferenceFn | None, settings: HandlerSettings) -> None:
        super().__init__(**settings)
        self._model_uri = model_uri
        self._inference_fn = inference_fn

    # What each framework defines.

    def _specs(self, model: Any, inference_args: InferenceArgs) -> Sequence[InputSpec]:
        """The inputs with a value for each row: all but those that inference_args give. None: the model does not say."""
        return ()

    def _takes_names(self, specs: Sequence[InputSpec]) -> bool:
        """Whether each of several columns is an input of its own."""
        return len(specs) > 1

    def _float_type(self, model: Any) -> np.dtype[Any]:
        """What floats of columns become, where an input does not say."""
        return FLOATS

    def _call(self, model: Any, inputs: Inputs, inference_args: InferenceArgs) -> Any:
        """What the model says of a whole batch: NumPy arrays with the rows first, one, in a dict or in a tuple."""
        raise NotImplementedError

    # Rows.

    def run_inference(self, batch: Sequence[Any], model: Any, inference_args: InferenceArgs = None) -> Any:
        if self._inference_fn is not None:
            return answers_of(self._inference_fn(model, batch, inference_args), len(batch))
        specs = self._specs(model, inference_args)
        if self._are_records(batch):
            inputs = self._columns_as_inputs(table_of_records(batch, self.input_columns()), specs, self._float_type(model))
        else:
            inputs = self._rows_as_inputs(batch, specs)
        return answers_of(self._run(model, inputs, len(batch), inference_args), len(batch))

    def _are_records(self, batch: Sequence[Any]) -> bool:
        """Whether rows are dicts of the columns, not yet of arrays."""
        names = self.input_columns()
        if names is None or not isinstance(batch[0], Mapping):
            return False
        return not all(isinstance(batch[0].get(name), (np.ndarray, np.generic)) for name in names)

    def _rows_as_inputs(self, batch: Sequence[Any], specs: Sequence[InputSpec]) -> Inputs:
        if isinstance(batch[0], Mapping) or len(specs) > 1:
            return stacked_by_name(batch, specs, self.model_id())
        return stacked(batch, specs[0] if specs else None, self.model_id())

    # Columns.

    def takes_columns(self) -> bool:
        return self._columns is not None and self._inference_fn is None

    def examples_of(self, table: pa.Table) -> Sequence[Any]:
        """Dicts of the columns, also where columns= is one name; what a function of the user's gets, is as ever."""
        rows: list[Any] = table.to_pylist()
        return rows if self._inference_fn is None else super().examples_of(table)

    def run_inference_columns(self, table: pa.Table, model: Any, inference_args: InferenceArgs = None) -> Any:
        check_names(self.input_columns(), table.column_names)
        inputs = self._columns_as_inputs(table, self._specs(model, inference_args), self._float_type(model))
        return column_answers_of(self._run(model, inputs, table.num_rows, inference_args), table.num_rows)

    def _columns_as_inputs(self, table: pa.Table, specs: Sequence[InputSpec], floats: np.dtype[Any]) -> Inputs:
        assert self._columns is not None
        names = self.input_columns() or ()
        if not self._takes_names(specs):
            return column_input(table, self._columns, specs[0] if specs else None, floats, self.model_id())
        wanted = [spec.name for spec in specs] or list(names)
        if set(wanted) != set(names):
            raise UsageError(
                f"the model in {self.model_id()!r} takes the inputs {wanted}, but columns={self._columns!r}; name a column "
                "for each input: rename columns in a step before if they have other names"
            )
        known: dict[str, InputSpec] = {spec.name: spec for spec in specs}
        return {name: column_input(table, name, known.get(name), floats, self.model_id()) for name in wanted}

    def check_columns(self, schema: pa.Schema) -> None:
        names = self.input_columns()
        if names is not None:
            check_names(names, schema.names)
            self._check_types(schema, names)
        elif self._inference_fn is None:
            raise UsageError(
                f"the rows are dicts of plain values, {list(schema.names)}, but the model takes arrays; name the columns "
                "that it takes with columns=[...], or make arrays with .with_preprocess_fn(lambda row: np.array(...))"
            )

    def _check_types(self, schema: pa.Schema, names: Sequence[str]) -> None:
        check_types(schema, names, lists=True, instead="make it an input of its own")

    # The model.

    def _run(self, model: Any, inputs: Inputs, rows: int, inference_args: InferenceArgs) -> Any:
        """Where the model takes a fixed number of rows, in pieces of so many, the last filled up with its last row."""
        size = next((spec.rows for spec in self._specs(model, inference_args) if spec.rows is not None), None)
        if size is None:
            return self._call(model, inputs, inference_args)
        pieces = []
        for start in range(0, rows, size):
            piece = each_of(inputs, lambda array, at=start: filled(array[at : at + size], size))  # type: ignore[misc]
            pieces.append(self._call(model, piece, inference_args))
        return _joined(pieces, rows)

    def changes_rows(self) -> bool:
        """Not where all it does with them is to stack them."""
        return self._inference_fn is not None

    def model_id(self) -> str:
        return without_secrets(str(self._model_uri))

    def model_files(self) -> Sequence[str]:
        return (str(self._model_uri),)

    def update_model_path(self, model_path: str) -> None:
        """Another model of the same kind."""
        self._model_uri = checked_path(model_path)

    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        return sum(row.nbytes if isinstance(row, np.ndarray) else byte_size([row]) for row in batch)


def each_of(inputs: Inputs, change: Callable[[Any], Any]) -> Inputs:
    """The inputs with every array changed."""
    return {name: change(array) for name, array in inputs.items()} if isinstance(inputs, dict) else change(inputs)


def filled(array: Any, size: int) -> Any:
    """The array with so many rows, by copies of its last one."""
    missing = size - len(array)
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing else array


def _joined(pieces: Sequence[Any], rows: int) -> Any:
    first = pieces[0]
    if isinstance(first, dict):
        return {name: _joined([piece[name] for piece in pieces], rows) for name in first}
    if isinstance(first, tuple):
        return ModelOutputs(_joined(each, rows) for each in zip(*pieces, strict=True))
    if isinstance(first, list):
        return [answer for piece in pieces for answer in piece][:rows]
    return np.concatenate(pieces)[:rows]
