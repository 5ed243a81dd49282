"""Which version of a model is wanted, and what becomes of one on trial: pure decisions."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.version_files import Status, VersionFiles
from penstock.models.versions import KEPT, ORIGINAL, REPLACED, Rollout, Trial, TrialRule, Version, Wanted, wanted_of

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


def test_what_is_wanted_is_read_as_it_was_written(tmp_path):
    files = VersionFiles(str(tmp_path / "private" / "run"), "step 's'")
    assert files.mark() is None
    assert files.wanted() == {}
    wanted = {"": Wanted((Version(2, "p", "id", "s"), ORIGINAL), Version(3, "q", None, ""), 0.25)}
    files.publish(wanted)
    first = files.mark()
    assert files.wanted() == wanted
    assert wanted_of(files.wanted(), "another") == Wanted()
    files.publish({})
    assert files.mark() != first
    assert os.listdir(files.folder) == [f"{os.path.basename(files._stem)}.versions"], "nothing half-written is left"


def test_reports_of_processes_are_read_as_they_were_written(tmp_path):
    files = VersionFiles(str(tmp_path / "private" / "run"), "step 's'")
    files.publish({})
    status = Status({"": {2: "how"}}, {"k": {1: "why"}}, {"": {3: Trial(10, 1)}})
    files.report(status)
    assert files.reports() == {str(os.getpid()): status}
    VersionFiles(str(tmp_path / "gone" / "run"), "s").report(status)  # the run is over: nobody reads it


def test_who_died_at_work_on_a_version_is_seen(tmp_path):
    files = VersionFiles(str(tmp_path / "private" / "run"), "step 's'")
    files.publish({})
    version = Version(4, "p")
    with files.at_work(version, "load", 3):
        assert files.deaths(version, "load") == [], "this process lives"
    script = (
        "import os, sys; from penstock.models.version_files import *; from penstock.models.versions import *\n"
        "with VersionFiles(*eval(sys.argv[1])).at_work(Version(4), 'load', 7): os._exit(9)"
    )
    told = json.dumps([files.folder, files.key])
    assert subprocess.run([sys.executable, "-c", script, told], check=False).returncode == 9
    assert files.deaths(version, "load") == [7]
    assert files.deaths(version, "trial") == []
    assert files.deaths(Version(5), "load") == []
