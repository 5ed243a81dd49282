"""TensorFlow models from files: a SavedModel, a Keras file, or weights with the function that makes their model.

tensorflow is imported where a model is loaded, not where it is only described.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import InputError, PenstockError, UsageError
from penstock.handlers.array_answers import ModelOutputs, by_name
from penstock.handlers.array_inputs import InputSpec
from penstock.handlers.keras_files import check_keras_file, untrusted
from penstock.handlers.model_files import open_model_file

SIGNATURE = "serving_default"  # what Keras and TensorFlow call the one that they write


class ModelType(enum.Enum):
    """What is in the file."""

    SAVED_MODEL = 1  # a whole model: a SavedModel folder, or a Keras file
    SAVED_WEIGHTS = 2  # the weights of what create_model_fn() makes


@dataclass(frozen=True)
class TFModel:
    """A model that takes a tensor for each input."""

    call: Callable[..., Any]  # of one tensor, a list or a dict of them
    specs: Sequence[InputSpec]  # none: it does not say
    takes: str  # "dict", "list" or "one"
    keras: bool = False


@dataclass(frozen=True, kw_only=True)
class TFSource:
    """Where the model comes from. Checked when made."""

    path: str
    model_type: ModelType
    create_model_fn: Callable[[], Any] | None
    custom_weights: str
    load_model_args: Mapping[str, Any]
    signature: str
    trusted: bool

    def __post_init__(self) -> None:
        if not isinstance(self.model_type, ModelType):
            raise UsageError(f"model_type={self.model_type!r}: expected ModelType.SAVED_MODEL or ModelType.SAVED_WEIGHTS")
        if (self.model_type is ModelType.SAVED_WEIGHTS) != (self.create_model_fn is not None):
            raise UsageError("create_model_fn= and ModelType.SAVED_WEIGHTS go together: it makes the model for the weights")
        if self.model_type is ModelType.SAVED_WEIGHTS:
            self._refuse_of_models()
        elif self.path.endswith(".keras"):
            self._check_signature()
        if not self.trusted and self.load_model_args.get("safe_mode", True) is not True:
            raise UsageError("load_model_args: safe_mode=False runs code from the file; pass trusted=True if you trust it")
        if self.model_type is ModelType.SAVED_MODEL and not self.path.endswith(".keras"):
            self._check_trusted()

    def _check_trusted(self) -> None:
        if not self.trusted:
            raise UsageError(
                f"{self.path!r}: to load a SavedModel, or an .h5 file of a whole model, can run code that is in it; pass "
                "trusted=True if you made it or trust who did, or save the model as a .keras file, or its weights alone"
            )

    def _refuse_of_models(self) -> None:
        """UsageError for what says how a whole model is loaded: weights are loaded into what create_model_fn() makes."""
        given = {"custom_weights": self.custom_weights, "load_model_args": self.load_model_args}
        names = [f"{name}=" for name, value in given.items() if value]
        if names or self.signature != SIGNATURE:
            raise UsageError(
                f"{' and '.join(names) or 'signature='}: for a whole model, but ModelType.SAVED_WEIGHTS loads the weights "
                "in model_uri into what create_model_fn() makes; leave it out"
            )

    def _check_signature(self) -> None:
        if self.signature != SIGNATURE:
            raise UsageError(f"signature={self.signature!r} is for a SavedModel; a Keras file has none: leave it out")

    def at(self, path: str) -> TFSource:
        """Another file of the same kind, loaded in the same way and trusted alike."""
        return replace(self, path=path)

    def load(self) -> TFModel:
        """InputError where a file is missing or is not what it is said to be."""
        for path in filter(None, (self.path, self.custom_weights)):
            if "://" not in path and not os.path.exists(path):
                raise InputError(
                    f"model {path!r} does not exist; expected a file or folder that the process that loads the model can "
                    "read: check the spelling, or give an absolute path"
                )
        try:
            if self.model_type is ModelType.SAVED_WEIGHTS:
                return self._with_weights()
            return self._keras_model() if self._is_keras_file() else self._saved_model()
        except PenstockError:
            raise
        except Exception as exc:
            if not self.trusted and "safe_mode" in str(exc):
                raise untrusted(self.path, exc) from exc
            what = "weights" if self.model_type is ModelType.SAVED_WEIGHTS else "a model"
            raise InputError(
                f"{self.path!r} could not be loaded as {what}: {type(exc).__name__}: {exc}; check the path and model_type, "
                "and that weights fit what create_model_fn() makes"
            ) from exc

    def _with_weights(self) -> TFModel:
        assert self.create_model_fn is not None
        model = self.create_model_fn()
        model.load_weights(self.path)
        return _of_keras(model)

    def _is_keras_file(self) -> bool:
        """Not a folder of that name, which is a SavedModel or a checkpoint."""
        if "://" in self.path:
            return self.path.endswith((".keras", ".h5", ".hdf5"))
        return not os.path.isdir(self.path)

    def _keras_model(self) -> TFModel:
        self._check_signature()
        options = {"compile": False, "safe_mode": not self.trusted, **self.load_model_args}
        with self._local_file() as path:
            if self.trusted:
                import tensorflow as tf

                model = tf.keras.models.load_model(path, **options)
            else:
                import keras  # not tf.keras, which may be set to be Keras 2: its safe mode stops little

                with open(path, "rb") as file:
                    check_keras_file(self.path, file)
                model = keras.models.load_model(path, **options)
        if self.custom_weights:
            model.load_weights(self.custom_weights)
        return _of_keras(model)

    @contextlib.contextmanager
    def _local_file(self) -> Iterator[str]:
        """The path of the file, or of a copy of what is at a URL."""
        if "://" not in self.path:
            yield self.path
            return
        with tempfile.TemporaryDirectory() as folder, open_model_file(self.path) as file:
            copy = os.path.join(folder, self.path.rpartition("/")[2])
            with open(copy, "wb") as into:
                shutil.copyfileobj(file, into)
            yield copy

    def _saved_model(self) -> TFModel:
        import tensorflow as tf

        self._check_trusted()
        if self.custom_weights:
            raise UsageError("custom_weights= are for Keras files; a SavedModel has its own")
        loaded = tf.saved_model.load(self.path, **self.load_model_args)
        if self.signature not in loaded.signatures:
            raise UsageError(
                f"{self.path!r} has no signature {self.signature!r}; it has {sorted(loaded.signatures)}: give one of them "
                "as signature=, or save the model with model.export(path), or with tf.saved_model.save(..., signatures=...)"
            )
        return _of_signature(loaded, loaded.signatures[self.signature])


def _of_keras(model: Any) -> TFModel:
    import tensorflow as tf

    def run(inputs: Any, **arguments: Any) -> Any:
        output = model(inputs, **{"training": False, **arguments})
        return tuple(output) if isinstance(output, list) else output  # an inference_fn's list has an answer for each row

    known = getattr(model, "inputs", None) or []  # none of models that are classes of their own
    struct = getattr(model, "input", known) if known else known
    call = tf.function(run, reduce_retracing=True)  # one trace for batches of all sizes
    if isinstance(struct, Mapping):
        return TFModel(call, [_spec(name, each) for name, each in struct.items()], "dict", keras=True)
    specs = [_spec(each.name, each) for each in (struct if isinstance(struct, (list, tuple)) else [struct])]
    return TFModel(call, specs, "list" if len(specs) > 1 else "one", keras=True)


def _of_signature(loaded: Any, function: Any) -> TFModel:
    named = function.structured_input_signature[1]
    specs = [_spec(name, each) for name, each in named.items()]

    def run(inputs: Mapping[str, Any], **arguments: Any) -> Any:
        return function(**inputs, **arguments)

    run.keeps = loaded  # type: ignore[attr-defined]  # its variables live as long as it does
    return TFModel(run, specs, "dict")


def _spec(name: str, described: Any) -> InputSpec:
    import tensorflow as tf

    dtype = tf.as_dtype(described.dtype)
    kind = np.dtype(object) if dtype == tf.string else np.dtype(dtype.as_numpy_dtype)
    shape = None if described.shape is None else tuple(described.shape)
    return InputSpec(name, kind, shape or None)


def fetched(output: Any) -> Any:
    """A model's output as NumPy's arrays; what has names is a dict, and a dict of one output is that output."""
    output = by_name(output)
    if isinstance(output, Mapping):
        parts = {str(name): fetched(part) for name, part in output.items()}
        return next(iter(parts.values())) if len(parts) == 1 else parts
    if isinstance(output, (tuple, list)):
        parts_of = ModelOutputs(fetched(part) for part in output)
        return parts_of[0] if len(parts_of) == 1 else parts_of
    return output.numpy() if hasattr(output, "numpy") else output
