"""The handler of ONNX models of arrays.

rows or columns -> one array for each input -> InferenceSession.run() -> an array for each output
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import numpy as np

from penstock.errors import UsageError
from penstock.handlers.array_inputs import Inputs, InputSpec
from penstock.handlers.arrays import ArrayModelHandler, InferenceArgs, InferenceFn
from penstock.handlers.catalog import check_versions
from penstock.handlers.number_columns import check_names
from penstock.handlers.onnx_sessions import Provider, check_options, is_gpu, load_session, providers_named, runs_on_gpu
from penstock.inference.handler_settings import HandlerSettings

if TYPE_CHECKING:
    import onnxruntime
    import pyarrow as pa

SessionOptions: TypeAlias = "Mapping[str, Any] | Callable[[], onnxruntime.SessionOptions] | None"

_TYPES = {"float": "float32", "double": "float64", "string": "object", "bfloat16": ""}


class OnnxModelHandlerNumpy(ArrayModelHandler):
    """Examples are arrays of the type and shape of the model's input; or dicts of arrays, where it has several.

    columns="x": one column as the input: numbers, or lists of one length. columns=["x", "y"]: for a model with one input,
    one matrix of these columns; for a model with several, a column for each input, by its name. Numbers become the type of
    the input where it has each of them, nulls among floats NaN.

    One output is the answer itself, several are a dict by name. A model that was exported for a fixed number of rows is
    called in pieces of so many; the last is filled up.
    """

    def __init__(
        self,
        model_uri: str,
        session_options: SessionOptions = None,
        providers: Sequence[Provider] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        inference_fn: InferenceFn | None = None,
        output_names: Sequence[str] | None = None,
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe a model in an .onnx file.

        session_options: attributes of onnxruntime.SessionOptions by name, and config entries by theirs (which have dots); or
            a function that gives SessionOptions. The threads of one operator are this process's share, unless set here.
        providers: what runs the model, the first that can: "CUDA", "TensorRT", "CPU" or any of ONNX Runtime's own names,
            each alone or with its options: ("CUDA", {"device_id": 0}). None: CUDA where onnxruntime-gpu is installed and
            there is a GPU, else the CPU.
        provider_options: the options of each provider, if they do not stand beside the names.
        inference_fn(session, batch, inference_args): gives one answer per row: an array, a dict of arrays or a list.
        output_names: the outputs that are wanted; None: all.
        inference_args of RunInference are more inputs by name, which all rows share.
        """
        super().__init__(model_uri, inference_fn, settings)
        check_options(session_options)
        if inference_fn is not None and output_names is not None:
            raise UsageError(
                "output_names= are for the model itself, but inference_fn= calls session.run() as it likes; name the "
                "outputs there"
            )
        self._session_options = session_options
        self._providers = providers_named(providers, provider_options)
        self._output_names = None if output_names is None else list(output_names)

    def load_model(self) -> onnxruntime.InferenceSession:
        check_versions("onnx")
        session = load_session(self._model_uri, self._session_options, self._providers)
        known = [output.name for output in session.get_outputs()]
        missing = [name for name in self._output_names or () if name not in known]
        if missing:
            raise UsageError(f"output_names: {self.model_id()!r} has no output {missing}; it has {known}")
        return session

    def _specs(self, model: onnxruntime.InferenceSession, inference_args: InferenceArgs) -> Sequence[InputSpec]:
        return [_spec(each) for each in model.get_inputs() if each.name not in (inference_args or {})]

    def _call(self, model: onnxruntime.InferenceSession, inputs: Inputs, inference_args: InferenceArgs) -> Any:
        named = inputs if isinstance(inputs, dict) else {self._specs(model, inference_args)[0].name: inputs}
        names = self._output_names or [output.name for output in model.get_outputs()]
        kinds = {each.name: _spec(each).dtype for each in model.get_inputs()}
        more = {name: np.asarray(value, kinds.get(name)) for name, value in (inference_args or {}).items()}
        outputs = model.run(names, {**named, **more})
        return outputs[0] if len(names) == 1 else dict(zip(names, outputs, strict=True))

    def _check_types(self, schema: pa.Schema, names: Sequence[str]) -> None:
        """Some models take texts: whether this one does is known when it is loaded."""
        check_names(names, schema.names)

    def is_native(self) -> bool:
        return type(self).__module__ == __name__ and self._inference_fn is None

    def is_thread_safe(self, model: onnxruntime.InferenceSession) -> bool:
        return self.is_native()

    def accelerator(self) -> str | None:
        return "gpu" if is_gpu(self._providers) else None

    def new_shapes_cost(self) -> bool:
        return runs_on_gpu(self._providers)

    def model_files(self) -> Sequence[str]:
        """The file, and the one beside it that holds large weights."""
        path = str(self._model_uri)
        return [path, *(more for more in (f"{path}.data", f"{path}_data") if os.path.isfile(more))]

    def get_metrics_namespace(self) -> str:
        return "Penstock_ONNX"


def _spec(described: Any) -> InputSpec:
    """Of an input that ONNX Runtime describes, such as tensor(float) of ['batch', 3]."""
    kind = described.type.removeprefix("tensor(").removesuffix(")")
    try:
        dtype = np.dtype(_TYPES.get(kind, kind))
    except TypeError:  # not of NumPy: the session says what it takes
        return InputSpec(described.name)
    shape = tuple(axis if isinstance(axis, int) else None for axis in described.shape)
    return InputSpec(described.name, dtype, shape or None)
