"""Many models behind one step: which key has which model, and what they have in common."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from penstock.batching.limits import BatchLimits
from penstock.errors import UsageError
from penstock.inference.handler import ModelHandler, describes_same_model, is_prebatched, output_of, variables_of
from penstock.models.budget import Budget
from penstock.models.memory import available_bytes, free_device_bytes

Handler = ModelHandler[Any, Any, Any]

SHOWN = 5  # keys, in an error
WINDOW = 16_384  # rows under way in front of one place: the more may wait, the fewer loads are paid
FREE_SHARE = 0.5  # of the memory that is free, where the user sets no budget


class ModelsByKey(ModelHandler[Any, Any, Any]):
    """The models of a KeyedModelHandler, as one handler: it says what all of them have in common. Models go by name, which
    is text; no model is ever loaded by this handler itself."""

    def __init__(self, of_key: OfKey, default: Handler | None, budget: Budget, key_column: str | None) -> None:
        self.budget = budget
        self.key_column = key_column
        self._of_key = of_key
        self._default = default
        kinds = self._kinds()
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

    def _kinds(self) -> list[Handler]:
        return [*self._of_key.kinds(), *([] if self._default is None else [self._default])]

    def same_models(self, other: ModelsByKey) -> bool:
        """Whether the other has the same models for the same keys, in the same budget."""
        alike = self.budget == other.budget and self.key_column == other.key_column
        return alike and self._of_key.same(other._of_key) and _same(self._default, other._default)

    def changed(self, change: Callable[[Handler], Handler]) -> ModelsByKey:
        """The same keys, with something else for each model."""
        default = None if self._default is None else change(self._default)
        return ModelsByKey(Changed(self._of_key, change), default, Budget(), None)

    # Which model.

    def model_of(self, key: Any) -> str:
        """The name of a key's model; LookupError if it has none."""
        try:
            return self._of_key.name(key)
        except (LookupError, TypeError) as exc:  # TypeError: it cannot be hashed, or is no text
            if self._default is not None:
                return DEFAULT
            raise LookupError(f"no model for the key {key!r}: {exc}") from None

    def handler_of(self, model: str) -> Handler:
        """The handler of a model."""
        if model == DEFAULT:
            assert self._default is not None
            return self._default
        return self._of_key.handler(model)

    def budget_or_default(self) -> Budget:
        """What the models on this machine may take: what the user says, or a share of the memory that is free."""
        if self.budget.bytes is not None:
            return self.budget
        return self.budget._replace(bytes=int(FREE_SHARE * available_bytes()), by_default=True)

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
        for kind in self._kinds():
            kind.validate_inference_args(inference_args)

    def share_model_across_processes(self) -> bool:
        return self._shared

    def accelerator(self) -> str | None:
        return self._first.accelerator()


DEFAULT = "/default"  # no key of a pattern has a slash


