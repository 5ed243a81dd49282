"""Checks of the settings of a model handler: each raises UsageError with what was given and what was expected."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

from penstock.errors import UsageError


def check_copies(copies: object) -> None:
    """UsageError unless it is a number of model copies."""
    if copies is not None and (not isinstance(copies, int) or isinstance(copies, bool) or copies < 1):
        raise UsageError(f"model_copies={copies!r}: expected a whole number of at least 1, or None")


def checked_path(model_path: object) -> str:
    """The path or name of a model, as text, or UsageError."""
    path = os.fspath(model_path) if isinstance(model_path, os.PathLike) else model_path
    if not isinstance(path, str) or not path:
        raise UsageError(f"update_model_path({model_path!r}): expected the path of a model, or its name")
    return path


def checked_bytes(size: object) -> int | None:
    """What model_bytes() gave, or UsageError."""
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, SupportsIndex) or operator.index(size) < 0:
        raise UsageError(f"model_bytes() returned {size!r}; expected a whole number of bytes, or None")
    return operator.index(size)


def checked_columns(columns: Any) -> str | tuple[str, ...] | None:
    """The names of columns, or UsageError."""
    names = [columns] if isinstance(columns, str) else columns
    if names is None:
        return None
    is_list = isinstance(names, Sequence) and names and all(isinstance(name, str) and name for name in names)
    if not is_list or len(set(names)) < len(names):
        raise UsageError(f"columns={columns!r}: expected the name of a column, or a list of different names")
    return columns if isinstance(columns, str) else tuple(names)


def check_output(column: object, prefix: object) -> None:
    """UsageError unless they name the columns of answers, in one way."""
    for name, given in [("output_column", column), ("output_prefix", prefix)]:
        if given is not None and (not isinstance(given, str) or not given):
            raise UsageError(f"{name}={given!r}: expected text")
    if column is not None and prefix is not None:
        raise UsageError("output_column= names one column, output_prefix= begins a name for each output; give one of them")


def checked_variables(variables: object) -> dict[str, str]:
    """Variables of the environment, or UsageError."""
    if variables is not None and not isinstance(variables, Mapping):
        raise UsageError(f'env_vars={variables!r}: expected a dict of text, such as {{"OMP_NUM_THREADS": "1"}}')
    for name, value in (variables or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f'env_vars={{{name!r}: {value!r}}}: expected text for both: {{"{name}": "{value}"}}')
    return dict(variables or {})


def check_function(method: str, fn: object) -> None:
    """UsageError unless it can be called; `method` says where it was given."""
    if not callable(fn):
        given = f"{method}{fn!r}" if method.endswith("=") else f"{method}({fn!r})"
        raise UsageError(f"{given}: expected a function of one row")
