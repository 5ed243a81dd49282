"""What a column of Arrow can hold, for models that take texts or images."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def fits(kind: pa.DataType, takes: str) -> bool:
    """Whether a column of this type can hold "texts", "texts or chats", or "images" as paths or bytes."""
    import pyarrow as pa

    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    texts = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    chats = (types.is_list, types.is_large_list)
    contents = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary, _has_image)
    more = {"texts": (), "texts or chats": chats, "images": contents}[takes]
    return any(test(kind) for test in (*texts, *more))


def _has_image(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) and not {"bytes", "path"}.isdisjoint(field.name for field in kind)