class OfKey:
    """Which model a key has."""

    def kinds(self) -> Sequence[Handler]:
        """Every handler there is; of models that differ in their files alone, one."""
        raise NotImplementedError

    def name(self, key: Any) -> str:
        raise NotImplementedError

    def handler(self, name: str) -> Handler:
        raise NotImplementedError

    def named_kinds(self) -> Iterator[tuple[str, Handler]]:
        """Those that may differ from the first, by name."""
        return iter(())

    def same(self, other: OfKey) -> bool:
        raise NotImplementedError

    def files(self) -> Iterator[str]:
        raise NotImplementedError

    def compared(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


class Mapped(OfKey):
    """Keys that the user lists, some for each handler."""

    def __init__(self, mappings: Sequence[tuple[Sequence[Any], Handler]]) -> None:
        self._handlers: dict[str, Handler] = {}
        self._names: dict[Any, str] = {}
        known: dict[int, str] = {}  # names, by the handler's id: one that is given twice is one model
        for keys, handler in mappings:
            name = known.get(id(handler)) or _new_name(str(keys[0]), self._handlers)
            self._handlers[name] = handler
            known[id(handler)] = name
            for key in keys:
                if not isinstance(key, Hashable):
                    raise UsageError(f"KeyModelMapping({[key]!r}, ...): a {type(key).__name__} cannot be a key")
                if key in self._names:
                    raise UsageError(f"the key {key!r} is in two mappings, or twice in one; give each key one model, once")
                self._names[key] = name

    def kinds(self) -> Sequence[Handler]:
        return list(self._handlers.values())

    def name(self, key: Any) -> str:
        try:
            return self._names[key]
        except KeyError:
            known = ", ".join(map(repr, islice(self._names, SHOWN)))
            more = f" and {len(self._names) - SHOWN:,} more" if len(self._names) > SHOWN else ""
            raise LookupError(f"the handler has models for {known}{more}") from None

    def handler(self, name: str) -> Handler:
        return self._handlers[name]

    def named_kinds(self) -> Iterator[tuple[str, Handler]]:
        return iter(self._handlers.items())

    def same(self, other: OfKey) -> bool:
        if not isinstance(other, Mapped) or self._names != other._names:
            return False
        return all(_same(handler, other._handlers[name]) for name, handler in self._handlers.items())

    def files(self) -> Iterator[str]:
        return (file for handler in self._handlers.values() for file in handler.model_files())

    def compared(self) -> Mapping[str, Any]:
        return {"keys": self._names, **{f"model of {name!r}": handler for name, handler in self._handlers.items()}}

    def describe(self) -> str:
        return f"{len(self._handlers):,} models for {len(self._names):,} keys"


class Pattern(OfKey):
    """A file for each key, by its name."""

    def __init__(self, pattern: str, handler: Handler) -> None:
        self._pattern = pattern
        self._handler = handler
        self._is_local = "://" not in pattern
        self._seen: set[str] = set()
        self.handler("key")  # a handler that cannot be told another path says so now

    def kinds(self) -> Sequence[Handler]:
        return [self._handler]

    def name(self, key: Any) -> str:
        is_number = isinstance(key, Integral) and not isinstance(key, bool)
        name = str(int(key)) if is_number else key if isinstance(key, str) else ""
        if name in self._seen:
            return name
        if not name or re.search(r"[/\\\0]", name) or name in {".", ".."}:
            raise LookupError("a key is text or a whole number, and part of the name of one file")
        if self._is_local and not os.path.exists(self._path(name)):
            raise LookupError(f"there is no {self._path(name)}")
        self._seen.add(name)
        return name

    def handler(self, name: str) -> Handler:
        try:
            changed = copy.deepcopy(
                self._handler
            )  # whatever update_model_path() changes in it, is changed for this one alone
        except Exception:  # of something that has no copies
            changed = copy.copy(self._handler)
        changed.update_model_path(self._path(name))
        return changed

    def same(self, other: OfKey) -> bool:
        return isinstance(other, Pattern) and self._pattern == other._pattern and _same(self._handler, other._handler)

    def files(self) -> Iterator[str]:
        if self._is_local:
            before, _, after = self._pattern.partition("{key}")
            folder, begin = os.path.split(before)
            yield from sorted(str(path) for path in Path(folder or ".").glob(f"{_plain(begin)}*{_plain(after)}"))

    def compared(self) -> Mapping[str, Any]:
        return {"pattern": self._pattern, "model": self._handler}

    def describe(self) -> str:
        return f"a model for each key, {self._pattern}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": set()}

    def _path(self, name: str) -> str:
        return self._pattern.replace("{key}", name)


class Changed(OfKey):
    """The keys of another, and for each of its models what a function makes of its handler."""

    def __init__(self, of_key: OfKey, change: Callable[[Handler], Handler]) -> None:
        self._of_key = of_key
        self._change = change

    def kinds(self) -> Sequence[Handler]:
        return [self._change(kind) for kind in self._of_key.kinds()]

    def name(self, key: Any) -> str:
        return self._of_key.name(key)

    def handler(self, name: str) -> Handler:
        return self._change(self._of_key.handler(name))

    def files(self) -> Iterator[str]:
        return self._of_key.files()

    def describe(self) -> str:
        return self._of_key.describe()


def _same(one: Handler | None, other: Handler | None) -> bool:
    return one is other or (one is not None and other is not None and describes_same_model(one, other))


def _plain(text: str) -> str:
    """For a glob that means just this text."""
    return re.sub(r"([*?[])", r"[\1]", text)


def _new_name(name: str, taken: Mapping[str, object]) -> str:
    while name in taken or name == DEFAULT:
        name += "'"
    return name


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
