"""Models that change during a run, as the user's process sees it.

    what gives versions (a folder that is watched, a branch of the pipeline)
        -> each row is a version: a rollout says what is wanted now (models/versions.py)
            -> published in a file that all who hold the model look at (models/version_files.py)
                -> what became of it comes back the same way: canaries are decided here, for all of them

One thread for each step looks at what gives its versions, so that a store that answers late holds up no other step; one
more reads what became of them all. The first looks are made before these threads start, one after the other: no row is read
until they are over.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.errors import UsageError
from penstock.inference.handler import ModelHandler
from penstock.inference.live_versions import OLD_FIRST
from penstock.inference.spec import InferenceSpec
from penstock.io.file_pattern import stamp_of
from penstock.io.files import place_of, without_secrets
from penstock.io.memory import Create
from penstock.io.model_versions import versions_of
from penstock.models.place import Surroundings
from penstock.models.version_files import Status, VersionFiles
from penstock.models.versions import Rollout, Trial, Version
from penstock.observe.metrics import MetricKey, Metrics
from penstock.observe.refreshes import METRICS, PROMOTED, REFUSED, ROLLED_BACK, SERVED, RefreshEvent
from penstock.pipeline.graph import Node
from penstock.pipeline.pipeline import Graph

PATIENCE = 5.0  # seconds for a look that is under way when the run ends
TICK = 0.2  # seconds between two looks at what became of versions

logger = logging.getLogger(__name__)


class ModelRefresh:
    """The models of a run that change. Used in a `with` block: it ends with the run."""

    def __init__(
        self,
        graph: Graph,
        around: Surroundings,
        run_branch: Callable[[Graph], Sequence[Any]],
        on_error: Callable[[], None],
    ) -> None:
        """run_branch: gives the rows of a graph that collects one collection. on_error: is called when `error` is set."""
        self.error: BaseException | None = None  # written by a thread, before on_error() wakes whoever reads it
        self._on_error = on_error
        self._models: dict[str, _ChangingModel] = {}
        self._branches: list[tuple[_Branch, _ChangingModel]] = []
        for node, branch in graph.branches.items():
            spec = node.traits.model
            assert spec is not None
            key = spec.session_key(node.label)
            model = self._models.setdefault(key, _ChangingModel(node.label, key, spec, around))
            self._branches.append((_Branch(branch, run_branch), model))
        self._events: list[RefreshEvent] = []
        self._lock = threading.Lock()  # guards the events, and the first error
        self._over = threading.Event()
        looks = [partial(self._look, branch, model) for branch, model in self._branches]
        self._threads = [
            threading.Thread(target=self._repeat, args=[do], name="penstock-watch-models", daemon=True)
            for do in (*looks, self._read_reports)
        ]

    def __enter__(self) -> ModelRefresh:
        if self._models:
            for branch, model in self._branches:  # on this thread: what is there already counts for the first row
                self._look(branch, model)
            for model in self._models.values():
                model.open()
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._models:
            until = time.monotonic() + PATIENCE
            for thread in self._threads:  # one that a store without an answer holds up ends with the process
                thread.join(max(0.0, until - time.monotonic()))
            self._read_reports()  # after the join: what workers said last, read by one thread at a time

    def take_events(self) -> list[RefreshEvent]:
        """What has happened since the last time."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def count_in(self, metrics: Metrics) -> None:
        """Add what has happened in the whole run."""
        for model in self._models.values():
            for name, count in model.counts.items():
                metrics.count(MetricKey(model.step, model.namespace, name), count)

    def _repeat(self, do: Callable[[], None]) -> None:
        """What each of the threads does until the run is over."""
        try:
            while not self._over.wait(TICK):
                do()
        except BaseException as exc:
            with self._lock:
                self.error = self.error or exc
            self._on_error()

    def _look(self, branch: _Branch, model: _ChangingModel) -> None:
        rows = branch.news()
        if rows and not self._over.is_set():  # a late answer: the files of the run are gone
            with model.changing:
                if model.announce(rows):
                    model.publish()

    def _read_reports(self) -> None:
        for model in self._models.values():
            if not model.changing.acquire(blocking=False):  # a version of it is announced, which may ask a store: next time
                continue
            try:
                events = model.read_reports()
            finally:
                model.changing.release()
            for event in events:
                as_wished = event.what in (SERVED, PROMOTED) and OLD_FIRST not in event.why
                logger.log(logging.INFO if as_wished else logging.WARNING, "%s", event.told())
            with self._lock:
                self._events += events


