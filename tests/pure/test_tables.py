"""Rows as tables: exactly the rows, or no table."""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.answers import as_rows, leave_out, make_room
from penstock.blocks import drop_rows, rows_of
from penstock.tables import table_of

LEAVES = [
    st.text(st.characters(codec=None, exclude_categories=[])),  # halves of surrogate pairs, too
    st.integers(-(2**65), 2**65) | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1]),
    st.floats(),
    st.booleans(),
    st.binary(),
    st.none(),
]
VALUES = st.recursive(st.one_of(LEAVES), lambda inner: st.lists(inner, max_size=3), max_leaves=4)
NAMES = st.text(st.characters(codec=None, exclude_categories=[]), max_size=3)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types all through; NaN is NaN, and a zero has its sign."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return bool(one == other)


@st.composite
def alike(draw: st.DrawFn) -> list[Any]:
    """Rows of one list of names, whose columns mostly have values of one kind."""
    columns = draw(st.dictionaries(NAMES, st.sampled_from(LEAVES), min_size=1, max_size=4))
    lists = draw(st.booleans())
    kinds = {name: st.none() | (st.lists(kind, max_size=3) if lists else kind) for name, kind in columns.items()}
    return draw(st.lists(st.fixed_dictionaries(kinds), min_size=1, max_size=6))


@settings(max_examples=300)
@given(rows=alike() | st.lists(st.dictionaries(NAMES, VALUES, max_size=3) | VALUES, max_size=4))
def test_a_table_holds_exactly_the_rows_or_there_is_none(rows: list[Any]) -> None:
    table = table_of(rows)
    if table is not None:
        assert same(rows_of(table), rows)
        assert table.num_rows == len(rows)


COLUMNS: list[tuple[list[Any], pa.DataType]] = [
    (["a", "", None, "\x00ü\U0001f600"], pa.string()),
    ([1, None, -(2**63), 2**63 - 1], pa.int64()),
    ([0.1, math.nan, -0.0, math.inf, None], pa.float64()),
    ([True, None, False], pa.bool_()),
    ([b"", b"\xff", None], pa.binary()),
    ([None, None], pa.null()),
    ([[0.5, 1.5], [], None, [None]], pa.list_(pa.float64())),
    ([[1, 2], [3]], pa.list_(pa.int64())),
    ([[["a"], None], []], pa.list_(pa.list_(pa.string()))),
]


@pytest.mark.parametrize(("values", "kind"), COLUMNS, ids=[str(kind) for _, kind in COLUMNS])
def test_columns_of_one_kind_have_a_table(values: list[Any], kind: pa.DataType) -> None:
    rows = [{"id": i, "inference": value, "model_id": "m"} for i, value in enumerate(values)]
    table = table_of(rows)
    assert table is not None
    assert table.schema.field("inference").type == kind
    assert same(rows_of(table), rows)


class Level(IntEnum):
    LOW = 1


class Name(str):
    __slots__ = ()


REFUSED: list[list[Any]] = [
    [],
    [{}],
    [1],
    [{"a": 1}, None],
    [OrderedDict(a=1)],
    [{1: 2}],
    [{Name("a"): 2}],
    [{"\ud800": 2}],
    [{"a": 1}, {"b": 1}],
    [{"a": 1}, {}],
    [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    *(
        [{"a": one}, {"a": other}]
        for one, other in [(1, 2.0), (1, True), ("a", b"a"), ([1], [0.5]), ([1], 1), ([1], [True])]
    ),
    *([{"a": value}] for value in [2**63, -(2**63) - 1, "\udfff", Level.LOW, Name("a"), np.float64(1), bytearray(b"a")]),
    *([{"a": value}] for value in [(1, 2), {"b": 1}, {1}, object(), [1, 2.0], [{"b": 1}], [2**63], np.ones(2)]),
]


@pytest.mark.parametrize("rows", REFUSED, ids=map(str, range(len(REFUSED))))
def test_rows_that_a_table_would_change_have_none(rows: list[Any]) -> None:
    assert table_of(rows) is None


def test_a_list_in_itself_has_no_table() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert table_of([{"a": endless}]) is None


ANSWERS = [
    lambda rows: [f"answer {at}" for at in range(rows)],
    lambda rows: np.arange(rows),
    lambda rows: np.array([f"answer {at}" for at in range(rows)]),
    lambda rows: np.arange(3.0 * rows).reshape(rows, 3),
    lambda rows: {"a": np.arange(rows), "b": np.arange(rows) * 0.5},
    lambda rows: pa.array(range(rows)),
    lambda rows: pa.chunked_array([range(rows // 2), range(rows // 2, rows)], pa.int64()),
]


def _listed(answers: Any) -> list[Any]:
    return [answer.tolist() if hasattr(answer, "tolist") else answer for answer in as_rows(answers)]


@pytest.mark.parametrize("made", ANSWERS, ids=map(str, range(len(ANSWERS))))
@given(rows=st.integers(1, 40), dropped=st.sets(st.integers(0, 39)))
def test_rows_that_failed_are_left_out_of_answers_by_position(made: Any, rows: int, dropped: set[int]) -> None:
    dropped = {at for at in dropped if at < rows}
    answers = made(rows)
    left = leave_out(answers, dropped)
    kept = [at for at in range(rows) if at not in dropped]
    assert _listed(left) == [_listed(answers)[at] for at in kept]
    whole = _listed(make_room(left, rows, dropped))
    assert [whole[at] for at in kept] == _listed(left)
    assert len(whole) == rows


@given(rows=st.integers(0, 40), dropped=st.sets(st.integers(0, 39)))
def test_rows_are_dropped_from_tables_and_lists_alike(rows: int, dropped: set[int]) -> None:
    dropped = {at for at in dropped if at < rows}
    table = pa.table({"a": range(rows), "b": [f"text {at}" for at in range(rows)]})
    assert rows_of(drop_rows(table, dropped)) == drop_rows(rows_of(table), dropped)
    assert drop_rows(table, ()) is table
