"""What tells one row from another, as bytes that are the same in every process. Pure."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from penstock.remote.answers import digest_of


def contents_of(value: Any) -> bytes | None:
    """A digest of plain data by its contents, and of other objects by what pickle makes of them, which is what travels
    between processes. None: it cannot be pickled, or holds itself, so that there is nothing to know it by."""
    try:
        return _contents(value)
    except Exception:  # whatever an object raises when it is pickled
        return None


def _contents(value: Any) -> bytes:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".encode()
    if value is None or kind in (bool, int, float):
        return digest_of(name, repr(value).encode())
    if kind is str:
        return digest_of(name, value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return digest_of(name, value)
    if kind in (list, tuple):
        return _all(name, value)
    if kind in (set, frozenset):
        return digest_of(name, *sorted(map(_contents, value)))
    if kind is dict:
        return _all(name, (each for pair in value.items() for each in pair))
    return digest_of(name, pickle.dumps(value, protocol=5))


def _all(name: bytes, values: Iterable[Any]) -> bytes:
    return digest_of(name, *map(_contents, values))