class _ChangingModel:
    """The model of a step, or the models of its keys: what is wanted of each, and what became of it."""

    def __init__(self, step: str, key: str, spec: InferenceSpec, around: Surroundings) -> None:
        self.step = step
        self.namespace = spec.metrics_namespace
        self.counts: dict[str, int] = {}
        self.changing = threading.Lock()  # held while it is told of versions, or of what became of them
        self._by_key = spec.by_key
        self._rule = None if spec.refresh is None else spec.refresh.rule
        self._files = VersionFiles(spec.folder(around), key)
        self._numbers = itertools.count(1)
        self._rollouts: dict[str, Rollout] = {}
        self._is_open = False
        self._handler = spec.handler
        self._own = {path: stamp_of(path) for path in map(str, spec.handler.model_files())}
        self._places = {place_of(path): path for path in self._own}
        self._told: set[tuple[str, int, str]] = set()  # what was said of versions: model, number, what

    def open(self) -> None:
        """Rows come from now on."""
        self._files.publish_own({path: stamp for path, stamp in self._own.items() if stamp})
        self._is_open = True
        for rollout in self._rollouts.values():
            rollout.is_open = True

    def announce(self, rows: Sequence[Any]) -> bool:
        """Versions of its models. Whether anything is new."""
        made = [self._announced(*version) for version in versions_of(rows, self.step)]
        return any(made)

    def publish(self) -> None:
        self._files.publish({name: rollout.wanted for name, rollout in self._rollouts.items()})

    def _announced(self, keys: Sequence[Any] | None, path: str, model_id: str) -> bool:
        stamp, names = stamp_of(path), self._names_of(keys, path)
        own = self._own.get(self._places.get(place_of(path), ""))
        if own == stamp and not any(name in self._rollouts for name in names):
            return False  # the handler's own model, as it was when the run began
        made = [self._announced_to(name, path, model_id, stamp) for name in names]
        return any(version is not None for version in made)

    def _announced_to(self, name: str, path: str, model_id: str, stamp: str) -> Version | None:
        now = {own: stamp_of(own) for own in map(str, self._handler_of(name).model_files())}
        is_gone = any(found and found != self._own.get(own, found) for own, found in now.items())
        return self._rollout(name).announce(path, model_id, stamp, original_is_gone=is_gone)

    def _handler_of(self, name: str) -> ModelHandler[Any, Any, Any]:
        return self._handler if self._by_key is None else self._by_key.handler_of(name)

    def _names_of(self, keys: Sequence[Any] | None, path: str) -> list[str]:
        """The models that a version is for."""
        if (self._by_key is None) != (keys is None):
            kinds = (
                ("ModelMetadata", "one model") if self._by_key is None else ("KeyModelPathMapping", "a model for each key")
            )
            raise UsageError(f"step {self.step!r} has {kinds[1]}: its versions are {kinds[0]}, got one for {path!r}")
        if self._by_key is None or keys is None:
            return [""]
        return self._by_key.models_of(keys)

    def _rollout(self, name: str) -> Rollout:
        rollout = self._rollouts.get(name)
        if rollout is None:
            rollout = self._rollouts[name] = Rollout(self._rule, self._numbers, self._own_ids(name))
            rollout.is_open = self._is_open
        return rollout

    def _own_ids(self, name: str) -> set[str]:
        """What answers of the handler's own model are marked with, and files that these may be."""
        handler = self._handler_of(name)
        model_id = handler.model_id()
        return {*map(place_of, map(str, handler.model_files())), *([] if model_id is None else [str(model_id)])}

    # What became of versions.

    def read_reports(self) -> list[RefreshEvent]:
        reports = list(self._files.reports().values())
        for report in reports:
            for name in {*report.served, *report.refused} & self._rollouts.keys():
                self._rollouts[name].became(report.served.get(name, ()), report.refused.get(name, ()))
        events = [event for report in reports for event in self._from_report(report)]
        decided = [event for name, rollout in self._rollouts.items() for event in self._decided(name, rollout, reports)]
        if decided:
            self.publish()
        return [*events, *decided]

    def _from_report(self, report: Status) -> Iterator[RefreshEvent]:
        for name, served in report.served.items():
            for number, how in served.items():
                if number:
                    yield from self._event(SERVED, name, number, how)
        for name, refused in report.refused.items():
            for number, why in refused.items():
                if number:  # else the handler's own model, whose error is the run's
                    yield from self._event(REFUSED, name, number, why)

    def _decided(self, name: str, rollout: Rollout, reports: Sequence[Status]) -> Iterator[RefreshEvent]:
        version = rollout.wanted.trial
        if version is None:
            return
        if any(version.number in report.refused.get(name, {}) for report in reports):
            rollout.refused(version.number)
            yield from self._event(ROLLED_BACK, name, version.number, "it could not be tried")
            return
        seen = [report.trials.get(name, {}).get(version.number, Trial()) for report in reports]
        lost = self._files.deaths(version, "trial")
        total = Trial(sum(each.rows for each in seen) + sum(lost), sum(each.errors for each in seen) + sum(lost))
        promoted = rollout.tried(version.number, total)
        if promoted is not None:
            told = f"{total.errors:,} of {total.rows:,} rows failed, or got an answer that compare= rejects"
            told += f", {len(lost)} of its processes died" if lost else ""
            yield from self._event(PROMOTED if promoted else ROLLED_BACK, name, version.number, told)

    def _event(self, what: str, name: str, number: int, why: str) -> Iterator[RefreshEvent]:
        if (name, number, what) in self._told:
            return
        self._told.add((name, number, what))
        self.counts[METRICS[what]] = self.counts.get(METRICS[what], 0) + 1
        rollout = self._rollouts.get(name)
        version = None if rollout is None else rollout.version(number)
        model_id = None if version is None or version.model_id is None else without_secrets(version.model_id)
        yield RefreshEvent(time.time(), self.step, what, number, model_id, without_secrets(why), name or None)


