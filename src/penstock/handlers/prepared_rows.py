"""Rows made one by one beside the data, where one that cannot be made is its own failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import BadRowsError


def prepared(examples: Sequence[Any], make: Callable[[Any], Any]) -> tuple[list[Any], dict[int, Exception]]:
    """make(example) for each, None where that raises; and the errors by position."""
    made: list[Any] = []
    errors: dict[int, Exception] = {}
    for at, example in enumerate(examples):
        try:
            made.append(make(example))
        except Exception as exc:
            errors[at] = exc
            made.append(None)
    return made, errors


def raise_bad_rows(errors: Mapping[int, Exception], values: list[Any]) -> list[Any]:
    """The values, or BadRowsError with them where some rows failed."""
    if errors:
        raise BadRowsError(dict(sorted(errors.items())), values)
    return values
