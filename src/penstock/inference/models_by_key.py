"""Many models behind one step: which key has which model, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.batching.limits import BatchLimits
from penstock.errors import UsageError
from penstock.inference.handler import ModelHandler, is_prebatched, output_of, variables_of
from penstock.inference.model_keys import DEFAULT, SHOWN, Changed, Handler, OfKey, same_handler
from penstock.models.budget import MemoryBudget
from penstock.models.memory import available_bytes, file_bytes, free_device_bytes

WINDOW = 16_384  # rows under way in front of one place: the more may wait, the fewer loads are paid
FREE_SHARE = 0.5  # of the memory that is free, where the user sets no budget


class ModelsByKey(ModelHandler[Any, Any, Any]):
    """The models of a KeyedModelHandler, as one handler: it says what all of them have in common. Models go by name, which
    is text; no model is ever loaded by this handler itself."""

    def __init__(self, of_key: OfKey, default: Handler | None, budget: MemoryBudget, key_column: str | None) -> None:
        self.budget = budget
        self.key_column = key_column
        self._of_key = of_key
        self._default = default
        kinds = self.kinds()
        first = self._first = kinds[0]
        self.wraps_answers = first.wraps_answers
        self.retry_safe = all(kind.retry_safe for kind in kinds)
        self._env_vars = variables_of(first)
        self._columns = first._columns
        self._output_column, self._output_prefix = first._output_column, first._output_prefix
        self._own_limits = _own_limits(of_key, default, _limits_of(first))
        self._at_once = min(kind.max_concurrent_batches() for kind in kinds)
        self._shared = any(kind.share_model_across_processes() for kind in kinds)
        self._model_copies = max((n for kind in kinds if (n := kind.model_copies()) is not None), default=None)
        self._prepares = any(kind.prepares() for kind in kinds)
        self._measures = first.measures_length()
        self._no_batching = is_prebatched(first)
        self._functions = max(len(k.get_preprocess_fns()) for k in kinds), max(len(k.get_postprocess_fns()) for k in kinds)
        for kind in kinds[1:]:
            _check_alike(first, kind)

    def kinds(self) -> list[Handler]:
        """Every handler there is; of models that differ in their files alone, one."""
        return [*self._of_key.kinds(), *([] if self._default is None else [self._default])]

    @property
    def is_listed(self) -> bool:
        """Whether the user lists every key; else there may be any number of them."""
        return any(True for _ in self._of_key.named_kinds())

    def same_models(self, other: ModelsByKey) -> bool:
        """Whether the other has the same models for the same keys, in the same budget."""
        alike = self.budget == other.budget and self.key_column == other.key_column
        return alike and self._of_key.same(other._of_key) and same_handler(self._default, other._default)

    def changed(self, change: Callable[[Handler], Handler]) -> ModelsByKey:
        """The same keys, with something else for each model."""
        default = None if self._default is None else change(self._default)
        return ModelsByKey(Changed(self._of_key, change), default, MemoryBudget(), None)

    # Which model.

    def model_of(self, key: Any) -> str:
        """The name of a key's model; LookupError if it has none."""
        try:
            return self._of_key.name(key)
        except (LookupError, TypeError) as exc:  # TypeError: it cannot be hashed, or is no text
            if self._default is not None:
                return DEFAULT
            raise LookupError(f"no model for the key {key!r}: {exc}") from None

    def models_of(self, keys: Sequence[Any]) -> list[str]:
        """The models of some keys, all of which change: UsageError if another key has one of them."""
        try:
            names = list(dict.fromkeys(self._of_key.name(key) for key in keys))
        except (LookupError, TypeError) as exc:
            raise UsageError(f"a new version for the keys {list(keys)!r}, of which one has no model: {exc}") from None
        for name in names:
            if others := [key for key in self._of_key.keys_of(name) if key not in keys]:
                raise UsageError(
                    f"a new version for the keys {list(keys)!r}, which share their model with {others[:SHOWN]!r}: name all "
                    "of these keys in it, or give them models of their own, KeyModelMapping(keys, handler)"
                )
        return names

    def handler_of(self, model: str) -> Handler:
        """The handler of a model."""
        if model == DEFAULT:
            assert self._default is not None
            return self._default
        return self._of_key.handler(model)

    def budget_or_default(self, steps: int) -> MemoryBudget:
        """What the models on this machine may take: what the user says, or a share of the memory that is free. steps: of the
        run, that have such a share together."""
        if self.budget.bytes is not None:
            return self.budget
        return self.budget._replace(bytes=int(FREE_SHARE * available_bytes()) // steps, by_default=True, steps=steps)

    def device_bytes(self) -> int | None:
        """What models may take on the device that they are for, as this process sees it."""
        return None if self.accelerator() is None else free_device_bytes()

    def own_limits(self) -> Mapping[str, tuple[BatchLimits, bool]]:
        """Of models whose batches are not limited like those of most, by name: the limits, and whether rows have lengths."""
        return self._own_limits

    @property
    def functions(self) -> tuple[int, int]:
        """How many functions at most a model has in front of it, and behind it."""
        return self._functions

    def passes_rows_on(self) -> bool:
        """Whether every model takes the rows just as they are: nothing is prepared, measured or taken from columns."""
        limits = [_limits_of(self._first), *self._own_limits.values()]
        weighs = any(each.max_weight is not None for each, _ in limits)
        from_columns = self.input_columns() is not None and not self.takes_columns()
        return not (self._prepares or self._measures or weighs or from_columns or self._functions[0])

    def known_models(self) -> int | None:
        """How many models keys have, but for the default; None: that is not known."""
        return sum(1 for _ in self._of_key.named_kinds()) or len(self.model_files()) or None

    def describe(self) -> str:
        return self._of_key.describe()

    def compared(self) -> Mapping[str, Any]:
        """What decides on answers, for whether a run is resumed with the same models; budgets may change."""
        return {"key_column": self.key_column, "default": self._default, **self._of_key.compared()}

    # What all have in common, for whoever asks a handler.

    def load_model(self) -> Any:
        raise AssertionError("models are loaded by name")

    def run_inference(self, batch: Sequence[Any], model: Any, inference_args: Mapping[str, Any] | None = None) -> Any:
        raise AssertionError("models are called by name")

    def prepares(self) -> bool:
        return self._prepares

    def measures_length(self) -> bool:
        return self._measures

    def input_columns(self) -> tuple[str, ...] | None:
        return self._first.input_columns()

    def takes_columns(self) -> bool | str:
        return self._first.takes_columns() if self.key_column is not None else False

    def check_columns(self, schema: Any) -> None:
        if self.key_column is not None and self.key_column not in schema.names:
            raise UsageError(f"there is no column {self.key_column!r} (key_column=): the rows have {list(schema.names)}")
        self._first.check_columns(schema)

    def model_files(self) -> Sequence[str]:
        return list(self._of_key.files())

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        return self._first.batch_elements_kwargs()

    def max_concurrent_batches(self) -> int:
        return self._at_once

    def prepares_ahead(self) -> bool:
        return self._first.prepares_ahead()

    def new_shapes_cost(self) -> bool:
        return self._first.new_shapes_cost()

    def get_metrics_namespace(self) -> str:
        return self._first.get_metrics_namespace()

    def get_resource_hints(self) -> Mapping[str, Any]:
        return self._first.get_resource_hints()

    def validate_inference_args(self, inference_args: Mapping[str, Any] | None) -> None:
        for kind in self.kinds():
            kind.validate_inference_args(inference_args)

    def share_model_across_processes(self) -> bool:
        return self._shared

    def accelerator(self) -> str | None:
        return self._first.accelerator()


class FileSizes(dict[str, int]):
    """Bytes of the files that the handler of each model names; 0: it names none, or none that is on this machine."""

    def __init__(self, handler: Handler) -> None:
        """Of many models, or of one, whatever its name is."""
        super().__init__()
        self._handler = handler

    def __missing__(self, model: str) -> int:
        size = self[model] = file_bytes(self._model_files(model)) or 0
        return size

    def _model_files(self, model: str) -> Callable[[], Iterable[str]]:
        handler = self._handler
        return lambda: (handler.handler_of(model) if isinstance(handler, ModelsByKey) else handler).model_files()


def _limits_of(handler: Handler) -> tuple[BatchLimits, bool]:
    return BatchLimits.of(handler.batch_elements_kwargs(), handler.new_shapes_cost()), handler.measures_length()


def _own_limits(
    of_key: OfKey, default: Handler | None, common: tuple[BatchLimits, bool]
) -> dict[str, tuple[BatchLimits, bool]]:
    named = [*of_key.named_kinds(), *([] if default is None else [(DEFAULT, default)])]
    return {name: limits for name, kind in named if (limits := _limits_of(kind)) != common}


def _check_alike(one: Handler, other: Handler) -> None:
    """Their answers leave by one output, in one form, and their processes are the same."""
    for what, first, second in [
        ("columns=", one.input_columns(), other.input_columns()),
        ("output_column= and output_prefix=", output_of(one), output_of(other)),
        ("PredictionResults (wraps_answers)", one.wraps_answers, other.wraps_answers),
        ("takes_columns()", one.takes_columns(), other.takes_columns()),
        ("measures_length()", one.measures_length(), other.measures_length()),
        ("with_no_batching()", is_prebatched(one), is_prebatched(other)),
        ("accelerator()", one.accelerator(), other.accelerator()),
        ("prepares_ahead()", one.prepares_ahead(), other.prepares_ahead()),
        ("new_shapes_cost()", one.new_shapes_cost(), other.new_shapes_cost()),
        ("prepare()", bool(one.takes_columns()) and one.prepares(), bool(other.takes_columns()) and other.prepares()),
        ("get_resource_hints()", dict(one.get_resource_hints()), dict(other.get_resource_hints())),
        ("get_metrics_namespace()", one.get_metrics_namespace(), other.get_metrics_namespace()),
        ("env_vars=", dict(variables_of(one)), dict(variables_of(other))),
    ]:
        if first != second:
            raise UsageError(
                f"the handlers of one KeyedModelHandler must agree in {what}: {type(one).__name__} has {first!r}, "
                f"{type(other).__name__} {second!r}"
            )
