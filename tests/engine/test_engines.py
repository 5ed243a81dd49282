"""What every engine must do, over every way of running; and whether the check would see an engine that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from conftest import WAYS
from penstock.testing import check_engine


@pytest.mark.parametrize("group", ["rows", "order", "resume"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_running_keeps_the_contract(way, group):
    check_engine("local", [group], **WAYS[way])


class Broken:
    """The local engine, but for what a test does to it."""

    def __init__(self, spoil=lambda rows: rows, options=lambda options: options):
        self.spoil = spoil
        self.options = options

    def start(self, graph, options):
        return Spoilt(ps.LocalEngine().start(graph, self.options(options)), self.spoil)

    def explain(self, graph, options):
        return ps.LocalEngine().explain(graph, options)


class Spoilt:
    def __init__(self, run, spoil):
        self.run = run
        self.spoil = spoil
        self.stop, self.progress = run.stop, run.progress

    def wait(self):
        return self.run.wait()

    @property
    def rows(self):
        return {pcoll: self.spoil(rows) for pcoll, rows in self.run.rows.items()}


def test_an_engine_that_loses_a_row_is_seen():
    with pytest.raises(AssertionError, match=r"collect\(\): 299 rows, expected 300"):
        check_engine(Broken(lambda rows: rows[:-1]), ["rows"], workers=0)


def test_an_engine_that_swaps_rows_is_seen_where_order_counts():
    broken = Broken(lambda rows: [rows[1], rows[0], *rows[2:]])
    check_engine(broken, ["rows"], workers=0)
    with pytest.raises(AssertionError, match=r"collect\(\) in order: row 0 is 1, expected 0"):
        check_engine(broken, ["order"], workers=0)


def test_an_engine_that_forgets_the_journal_is_seen():
    forgetful = Broken(options=lambda options: options.replace({"run_dir": None}))
    with pytest.raises(AssertionError, match="ran all 4000 rows again; what was done before must be kept in run_dir"):
        check_engine(forgetful, ["resume"], workers=0)


def test_an_engine_that_does_not_stop_is_seen():
    class Deaf(Broken):
        def start(self, graph, options):
            run = super().start(graph, options)
            run.stop = lambda: None
            return run

    with pytest.raises(AssertionError, match=r"a run that was stopped: wait\(\) returned; it must raise StoppedError"):
        check_engine(Deaf(), ["resume"], workers=0)


def test_an_engine_that_tells_nothing_or_wrong_things_of_a_run_is_seen():
    class Silent(Broken):
        def explain(self, graph, options):
            return "runs somewhere"

    class Runs(Broken):
        def explain(self, graph, options):
            self.start(graph, options).wait()
            return super().explain(graph, options)

    class Lies(Broken):
        told: object = None

        def start(self, graph, options):
            run = super().start(graph, options)
            made, run.progress = run.progress, lambda: self.spoil_progress(made())
            return run

    lies = Lies()

    def rows(stages, more):
        return [replace(each, rows=each.rows + more) for each in stages]

    wrong = {
        r"progress\(\) before wait\(\) returned None": lambda stages: None,
        r"progress\(\) after wait\(\) tells of 0 rows in 0 stage": lambda stages: [],
        r"progress\(\) after wait\(\) tells of 598 rows": lambda stages: rows(stages, -1),
        r"progress\(\) after wait\(\): 301 rows of 300": lambda stages: rows(stages, 1),
    }
    with pytest.raises(AssertionError, match=r"explain\(\) does not name the step 'Numbers'"):
        check_engine(Silent(), ["rows"], workers=0)
    with pytest.raises(AssertionError, match=r"explain\(\) has run the pipeline"):
        check_engine(Runs(), ["rows"], workers=0)
    for message, spoil in wrong.items():
        lies.spoil_progress = spoil
        with pytest.raises(AssertionError, match=message):
            check_engine(lies, ["rows"], workers=0)


def test_a_group_that_there_is_not():
    with pytest.raises(AssertionError, match="has no group speed; expected some of rows, order, resume"):
        check_engine("local", ["speed"])
