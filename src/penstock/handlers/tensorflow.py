"""Handlers for TensorFlow and Keras models: a SavedModel, a Keras file, or weights with the function that makes their model.

rows or columns -> one array for each input -> the model -> an array for each output
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from penstock.handlers.array_answers import answers_of, is_several
from penstock.handlers.array_inputs import Inputs, InputSpec
from penstock.handlers.arrays import ArrayModelHandler, InferenceArgs
from penstock.handlers.catalog import check_installed, check_versions
from penstock.handlers.number_columns import check_names
from penstock.handlers.tensorflow_models import SIGNATURE, ModelType, TFModel, TFSource, fetched
from penstock.inference.handler_checks import checked_path
from penstock.inference.handler_settings import HandlerSettings

if TYPE_CHECKING:
    import pyarrow as pa

check_installed("tensorflow")

__all__ = ["ModelType", "TFModelHandlerNumpy", "TFModelHandlerTensor"]

TFInferenceFn: TypeAlias = "Callable[[Any, Sequence[Any], Mapping[str, Any], str | None], Iterable[Any]]"


class TFModelHandlerNumpy(ArrayModelHandler):
    """Examples are arrays of the type and shape of the model's input; or dicts of arrays, where it has several.

    columns="x": one column as the input: numbers, or lists of one length. columns=["x", "y"]: for a model with one input,
    one matrix of these columns; for a model with several, a column for each input, by its name. Numbers become the type of
    the input where it has each of them, nulls among floats NaN. An input of texts takes a column of texts.

    Answers are NumPy's arrays. One output is the answer itself, several are a dict by name, or a tuple.
    """

    def __init__(
        self,
        model_uri: str,
        model_type: ModelType = ModelType.SAVED_MODEL,
        create_model_fn: Callable[[], Any] | None = None,
        *,
        load_model_args: Mapping[str, Any] | None = None,
        custom_weights: str = "",
        inference_fn: TFInferenceFn | None = None,
        signature: str = SIGNATURE,
        trusted: bool = False,
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe a model in a SavedModel folder, in a .keras file, or by its weights.

        create_model_fn(): gives the Keras model that weights are for, with ModelType.SAVED_WEIGHTS.
        load_model_args: for tf.saved_model.load() or keras.models.load_model(); weights take none.
        custom_weights: a file of weights that replace those of a Keras file.
        inference_fn(model, batch, inference_args, model_id): gives the answers to a batch: an array or tensor, a dict or
            tuple of them, or a list of one answer or PredictionResult for each row. The model is a function of a tensor, a
            list or a dict of them; several outputs are a dict, or a tuple.
        signature: of a SavedModel, what is called.
        trusted: you trust the file to run code: a SavedModel needs it, an .h5 file, and a .keras file with Lambda layers.
        inference_args of RunInference are more arguments of the call, which all rows share.
        """
        super().__init__(model_uri, None, settings)
        self._source = TFSource(
            path=str(model_uri),
            model_type=model_type,
            create_model_fn=create_model_fn,
            custom_weights=custom_weights,
            load_model_args=dict(load_model_args or {}),
            signature=signature,
            trusted=trusted,
        )
        self._own_fn = inference_fn
        self.wraps_answers = inference_fn is None

    def load_model(self) -> TFModel:
        check_versions("tensorflow")
        return self._source.load()

    def run_inference(self, batch: Sequence[Any], model: TFModel, inference_args: InferenceArgs = None) -> Any:
        if self._own_fn is not None:
            made = self._own_fn(model.call, batch, inference_args or {}, self.model_id())
            return answers_of(fetched(made), len(batch)) if is_several(made) or isinstance(made, Mapping) else made
        return super().run_inference(batch, model, inference_args)

    def _specs(self, model: TFModel, inference_args: InferenceArgs) -> Sequence[InputSpec]:
        return [spec for spec in model.specs if model.keras or spec.name not in (inference_args or {})]

    def _call(self, model: TFModel, inputs: Inputs, inference_args: InferenceArgs) -> Any:
        import tensorflow as tf

        names = [spec.name for spec in self._specs(model, inference_args)]
        named = inputs if isinstance(inputs, dict) else {names[0] if names else "": inputs}
        tensors = {name: tf.convert_to_tensor(array) for name, array in named.items()}
        given: Any = tensors
        if model.takes == "one" and (names or "" in tensors):
            given = next(iter(tensors.values()))
        elif model.takes == "list":
            given = [tensors[name] for name in names]
        return fetched(model.call(given, **(inference_args or {})))

    def _check_types(self, schema: pa.Schema, names: Sequence[str]) -> None:
        """Some models take texts: whether this one does is known when it is loaded."""
        check_names(names, schema.names)

    def takes_columns(self) -> bool:
        return self._columns is not None and self._own_fn is None

    def changes_rows(self) -> bool:
        return self._own_fn is not None

    def model_files(self) -> Sequence[str]:
        return [path for path in (self._source.path, self._source.custom_weights) if path]

    def update_model_path(self, model_path: str) -> None:
        """Another model of the same kind, trusted like the first."""
        self._model_uri = checked_path(model_path)
        self._source = self._source.at(self._model_uri)

    def get_metrics_namespace(self) -> str:
        return "Penstock_TF_Numpy"


class TFModelHandlerTensor(TFModelHandlerNumpy):
    """Like TFModelHandlerNumpy, for examples that are tensors, or dicts of tensors. Answers are NumPy's arrays."""

    def get_metrics_namespace(self) -> str:
        return "Penstock_TF_Tensor"
