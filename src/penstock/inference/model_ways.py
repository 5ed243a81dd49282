"""Rows of many keys to many models: each row's model is found, and rows of one model are put side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.batching.limits import BatchLimits
from penstock.blocks import row_count
from penstock.failures import Failure
from penstock.inference.guard import Guard
from penstock.inference.intake import Intake, Passage, parts_of
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.preparing import Preparer
from penstock.inference.spec import InferenceSpec
from penstock.rows import row_error


class ModelWays:
    """Of one bundle: an intake for each model that it has rows for, where models do anything to them."""

    def __init__(
        self,
        spec: InferenceSpec,
        models: ModelsByKey,
        guard: Guard,
        preparer: Callable[[str], Preparer | None],
        note: Callable[[int, Passage, dict[int, Failure]], None],
    ) -> None:
        self._spec = spec
        self._models = models
        self._guard = guard
        self._preparer = preparer
        self._note = note
        self._is_short = models.passes_rows_on()
        self._intakes: dict[str, Intake] = {}

    def keys_in_table(self, table: Any) -> list[Any]:
        keys: list[Any] = table.column(self._models.key_column).to_pylist()
        return keys

    def keys_in_rows(self, rows: list[Any]) -> list[Any]:
        """Of records; what is none has no key."""
        name = self._models.key_column
        return [row.get(name) if isinstance(row, dict) else None for row in rows]

    def lead(self, passage: Passage, keys: list[Any], way: Callable[[Intake, Passage], Passage]) -> Passage:
        names, failed = self._guard.all_or_each(self._names_of, keys)
        passage.models = names
        passage.fail(failed)
        self._sort(passage)
        if self._is_short:
            if isinstance(passage.rows, list):
                passage.kept = passage.rows
            return passage
        parts = [(name, passage.part(start, stop)) for name, start, stop in parts_of(passage.models)]
        if parts:
            passage.put_together([way(self._intake(name), part) for name, part in parts])
        return passage

    def _names_of(self, keys: list[Any]) -> list[str]:
        names = []
        for key in keys:
            try:
                names.append(self._models.model_of(key))
            except LookupError as exc:
                raise row_error(self._guard.step, key, exc) from exc
        return names

    def _sort(self, passage: Passage) -> None:
        """By model, in the order in which they first come."""
        assert passage.models is not None
        rank: dict[str, int] = {}
        ranks = [rank.setdefault(name, len(rank)) for name in passage.models]
        if len(rank) > 1:
            passage.reorder(sorted(range(row_count(passage.rows)), key=ranks.__getitem__))

    def _intake(self, name: str) -> Intake:
        found = self._intakes.get(name)
        if found is None:
            handler = self._models.handler_of(name)
            before = tuple(handler.get_preprocess_fns())
            path = replace(self._spec.path, model_handler=handler, keys=None, before_model=before, of_models=(0, 0))
            limits = BatchLimits.of(handler.batch_elements_kwargs(), handler.new_shapes_cost())
            spec = replace(self._spec, path=path, limits=limits)
            found = self._intakes[name] = Intake(spec, self._guard, self._preparer(name), self._note)
        return found


class OwnFunctions:
    """The functions of one number that models have behind them, as one: of (model, answer)."""

    def __init__(self, models: ModelsByKey | None, number: int) -> None:
        assert models is not None
        self._models = models
        self._number = number
        self._functions: dict[str, Callable[[Any], Any] | None] = {}
        self.__name__ = f"{number} of each model"

    def __call__(self, given: tuple[str, Any]) -> Any:
        model, answer = given
        if model not in self._functions:
            own = self._models.handler_of(model).get_postprocess_fns()
            self._functions[model] = own[self._number] if self._number < len(own) else None
        function = self._functions[model]
        return answer if function is None else function(answer)
