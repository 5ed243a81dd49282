"""Types of Arrow: which of them hold the values of another unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as types


def is_lossless(source: pa.DataType, target: pa.DataType, *, rounds: bool) -> bool:
    """Whether a safe cast keeps every value, or raises. Arrow's own rules are wider: a safe cast makes dates of times, bools
    of numbers and bytes of text, and drops fields of structs. `rounds`: floats may become shorter ones."""
    source, target = _value_type(source), _value_type(target)
    if source == target or types.is_null(source):
        return True
    if is_list(source) and is_list(target):
        return is_lossless(source.value_type, target.value_type, rounds=rounds)
    if types.is_map(source) and types.is_map(target):
        pairs = (source.key_type, target.key_type), (source.item_type, target.item_type)
        return all(is_lossless(one, other, rounds=rounds) for one, other in pairs)
    if types.is_struct(source) and types.is_struct(target):
        there = {field.name: field.type for field in target}
        return all(field.name in there and is_lossless(field.type, there[field.name], rounds=rounds) for field in source)
    if types.is_floating(source) and types.is_floating(target):
        return rounds or target.bit_width >= source.bit_width
    return any(one(source) and other(target) for one, other in _KEPT)


def contains(kind: pa.DataType, is_kind: Callable[[pa.DataType], bool]) -> bool:
    """Whether the type, or one that is inside it, is such."""
    if types.is_struct(kind):
        return any(contains(field.type, is_kind) for field in kind)
    if types.is_map(kind):
        return contains(kind.key_type, is_kind) or contains(kind.item_type, is_kind)
    return contains(kind.value_type, is_kind) if is_list(kind) else is_kind(kind)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if types.is_dictionary(kind) else kind


def is_list(kind: Any) -> bool:
    """Whether it has items, in any of Arrow's ways."""
    return any((types.is_list(kind), types.is_large_list(kind), types.is_fixed_size_list(kind)))


def _is_text(kind: Any) -> bool:
    return any((types.is_string(kind), types.is_large_string(kind), types.is_string_view(kind)))


def _is_bytes(kind: Any) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    )


def _is_zoned(kind: Any) -> bool:
    return bool(types.is_timestamp(kind)) and kind.tz is not None


def _is_naive(kind: Any) -> bool:
    return bool(types.is_timestamp(kind)) and kind.tz is None


# From and to. That a number, or a time in other units, fits is seen by the cast itself.
_KEPT: list[tuple[Callable[[Any], bool], Callable[[Any], bool]]] = [
    (types.is_integer, types.is_integer),
    (types.is_integer, types.is_floating),
    (types.is_integer, types.is_decimal),
    (types.is_floating, types.is_integer),
    (types.is_decimal, types.is_integer),
    (types.is_decimal, types.is_decimal),
    (types.is_date, types.is_date),
    (types.is_time, types.is_time),
    (types.is_duration, types.is_duration),
    (_is_zoned, _is_zoned),
    (_is_naive, _is_naive),
    (_is_text, _is_text),
    (_is_bytes, _is_bytes),
]
