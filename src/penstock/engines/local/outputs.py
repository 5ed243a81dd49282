"""When output becomes visible: at the end of the run, or split by split where the run has a journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from penstock.engines.local.commits import Commits
from penstock.engines.local.coordinator import Tally
from penstock.engines.local.digests import Digests
from penstock.engines.local.journal import Journal
from penstock.errors import OutputError
from penstock.io.sink import Sink
from penstock.rows import safe_str


class Outputs(Protocol):
    """The sinks of a run, from their first to their last word."""

    @property
    def commits(self) -> Commits | None:
        """What the coordinator commits splits to, after begin()."""

    def begin(self) -> Tally:
        """Before anything is written. Returns what is done already."""

    def publish(self, tally: Tally) -> None:
        """The run has succeeded."""

    def abandon(self, error: BaseException) -> None:
        """The run has failed, or was stopped. What goes wrong here is told with that error."""

    def folders(self) -> list[str]:
        """Of this machine, to be removed if this process is killed."""


class AtTheEnd:
    """All parts are published when the run is done. A run that fails publishes nothing."""

    commits: Commits | None = None

    def __init__(self, run: str, sinks: Mapping[int, Sink[Any]]) -> None:
        self._run = run
        self._sinks = sinks

    def begin(self) -> Tally:
        for sink in self._sinks.values():
            sink.prepare(self._run)
        return Tally()

    def publish(self, tally: Tally) -> None:
        for done, (index, token) in enumerate(tally.parts):
            try:
                self._sinks[index].publish(token)
            except Exception as exc:
                where = ", ".join(self.folders())
                raise OutputError(
                    f"{done} of {len(tally.parts)} finished parts were published, then {type(exc).__name__}: {safe_str(exc)}"
                    f"; the others are whole and lie in {where or 'the place aside of each sink'}"
                ) from exc
        finish(self._run, self._sinks, published=True)

    def abandon(self, error: BaseException) -> None:
        finish(self._run, self._sinks, published=False, error=error)

    def folders(self) -> list[str]:
        return [folder for sink in self._sinks.values() for folder in sink.aside(self._run)]


class SplitBySplit:
    """Parts are published as their splits are done, and what is prepared outlives this process."""

    def __init__(
        self,
        journal: Journal,
        sinks: Mapping[int, Sink[Any]],
        session: int,
        digests: Digests,
        names: Mapping[str, str],
    ) -> None:
        self.commits: Commits
        self._digests = digests
        self._names = names  # that the journal has for steps, by label
        self._journal = journal
        self._run: str = journal.fact("run")
        self._sinks = sinks
        self._session = session

    def begin(self) -> Tally:
        notes = self._journal.fact("sinks")
        if notes is None:
            self._prepare()
        else:
            self._resume(notes)
        hold = bool(self._journal.fact("hold"))
        self.commits = Commits(self._journal, self._sinks, self._session, self._digests, self._names, hold=hold)
        if not hold:
            self.commits.publish_prepared()
        return tally_of(self._journal, self._names)

    def publish(self, tally: Tally) -> None:
        self.commits.publish_prepared()
        self._digests.finish()
        finish(self._run, self._sinks, published=True)
        self._journal.set_facts({"hold": False})

    def abandon(self, error: BaseException) -> None:
        """What is prepared stays: the next process goes on from there."""
        try:
            self._clean()
        except Exception as exc:
            error.add_note(f"what the run left aside could not be removed: {type(exc).__name__}: {safe_str(exc)}")

    def folders(self) -> list[str]:
        return []

    def _prepare(self) -> None:
        for run in self._journal.fact("earlier_runs") or ():
            for sink in self._sinks.values():
                sink.clean(run)
        self._clean()
        if earlier := self._journal.fact("earlier"):
            for sink in self._sinks.values():
                sink.start_over(earlier)
        notes = {str(index): sink.prepare(self._run) for index, sink in self._sinks.items()}
        hold = any(sink.replaces() for sink in self._sinks.values())
        self._journal.set_facts({"sinks": notes, "hold": hold})

    def _resume(self, notes: Mapping[str, Any]) -> None:
        self._clean()
        published = self._journal.published()
        for index, sink in self._sinks.items():
            sink.resume(self._run, notes[str(index)], published.get(index, ()))

    def _clean(self) -> None:
        kept: dict[int, list[Any]] = {}
        for _, parts in self._journal.prepared():
            for part in parts:
                kept.setdefault(part.sink, []).append(part.token)
        for index, sink in self._sinks.items():
            sink.clean(self._run, kept.get(index, ()))


def tally_of(journal: Journal, names: Mapping[str, str]) -> Tally:
    """What a run has done so far, by the labels that its steps have in this program."""
    total = journal.total().renamed({name: label for label, name in names.items()})
    return Tally(counts=total.counts, metrics=total.metrics, stage_rows=total.stage_rows, splits=total.bundles)


def finish(run: str, sinks: Mapping[int, Sink[Any]], *, published: bool, error: BaseException | None = None) -> None:
    """The sinks' last word. One that fails keeps none of the others from theirs, and hides no earlier error."""
    for sink in sinks.values():
        try:
            sink.finish(run, published)
        except Exception as exc:
            told = f"{sink.describe()} could not be tidied up: {type(exc).__name__}: {safe_str(exc)}"
            if error is None:
                error = OutputError(told)
                error.__cause__ = exc
            else:
                error.add_note(told)
    if published and error is not None:
        raise error
