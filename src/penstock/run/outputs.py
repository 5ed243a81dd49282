"""When output becomes visible: at the end of the run, or split by split where the run has a journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import OutputError, PenstockError
from penstock.io.files import place_of, real_folder
from penstock.io.sink import Sink
from penstock.io.stored_sink import stored
from penstock.observe.refreshes import RefreshEvent
from penstock.observe.result import StepCount
from penstock.rows import safe_str
from penstock.run.accounting import check_published
from penstock.run.file_changes import FileWatch, Input
from penstock.run.outcomes import SplitResult, Tally
from penstock.run.schedule import Task
from penstock.steps.bundle import FinishedPart


class RunOutputs:
    """The sinks of a run, from their first to their last word. Called by the coordinator's thread, in this order."""

    files: FileWatch  # is told when a split of a source begins to be read, and when it has been
    attempts_before = 0  # attempts are numbered on from here: no two processes write the same part aside under one name

    def begin(self) -> Tally:
        """Before anything is written. Returns what is done already."""
        raise NotImplementedError

    def folders(self) -> list[str]:
        """Of this machine, to be removed if this process is killed."""
        return []

    def shared(self) -> list[str]:
        """Local folders that workers write to: each must reach them."""
        return []

    def bundle_done(self, task: Task, made: SplitResult, parts: Sequence[FinishedPart], fed: int) -> None:
        """A bundle is done, with `parts` aside, and has led to `fed` more bundles."""
        raise NotImplementedError

    def flush(self) -> None:
        """Workers have been given their work: time to make visible what may be."""

    def refreshed(self, events: Sequence[RefreshEvent]) -> None:
        """Models have changed, or did not: to be remembered with the run. Often there is nothing new."""

    def check(self) -> None:
        """All is done. Raise if it must not count."""

    def publish(self, counts: Mapping[str, StepCount]) -> None:
        """The run has succeeded. Raise if not every row that was counted into a sink is published."""
        raise NotImplementedError

    def abandon(self, error: BaseException) -> None:
        """The run has failed, or was stopped. What goes wrong here is told with that error."""
        raise NotImplementedError


class AtTheEnd(RunOutputs):
    """All parts are published when the run is done. A run that fails publishes nothing."""

    def __init__(self, run: str, sinks: Mapping[int, tuple[str, Sink[Any]]], inputs: Sequence[Input]) -> None:
        """`sinks`: with their steps' labels, by node."""
        self.files = FileWatch(inputs)
        self._run = run
        self._labels = {node: label for node, (label, _) in sinks.items()}
        self._sinks = {node: sink for node, (_, sink) in sinks.items()}
        self._inputs = inputs
        self._parts: list[FinishedPart] = []

    def begin(self) -> Tally:
        for sink in self._sinks.values():
            sink.prepare(self._run)
        check_not_read(self._sinks.values(), self._inputs)
        return Tally()

    def folders(self) -> list[str]:
        return own_folders(self._sinks.values(), self._run)

    def shared(self) -> list[str]:
        return asides(self._sinks.values(), self._run)

    def bundle_done(self, task: Task, made: SplitResult, parts: Sequence[FinishedPart], fed: int) -> None:
        self._parts += parts

    def check(self) -> None:
        self.files.finish()
        self._parts = unified(self._sinks, self._parts)

    def publish(self, counts: Mapping[str, StepCount]) -> None:
        for done, part in enumerate(self._parts):
            try:
                self._sinks[part.node].publish(part.token)
            except Exception as exc:
                where = ", ".join(self.folders())
                raise OutputError(
                    f"{done} of {len(self._parts)} finished parts were published, then {type(exc).__name__}: {safe_str(exc)}"
                    f"; the others are complete and in {where or 'the temporary folder of each sink'}"
                ) from exc
        for node, sink in self._sinks.items():
            parts = [{**sink.details(part.token), "rows": part.rows} for part in self._parts if part.node == node]
            check_published(self._labels[node], sink, parts, counts.get(self._labels[node], StepCount()))
        finish(self._run, self._sinks.values(), published=True)

    def abandon(self, error: BaseException) -> None:
        finish(self._run, self._sinks.values(), published=False, error=error)


def unified(sinks: Mapping[int, Sink[Any]], parts: Sequence[FinishedPart]) -> list[FinishedPart]:
    """Parts in the form that their sinks want them to have with those before."""
    tokens = {
        node: iter(_unified(sink, [part.token for part in parts if part.node == node])) for node, sink in sinks.items()
    }
    return [part._replace(token=next(tokens[part.node])) for part in parts]


def _unified(sink: Sink[Any], tokens: list[Any]) -> Sequence[Any]:
    try:
        return stored(sink).unify(tokens)
    except PenstockError:
        raise
    except Exception as exc:
        raise OutputError(f"{sink.describe()}: {type(exc).__name__} while its parts were unified: {safe_str(exc)}") from exc


def own_folders(sinks: Iterable[Sink[Any]], run: str) -> list[str]:
    """The folders aside of a run that may be removed: those with its id in their path. Others were not made for it."""
    return [folder for folder in asides(sinks, run) if run in folder]


def asides(sinks: Iterable[Sink[Any]], run: str) -> list[str]:
    """The folders that hold the unpublished parts of a run."""
    return [folder for sink in sinks for folder in stored(sink).aside(run)]


def check_not_read(sinks: Iterable[Sink[Any]], inputs: Iterable[Input]) -> None:
    """Raise OutputError if a sink would replace what the pipeline reads."""
    real_folder.cache_clear()
    replaced = {place_of(path): sink for sink in sinks for path in stored(sink).replaced()}
    places = (place_of(file.path) for each in inputs for file in each.files) if replaced else ()
    if read := sorted(place for place in places if place in replaced):
        raise OutputError(
            f"{replaced[read[0]].describe()}: would replace {len(read)} file(s) that this pipeline reads, such as {read[0]}"
            "; write to another folder"
        )


def finish(run: str, sinks: Iterable[Sink[Any]], *, published: bool, error: BaseException | None = None) -> None:
    """The sinks' last word. One that fails keeps none of the others from theirs, and hides no earlier error."""
    for sink in sinks:
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
