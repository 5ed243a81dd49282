"""Copies of handlers, which may be changed without a change to the user's."""

from __future__ import annotations

import copy
from typing import Any

from penstock.inference.handler import ModelHandler


def at_path(handler: ModelHandler[Any, Any, Any], path: str) -> ModelHandler[Any, Any, Any]:
    """A handler that is for the model at another path; the one that is given stays as it is."""
    changed = copy_of(handler)
    changed.update_model_path(path)
    return changed


def copy_of(handler: ModelHandler[Any, Any, Any]) -> ModelHandler[Any, Any, Any]:
    """One that a method may change without a change to this one."""
    try:
        return copy.deepcopy(handler)
    except Exception:  # of something that has no copies
        return copy.copy(handler)
