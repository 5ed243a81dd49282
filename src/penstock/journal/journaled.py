"""A run with a journal: begun, or gone on with from where an earlier process left it."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.errors import (
    BudgetSpentError,
    InputError,
    OutputError,
    RunChangedError,
    StepError,
    StoppedError,
    TooManyFailuresError,
)
from penstock.io.files import without_secrets
from penstock.io.source import SplitGoal
from penstock.io.stored_sink import stored
from penstock.journal.commits import JournalSession, SplitBySplit, tally_of
from penstock.journal.digests import Digests
from penstock.journal.errors import KEPT
from penstock.journal.identity import describe_run, stable_names
from penstock.journal.inputs import list_inputs, model_files, written_by
from penstock.journal.journal import Journal
from penstock.journal.manifest import environment, is_told_finished, write_manifest
from penstock.journal.resuming import check_same_run, check_still_same, find_new_files, fixed_by, order_of
from penstock.journal.run_dir import RunDir
from penstock.models.host_address import end_hosts, run_folder
from penstock.remote.answers import forget_answers
from penstock.rows import safe_str
from penstock.run.explain import explain
from penstock.run.file_changes import Input
from penstock.run.pools import RunSize
from penstock.run.run import Begun
from penstock.run.setup import Job, Layout, lay_out
from penstock.run.splits import cut


@contextlib.contextmanager
def journaled(job: Job) -> Iterator[Begun]:
    """What is left of the run in `run_dir`; all of it, if none was begun there."""
    with RunDir(str(job.options.run_dir)) as folder:
        found = _RunInFolder(folder, job)
        try:
            with found.taken_up() as begun:
                yield begun
        finally:
            found.journal.close()


class _RunInFolder:
    """The run of a folder, with its journal open."""

    def __init__(self, folder: RunDir, job: Job) -> None:
        self.started = time.monotonic()
        self.folder = folder
        self.job = job
        self.plan = job.plan
        self.options = job.options
        self.sinks = list(job.sinks.values())
        self.identity = describe_run(job.graph, job.plan)
        self.inputs: Sequence[Input] = ()
        self.journal = self._opened()

    def _opened(self) -> Journal:
        found = self.folder.journal()
        if found is None:
            return self._create(None)
        try:
            if self.options.fresh or not found.was_begun:
                return self._create(found)
            self.inputs = list_inputs(self.plan, self.folder.path, written_by(found), may_be_gone=True)
            check_same_run(found, self.identity, self.plan, self.inputs, self.options)
            self._check_output(found)
            self._add_new_files(found)
        except BaseException:
            found.close()
            raise
        return found

    @contextlib.contextmanager
    def taken_up(self) -> Iterator[Begun]:
        """A session of this process; how it ends is noted in the journal. None of a run that is finished."""
        journal, names = self.journal, stable_names(self.job.graph)
        run, rows, few = (journal.fact(name) for name in ("run", "rows", "few"))
        size = RunSize(rows)
        layout = Layout(run=run, size=size, few=few, splits=journal.splits.open())
        explained = explain(self.job, size)  # what cannot be read or run is found before a session has begun
        if journal.fact("finished"):
            if not is_told_finished(journal.folder):  # the process that finished it died before it could say so
                write_manifest(journal)
            yield Begun(layout, tally_of(journal, names))
            return
        number = self._begin_session(run)
        try:
            self._describe(explained)
            with Digests(journal, self.options) as digests:
                session = JournalSession(
                    number=number,
                    journal=journal,
                    names=names,
                    inputs=self.inputs,
                    digests=digests,
                    check_files=lambda: self._check_files(digests),
                )
                yield Begun(replace(layout, session=f"-{number}"), SplitBySplit(session, self.job.labelled_sinks()))
            journal.finish(number, time.monotonic() - self.started)
            write_manifest(journal)
            forget_answers(self.folder.path)  # all of them are in the output
        except BaseException as exc:
            self._ended(number, exc)
            raise

    def _check_files(self, digests: Digests) -> None:
        """Whether the files are still those that were read."""
        digests.finish()
        inputs = list_inputs(self.plan, self.folder.path, written_by(self.journal), may_be_gone=True)
        check_still_same(self.journal, self.identity, inputs)

    def _describe(self, explained: str) -> None:
        """What `penstock status` and the manifest tell of the run, from its beginning on."""
        self.journal.set_facts(
            {
                "environment": environment(self.options),
                "explained": explained,
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
        outcome = "failed" if isinstance(exc, Exception) and not isinstance(exc, StoppedError) else "stopped"
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
            return "rows that failed do not run again: set a higher threshold to resume, or start over (--fresh)"
        again = f"run the same command again{', without fresh,' if self.options.fresh else ','} and it resumes from there"
        changed = {StepError: "code", InputError: "inputs", BudgetSpentError: "code"}
        kinds = [kind for error, kind in changed.items() if isinstance(exc, error)]
        return f"{again} (if you change the {kinds[0]} before that, with --accept-change {kinds[0]})" if kinds else again

    def _so_far(self) -> str:
        """How much is done, if the journal can still tell."""
        try:
            counts = self.journal.splits.counts()
        except Exception:
            return ""
        return f" ({sum(counts.values()) - counts.get('open', 0):,} of {sum(counts.values()):,} splits)"

    def _create(self, found: Journal | None) -> Journal:
        written = () if found is None else written_by(found)
        self.inputs = inputs = list_inputs(self.plan, self.folder.path, written)
        layout, goals = lay_out(self.job, inputs)
        files = [("input", each.step, file) for each in inputs for file in each.files]
        facts = {
            "run": layout.run,
            "rows": layout.size.rows,
            "few": layout.few,
            "goals": [asdict(goal) for goal in goals],
            "identity": self.identity.as_json(),
            "order": order_of(self.plan),
            "fixed": fixed_by(self.options),
            **_facts_of(found),
        }
        if found is not None:
            self._rehearse(facts)
            found.close()
        forget_answers(self.folder.path)  # of a run that this one takes the place of
        return Journal.create(self.folder.path, facts, layout.splits, [*files, *model_files(self.identity)])

    def _rehearse(self, facts: Mapping[str, Any]) -> None:
        """Whether the sinks can start over: if not, the journal that is there must stay."""
        for sink in self.sinks:
            sink.clean(facts["run"])  # a process that was killed may have been here before
        try:
            for sink in self.sinks:
                stored(sink).start_over(facts.get("earlier") or ())
                sink.prepare(facts["run"])
        finally:
            for sink in self.sinks:
                sink.clean(facts["run"])

    def _check_output(self, journal: Journal) -> None:
        """What was published, or is about to be, must be there: it is not made again."""
        published = journal.splits.published()
        prepared = journal.splits.prepared_tokens()
        for place, sink in enumerate(self.sinks):
            if gone := stored(sink).missing(published.get(place, ()), prepared.get(place, ())):
                raise OutputError(
                    f"{sink.describe()}: {len(gone)} part(s) that this run has written are gone or changed, such as "
                    f"{gone[0]}; restore them, or remove what was changed and start over with fresh=True (--fresh)"
                )

    def _add_new_files(self, journal: Journal) -> None:
        goals = [SplitGoal(**goal) for goal in journal.fact("goals")]
        for position, files in find_new_files(journal, self.inputs):
            source = self.inputs[position].source.only([file.path for file in files])
            splits = cut(source, position, goals[position], journal.splits.next_number(position))
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
    parts = [*(found.fact("earlier") or ()), *found.splits.parts()]
    return {
        "earlier": list({json.dumps({**part, "xxh128": None}, sort_keys=True): part for part in parts}.values()),
        "earlier_runs": [*(found.fact("earlier_runs") or ()), found.fact("run")],
        "earlier_asides": [*(found.fact("earlier_asides") or ()), *(found.fact("asides") or ())],
    }
