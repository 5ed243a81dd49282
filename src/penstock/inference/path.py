"""The way of a row around the model: preprocessing, keys off, the model, keys on, postprocessing.

A handler is peeled into layers, outermost first; rows pass them inwards, answers outwards. Functions are composed here, in
one place, and run on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import StepError
from penstock.inference.handler import ModelHandler, is_prebatched
from penstock.inference.keyed import KeyedModelHandler
from penstock.inference.models_by_key import ModelsByKey
from penstock.pipeline.functions import describe_function
from penstock.rows import shorten

NO_KEY = object()
FAILED_INFERENCES = "failed_inferences"  # the output of a step


@dataclass(frozen=True, slots=True)
class RowPath:
    """What happens to a row on its way to `model_handler`, and to the answer on its way back."""

    model_handler: ModelHandler[Any, Any, Any]
    before: tuple[Callable[[Any], Any], ...]  # on rows as they come
    keys: bool | None  # None: rows have no keys; True: every row has; False: pairs have
    before_model: tuple[Callable[[Any], Any], ...]  # on examples, without keys
    after_model: tuple[Callable[[Any], Any], ...]
    after: tuple[Callable[[Any], Any], ...]
    prebatched: bool
    of_models: tuple[int, int] = (0, 0)  # functions that each of many models may have of its own, before it and after

    @classmethod
    def of(cls, handler: ModelHandler[Any, Any, Any]) -> RowPath:
        inner = handler.unkeyed if isinstance(handler, KeyedModelHandler) else handler
        keyed = inner is not handler
        by_key = inner if isinstance(inner, ModelsByKey) else None
        has_pairs = keyed and (by_key is None or by_key.key_column is None)
        return cls(
            model_handler=inner,
            before=tuple(handler.get_preprocess_fns()),
            keys=handler.keys_required if isinstance(handler, KeyedModelHandler) and has_pairs else None,
            before_model=tuple(inner.get_preprocess_fns()) if keyed else (),
            after_model=tuple(inner.get_postprocess_fns()) if keyed else (),
            after=tuple(handler.get_postprocess_fns()),
            prebatched=is_prebatched(handler) or is_prebatched(inner),
            of_models=(0, 0) if by_key is None else by_key.functions,
        )

    @property
    def plain(self) -> bool:
        """Whether rows reach the model, and answers come back, just as they are."""
        return not (self.functions_before or self.functions_after or self.prebatched) and self.keys is None

    @property
    def functions_before(self) -> int:
        return len(self.before) + len(self.before_model) + self.of_models[0]

    @property
    def functions_after(self) -> int:
        return self.of_models[1] + len(self.after_model) + len(self.after)

    def failure_tags(self) -> list[str]:
        """The outputs for rows that failed, in the order in which a row could."""
        before, after = range(self.functions_before), range(self.functions_after)
        return [*map(failed_preprocessing, before), FAILED_INFERENCES, *map(failed_postprocessing, after)]

    def split_keys(self, rows: list[Any], step: str) -> tuple[list[Any], list[Any] | None]:
        """Examples and their keys."""
        if self.keys is None:
            return rows, None
        if self.keys:
            for row in rows:
                if not (isinstance(row, tuple) and len(row) == 2):
                    hint = "put ps.Map(lambda row: (key, row)) before it, or use MaybeKeyedModelHandler"
                    if isinstance(row, list) and len(row) == 2:
                        hint = "put ps.Map(tuple) before it: a tuple that was written to a file is read as a list"
                    raise StepError(
                        f"step {step!r}: KeyedModelHandler expects (key, example) rows, but got {type(row).__name__}: "
                        f"{shorten(row)}\n  {hint}"
                    )
            return [row[1] for row in rows], [row[0] for row in rows]
        pairs = [row if isinstance(row, tuple) and len(row) == 2 else (NO_KEY, row) for row in rows]
        return [example for _, example in pairs], [key for key, _ in pairs]


def failed_preprocessing(number: int) -> str:
    return f"failed_preprocessing[{number}]"


def failed_postprocessing(number: int) -> str:
    return f"failed_postprocessing[{number}]"


def join_keys(keys: list[Any] | None, answers: list[Any]) -> list[Any]:
    if keys is None:
        return answers
    return [answer if key is NO_KEY else (key, answer) for key, answer in zip(keys, answers, strict=True)]


def name_of(function: Callable[[Any], Any], step: str, what: str) -> str:
    """What errors of a function around the model give as the step."""
    return f"{step} ({what} function {describe_function(function)})"
