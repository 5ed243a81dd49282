"""Rows of many keys to many models: each row's model is found, and rows of one model are put side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.batching.limits import BatchLimits
from penstock.blocks import row_count
from penstock.errors import StepError, UsageError
from penstock.failures import LOADING, Failure
from penstock.inference.guard import Guard
from penstock.inference.intake import Intake, Passage, parts_of
from penstock.inference.model_keys import Handler
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.path import NO_KEY
from penstock.inference.preparing import Preparer
from penstock.inference.spec import InferenceSpec
from penstock.models.uses import not_loaded
from penstock.rows import let_through

MOST_KNOWN = 100_000  # keys whose models are remembered


class ModelWays:
    """Of one bundle: an intake for each model that it has rows for, where models do anything to them."""

    def __init__(
        self,
        spec: InferenceSpec,
        models: ModelsByKey,
        guard: Guard,
        preparer: Callable[[str, Handler, Guard], Preparer | None],
        note: Callable[[int, Passage, dict[int, Failure]], None],
    ) -> None:
        self._spec = spec
        self._models = models
        self._guard = guard
        self._preparer = preparer
        self._note = note
        self._is_short = models.passes_rows_on()
        self._intakes: dict[str, Intake] = {}
        self._known: dict[str, str] = {}  # names, by key

    def keys_in_table(self, table: Any) -> list[Any]:
        keys: list[Any] = table.column(self._models.key_column).to_pylist()
        return keys

    def keys_in_rows(self, rows: list[Any]) -> list[Any]:
        """Of records; what is none, or lacks the column, has no key."""
        name = self._models.key_column
        return [row.get(name, NO_KEY) if isinstance(row, dict) else NO_KEY for row in rows]

    def lead(self, passage: Passage, keys: list[Any], way: Callable[[Intake, Passage], Passage]) -> Passage:
        """Each row to the model of its key: those of one model stand together then."""
        names, failed = self._guard.all_or_each(self._names_of, keys)
        passage.models = names
        passage.fail(failed)
        self._sort(passage)
        if self._is_short:
            if isinstance(passage.rows, list):
                passage.kept = passage.rows
            return passage
        parts = [(name, passage.part(start, stop)) for name, start, stop in parts_of(passage.models)]
        passage.put_together([self._led(name, part, way) for name, part in parts])
        return passage

    def _led(self, name: str, part: Passage, way: Callable[[Intake, Passage], Passage]) -> Passage:
        """The rows of one model, on their way; they fail if its handler cannot be made."""
        try:
            intake = self._intake(name)
        except BaseException as exc:
            let_through(exc)
            handling = self._guard.handling
            if isinstance(exc, UsageError) or handling is None or not handling.handles(exc):
                raise not_loaded(self._guard.step, name, exc) from exc
            part.fail(dict.fromkeys(range(row_count(part.rows)), self._guard.failure(exc, LOADING)))
            return part
        return way(intake, part)

    def _names_of(self, keys: list[Any]) -> list[str]:
        known = self._known
        return [known.get(key) or self._look_up(key) if type(key) is str else self._look_up(key) for key in keys]

    def _look_up(self, key: Any) -> str:
        try:
            if key is NO_KEY:
                raise LookupError(f"the row has no column {self._models.key_column!r} (key_column=)")
            name = self._models.model_of(key)
        except LookupError as exc:
            raise StepError(f"step {self._guard.step!r}: {exc}") from exc
        if type(key) is str and len(self._known) < MOST_KNOWN:
            self._known[key] = name
        return name

    def _sort(self, passage: Passage) -> None:
        """By model, in the order in which they first come."""
        models = passage.models
        if not models or models.count(models[0]) == len(models):
            return
        rank: dict[str, int] = {}
        ranks = [rank.setdefault(name, len(rank)) for name in models]
        passage.reorder(sorted(range(len(models)), key=ranks.__getitem__))
        passage.is_sorted = True

    def _intake(self, name: str) -> Intake:
        found = self._intakes.get(name)
        if found is None:
            handler = self._models.handler_of(name)
            before = tuple(handler.get_preprocess_fns())
            path = replace(self._spec.path, model_handler=handler, keys=None, before_model=before, of_models=(0, 0))
            limits = BatchLimits.of(handler.batch_elements_kwargs(), handler.new_shapes_cost())
            spec = replace(self._spec, path=path, limits=limits)
            guard = Guard(self._guard.step, self._guard.handling, handler.model_id())
            found = self._intakes[name] = Intake(spec, guard, self._preparer(name, handler, guard), self._note)
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
