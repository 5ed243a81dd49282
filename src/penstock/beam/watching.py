"""New versions of models that a pattern of paths names, as they appear: on Beam, with the look of Penstock's own engine."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.coders import PickleCoder
from apache_beam.transforms.periodicsequence import PeriodicImpulse, RebaseMode
from apache_beam.transforms.trigger import AccumulationMode, AfterProcessingTime, Repeatedly
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.timestamp import MAX_TIMESTAMP

from penstock.io.file_pattern import FilePattern
from penstock.io.model_versions import KeyModelPathMapping

EARLIEST = 0.9  # of an interval after a look, the next one
INTERVAL = 360.0  # seconds between two looks: Beam's


class WatchFilePattern(beam.PTransform[Any, Any]):  # type: ignore[misc]
    """The newest model that a pattern names, as a ModelMetadata, when it appears or changes; for RunInference(
    model_metadata_pcoll=...). The first look gives the newest that is there; files that are still being written come when
    they are finished. With {key} in the pattern: the newest of each key, as a list of KeyModelPathMapping."""

    def __init__(self, file_pattern: str, interval: float = INTERVAL, stop_timestamp: Any = MAX_TIMESTAMP) -> None:
        """interval: seconds between two looks. stop_timestamp: from then on nobody looks. Raises UsageError for what is no
        pattern or interval."""
        super().__init__()
        self._pattern = FilePattern(file_pattern, interval)
        self._interval = interval
        self._stop = stop_timestamp

    def expand(self, pbegin: Any) -> Any:
        """Called by Beam when the pipeline is built."""
        looks = PeriodicImpulse(stop_timestamp=self._stop, fire_interval=self._interval, rebase=RebaseMode.REBASE_START)
        windows = beam.WindowInto(
            GlobalWindows(), trigger=Repeatedly(AfterProcessingTime(1)), accumulation_mode=AccumulationMode.DISCARDING
        )
        keyed = pbegin | "Looks" >> looks | "OneKey" >> beam.Map(lambda _: ("", None))
        return keyed | "Look" >> beam.ParDo(_Look(self._pattern, self._interval)) | "Global" >> windows


class _Look(beam.DoFn):  # type: ignore[misc]
    """All looks are of one key, so that one comes after the other, wherever they run; what was seen is in its state."""

    SEEN = ReadModifyWriteStateSpec("seen", PickleCoder())

    def __init__(self, pattern: FilePattern, interval: float) -> None:
        self._pattern = pattern
        self._apart = EARLIEST * interval

    def process(self, element: Any, seen: Any = beam.DoFn.StateParam(SEEN)) -> Iterator[Any]:  # noqa: B008
        """Runners that are late ask for several looks at once. A file that is the same at two of these may be half there."""
        pattern, looked = seen.read() or (copy.deepcopy(self._pattern), 0.0)  # a bundle that fails leaves nothing behind
        if 0 <= time.time() - looked < self._apart:
            return
        found = list(pattern.look())
        seen.write((pattern, time.time()))
        if found:
            yield found if isinstance(found[-1], KeyModelPathMapping) else found[-1]
