"""A run with a journal: begun, or gone on with from where an earlier process left it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.engines.identity import describe_run, stable_names
from penstock.engines.local.commits import Commits, SplitBySplit, tally_of
from penstock.engines.local.digests import Digests
from penstock.engines.local.explain import explain
from penstock.engines.local.journal import Journal
from penstock.engines.local.manifest import environment, is_told_finished, write_manifest
from penstock.engines.local.outcomes import SplitId
from penstock.engines.local.pools import Machine, Pools, choose_pools, count_rows, surroundings
from penstock.engines.local.resuming import check_same_run, find_new_files, fixed_by, model_files, order_of, outside
from penstock.engines.local.run import Run, labelled_sinks, terminable
from penstock.engines.local.run_dir import RunDir
from penstock.engines.local.splits import cut, few_splits, make_scheduler, split_goals
from penstock.engines.plan import Plan
from penstock.errors import EngineError, OutputError, TooManyFailuresError, UsageError
from penstock.io.files import InputFile, without_secrets
from penstock.io.source import SplitGoal
from penstock.models.rendezvous import end_hosts, run_folder
from penstock.observe.result import RunResult
from penstock.options import RunOptions
from penstock.pipeline.pipeline import Graph
from penstock.rows import safe_str

KEPT = "what was done is kept in"  # begins the note on an error that says so


def run_journaled(graph: Graph, plan: Plan, programs: Mapping[int, bytes], options: RunOptions) -> RunResult:
    """Run what is left of the run in `run_dir`; all of it, if none was begun there."""
    if graph.collect:
        raise UsageError(
            "collect() keeps its rows in memory, so it cannot be resumed: write to a sink, or leave out run_dir"
        )
    with terminable(), RunDir(str(options.run_dir)) as folder:
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
        self.sinks = {index: sink for index, (_, sink) in labelled_sinks(plan).items()}
        self.identity = describe_run(graph, plan)
        self.names = stable_names(graph)
        self.journal = self._opened()

    def _opened(self) -> Journal:
        found = self._found()
        if found is None:
            return self._create(None)
        try:
            if self.options.fresh or found.fact("sinks") is None:
                return self._create(found)
            check_same_run(found, self.identity, self.plan, self.options)
            self._check_output(found)
            self._reopen_lost(found)
            self._add_new_files(found)
        except BaseException:
            found.close()
            raise
        return found

    def go_on(self, programs: Mapping[int, bytes]) -> RunResult:
        journal = self.journal
        run_id, finished = journal.fact("run"), journal.fact("finished")
        pools = choose_pools(self.plan, self.options, Machine.here(), journal.fact("rows"))
        splits = journal.open_splits()  # if these cannot be read, no session has begun
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
            return run.result(tally, before=tally.splits, was_finished=True)
        try:
            self._describe(pools)
            with Digests(journal, self.options) as digests:
                commits = Commits(journal, self.sinks, session, digests, self.names)
                result, _ = run.carry_out(SplitBySplit(commits))
                digests.finish()
            journal.finish(session, time.monotonic() - self.started)
            write_manifest(journal)
        except BaseException as exc:
            self._ended(session, exc)
            raise
        return result

    def _describe(self, pools: Pools) -> None:
        """What `penstock status` and the manifest tell of the run, from its beginning on."""
        self.journal.set_facts(
            {
                "environment": environment(self.options),
                "explained": explain(self.plan, pools, surroundings(self.options, Machine.here()), journaled=True),
                "sink_names": [sink.describe() for sink in self.sinks.values()],
            }
        )
        write_manifest(self.journal)

    def _begin_session(self, run: str) -> int:
        """The number of this process. Model hosts of one that was killed are ended, and their folder is removed."""
        for session in self.journal.sessions():
            if session["outcome"] in (None, "died"):
                end_hosts(run_folder(f"{run}-{session['number']}"))
        return self.journal.begin_session()

    def _ended(self, session: int, exc: BaseException) -> None:
        """Leave word of how this process ended. What hinders that changes nothing."""
        outcome = "failed" if isinstance(exc, Exception) else "stopped"
        text = without_secrets(f"{type(exc).__name__}: {safe_str(exc)}").encode("utf-8", "backslashreplace").decode()
        try:
            if self.journal.fact("sinks") is None and not self.journal.fact("earlier_runs"):
                self.folder.forget(self.journal)  # nothing was begun: change what was wrong, and it is a new run
                return
            self.journal.end_session(session, time.monotonic() - self.started, outcome, text)
            write_manifest(self.journal)
        except Exception as again:
            exc.add_note(f"how the run ended could not be noted: {safe_str(again)}")
        exc.add_note(f"{KEPT} {self.folder.path}: {self._advice(exc)}")

    def _advice(self, exc: BaseException) -> str:
        if isinstance(exc, TooManyFailuresError):
            return "rows that failed do not run again: set a higher threshold to go on, or start over (--fresh)"
        without = ", without fresh," if self.options.fresh else ","
        return f"run the same command again{without} and it goes on from there"

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
        splits: list[tuple[SplitId, Any]] = []
        files: list[tuple[str, str, InputFile]] = []
        for position, (_, _, step, read) in enumerate(self.plan.sources()):
            every = read.source.inputs()
            own = outside(every, self.folder.path)
            splits += cut(sources[position], position, goals[position], own if len(own) < len(every) else ())
            files += [("input", step.label, file) for file in own]
        facts = {
            "run": secrets.token_hex(8),
            "rows": rows,
            "few": few_splits(self.plan, pools, self.options, splits),
            "goals": [asdict(goal) for goal in goals],
            "identity": self.identity.as_json(),
            "order": order_of(self.plan),
            "fixed": fixed_by(self.options),
            **_facts_of(found),
        }
        if found is not None:
            self._rehearse(facts)
            found.close()
        return Journal.create(self.folder.path, facts, splits, [*files, *model_files(self.identity)])

    def _rehearse(self, facts: Mapping[str, Any]) -> None:
        """Whether the sinks can start over: if not, the journal that is there must stay."""
        for sink in self.sinks.values():
            sink.clean(facts["run"])  # a process that was killed may have been here before
        try:
            for sink in self.sinks.values():
                sink.start_over(facts.get("earlier") or ())
                sink.prepare(facts["run"])
        finally:
            for sink in self.sinks.values():
                sink.clean(facts["run"])

    def _check_output(self, journal: Journal) -> None:
        """What was published must be there: it is not made again."""
        published = journal.published()
        for place, sink in enumerate(self.sinks.values()):
            if gone := sink.missing(published.get(place, ())):
                raise OutputError(
                    f"{sink.describe()}: {len(gone)} part(s) that this run has written are gone, such as {gone[0]}; "
                    "put them back, or start over with fresh=True (--fresh)"
                )

    def _reopen_lost(self, journal: Journal) -> None:
        """Splits that were prepared, and whose parts are lost before they were published, run again."""
        sinks = list(self.sinks.values())
        lost = [split for split, parts in journal.prepared() if not all(sinks[p.sink].has(p.token) for p in parts)]
        if lost:
            journal.reopen(lost)

    def _add_new_files(self, journal: Journal) -> None:
        goals = [SplitGoal(**goal) for goal in journal.fact("goals")]
        for position, step, read, files in find_new_files(journal, self.plan):
            splits = cut(read.source, position, goals[position], files, journal.next_number(position))
            journal.add_splits(splits, step.label, files)
            journal.set_facts({"rows": None})


def _facts_of(found: Journal | None) -> dict[str, Any]:
    """What a new journal takes over from the one that it replaces."""
    if found is None:
        return {}
    if found.fact("sinks") is None:  # that run was never begun: this one takes its place
        return {name: found.fact(name) for name in ("run", "earlier", "earlier_runs", "earlier_asides")}
    parts = [*(found.fact("earlier") or ()), *(part for some in found.published().values() for part in some)]
    parts += [dict(part.details) for _, some in found.prepared() for part in some]
    return {
        "earlier": list({json.dumps(part, sort_keys=True): part for part in parts}.values()),
        "earlier_runs": [*(found.fact("earlier_runs") or ()), found.fact("run")],
        "earlier_asides": [*(found.fact("earlier_asides") or ()), *(found.fact("asides") or ())],
    }
