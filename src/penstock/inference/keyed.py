"""Handlers for rows that have a key: one model for all of them, or a model for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.display import Look
from penstock.errors import UsageError
from penstock.inference.handler import ModelHandler
from penstock.inference.model_keys import Handler, Mapped, OfKey, Pattern
from penstock.inference.models_by_key import ModelsByKey
from penstock.models.budget import MemoryBudget
from penstock.pipeline.hints import parse_bytes


@dataclass(frozen=True)
class KeyModelMapping:
    """Rows with these keys are for this handler's model."""

    keys: Sequence[Any]
    model_handler: Handler


class KeyedModelHandler(ModelHandler[Any, Any, Any]):
    """Rows are (key, example); answers are (key, prediction). The model sees the examples alone.

    `KeyedModelHandler(handler)` has one model for all keys; a list of KeyModelMapping, or from_pattern(), one for each, of
    which as many are in memory at once as the budget holds. Functions attached to an inner handler see examples and
    predictions; those attached to this one see the pairs.
    """

    keys_required = True

    def __init__(
        self,
        unkeyed: Handler | Sequence[KeyModelMapping],
        max_models_per_worker_hint: int | None = None,
        memory_budget: str | int | None = None,
        *,
        default: Handler | None = None,
        key_column: str | None = None,
    ) -> None:
        """max_models_per_worker_hint: in one process at most. memory_budget: for all models on this machine, in bytes or as
        "8GB"; by default half of what is free, for all steps without a budget together. default: for keys that no mapping
        has; without it such rows fail. key_column: rows are records, or tables, and this column of them is the key."""
        if isinstance(unkeyed, ModelHandler):
            given: dict[str, object] = {"max_models_per_worker_hint": max_models_per_worker_hint}
            given |= {"memory_budget": memory_budget, "default": default, "key_column": key_column}
            if names := [name for name, value in given.items() if value is not None]:
                what = "a model for each key: a list of KeyModelMapping, or from_pattern()"
                raise UsageError(f"{type(self).__name__}({type(unkeyed).__name__}(...), {names[0]}=...) is for {what}")
            _check_inner(type(self), unkeyed)
            self.unkeyed: Handler = unkeyed
            return
        mapped = _mapped(type(self), unkeyed)
        self._set(mapped, max_models_per_worker_hint, memory_budget, default, key_column)

    @classmethod
    def from_pattern(
        cls,
        pattern: str,
        handler: Handler,
        max_models_per_worker_hint: int | None = None,
        memory_budget: str | int | None = None,
        *,
        default: Handler | None = None,
        key_column: str | None = None,
    ) -> KeyedModelHandler:
        """A model for each file of a pattern such as "models/{key}.pt"; `handler` says how one is loaded and called."""
        if not isinstance(pattern, str) or pattern.count("{key}") != 1:
            raise UsageError(f'from_pattern({pattern!r}): expected a path that has {{key}} in it once: "models/{{key}}.pt"')
        _check_inner(cls, handler)
        made = cls.__new__(cls)
        made._set(Pattern(pattern, handler), max_models_per_worker_hint, memory_budget, default, key_column)
        return made

    def model_files(self) -> Sequence[str]:
        return self.unkeyed.model_files()

    def _look(self) -> Look:
        models = self.unkeyed
        return Look(f"{type(self).__name__}({models.describe()})") if isinstance(models, ModelsByKey) else super()._look()

    def _set(
        self, of_key: OfKey, most: int | None, budget: str | int | None, default: Handler | None, key_column: str | None
    ) -> None:
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise UsageError(f"max_models_per_worker_hint={most!r}: expected a whole number of at least 1, or None")
        if key_column is not None and (not isinstance(key_column, str) or not key_column):
            raise UsageError(f"key_column={key_column!r}: expected the name of a column")
        if default is not None:
            _check_inner(type(self), default)
        size = None if budget is None else parse_bytes(budget, "memory_budget")
        self.unkeyed = ModelsByKey(of_key, default, MemoryBudget(size, most), key_column)


class MaybeKeyedModelHandler(KeyedModelHandler):
    """Rows that are pairs (a tuple of two) are taken as (key, example); any other row is an example by itself."""

    keys_required = False

    def __init__(self, unkeyed: Handler) -> None:
        _check_inner(type(self), unkeyed)
        super().__init__(unkeyed)

    @classmethod
    def from_pattern(cls, *args: Any, **settings: Any) -> KeyedModelHandler:
        raise UsageError("a row without a key has no model of its own; use KeyedModelHandler.from_pattern(), with default=")


def _mapped(cls: type, mappings: Any) -> Mapped:
    is_list = isinstance(mappings, Sequence) and not isinstance(mappings, (str, bytes))
    if not is_list or not mappings or not all(isinstance(each, KeyModelMapping) for each in mappings):
        raise UsageError(f"{cls.__name__}({mappings!r}): expected a ModelHandler, or a list of KeyModelMapping")
    for each in mappings:
        _check_inner(cls, each.model_handler)
        if isinstance(each.keys, (str, bytes)) or not isinstance(each.keys, Sequence) or not each.keys:
            raise UsageError(f'KeyModelMapping({each.keys!r}, ...): expected a list of keys, such as ["key1", "key2"]')
    return Mapped([(each.keys, each.model_handler) for each in mappings])


def _check_inner(cls: type, handler: object) -> None:
    if not isinstance(handler, ModelHandler):
        raise UsageError(f"{cls.__name__}({handler!r}): expected a ModelHandler")
    if isinstance(handler, (KeyedModelHandler, ModelsByKey)):
        raise UsageError(f"{cls.__name__}({type(handler).__name__}(...)): the inner handler has keys already")
