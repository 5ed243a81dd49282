"""Handlers for rows that have a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import UsageError
from penstock.inference.handler import ModelHandler


class KeyedModelHandler(ModelHandler[Any, Any, Any]):
    """Rows are (key, example); answers are (key, prediction). The model sees the examples alone.

    Functions attached to the inner handler see examples and predictions; those attached to this one see the pairs.
    """

    keys_required = True

    def __init__(self, unkeyed: ModelHandler[Any, Any, Any]) -> None:
        if not isinstance(unkeyed, ModelHandler):
            raise UsageError(f"{type(self).__name__}({unkeyed!r}): expected a ModelHandler")
        if isinstance(unkeyed, KeyedModelHandler):
            raise UsageError(f"{type(self).__name__}({type(unkeyed).__name__}(...)): the inner handler has keys already")
        self.unkeyed = unkeyed

    def model_files(self) -> Sequence[str]:
        return self.unkeyed.model_files()


class MaybeKeyedModelHandler(KeyedModelHandler):
    """Rows that are pairs (a tuple of two) are taken as (key, example); any other row is an example by itself."""

    keys_required = False
