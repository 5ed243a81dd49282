"""What a model was given, added to errors of its framework about shapes and types: those name its own matrices alone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

_ABOUT = re.compile(r"shape|size|dimension|\bdims?\b|dtype|\btype\b|\brank\b|broadcast", re.IGNORECASE)
_EACH = "Each row is"
_MOST = 8  # inputs that are named


@contextlib.contextmanager
def naming_rows(inputs: Any) -> Iterator[None]:
    """Around a call of the model with these inputs: an array or tensor with the rows first, or a dict of them. The error is
    the same one, and says more; of two such calls, one in the other, what the inner one was given."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as exc:
        told = str(exc.args[0]) if len(exc.args) == 1 else ""
        if _ABOUT.search(told) and "memory" not in told and _EACH not in told:
            exc.args = (f"{told.rstrip()}\n  {_EACH} {_rows_of(inputs)}: check that the model takes rows like that.",)
        raise


def _rows_of(inputs: Any) -> str:
    if isinstance(inputs, Mapping):
        named = [f"{name}: {_row_of(each)}" for name, each in inputs.items()]
        return ", ".join(named[:_MOST]) + (", ..." if len(named) > _MOST else "")
    return _row_of(inputs)


def _row_of(array: Any) -> str:
    kind = str(array.dtype).removeprefix("torch.")
    return f"{kind} of shape {list(array.shape[1:])}"
