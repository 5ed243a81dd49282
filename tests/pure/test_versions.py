"""Which version of a model is wanted, and what becomes of one on trial: pure decisions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.versions import KEPT, ORIGINAL, REPLACED, Rollout, Trial, TrialRule, Version, Wanted

RULE = TrialRule(share=0.1, rows=100, max_error_rate=0.02)


def rollout(rule=None):
    return Rollout(rule, itertools.count(1))


def test_the_newest_is_wanted_and_those_before_it_are_there_to_fall_back_on():
    made = rollout()
    assert made.wanted == Wanted((ORIGINAL,))
    for n in range(1, 6):
        made.announce(f"m{n}", f"m{n}", "s")
    assert [version.number for version in made.wanted.serve] == [5, 4, 3, 0]
    assert len(made.wanted.serve) == KEPT + 1


def test_those_that_nobody_could_use_take_no_place_of_one_to_fall_back_on():
    made = rollout()
    for n in range(1, 6):
        made.announce(f"m{n}", f"m{n}", "s")
        made.became([1, 2], [2, 3, 4])  # one of them was refused in some process only
    assert [version.number for version in made.wanted.serve] == [5, 2, 1, 0]


def announced(told, bad=()):
    """What is wanted after these paths, each with when it came; and the path of the newest after each."""
    wanted, newest = Wanted(), []
    for number, (path, since) in enumerate(told, 1):
        wanted = wanted.announced(Version(number, path, path, "s", since=since), bad)
        newest.append(wanted.serve[0].path)
    return wanted, newest


def test_of_several_who_announce_one_that_is_behind_does_not_bring_an_older_version_back():
    _, newest = announced([("a", 1), ("b", 2), ("a", 1), ("b", 2), ("a", 3), ("b", 2)])
    assert newest == ["a", "b", "b", "b", "a", "a"], "it may go back, if that is news"
    _, newest = announced([("a", 1), ("a", 3), ("b", 2)])
    assert newest == ["a", "a", "a"]


def test_the_last_to_fall_back_on_is_the_handlers_own_whoever_announces():
    wanted, _ = announced([(str(number), number) for number in range(1, 7)], bad=[2, 3, 4, 5])
    assert [version.number for version in wanted.serve] == [6, 1, 0]


@given(st.permutations(range(1, 7)))
def test_whatever_the_order_the_newest_wins(times):
    wanted, _ = announced([(str(since), since) for since in times])
    assert wanted.serve[0].since == 6


@pytest.mark.parametrize("rule", [None, RULE])
def test_nobody_falls_back_on_what_is_not_there_any_more(rule):
    made = rollout(rule)
    made.is_open = True
    made.announce("own", "own", "changed", original_is_gone=True)
    assert made.wanted.serve[-1] == REPLACED
    assert (made.wanted.trial is None) == (rule is None), "it has to prove itself all the same"
    made.announce("m2", "m2", "")
    assert made.wanted.serve[-1] == REPLACED
    assert made.wanted.version(0) == REPLACED


def test_what_was_announced_last_is_not_new_and_the_same_file_with_something_else_in_it_is():
    made = rollout()
    first = made.announce("m", "m", "one")
    assert made.announce("m", "m", "one") is None
    second = made.announce("m", "m", "two")
    assert (first.model_id, second.model_id) == ("m", "m#2"), "answers of both can be told apart"
    assert made.announce("m", "m", "one").model_id == "m#3", "it went back: that is a change, too"


def test_a_new_version_is_on_trial_once_rows_are_answered_and_a_newer_one_takes_its_place():
    made = rollout(RULE)
    made.announce("m1", "m1", "")
    assert made.wanted.serve[0].path == "m1", "what is there at the start is used"
    made.is_open = True
    made.announce("m2", "m2", "")
    made.announce("m3", "m3", "")
    assert made.wanted.serve[0].path == "m1"
    assert made.wanted.trial.path == "m3"
    assert made.wanted.share == 0.1
    assert made.tried(2, Trial(1000, 0)) is None, "nobody waits for that one any more"


@pytest.mark.parametrize(
    ("rows", "errors", "promoted"),
    [(99, 0, None), (100, 0, True), (100, 2, True), (100, 3, False), (3, 3, False), (2, 2, None), (1000, 20, True)],
)
def test_a_trial_is_decided_when_it_had_its_rows_or_cannot_be_won_any_more(rows, errors, promoted):
    made = rollout(RULE)
    made.is_open = True
    version = made.announce("m1", "m1", "")
    assert made.tried(version.number, Trial(rows, errors)) is promoted
    serving = {True: (version, ORIGINAL), False: (ORIGINAL,), None: (ORIGINAL,)}[promoted]
    assert made.wanted == Wanted(serving, version if promoted is None else None, 0.1 if promoted is None else 0.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: Trial(max(p), min(p))), max_size=30))
def test_a_trial_ends_once_and_is_never_won_with_too_many_errors(seen):
    made = rollout(RULE)
    made.is_open = True
    version = made.announce("m1", "m1", "")
    total, decisions = Trial(), []
    for each in seen:
        total = Trial(total.rows + each.rows, total.errors + each.errors)
        decisions.append((made.tried(version.number, total), total))
    ends = [(promoted, at) for promoted, at in decisions if promoted is not None]
    assert len(ends) <= 1
    for promoted, at in ends:
        assert promoted == (at.errors <= RULE.max_error_rate * max(RULE.rows, at.rows))


def test_one_that_cannot_be_tried_is_not_wanted_any_more():
    made = rollout(RULE)
    made.is_open = True
    version = made.announce("m1", "m1", "")
    made.refused(version.number)
    assert made.wanted == Wanted((ORIGINAL,))
    assert made.announce("m1", "m1", "") is None, "it is tried again when its file changes"
    assert made.announce("m1", "m1", "changed") is not None
