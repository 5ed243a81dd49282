"""Rows that failed, in the shape of Beam's dead letters."""

from __future__ import annotations

import builtins
from typing import Any

from penstock.errors import RowError
from penstock.failures import Failure


def as_beam(row: Any, failure: Failure) -> tuple[Any, tuple[type[BaseException], str, list[str]]]:
    """The row, and of its error the class, its repr and its traceback by lines. A class that is not Python's own is RowError
    here: it may not exist in this process."""
    found = getattr(builtins, failure.error_type, None)
    kind = found if isinstance(found, type) and issubclass(found, BaseException) else RowError
    message = failure.message if failure.error_type == "KeyError" else repr(failure.message)  # of which str() is a repr()
    told = f"{failure.error_type}({message})"
    return row, (kind, told, failure.traceback.splitlines(keepends=True))
