"""Handlers that were written against Beam's ModelHandler, as handlers of Penstock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from apache_beam.ml.inference import base

from penstock.beam import model_handler
from penstock.beam.model_handler import OfKeyedModelHandler
from penstock.errors import UsageError
from penstock.inference import keyed
from penstock.inference.handler import ExampleT, ModelHandler, ModelT, PredictionT
from penstock.inference.models_by_key import ModelsByKey

BATCHING = {  # arguments of Beam's batching: what each is called here; None: there is nothing to set
    "min_batch_size": "min_batch_size",
    "max_batch_size": "max_batch_size",
    "max_batch_duration_secs": "max_batch_duration_secs",
    "max_batch_weight": "max_batch_weight",
    "element_size_fn": "element_size_fn",
    "length_fn": None,  # get_lengths() calls it
    "bucket_boundaries": None,
    "target_batch_overhead": None,
    "target_batch_duration_secs": None,
    "target_batch_duration_secs_including_fixed_cost": None,
    "variance": None,
    "clock": None,
    "record_metrics": None,
}

DEFINE_IT = "define update_model_path(self, model_path), which sets what load_model() loads"
KeyT = TypeVar("KeyT")


def from_beam(handler: Any) -> ModelHandler[Any, Any, Any]:
    """A handler of Penstock that does what this one does. One of Penstock's is given back as it is."""
    if isinstance(handler, ModelHandler):
        return handler
    if not isinstance(handler, base.ModelHandler):
        hint = f"call it: {handler.__name__}(...)" if isinstance(handler, type) else "subclass penstock.beam.ModelHandler"
        raise UsageError(f"{handler!r}: expected a ModelHandler of Penstock or of Beam; {hint}")
    made, before, after = _peeled(handler)
    for function in reversed(before):  # the last one attached runs first
        made = made.with_preprocess_fn(function)
    for function in after:
        made = made.with_postprocess_fn(function)
    return made.with_no_batching() if handler.should_skip_batching() else made


def _peeled(handler: Any) -> tuple[ModelHandler[Any, Any, Any], Sequence[Any], Sequence[Any]]:
    """The handler inside, and the functions around it, in the order in which they run."""
    before, after = list(handler.get_preprocess_fns()), list(handler.get_postprocess_fns())
    while isinstance(
        handler, (base._PreProcessingModelHandler, base._PostProcessingModelHandler, base._PrebatchedModelHandler)
    ):
        handler = handler._base
    if type(handler) is base.MaybeKeyedModelHandler:
        return MaybeKeyedModelHandler(handler._unkeyed), before, after
    if type(handler) is not base.KeyedModelHandler:
        return BeamModelHandler(handler), before, after
    if handler._single_model:
        return KeyedModelHandler(handler._unkeyed), before, after
    return _keyed(handler), before, after


def check_can_change(handler: ModelHandler[Any, Any, Any]) -> None:
    """UsageError for handlers that ignore a new path: Beam would go on with the old model under the new name."""
    inner = handler.unkeyed if isinstance(handler, keyed.KeyedModelHandler) else handler
    for kind in inner.kinds() if isinstance(inner, ModelsByKey) else [inner]:
        own = getattr(kind, "beam", kind)
        if ignores_paths(own):
            what = "ignores a new path, so its model cannot change while a pipeline runs"
            raise UsageError(f"{type(own).__name__} {what}: {DEFINE_IT}")


def ignores_paths(handler: Any) -> bool:
    """Of a handler of Beam's, or one whose base is replaced: whether it has no update_model_path() of its own."""
    method = getattr(type(handler), "update_model_path", None)
    return method in (base.ModelHandler.update_model_path, model_handler.ModelHandler.update_model_path)


def _keyed(handler: Any) -> ModelHandler[Any, Any, Any]:
    keys: dict[Any, list[Any]] = {}
    for key, first in handler._key_to_id_map.items():
        keys.setdefault(first, []).append(key)
    mappings: list[Any] = [KeyModelMapping(keys[first], own) for first, own in handler._id_to_mh_map.items()]
    return KeyedModelHandler(mappings, max_models_per_worker_hint=handler._max_models_per_worker_hint)


class KeyModelMapping(keyed.KeyModelMapping, Generic[KeyT, ExampleT, PredictionT, ModelT]):
    """Elements with these keys are for this handler's model: a handler of Penstock's or of Beam's."""

    def __init__(self, keys: Sequence[KeyT], mh: Any) -> None:
        super().__init__(keys, from_beam(mh))

    @property
    def mh(self) -> ModelHandler[Any, Any, Any]:
        """The handler, by Beam's name for it."""
        return self.model_handler


