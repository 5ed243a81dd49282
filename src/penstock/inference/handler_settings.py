"""The settings that every handler takes, written once: the arguments of ModelHandler.__init__(), by name.

A handler of your own takes them all with `**settings: Unpack[HandlerSettings]`, and passes them on to super().__init__().
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict


class HandlerSettings(TypedDict, total=False):
    """How rows are batched, where the model lives, and which columns go in and come out."""

    min_batch_size: int | None
    max_batch_size: int | None
    max_batch_duration_secs: float | None
    max_batch_weight: int | None
    element_size_fn: Callable[[Any], int] | None
    batch_length_fn: Callable[[Any], int] | None
    max_padded_cost: int | None
    lookahead_rows: int | None
    lookahead_bytes: int | None
    batch_size_buckets: Sequence[int]
    length_buckets: Sequence[int]
    env_vars: Mapping[str, str] | None
    large_model: bool
    model_copies: int | None
    columns: str | Sequence[str] | None
    output_column: str | None
    output_prefix: str | None
