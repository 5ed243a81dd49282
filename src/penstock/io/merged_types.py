"""The one type for a column whose types differ: between the parts of an output, or between the blocks of one part."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as types

from penstock.io.arrow_types import is_list
from penstock.io.list_sizes import with_items, without_sizes


def merged(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type for a column that has one in some parts and the other in others: a null fits every type, a struct may have
    more fields, lists of different sizes are lists, and text may be encoded by a dictionary. None if there is no such type.
    """
    if one == other:
        return one
    if types.is_null(one) or types.is_null(other):
        return without_sizes(other if types.is_null(one) else one)
    if types.is_dictionary(one) or types.is_dictionary(other):
        return merged(decoded(one), decoded(other))
    if types.is_struct(one) and types.is_struct(other):
        return _merged_struct(one, other)
    if is_list(one) and is_list(other):
        return _merged_list(one, other)
    return None


def _merged_struct(one: pa.StructType, other: pa.StructType) -> pa.DataType | None:
    fields = []
    names = dict.fromkeys([field.name for field in (*one, *other)])
    for name in names:
        kinds = [kind.field(name).type if kind.get_field_index(name) >= 0 else pa.null() for kind in (one, other)]
        found = merged(*kinds)
        if found is None:
            return None
        fields.append(pa.field(name, found))
    return pa.struct(fields)


def _merged_list(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    item = merged(one.value_type, other.value_type)
    if item is None:
        return None
    if types.is_large_list(one) or types.is_large_list(other):
        return pa.large_list(item)
    both_fixed = types.is_fixed_size_list(one) and types.is_fixed_size_list(other)
    return pa.list_(item, one.list_size if both_fixed and one.list_size == other.list_size else -1)


def decoded(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries, also inside."""
    if types.is_dictionary(kind):
        return decoded(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(decoded(field.type)) for field in kind])
    return with_items(kind, decoded)
