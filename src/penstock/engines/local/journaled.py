"""A run with a journal: begun, or gone on with from where an earlier process left it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.engines.identity import describe_run, stable_names
from penstock.engines.local.commits import SplitBySplit, tally_of
from penstock.engines.local.digests import Digests
from penstock.engines.local.explain import explain
from penstock.engines.local.journal import Journal
from penstock.engines.local.manifest import environment, is_told_finished, write_manifest
from penstock.engines.local.pools import Machine, choose_pools, count_rows, surroundings
from penstock.engines.local.resuming import check_same_run, find_new_files, fixed_by, model_files
from penstock.engines.local.run import Run
from penstock.engines.local.run_dir import RunDir
from penstock.engines.local.splits import cut, few_splits, make_scheduler, split_goals
from penstock.engines.plan import Plan
from penstock.errors import EngineError, UsageError
from penstock.io.source import SplitGoal
from penstock.models.rendezvous import end_hosts, run_folder
from penstock.observe.result import RunResult
from penstock.options import RunOptions
from penstock.pipeline.pipeline import Graph

KEPT = "what was done is kept in"  # begins the note on an error that says so


def run_journaled(graph: Graph, plan: Plan, programs: Mapping[int, bytes], options: RunOptions) -> RunResult:
    """Run what is left of the run in `run_dir`; all of it, if none was begun there."""
    assert options.run_dir is not None
    if graph.collect:
        raise UsageError(
            "collect() keeps its rows in memory, so it cannot be resumed: write to a sink, or leave out run_dir"
        )
    with RunDir(str(options.run_dir)) as folder:
        begun = _Begun(folder, graph, plan, options)
        try:
            return begun.go_on(programs)
        finally:
            begun.journal.close()


class _Begun:
    """The run of a folder, with its journal open."""

    def __init__(self, folder: RunDir, graph: Graph, plan: Plan, options: RunOptions) -> None:
        self.started = time.monotonic()
        self.folder = folder
        self.graph = graph
        self.plan = plan
        self.options = options
        self.identity = describe_run(graph, plan)
        self.names = stable_names(graph)
        found = self._found()
        if found is None or options.fresh or found.fact("sinks") is None:
            self.journal = self._create(found)
        else:
            self.journal = found
            self._check()

    def _check(self) -> None:
        try:
            check_same_run(self.journal, self.identity, self.plan, self.options)
            self._add_new_files()
        except BaseException:
            self.journal.close()
            raise

    def go_on(self, programs: Mapping[int, bytes]) -> RunResult:
        journal = self.journal
        run_id, finished = journal.fact("run"), journal.fact("finished")
        splits = journal.open_splits()
        pools = choose_pools(self.plan, self.options, Machine.here(), journal.fact("rows"))
        session = 0 if finished else self._begin_session(run_id)
        run = Run(
            id=run_id,
            graph=self.graph,
            plan=self.plan,
            pools=pools,
            programs=programs,
            scheduler=make_scheduler(self.plan, pools, self.options, splits),
            few=journal.fact("few"),
            options=self.options,
            session=f"-{session}",
        )
        if finished:
            if not is_told_finished(journal.folder):  # the process that finished it died before it could say so
                write_manifest(journal)
            tally = tally_of(journal, self.names)
            return run.result(tally, before=tally.splits)
        journal.set_facts(
            {
                "environment": environment(self.options),
                "explained": explain(self.plan, pools, surroundings(self.options, Machine.here()), journaled=True),
                "sink_names": {index: sink.describe() for index, sink in run.sinks.items()},
            }
        )
        write_manifest(journal)
        try:
            with Digests(journal, self.options) as digests:
                result, _ = run.carry_out(SplitBySplit(journal, run.sinks, session, digests, self.names))
                digests.finish()
        except BaseException as exc:
            self._ended(session, exc)
            raise
        journal.finish(session, time.monotonic() - self.started)
        write_manifest(journal)
        return result

    def _begin_session(self, run: str) -> int:
        """The number of this process. Model hosts of one that was killed are ended, and their folder is removed."""
        for session in self.journal.sessions():
            if session["outcome"] in (None, "died"):
                end_hosts(run_folder(f"{run}-{session['number']}"))
        return self.journal.begin_session()

    def _ended(self, session: int, exc: BaseException) -> None:
        """Leave word of how this process ended. What hinders that changes nothing."""
        outcome = "failed" if isinstance(exc, Exception) else "stopped"
        try:
            if self.journal.fact("sinks") is None:
                self.folder.forget(self.journal)  # nothing was begun: change what was wrong, and it is a new run
                return
            self.journal.end_session(session, time.monotonic() - self.started, outcome, f"{type(exc).__name__}: {exc}")
            write_manifest(self.journal)
        except EngineError as again:
            exc.add_note(str(again))
        exc.add_note(f"{KEPT} {self.folder.path}: run the same command again, and it goes on from there")

    def _found(self) -> Journal | None:
        try:
            return self.folder.journal()
        except EngineError:
            if self.options.fresh:
                return None
            raise

    def _create(self, found: Journal | None) -> Journal:
        sources = [read.source for _, _, _, read in self.plan.sources()]
        rows = count_rows(self.plan)
        pools = choose_pools(self.plan, self.options, Machine.here(), rows)
        goals = split_goals(self.plan, pools)
        inputs = [source.inputs() for source in sources]
        splits = [
            split
            for i, (source, goal) in enumerate(zip(sources, goals, strict=True))
            for split in cut(source, i, goal, inputs[i])
        ]
        facts = {
            "run": secrets.token_hex(8),
            "rows": rows,
            "few": few_splits(self.plan, pools, self.options, splits),
            "goals": [asdict(goal) for goal in goals],
            "identity": self.identity.as_json(),
            "fixed": fixed_by(self.options),
            **_facts_of(found),
        }
        if found is not None:
            found.close()
        files = [
            ("input", step.label, file)
            for (_, _, step, _), some in zip(self.plan.sources(), inputs, strict=True)
            for file in some
        ]
        return Journal.create(self.folder.path, facts, splits, [*files, *model_files(self.identity)])

    def _add_new_files(self) -> None:
        goals = [SplitGoal(**goal) for goal in self.journal.fact("goals")]
        for position, step, read, files in find_new_files(self.journal, self.plan):
            first = self.journal.next_number(position)
            splits = cut(read.source, position, goals[position], files, first)
            self.journal.add_splits(splits, step.label, files)
            self.journal.set_facts({"rows": None})


def _facts_of(found: Journal | None) -> dict[str, Any]:
    """What a new journal takes over from the one that it replaces."""
    if found is None:
        return {}
    if found.fact("sinks") is None:  # that run was never begun: this one takes its place
        return {name: found.fact(name) for name in ("run", "earlier", "earlier_runs")}
    parts = [part for some in found.published().values() for part in some]
    parts += [dict(part.details) for _, some in found.prepared() for part in some]
    return {
        "earlier": [*(found.fact("earlier") or ()), *parts],
        "earlier_runs": [*(found.fact("earlier_runs") or ()), found.fact("run")],
    }