class KeyedModelHandler(keyed.KeyedModelHandler, OfKeyedModelHandler, Generic[KeyT, ExampleT, PredictionT, ModelT]):
    """Penstock's, which takes handlers of Beam's, too."""

    def __init__(
        self,
        unkeyed: Any,
        max_models_per_worker_hint: int | None = None,
        memory_budget: str | int | None = None,
        *,
        default: Any = None,
        key_column: str | None = None,
    ) -> None:
        """As of Penstock's. max_models_per_worker_hint has nothing to do where there is one model."""
        if isinstance(unkeyed, (ModelHandler, base.ModelHandler)):
            unkeyed, max_models_per_worker_hint = from_beam(unkeyed), None
        elif isinstance(unkeyed, list):
            unkeyed = list(map(_own_mapping, unkeyed))
        settings: dict[str, Any] = {"default": _or_none(default), "key_column": key_column}
        super().__init__(unkeyed, max_models_per_worker_hint, memory_budget, **settings)

    @classmethod
    def from_pattern(cls, pattern: str, handler: Any, *args: Any, default: Any = None, **settings: Any) -> Any:
        return super().from_pattern(pattern, from_beam(handler), *args, default=_or_none(default), **settings)


class MaybeKeyedModelHandler(
    keyed.MaybeKeyedModelHandler, OfKeyedModelHandler, Generic[KeyT, ExampleT, PredictionT, ModelT]
):
    """Penstock's, which takes handlers of Beam's, too."""

    def __init__(self, unkeyed: Any) -> None:
        super().__init__(from_beam(unkeyed))


def _own_mapping(mapping: Any) -> Any:
    return KeyModelMapping(mapping.keys, mapping.mh) if isinstance(mapping, base.KeyModelMapping) else mapping


def _or_none(handler: Any) -> ModelHandler[Any, Any, Any] | None:
    return None if handler is None else from_beam(handler)


class BeamModelHandler(ModelHandler[Any, Any, Any]):
    """A handler of Beam's, asked for all that it says of itself. It may never have called super().__init__()."""

    def __init__(self, handler: Any) -> None:
        self.beam = handler
        self._env_vars = dict(getattr(handler, "_env_vars", None) or {})
        kwargs = dict(handler.batch_elements_kwargs())
        if unknown := sorted(set(kwargs) - set(BATCHING)):
            raise UsageError(f"{type(handler).__name__}.batch_elements_kwargs() has {unknown}, which Penstock does not know")
        self._length_fn = kwargs.get("length_fn") or getattr(handler, "_batch_length_fn", None)

    def set_environment_vars(self) -> None:
        self.beam.set_environment_vars()

    def load_model(self) -> Any:
        return self.beam.load_model()

    def run_inference(self, batch: Sequence[Any], model: Any, inference_args: Mapping[str, Any] | None = None) -> Any:
        return list(self.beam.run_inference(batch, model, inference_args))

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        given = self.beam.batch_elements_kwargs()
        return {own: given[name] for name, own in BATCHING.items() if own is not None and given.get(name) is not None}

    def measures_length(self) -> bool:
        return self._length_fn is not None

    def get_lengths(self, batch: Sequence[Any]) -> Sequence[int]:
        assert self._length_fn is not None
        return [int(self._length_fn(example)) for example in batch]

    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        return int(self.beam.get_num_bytes(batch))

    def get_metrics_namespace(self) -> str:
        return str(self.beam.get_metrics_namespace())

    def override_metrics(self, metrics_namespace: str = "") -> bool:
        """What Beam's handler says: True, if it counts by itself, and nothing else is reported."""
        return bool(self.beam.override_metrics(metrics_namespace))

    def get_resource_hints(self) -> Mapping[str, Any]:
        return dict(self.beam.get_resource_hints())

    def validate_inference_args(self, inference_args: Mapping[str, Any] | None) -> None:
        self.beam.validate_inference_args(inference_args)

    def update_model_path(self, model_path: str) -> None:
        if ignores_paths(self.beam):
            raise UsageError(f"{type(self.beam).__name__} ignores a new path: {DEFINE_IT}")
        self.beam.update_model_path(model_path)

    def share_model_across_processes(self) -> bool:
        return bool(self.beam.share_model_across_processes())

    def model_copies(self) -> int | None:
        copies = int(self.beam.model_copies())
        return None if copies == 1 else copies
