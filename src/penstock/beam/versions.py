"""New versions of models, which come by a side input of Beam's."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from apache_beam.transforms.window import GlobalWindows

from penstock.errors import UsageError
from penstock.inference.spec import InferenceSpec
from penstock.io.file_pattern import stamp_of
from penstock.io.files import without_secrets
from penstock.io.model_versions import versions_of
from penstock.models.place import Surroundings
from penstock.models.version_files import VersionFiles
from penstock.observe.metrics import MetricKey, Metrics
from penstock.observe.refreshes import METRICS, REFUSED, SERVED, RefreshEvent

TICK = 100_000_000  # nanoseconds: no file system's clock is coarser, but for some of networks

logger = logging.getLogger(__name__)


def check_windows(versions: Any) -> None:
    """UsageError for versions of a window each: a model has one version at a time, which answers rows of all windows."""
    windows = versions.windowing.windowfn
    if not isinstance(windows, GlobalWindows):
        raise UsageError(
            f"model_metadata_pcoll= is in {type(windows).__name__}, and a step has one version at a time, for rows of all "
            "windows; expected a collection in the global window: put beam.WindowInto(GlobalWindows(), "
            "trigger=Repeatedly(AfterProcessingTime(1)), accumulation_mode=AccumulationMode.DISCARDING) behind it, as "
            "Beam's WatchFilePattern does. For a version of each window, use Beam's own RunInference"
        )


class TimedVersions(NamedTuple):
    """What came by the side input, and when. Bundles, threads and processes may see another one at the same time."""

    since: float  # as of time.time(), where it came
    versions: Any  # a ModelMetadata, or a list of KeyModelPathMapping

    @classmethod
    def of(cls, versions: Any) -> TimedVersions:
        return cls(time.time(), versions)


def announce(told: Sequence[TimedVersions], spec: InferenceSpec, step: str, around: Surroundings) -> None:
    """To whoever holds the model on this machine; all processes that see a version do. What came before one that is known is
    passed over: the newest wins (Wanted.announced())."""
    files = _files_of(spec, step, around)
    for since, versions in sorted(told, key=lambda each: each.since):
        for each in versions if isinstance(versions, list) else [versions]:
            for keys, path, model_id in versions_of([each], step):
                if path:  # Beam's WatchFilePattern gives an empty one before there is any
                    models = [""] if spec.by_key is None or keys is None else spec.by_key.models_of(keys)
                    name = str(getattr(each, "model_name", model_id))
                    for model in models:
                        files.announce(model, path, model_id, stamp_of(path), name, since)


class VersionNames:
    """What versions are called that were announced to a step's models, by this process or another."""

    def __init__(self, spec: InferenceSpec, step: str, around: Surroundings) -> None:
        self._files = _files_of(spec, step, around)
        self._mark: tuple[int, int] | None = None  # of what was read
        self._names: dict[tuple[str, str | None], str] = {}
        self._newest: dict[str, str] = {}

    def look(self) -> None:
        """Read what was announced since the last look."""
        mark = self._files.mark()
        if mark == self._mark:
            return
        self._mark = mark
        for model, wanted in self._files.wanted().items():
            for version in wanted.serve:
                if version.number:
                    self._names[model, version.model_id] = version.name
            self._newest[model] = wanted.serve[0].name

    def of(self, model: str, model_id: str | None) -> str:
        """Empty: it is the model that the handler itself describes, or has no name."""
        return self._names.get((model, model_id), "")

    def newest(self, model: str) -> str:
        """The name of the version that is wanted now; empty as for of()."""
        return self._newest.get(model, "")


class VersionNews:
    """What became of versions of a step's models on this machine: logged and counted by the process that sees it first."""

    def __init__(self, spec: InferenceSpec, step: str, around: Surroundings) -> None:
        self._files = _files_of(spec, step, around)
        self._step = step
        self._namespace = spec.metrics_namespace
        self._mark = 0  # of the folder, when it was last looked at
        self._known: set[tuple[int, str]] = set()
        self._ids: dict[int, str | None] = {}  # of versions, by their numbers

    def look(self) -> Metrics:
        """The counts of what is new. Called after each bundle."""
        found = Metrics()
        mark = self._files.changed_at()
        if mark == self._mark:
            return found
        self._mark = mark if time.time_ns() - mark > TICK else 0  # what changes within a tick has the same time
        for wanted in self._files.wanted().values():
            self._ids.update({version.number: version.model_id for version in wanted.serve})
        for report in self._files.reports().values():
            for what, told in [(SERVED, report.served), (REFUSED, report.refused)]:
                every = [(model, *version) for model, versions in told.items() for version in versions.items()]
                for model, number, why in every:
                    if number and self._is_news(number, what):
                        found.count(MetricKey(self._step, self._namespace, METRICS[what]), 1)
                        self._log(what, model, number, why)
        return found

    def _log(self, what: str, model: str, number: int, why: str) -> None:
        why, model_id = without_secrets(why), self._ids.get(number)
        event = RefreshEvent(time.time(), self._step, what, number, model_id, why, model or None)
        logger.log(logging.WARNING if what == REFUSED else logging.INFO, "%s", event.told())

    def _is_news(self, version: int, what: str) -> bool:
        if (version, what) in self._known:
            return False
        self._known.add((version, what))
        return self._files.is_first_to_tell(version, what.replace(" ", "-"))


def _files_of(spec: InferenceSpec, step: str, around: Surroundings) -> VersionFiles:
    return VersionFiles(spec.folder(around), spec.session_key(step))
