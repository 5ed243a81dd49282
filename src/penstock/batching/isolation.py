"""The search for the rows that make a batch fail. Pure: it says what to call, and is told what came of it.

A batch that raised is halved. When one half passes, the other is known to be bad and is halved without a call for it; so
k bad rows among n are found in about k log2(n) calls, and every call that passes has answered its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Generic, NamedTuple, TypeAlias, TypeVar

E = TypeVar("E")


class IsolationCall(NamedTuple):
    """Call the model with rows start to stop, and send what that raised, or None."""

    start: int
    stop: int


class Blame(NamedTuple, Generic[E]):
    """One row that fails alone; or several that fail together, though each half of them passes."""

    start: int
    stop: int
    error: E


Search: TypeAlias = Generator["IsolationCall | Blame[E]", "E | None", bool]


def isolate(rows: int, error: E, too_large: Callable[[E], bool]) -> Search[E]:
    """Find out which of the rows of a batch are to blame for its error. The search goes depth first, so that whoever wants
    the first guilty row alone stops there. An error that says `too_large` blames no row of the batch, unless it has only
    one, and tells nothing of one half when the other passes."""
    return _split(0, rows, error, too_large, called=True)


def blamed(search: Search[E], call: Callable[[int, int], E | None]) -> Iterator[Blame[E]]:
    """Carry out a search with a function that calls the model."""
    reply: E | None = None
    while True:
        try:
            step = search.send(reply)
        except StopIteration:
            return
        reply = None
        if isinstance(step, IsolationCall):
            reply = call(step.start, step.stop)
        else:
            yield step


def _split(start: int, stop: int, error: E, too_large: Callable[[E], bool], *, called: bool) -> Search[E]:
    """The search among rows that are known to be bad: they were `called`, or the rest of their batch passed. Returns
    whether a row was blamed."""
    if stop - start == 1:
        return (yield from _as_one(start, stop, error, called))
    middle = (start + stop) // 2
    found = False
    left = yield IsolationCall(start, middle)
    if left is not None:
        found = yield from _split(start, middle, left, too_large, called=True)
    if left is None and not too_large(error):
        found = yield from _split(middle, stop, error, too_large, called=False)
    else:
        right = yield IsolationCall(middle, stop)
        if right is not None:
            found = (yield from _split(middle, stop, right, too_large, called=True)) or found
    if not found and not too_large(error):
        found = yield from _as_one(start, stop, error, called)
    return found


def _as_one(start: int, stop: int, error: E, called: bool) -> Search[E]:
    """One row, or several of which no smaller part fails: they are to blame if a call with just them does raise."""
    own = error if called else (yield IsolationCall(start, stop))
    if own is None:
        return False
    yield Blame(start, stop, own)
    return True
