"""Which models of a listing are new, and whole: decided without files."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from penstock.io.new_models import ModelState, NewModels

INTERVAL = 10.0


def file(stamp: str, modified: float = 0.0, **more) -> ModelState:
    """A model that is finished, unless it is said to be otherwise."""
    return ModelState(**{"stamp": stamp, "size": 1, "modified": modified, "touched": modified, "finished": True, **more})


def unsure(stamp: str, modified: float = 0.0, **more) -> ModelState:
    """A model that may still be written."""
    return file(stamp, modified, **{"touched": math.inf, "finished": False, **more})


def looks(*listings: dict[str, ModelState], key_of: Callable[[str], str | None] = lambda path: None) -> list[list[str]]:
    """The paths that each look tells, of one listing after the other."""
    new = NewModels(INTERVAL, key_of)
    return [[path for _, path in new.look(listing, now=100.0)] for listing in listings]


def test_the_first_look_tells_the_newest_by_time_then_by_name():
    assert looks({}) == [[]]
    assert looks({"a": file("1", 5.0), "b": file("1", 7.0), "c": file("1", 6.0)}) == [["b"]]
    assert looks({"b": file("1", 5.0), "c": file("1", 5.0), "a": file("1", 5.0)}) == [["c"]]


def test_older_ones_never_come_later():
    listing = {"a": file("1", 5.0), "b": file("1", 7.0)}
    assert looks(listing, listing, {"a": file("1", 5.0)}, listing) == [["b"], [], [], []]


def test_what_appears_or_changes_later_is_newer_whatever_its_time_says():
    first = {"a": file("1", 500.0)}
    appeared = {**first, "b": file("1", 3.0)}
    changed = {**appeared, "a": file("2", 2.0)}
    assert looks(first, appeared, changed) == [["a"], ["b"], ["a"]]


def test_among_several_that_appear_at_once_times_decide():
    assert looks({"z": file("1", 500.0)}, {"a": file("1", 3.0), "b": file("1", 2.0)}) == [["z"], ["a"]]


def test_each_stamp_is_told_once_and_a_way_back_is_a_change():
    one, two = {"a": file("1")}, {"a": file("2")}
    assert looks(one, one, two, two, one) == [["a"], [], ["a"], [], ["a"]]


def test_a_model_that_vanishes_and_comes_back_as_it_was_is_not_new():
    assert looks({"a": file("1")}, {}, {"a": file("1")}, {}, {"a": file("2")}) == [["a"], [], [], [], ["a"]]


def test_what_may_still_be_written_comes_when_it_stays_the_same():
    growing = [{"a": file("1", 1.0), "b": unsure(stamp, 2.0)} for stamp in ("1", "2", "3", "3", "3")]
    assert looks(*growing) == [["a"], [], [], ["b"], []]


def test_what_was_written_long_ago_is_whole():
    assert looks({"a": unsure("1", touched=100.0 - INTERVAL - 0.1)}) == [["a"]]
    assert looks({"a": unsure("1", touched=100.0 - INTERVAL)}) == [[]]
    assert looks({"a": unsure("1", touched=5000.0)}) == [[]]  # the clock was set back


def test_how_long_to_wait_for_what_may_still_be_written():
    def wait(*states: ModelState, key_of: Callable[[str], str | None] = lambda path: None) -> float:
        new = NewModels(INTERVAL, key_of)
        new.look({f"{at}": state for at, state in enumerate(states)}, now=100.0)
        return new.settled_in(now=101.0)

    assert wait() == wait(file("1", 99.0)) == wait(unsure("1", touched=80.0)) == 0.0
    assert wait(unsure("1", 95.0, touched=95.0)) == 4.0
    assert wait(unsure("1", touched=99.0), unsure("1", touched=97.0)) == 8.0
    assert wait(unsure("1", touched=math.inf)) == wait(unsure("1", touched=5000.0)) == INTERVAL  # the clock was set back
    assert wait(unsure("1", 97.0, size=0, touched=97.0)) == 0.0  # it never comes
    assert wait(unsure("1", 97.0, touched=97.0), file("1", 98.0)) == 0.0  # it would be no news
    assert wait(unsure("1", 97.0, touched=97.0), file("1", 98.0), key_of=str) == 6.0


def test_a_model_that_was_there_first_but_is_older_does_not_replace_the_newest():
    listing = {"old": unsure("1", 5.0), "new": file("1", 6.0)}
    assert looks(listing, listing) == [["new"], []]


def test_empty_models_never_come():
    empty = {"a": file("1", size=0)}
    assert looks(empty, empty, {"a": file("2", size=None)}) == [[], [], ["a"]]


def test_every_key_has_its_own_newest():
    def key_of(path: str) -> str:
        return path[0]

    first = {"a1": file("1", 1.0), "a2": file("1", 2.0), "b1": file("1", 9.0), "c1": unsure("1", 5.0)}
    later = {**first, "a1": file("2", 0.0), "d1": file("1", 4.0)}
    assert looks(first, first, later, key_of=key_of) == [["a2", "b1"], ["c1"], ["a1", "d1"]]


PATHS = st.sampled_from(["a1", "a2", "b1", "b2"])
STATES = st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 85.0, 95.0]), st.sampled_from([0, 1, None]))


@given(st.lists(st.dictionaries(PATHS, STATES), max_size=8))
def test_nothing_half_written_is_told_and_no_stamp_twice(worlds):
    new = NewModels(INTERVAL, lambda path: path[0])
    told: dict[str, str] = {}
    last: dict[str, ModelState] = {}
    for world in worlds:
        listing = {
            path: ModelState(str(stamp), size, 1.0, touched, finished)
            for path, (stamp, finished, touched, size) in world.items()
        }
        found = new.look(listing, now=100.0)
        assert len({key for key, _ in found}) == len(found)
        for key, path in found:
            state = listing[path]
            assert key == path[0]
            assert state.size != 0
            assert state.finished or 100.0 - state.touched > INTERVAL or last.get(path, state)[0] == state.stamp
            assert state.finished or state.touched < 90.0 or path in last
            assert told.get(path) != state.stamp
            told[path] = state.stamp
        last = listing


@given(st.lists(st.dictionaries(PATHS, st.tuples(st.integers(0, 3), st.booleans())), max_size=8))
def test_when_all_stands_still_the_newest_was_told_last(changes):
    """Models appear and change; none vanishes."""
    new = NewModels(INTERVAL, lambda path: path[0])
    listing: dict[str, ModelState] = {}
    ages: dict[str, tuple[int, float, str]] = {}
    told: dict[str | None, tuple[str, str]] = {}
    for number, change in enumerate([*changes, {}, {}]):
        for path, (modified, finished) in change.items():
            listing[path] = ModelState(str(number), 1, float(modified), math.inf, finished)
            ages[path] = (number, float(modified), path)
        told.update({key: (path, listing[path].stamp) for key, path in new.look(listing, now=100.0)})
    for key in {path[0] for path in listing}:
        newest = max(age for path, age in ages.items() if path[0] == key)
        assert told[key] == (newest[2], listing[newest[2]].stamp)
