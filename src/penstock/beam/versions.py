"""New versions of models, which come by a side input of Beam's."""

from __future__ import annotations

from typing import Any

from apache_beam.transforms.window import GlobalWindows

from penstock.errors import UsageError
from penstock.inference.spec import InferenceSpec
from penstock.io.file_pattern import stamp_of
from penstock.io.model_versions import versions_of
from penstock.models.place import Surroundings
from penstock.models.version_files import VersionFiles


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


def announce(versions: Any, spec: InferenceSpec, step: str, around: Surroundings) -> None:
    """To whoever holds the model on this machine; all processes that see a version do, and the first one counts."""
    files = _files_of(spec, step, around)
    for each in versions if isinstance(versions, list) else [versions]:
        for keys, path, model_id in versions_of([each], step):
            if path:  # Beam's WatchFilePattern gives an empty one before there is any
                models = [""] if spec.by_key is None or keys is None else spec.by_key.models_of(keys)
                for model in models:
                    files.announce(model, path, model_id, stamp_of(path), str(getattr(each, "model_name", model_id)))


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


def _files_of(spec: InferenceSpec, step: str, around: Surroundings) -> VersionFiles:
    return VersionFiles(spec.folder(around), spec.session_key(step))
