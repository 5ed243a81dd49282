"""Commits: the splits of a run that has a journal become visible, and done, one by one.

    all bundles that a split of a source led to are done; their parts lie aside, synced
      -> journal: prepared, with the final names and the counts       (from here on it is never run again)
      -> every part is published                                      (a rename, or a transaction; may be repeated)
      -> journal: done

A process that dies in between leaves splits that are open, which run again, or prepared, which the next process publishes.
Where a sink replaces an earlier output, splits stay prepared until all of them are, and are published together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engines.bundle import BundleResult
from penstock.engines.local.digests import Digests
from penstock.engines.local.journal import Journal
from penstock.engines.local.outcomes import PreparedPart, SplitId, SplitResult
from penstock.engines.local.schedule import Task
from penstock.errors import OutputError
from penstock.io.sink import Sink
from penstock.observe.metrics import Metrics
from penstock.rows import safe_str

ATTEMPTS_OF_A_SESSION = 10_000  # so that two processes never write the same part aside under one name


@dataclass(slots=True)
class _Flow:
    """What a split has become so far."""

    open: int = 1  # bundles that are not done
    result: SplitResult = field(default_factory=SplitResult)
    parts: list[tuple[int, Any]] = field(default_factory=list)


class Commits:
    """One process's commits to the journal of a run."""

    def __init__(
        self,
        journal: Journal,
        sinks: Mapping[int, Sink[Any]],
        session: int,
        digests: Digests,
        names: Mapping[str, str],
        *,
        hold: bool,
    ) -> None:
        self.attempts_before = session * ATTEMPTS_OF_A_SESSION
        self._journal = journal
        self._digests = digests
        self._names = names  # that the journal has for steps, by label
        self._sinks = sinks
        self._hold = hold  # publish nothing before the end
        self._flows: dict[SplitId, _Flow] = {}
        self._complete: list[tuple[SplitId, _Flow]] = []

    def bundle_done(self, task: Task, result: BundleResult, metrics: Metrics, fed: int) -> None:
        """A bundle is done, and has led to `fed` more of them."""
        flow = self._flows.setdefault(task.origin, _Flow())
        flow.result.add(SplitResult(result.counts, metrics, {task.stage: result.rows_read}, 1))
        flow.parts += result.parts
        flow.open += fed - 1
        if flow.open == 0:
            self._complete.append((task.origin, self._flows.pop(task.origin)))

    def flush(self) -> None:
        """Commit the splits that are complete."""
        if not self._complete:
            return
        splits = [
            (split, flow.result.renamed(self._names), [self._described(*part) for part in flow.parts])
            for split, flow in self._complete
        ]
        self._complete = []
        self._journal.prepare(splits)
        if not self._hold:
            self._publish((split, parts) for split, _, parts in splits)
        self._digests.store()

    def publish_prepared(self) -> None:
        """Publish what is prepared: by an earlier process, or held back until now."""
        self._publish(self._journal.prepared())

    def _described(self, sink: int, token: Any) -> PreparedPart:
        return PreparedPart(sink, token, self._sinks[sink].details(token))

    def _publish(self, splits: Iterable[tuple[SplitId, Sequence[PreparedPart]]]) -> None:
        published = []
        for split, parts in splits:
            for part in parts:
                try:
                    self._sinks[part.sink].publish(part.token)
                except Exception as exc:
                    raise OutputError(
                        f"{self._sinks[part.sink].describe()}: a finished part could not be published: "
                        f"{type(exc).__name__}: {safe_str(exc)}; put that right and run the same command again: "
                        "the part is kept, and the run goes on from there"
                    ) from exc
            published.append(split)
        self._journal.done(published)
