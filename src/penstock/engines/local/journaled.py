"""A run with a journal: begun, or gone on with from where an earlier process left it."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock.engines.local.run import Run, labelled_sinks, sinks_of, stoppable
from penstock.errors import (
    EngineError,
    InputError,
    OutputError,
    RunChangedError,
    StepError,
    TooManyFailuresError,
    UsageError,
)
from penstock.io.files import without_secrets
from penstock.io.source import SplitGoal
from penstock.journal.commits import Commits, SplitBySplit, tally_of
from penstock.journal.digests import Digests
from penstock.journal.errors import KEPT
from penstock.journal.identity import describe_run, stable_names
from penstock.journal.inputs import list_inputs, model_files, written_by
from penstock.journal.journal import Journal
from penstock.journal.manifest import environment, is_told_finished, told_run, write_manifest
from penstock.journal.resuming import (
    check_same_run,
    check_still_same,
    find_new_files,
    fixed_by,
    order_of,
    refuse_changed_input,
)
from penstock.journal.run_dir import RunDir
from penstock.models.rendezvous import end_hosts, run_folder
from penstock.observe.result import RunResult
from penstock.options import RunOptions
from penstock.pipeline.pipeline import Graph
from penstock.rows import safe_str
from penstock.run.explain import explain
from penstock.run.file_changes import FileWatch, Input
from penstock.run.plan import Plan
from penstock.run.pools import Machine, Pools, choose_pools, count_rows, surroundings
from penstock.run.splits import cut, few_splits, make_scheduler, split_goals


def run_journaled(graph: Graph, plan: Plan, programs: Mapping[int, bytes], options: RunOptions) -> RunResult:
    """Run what is left of the run in `run_dir`; all of it, if none was begun there."""
    if graph.collect:
        raise UsageError(
            "collect() keeps its rows in memory, so it cannot be resumed: write to a sink, or leave out run_dir"
        )
    with stoppable(), RunDir(str(options.run_dir)) as folder:
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
        self.by_node = sinks_of(plan)
        self.sinks = list(self.by_node.values())
        self.identity = describe_run(graph, plan)
        self.names = stable_names(graph)
        self.inputs: Sequence[Input] = ()
        self.is_blind = False  # it takes the place of a run whose journal cannot be read
        self.journal = self._opened()

    def _opened(self) -> Journal:
        found = self._found()
        if found is None:
            return self._create(None)
        try:
            if self.options.fresh or not found.was_begun:
                return self._create(found)
            self.inputs = list_inputs(self.plan, self.folder.path, written_by(found), may_be_gone=True)
            check_same_run(found, self.identity, self.plan, self.inputs, self.options)
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
                commits = Commits(journal, self.by_node, session, digests, self.names)
                files = FileWatch(self.inputs, lambda *found: refuse_changed_input(journal, digests, *found))
                labels = [label for label, _ in labelled_sinks(self.plan).values()]
                outputs = SplitBySplit(commits, labels, files, self.inputs, lambda: self._check_files(digests))
                result, _ = run.carry_out(outputs)
            journal.finish(session, time.monotonic() - self.started)
            write_manifest(journal)
        except BaseException as exc:
            self._ended(session, exc)
            raise
        return result

    def _check_files(self, digests: Digests) -> None:
        """Whether the files are still those that were read."""
        digests.finish()
        inputs = list_inputs(self.plan, self.folder.path, written_by(self.journal), may_be_gone=True)
        check_still_same(self.journal, self.identity, inputs)

    def _describe(self, pools: Pools) -> None:
        """What `penstock status` and the manifest tell of the run, from its beginning on."""
        self.journal.set_facts(
            {
                "environment": environment(self.options),
                "explained": explain(self.plan, pools, surroundings(self.options, Machine.here()), journaled=True),
                "sink_names": [sink.describe() for sink in self.sinks],
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
        kind = type(exc).__name__.lstrip("_")
        text = f"{_without_rows(exc, kind)}\n{kind}: {safe_str(exc)}".removesuffix(": ")
        text = without_secrets(text).encode("utf-8", "backslashreplace").decode()
        try:
            if not self.journal.was_begun and not self.journal.fact("earlier_runs"):
                self.folder.forget(self.journal)  # nothing was begun: change what was wrong, and it is a new run
                return
            self.journal.end_session(session, time.monotonic() - self.started, outcome, text)
            write_manifest(self.journal)
        except Exception as again:
            exc.add_note(f"how the run ended could not be noted: {safe_str(again)}")
        if not isinstance(exc, RunChangedError):
            exc.add_note(f"{KEPT} {self.folder.path}{self._so_far()}: {self._advice(exc)}")

    def _advice(self, exc: BaseException) -> str:
        if isinstance(exc, TooManyFailuresError):
            return "rows that failed do not run again: set a higher threshold to go on, or start over (--fresh)"
        again = f"run the same command again{', without fresh,' if self.options.fresh else ','} and it goes on from there"
        changed = {StepError: "code", InputError: "inputs"}
        kinds = [kind for error, kind in changed.items() if isinstance(exc, error)]
        return f"{again} (if you change the {kinds[0]} before that, with --accept-change {kinds[0]})" if kinds else again

    def _so_far(self) -> str:
        """How much is done, if the journal can still tell."""
        try:
            counts = self.journal.split_counts()
        except Exception:
            return ""
        return f" ({sum(counts.values()) - counts.get('open', 0):,} of {sum(counts.values()):,} splits)"

    def _found(self) -> Journal | None:
        found = None
        try:
            found = self.folder.journal()
            if self.options.fresh:
                _facts_of(found)  # all that a fresh start must know of it can be read
            return found
        except EngineError:
            if not self.options.fresh:
                raise
        if found is not None:
            found.close()
        self.is_blind = True
        return None

    def _create(self, found: Journal | None) -> Journal:
        written = () if found is None else written_by(found)
        self.inputs = inputs = list_inputs(self.plan, self.folder.path, written)
        rows = count_rows(each.source for each in inputs)
        pools = choose_pools(self.plan, self.options, Machine.here(), rows)
        goals = split_goals(self.plan, pools, journaled=True)
        splits = [split for i, each in enumerate(inputs) for split in cut(each.source, i, goals[i])]
        files = [("input", each.step, file) for each in inputs for file in each.files]
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
        if found is not None or self.is_blind:
            self._rehearse(facts)
        if found is not None:
            found.close()
        return Journal.create(self.folder.path, facts, splits, [*files, *model_files(self.identity)])

    def _rehearse(self, facts: Mapping[str, Any]) -> None:
        """Whether the sinks can start over: if not, the journal that is there must stay."""
        for sink in self.sinks:
            sink.clean(facts["run"])  # a process that was killed may have been here before
        try:
            for sink in self.sinks:
                if self.is_blind:
                    earlier = told_run(self.folder.path)
                    sink.start_over_blindly(earlier)
                    if earlier is not None:
                        sink.clean(earlier)
                else:
                    sink.start_over(facts.get("earlier") or ())
                sink.prepare(facts["run"])
        finally:
            for sink in self.sinks:
                sink.clean(facts["run"])

    def _check_output(self, journal: Journal) -> None:
        """What was published must be there: it is not made again."""
        published = journal.published()
        for place, sink in enumerate(self.sinks):
            if gone := sink.missing(published.get(place, ())):
                raise OutputError(
                    f"{sink.describe()}: {len(gone)} part(s) that this run has written are gone or changed, such as "
                    f"{gone[0]}; put them back, or remove what was changed and start over with fresh=True (--fresh)"
                )

    def _reopen_lost(self, journal: Journal) -> None:
        """Splits that were prepared, and whose parts are lost before they were published, run again."""
        lost = []
        for split, parts in journal.prepared():
            if not all(self.sinks[part.sink].has(part.token) for part in parts):
                lost.append(split)
                for part in parts:
                    self.sinks[part.sink].withdraw(part.token)
        if lost:
            journal.reopen(lost)

    def _add_new_files(self, journal: Journal) -> None:
        goals = [SplitGoal(**goal) for goal in journal.fact("goals")]
        for position, files in find_new_files(journal, self.inputs):
            source = self.inputs[position].source.only([file.path for file in files])
            splits = cut(source, position, goals[position], journal.next_number(position))
            journal.add_splits(splits, self.inputs[position].step, files)


def _without_rows(exc: BaseException, kind: str) -> str:
    """An error for the manifest, in a line: its type, its step, and the type of what led to it. Messages may show rows."""
    step = re.match(r"step ('[^'\n]*'|\"[^\"\n]*\")", safe_str(exc))
    told = [kind, *([step[0]] if step else []), *([type(exc.__cause__).__name__] if exc.__cause__ else [])]
    return ": ".join(told)


def _facts_of(found: Journal | None) -> dict[str, Any]:
    """What a new journal takes over from the one that it replaces."""
    if found is None:
        return {}
    if not found.was_begun:  # this one takes its place
        return {name: found.fact(name) for name in ("run", "earlier", "earlier_runs", "earlier_asides")}
    parts = [*(found.fact("earlier") or ()), *found.parts()]
    return {
        "earlier": list({json.dumps({**part, "xxh128": None}, sort_keys=True): part for part in parts}.values()),
        "earlier_runs": [*(found.fact("earlier_runs") or ()), found.fact("run")],
        "earlier_asides": [*(found.fact("earlier_asides") or ()), *(found.fact("asides") or ())],
    }
