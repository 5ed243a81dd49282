"""Does a source keep its contract?"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.blocks import row_count, rows_of
from penstock.io.source import Source, SplitGoal

T = TypeVar("T")

GOALS = (
    SplitGoal(),
    SplitGoal(min_splits=2),
    SplitGoal(min_splits=7),
    SplitGoal(max_bytes=1, min_splits=3),
    SplitGoal(max_bytes=1 << 40),
)


def check_source(source: Source[T], expected_rows: Sequence[T] | None = None) -> None:
    """Raise AssertionError unless the source gives the same rows, in the same order, however it is cut and read.

    It is cut for several goals and read as a worker would: from pickled copies of the source and of its splits, each
    twice. `expected_rows` are the rows that must come out, if they are known. Rows that cannot be compared with `==`,
    such as arrays, are compared by their pickled bytes.
    """
    name = type(source).__name__
    copy = worker_copy(source, f"{name} itself")
    first: list[Any] | None = None if expected_rows is None else list(expected_rows)
    for goal in GOALS:
        splits = list(source.splits(goal))
        _check_cut_again(source, goal, splits)
        _check_paths(source, splits)
        rows = [row for split in splits for row in _read_twice(copy, source.payload(split), name)]
        if first is None:
            first = rows
        check_same(first, rows, f"{name}, cut into {len(splits)} splits for {goal}")
    count = source.count()
    expect(count is None or count == len(first or ()), f"{name}.count() is {count}, but {len(first or ())} rows were read")


def _check_cut_again(source: Source[Any], goal: SplitGoal, splits: list[Any]) -> None:
    again = list(source.splits(goal))
    expect(
        len(again) == len(splits) and all(map(same_row, splits, again)),
        f"{type(source).__name__}.splits({goal}) gave {len(splits)} splits, and {len(again)} other ones when called "
        "again; it must give the same ones while the input is the same",
    )


def _check_paths(source: Source[Any], splits: list[Any]) -> None:
    inputs = {file.path for file in source.inputs()}
    strangers = {path for split in splits for path in source.paths_of(split)} - inputs
    expect(
        not strangers,
        f"{type(source).__name__}.paths_of() names {min(strangers, default='')}, which inputs() does not have",
    )


def _read_twice(source: Source[Any], split: Any, name: str) -> list[Any]:
    rows = _read(source, worker_copy(split, f"a split of {name}"), name)
    check_same(rows, _read(source, split, name), f"{name}, one split read a second time")
    return rows


def _read(source: Source[Any], split: Any, name: str) -> list[Any]:
    rows = []
    for block in source.read(split):
        expect(row_count(block) > 0, f"{name}.read() gave an empty block; leave it out")
        rows += rows_of(block)
    return rows


def check_same(expected: Sequence[Any], got: Sequence[Any], what: str) -> None:
    """Raise AssertionError, naming the first row that is not the expected one, unless both hold the same rows."""
    for index, (one, other) in enumerate(zip(expected, got, strict=False)):
        if not same_row(one, other):
            raise AssertionError(f"{what}: row {index} is {other!r}, expected {one!r}")
    expect(len(expected) == len(got), f"{what}: {len(got)} rows, expected {len(expected)}")


def worker_copy(thing: Any, what: str) -> Any:
    """A thing as a worker gets it. AssertionError if it cannot be sent there."""
    import cloudpickle

    try:
        return pickle.loads(cloudpickle.dumps(thing))
    except Exception as exc:
        raise AssertionError(f"{what} cannot be sent to a worker: {type(exc).__name__}: {exc}") from exc


def expect(kept: bool, message: str) -> None:
    """Raise AssertionError with the message unless the promise was kept; also where Python runs without asserts."""
    if not kept:
        raise AssertionError(message)


def same_row(one: Any, other: Any) -> bool:
    """Whether two rows are equal; those that cannot say so, and NaN, by their pickled bytes."""
    try:
        if one == other:
            return True
    except (RuntimeError, TypeError, ValueError):
        pass  # arrays have no single truth value
    return pickle.dumps(one) == pickle.dumps(other)
