"""What a journal keeps of users' sources and sinks: names, splits, parts, notes; and what is said when it cannot."""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import NotShippableError, UsageError
from penstock.io.sink import Sink
from penstock.rows import safe_str, shorten


def storable(name: str) -> str | bytes:
    """File names, and labels that have them, are bytes: those that are no text are kept as such."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogateescape")
    return name


def name_of(stored: str | bytes) -> str:
    return stored.decode("utf-8", "surrogateescape") if isinstance(stored, bytes) else stored


def checked_json(value: Any, sink: Sink[Any], method: str) -> Any:
    """What a sink has returned, if the journal can keep it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as exc:
        raise UsageError(
            f"{sink.describe()}: {type(sink).__name__}.{method}() returned {shorten(value)}: {safe_str(exc)}; expected what "
            "JSON has: str, int, float, bool, None, lists, and dicts with str as keys"
        ) from exc
    return value


def not_picklable(value: Any, kind: str, maker: str, exc: Exception) -> NotShippableError:
    return NotShippableError(
        f"{maker}: a {kind} of type {type(value).__name__} cannot be pickled ({type(exc).__name__}: {safe_str(exc)}), so "
        f"the journal cannot keep it\n  {kind}: {shorten(value)}\n  make it of plain data, such as names and numbers"
    )