class _Branch:
    """What gives versions: looks at what is watched, and runs the steps behind it over what is new. Used by one thread at a
    time, without a lock: by that which opens the run, and then by its own."""

    def __init__(self, graph: Graph, run: Callable[[Graph], Sequence[Any]]) -> None:
        self._graph = graph
        self._run = run
        self._watched = {n: watch for n in graph.nodes if (watch := n.traits.watches) is not None}
        self._sources = {n: copy.deepcopy(watch.source) for n, watch in self._watched.items()}  # each run begins anew
        self._due = dict.fromkeys(self._watched, -math.inf)  # as of time.monotonic(): the clock may be set back
        self._is_first = True

    def news(self) -> Sequence[Any]:
        """The rows that have come since the last look, where it is time for one: an interval after the last one ended."""
        first, self._is_first = self._is_first, False
        found: dict[Node, Sequence[Any]] = {}
        for node, watch in self._watched.items():
            is_over = watch.stop_timestamp is not None and time.time() >= watch.stop_timestamp
            if time.monotonic() >= self._due[node] and not is_over:
                found[node] = list(self._sources[node].look())
                self._due[node] = time.monotonic() + watch.interval
        if not first and not any(found.values()):
            return []
        if len(self._graph.nodes) == len(self._watched) == 1:
            return next(iter(found.values()))
        if first and len(self._watched) == len([n for n in self._graph.nodes if not n.inputs]) and not any(found.values()):
            return []
        return self._run(self._with_rows(found, first))

    def _with_rows(self, found: Mapping[Node, Sequence[Any]], first: bool) -> Graph:
        """The branch over these rows. What is not watched gives its rows the first time only."""

        def changed(node: Node) -> Node:
            if node in self._watched or (node.traits.source is not None and not first):
                return replace(node, transform=Create(list(found.get(node, ()))))
            return node

        return Graph([changed(node) for node in self._graph.nodes], self._graph.collect)
