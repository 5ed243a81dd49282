"""Commits: the splits of a run that has a journal become visible, and done, one by one.

    all bundles that a split of a source led to are done; their parts lie aside, synced
      -> journal: prepared, with the final names and the counts       (from here on it is never run again)
      -> every part is published                                      (a rename, or a transaction; may be repeated)
      -> journal: done

A process that dies in between leaves splits that are open, which run again, or prepared, which the next process publishes.
Where a sink replaces an earlier output, splits stay prepared until all of them are, and are published together.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.errors import EngineError
from penstock.io.sink import Sink
from penstock.io.stored_sink import stored
from penstock.journal.digests import Digests
from penstock.journal.journal import Journal
from penstock.journal.resuming import refuse_changed_input
from penstock.journal.values import checked_json
from penstock.observe.refreshes import RefreshEvent
from penstock.observe.result import StepCount
from penstock.rows import safe_str
from penstock.run.accounting import check_published
from penstock.run.file_changes import FileWatch, Input
from penstock.run.outcomes import PreparedPart, SplitId, SplitResult, Tally
from penstock.run.outputs import RunOutputs, asides, check_not_read, finish, own_folders, unified
from penstock.run.schedule import Task
from penstock.steps.bundle import FinishedPart

ATTEMPTS_OF_A_SESSION = 10_000  # so that two processes never write the same part aside under one name


@dataclass(slots=True)
class _Flow:
    """What a split has become so far."""

    open: int = 1  # bundles that are not done
    result: SplitResult = field(default_factory=SplitResult)
    parts: list[FinishedPart] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class JournalSession:
    """What one process knows that works on the run of a journal."""

    number: int
    journal: Journal
    names: Mapping[str, str]  # that the journal has for steps, by label
    inputs: Sequence[Input]
    digests: Digests
    check_files: Callable[[], None]  # called when all splits are done, before the run is: may raise


class SplitBySplit(RunOutputs):
    """One process's commits to the journal of a run: parts are published as their splits are done, and what is prepared
    outlives this process."""

    def __init__(self, session: JournalSession, sinks: Mapping[int, tuple[str, Sink[Any]]]) -> None:
        """`sinks`: with their steps' labels, by node."""
        self.attempts_before = session.number * ATTEMPTS_OF_A_SESSION
        self._session = session
        self._journal = session.journal
        self._run: str = session.journal.fact("run")
        self._labels = [label for label, _ in sinks.values()]
        self._sinks = [sink for _, sink in sinks.values()]  # the journal knows them by their place here
        self._places = {node: place for place, node in enumerate(sinks)}
        self.files = FileWatch(session.inputs, partial(refuse_changed_input, session.journal, session.digests))
        self._hold = False  # publish nothing before the end
        # The coordinator's thread's own: no lock.
        self._flows: dict[SplitId, _Flow] = {}  # splits of which a bundle is done, and another is not
        self._complete: list[tuple[SplitId, _Flow]] = []  # until flush()

    def begin(self) -> Tally:
        if self._journal.was_begun:
            self._resume(self._journal.fact("sinks"))
            self._unify()
        else:
            self._prepare()
        self._hold = bool(self._journal.fact("hold"))
        if not self._hold:
            self._publish(self._journal.splits.prepared())
        return tally_of(self._journal, self._session.names)

    def shared(self) -> list[str]:
        return asides(self._sinks, self._run)

    def bundle_done(self, task: Task, made: SplitResult, parts: Sequence[FinishedPart], fed: int) -> None:
        flow = self._flows.setdefault(task.origin, _Flow())
        flow.result.add(made)
        flow.parts += parts
        flow.open += fed - 1
        if flow.open == 0:
            self._complete.append((task.origin, self._flows.pop(task.origin)))

    def flush(self) -> None:
        """Commit the splits that are complete."""
        if not self._complete:
            return
        found = [part._replace(node=self._places[part.node]) for _, flow in self._complete for part in flow.parts]
        parts = iter(unified(dict(enumerate(self._sinks)), found))
        splits = [
            (split, flow.result.renamed(self._session.names), [self._described(next(parts)) for _ in flow.parts])
            for split, flow in self._complete
        ]
        self._session.digests.store()
        self._complete = []
        self._journal.prepare(splits)  # first: what is published, and not in the journal, would run again and be there twice
        if not self._hold:
            self._publish((split, parts) for split, _, parts in splits)

    def refreshed(self, events: Sequence[RefreshEvent]) -> None:
        if events:
            before = self._journal.fact("refreshes") or []
            self._journal.set_facts({"refreshes": [*before, *(event._asdict() for event in events)]})

    def check(self) -> None:
        self._session.check_files()
        self._unify()

    def publish(self, counts: Mapping[str, StepCount]) -> None:
        """What was held back until now, or could not be published before."""
        self._publish(self._journal.splits.prepared())
        published = self._journal.splits.published()
        for place, (label, sink) in enumerate(zip(self._labels, self._sinks, strict=True)):
            check_published(label, sink, published.get(place, ()), counts.get(label, StepCount()))
        finish(self._run, self._sinks, published=True)
        self._journal.set_facts({"hold": False})

    def abandon(self, error: BaseException) -> None:
        """What is prepared stays: the next process resumes from there."""
        try:
            self._clean()
        except Exception as exc:
            error.add_note(f"unpublished files of the run could not be removed: {type(exc).__name__}: {safe_str(exc)}")

    def _unify(self) -> None:
        """Parts that must have another form, now that others are known, are prepared in it, to be published again."""
        splits = self._journal.splits.with_parts()
        parts = [FinishedPart(part.sink, part.token, part.details["rows"]) for _, parts in splits for part in parts]
        now = iter(unified(dict(enumerate(self._sinks)), parts))
        changed = []
        for split, before in splits:
            after = [self._described(next(now)) for _ in before]
            if after != before:
                changed.append((split, after))
        if changed:
            self._journal.prepare_again(changed)

    def _described(self, part: FinishedPart) -> PreparedPart:
        """A part as the journal has it: its sink is known by its place there."""
        place = part.node
        sink = self._sinks[place]
        details = checked_json(sink.details(part.token), sink, "details")
        return PreparedPart(place, part.token, {**details, "rows": part.rows})

    def _publish(self, splits: Iterable[tuple[SplitId, Sequence[PreparedPart]]]) -> None:
        published = []
        for split, parts in splits:
            for part in parts:
                try:
                    self._sinks[part.sink].publish(part.token)
                except Exception as exc:
                    raise EngineError(
                        f"{self._sinks[part.sink].describe()}: a finished part could not be published: "
                        f"{type(exc).__name__}: {safe_str(exc)}; fix that and run the same command again: "
                        "the part is kept, and the run resumes from there"
                    ) from exc
            published.append(split)
        self._journal.done(published)  # after all of them: a death in between leaves them prepared, and they are repeated

    def _prepare(self) -> None:
        for run in self._journal.fact("earlier_runs") or ():
            for sink in self._sinks:
                sink.clean(run)
        for aside in self._journal.fact("earlier_asides") or ():  # of sinks that this run does not have, too
            if any(run in aside for run in self._journal.fact("earlier_runs") or ()):
                shutil.rmtree(aside, ignore_errors=True)
        self._clean()
        if earlier := self._journal.fact("earlier"):
            for sink in self._sinks:
                stored(sink).start_over(earlier)
        notes = [checked_json(sink.prepare(self._run), sink, "prepare") for sink in self._sinks]
        check_not_read(self._sinks, self._session.inputs)
        hold = any(stored(sink).replaced() for sink in self._sinks)
        asides = own_folders(self._sinks, self._run)
        # Last: with "sinks" there, a later process takes all of this as done, and resumes. Else it does it again.
        self._journal.set_facts({"sinks": notes, "hold": hold, "asides": asides})

    def _resume(self, notes: Sequence[Any]) -> None:
        self._clean()
        published = self._journal.splits.published()
        for place, (sink, note) in enumerate(zip(self._sinks, notes, strict=True)):
            sink.resume(self._run, note, published.get(place, ()))

    def _clean(self) -> None:
        kept = self._journal.splits.prepared_tokens()
        for place, sink in enumerate(self._sinks):
            sink.clean(self._run, kept.get(place, ()))


def tally_of(journal: Journal, names: Mapping[str, str]) -> Tally:
    """What a run has done so far, by the labels that its steps have in this program."""
    total = journal.splits.total().renamed({name: label for label, name in names.items()})
    return Tally(total.counts, total.metrics, total.stage_rows, total.bundles)
