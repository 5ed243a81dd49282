"""Rows as records: the named fields of a row, and its values in a form that file formats take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from penstock.errors import OutputError, UsageError
from penstock.failures import Failure

LEAVES = frozenset([str, int, float, bool, type(None)])


def plain(value: Any, of_array: Callable[[Any], Any]) -> Any:
    """A value as dicts, lists and leaves: NamedTuples and dataclasses become dicts, arrays what `of_array` returns.

    Leaves of other types are returned as they are, for the format to take or to refuse.
    """
    kind = type(value)
    if kind in LEAVES:
        return value
    if kind is list or kind is tuple:
        if LEAVES.issuperset(map(type, value)):
            return list(value)
        return [plain(item, of_array) for item in value]
    fields = fields_of(value)
    if fields is not None:
        _check_keys(fields)
        return {key: plain(item, of_array) for key, item in fields.items()}
    return of_array(value) if hasattr(value, "tolist") and kind is not memoryview else value


def as_lists(array: Any) -> Any:
    """An array, a tensor or one of their numbers as lists and numbers. Times of NumPy stay: as numbers they have no unit."""
    if getattr(getattr(array, "dtype", None), "kind", "") not in ("m", "M"):
        return array.tolist()
    return list(array) if array.ndim else array


def _check_keys(fields: dict[Any, Any]) -> None:
    """Formats write all keys as text."""
    try:
        "".join(fields)  # the quickest way to see that all of them are
    except TypeError:
        if len(set(map(str, fields))) < len(fields):
            message = f"two keys of a dict are the same text ({listed(fields)}): rename one in a step before"
            raise OutputError(message) from None


def fields_of(row: Any) -> dict[Any, Any] | None:
    """The named fields of a dict, a NamedTuple (such as PredictionResult) or a dataclass; None for anything else."""
    if isinstance(row, dict):
        return row
    if isinstance(row, tuple) and hasattr(row, "_asdict"):
        return dict(row._asdict())
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return None


def named_fields(row: Any, step: str) -> dict[Any, Any]:
    """fields_of(row) for the steps that need at least one. A failed row, (row, Failure), is `row` and the failure's; one
    that is a pair, as those with a key are, is `key` and `row`, because a column has values of one type."""
    if type(row) is tuple and len(row) == 2 and isinstance(row[1], Failure):
        failed = row[0]
        pair = {"key": failed[0], "row": failed[1]} if type(failed) is tuple and len(failed) == 2 else {"row": failed}
        return {**pair, **row[1].as_dict()}
    fields = fields_of(row)
    if fields:
        return fields
    raise OutputError(
        f"{step} expects rows with named fields (dict, NamedTuple, dataclass), "
        f"got {type(row).__name__ if fields is None else row}: put ps.Map(lambda x: {{'value': x}}) before it"
    )


def columns_of(rows: list[Any], step: str) -> dict[Any, list[Any]]:
    """Rows with named fields as columns, in the order in which names first come; None where a row lacks one."""
    records = [named_fields(row, step) for row in rows]
    names = dict.fromkeys(records[0])
    if any(record.keys() != names.keys() for record in records):
        names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def checked_names(names: Any, asked: str, expected: str = "a list of names") -> tuple[str, ...]:
    """Names of columns that a user gave, or UsageError. asked: for what, such as "WriteToCsv(columns"."""
    fits = isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names)
    if not fits or len(set(names)) < len(names):
        raise UsageError(f"{asked}={names!r}): expected {expected} (different ones)")
    return tuple(names)


def listed(names: Iterable[Any]) -> str:
    """Names for a message."""
    return ", ".join(map(repr, names)) or "none"
