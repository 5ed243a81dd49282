"""Rows that somebody may change: whoever runs rows that are needed again, or that others see too, runs copies of them."""

from __future__ import annotations

import copy
import datetime
import decimal
import fractions
import sys
import uuid
from collections.abc import Iterable
from itertools import chain
from operator import countOf
from types import NoneType
from typing import Any, TypeVar

from penstock.blocks import Block
from penstock.rows import safe_str

BlockT = TypeVar("BlockT", bound=Block)

# Exact types whose values nobody can change.
CONSTANT = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, range, decimal.Decimal, fractions.Fraction, uuid.UUID}
    | {datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone}
)


def own_rows(block: BlockT, uncopied: dict[int, Exception] | None = None) -> BlockT:
    """The block with copies of what could be changed in its rows; itself where nothing could, as in a table.

    Arrays and tensors cost a copy of their bytes. A row that cannot be copied, such as for a lock or a connection in it,
    stays as it is: `uncopied` is told where it stands and why."""
    if not isinstance(block, list):
        return block
    if are_constant(block):
        return block
    kinds = set(map(type, block))
    if kinds == {dict} and _are_constant(chain.from_iterable(map(dict.values, block))):
        return list(map(dict.copy, block))  # type: ignore[return-value]
    if len(kinds) == 1 and (stacked := _stacked(block)) is not None:
        return stacked  # type: ignore[return-value]
    memo: dict[int, Any] = {}  # what is one object in several rows stays one, as in a block that was pickled
    made: list[Any] = []
    for at, row in enumerate(block):
        try:
            made.append(_own_row(row, memo))
        except Exception as exc:
            made.append(row)
            if uncopied is not None:
                uncopied[at] = exc
    return made  # type: ignore[return-value]


def are_constant(rows: list[Any]) -> bool:
    """Whether nobody can change anything in these rows."""
    first = type(rows[0]) if rows else NoneType
    if first in CONSTANT and countOf(map(type, rows), first) == len(rows):  # as mostly, and quicker told than by a set
        return True
    kinds = set(map(type, rows))
    return kinds <= CONSTANT or (kinds == {tuple} and _are_constant(chain.from_iterable(rows)))


def told_once(rows: list[Any]) -> str:
    """Of a row that its step has had, for its error: that it is not tried again, and why; nothing if it can be copied."""
    uncopied: dict[int, Exception] = {}
    own_rows(rows, uncopied)
    return next((as_text(why) for why in uncopied.values()), "")


def as_text(why: Exception) -> str:
    """Why a row that cannot be copied is given to a step once: nobody can say what it was before."""
    told = f"{type(why).__name__}: {safe_str(why)}"
    return f"the row cannot be copied ({told}), so it is as the step left it, and is not tried again"


def _are_constant(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= CONSTANT


def _stacked(rows: list[Any]) -> list[Any] | None:
    """Copies of arrays, or tensors, of one kind and shape, in one piece of memory: four times as fast as one by one."""
    first = rows[0]
    if type(first) not in (loaded_class("numpy", "ndarray"), loaded_class("torch", "Tensor")) or not first.shape:
        return None
    shape, dtype = first.shape, first.dtype
    if any(row.shape != shape or row.dtype != dtype for row in rows):
        return None
    if type(first) is loaded_class("numpy", "ndarray"):
        return None if dtype.hasobject else list(sys.modules["numpy"].stack(rows))
    torch = sys.modules["torch"]
    if any(row.requires_grad or row.device != first.device or row.layout != torch.strided for row in rows):
        return None
    return list(torch.stack(rows).unbind(0))


def loaded_class(module: str, name: str) -> Any:
    """A class of a module, if that is imported; another thread may just be about to."""
    return getattr(sys.modules.get(module), name, None)


def _own_row(row: Any, memo: dict[int, Any]) -> Any:
    before = len(memo)
    try:
        return _own(row, memo)
    except Exception:
        while len(memo) > before:  # halves of copies: other rows may hold the same things
            memo.popitem()
        raise


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """copy.deepcopy() for what rows are mostly made of; with its memo, so that it does the rest."""
    kind = type(value)
    if kind in CONSTANT:
        return value
    if (found := memo.get(id(value))) is not None:
        return found
    if kind is dict:
        made: Any = {}
        memo[id(value)] = made  # first: it may hold itself
        made.update({key: _own(each, memo) for key, each in value.items()})
    elif kind is list:
        made = memo[id(value)] = []
        made.extend([_own(each, memo) for each in value])
    elif kind is tuple and value:
        made = memo[id(value)] = tuple([_own(each, memo) for each in value])
    elif kind is loaded_class("numpy", "ndarray") and not value.dtype.hasobject:
        made = memo[id(value)] = value.copy("K")
    elif kind is loaded_class("torch", "Tensor"):
        made = memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    else:
        made = copy.deepcopy(value, memo)
    return made
