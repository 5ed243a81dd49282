"""Lists of a fixed size, such as vectors: a column has them where each of its values is there and has that size.

A column with a null instead of such a list has plain lists: readers before Arrow 26 refuse files that say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from penstock.io.arrow_types import is_list


def without_sizes(kind: pa.DataType) -> pa.DataType:
    """The type with a plain list instead of each list of a fixed size."""
    return with_sizes_of(kind, pa.null())


def with_sizes_of(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type, in which lists have a fixed size only where those of the other type have the same."""
    if types.is_struct(kind):
        there = {field.name: field.type for field in other} if types.is_struct(other) else {}
        return pa.struct([field.with_type(with_sizes_of(field.type, there.get(field.name, pa.null()))) for field in kind])
    inside = other.value_type if is_list(other) else pa.null()
    kind = with_items(kind, lambda item: with_sizes_of(item, inside))
    if types.is_fixed_size_list(kind) and not (types.is_fixed_size_list(other) and other.list_size == kind.list_size):
        return pa.list_(kind.value_field)
    return kind


def with_items(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type of a list with its items' type changed; any other type as it is."""
    if not is_list(kind):
        return kind
    item = kind.value_field.with_type(change(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return pa.large_list(item) if types.is_large_list(kind) else pa.list_(item)


def held_type(column: pa.ChunkedArray) -> pa.DataType:
    """The column's type, in which lists have a fixed size only where no value of this column is null, or empty."""
    return _held_type(column.type, column.chunks)


def _held_type(kind: pa.DataType, arrays: list[Any]) -> pa.DataType:
    if types.is_struct(kind):
        columns = [array.flatten() for array in arrays]  # null where the struct is
        return pa.struct(
            [field.with_type(_held_type(field.type, [column[i] for column in columns])) for i, field in enumerate(kind)]
        )
    kind = with_items(kind, lambda item: _held_type(item, [array.flatten() for array in arrays]))
    if types.is_fixed_size_list(kind) and (kind.list_size == 0 or any(array.null_count for array in arrays)):
        return pa.list_(kind.value_field)
    return kind


def sizes_kept(schema: pa.Schema, table: pa.Table) -> pa.Schema:
    """The schema, in which lists have a fixed size only where all of this table's do. A column that it lacks is null."""
    for at, field in enumerate(schema):
        if field.type == without_sizes(field.type):
            continue
        kind = held_type(table.column(field.name)) if field.name in table.column_names else pa.null()
        fixed = with_sizes_of(field.type, kind)
        if fixed != field.type:
            schema = schema.set(at, field.with_type(fixed))
    return schema


def schema_without_sizes(schema: pa.Schema) -> pa.Schema:
    """The same columns, with lists of any size instead of lists of a fixed one."""
    return pa.schema([field.with_type(without_sizes(field.type)) for field in schema], metadata=schema.metadata)
