"""Files and folders that a pattern names, as a source of new versions of models."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from penstock.io.files import short_name, without_secrets
from penstock.io.model_listing import ModelPattern, list_models
from penstock.io.model_stamps import stamp_of
from penstock.io.model_versions import (
    INTERVAL,
    KeyModelPathMapping,
    ModelMetadata,
    NewVersion,
    WatchModels,
    checked_interval,
)
from penstock.io.new_models import NewModels
from penstock.io.outages import Outage

LONGEST_WAIT = 10.0  # seconds that a run waits for a file that may still be written, however long the interval is
TOLD_FROM = 1.0  # seconds of such a wait that are logged

logger = logging.getLogger(__name__)

__all__ = ["FilePattern", "WatchFilePattern", "stamp_of"]


class FilePattern:
    """The models that a pattern names: local paths or fsspec URLs, with the wildcards *, ?, [] and **. A folder that
    matches is one model, with all that is in it.

    Each look gives the newest model that appeared or changed since the last one, as a ModelMetadata: at the first look by
    modification time, later whatever that says. With {key} in the pattern ("models/{key}.pt") it gives the newest of every
    key, as a KeyModelPathMapping. Files that are still being written come when they are finished; empty ones never do.
    """

    def __init__(self, pattern: str | os.PathLike[str], interval: float = INTERVAL) -> None:
        """interval: a file that was not touched for this many seconds is not being written."""
        self._pattern = ModelPattern(pattern, type(self).__name__)
        self._interval = checked_interval(interval)
        self._is_first = True
        self._new = NewModels(self._interval, self._pattern.key_of)
        self._outage = Outage(self._pattern.text)

    def look(self) -> Sequence[NewVersion]:
        """The first look waits until a file that was written just before is the same for an interval, or 10 seconds: a run
        begins with it. A wait of a second or more is logged."""
        is_first, self._is_first = self._is_first, False
        found = list(self.look_at(time.time()))
        if is_first and (wait := min(LONGEST_WAIT, self._new.settled_in(time.time()))):
            if wait >= TOLD_FROM:
                logger.warning(
                    "%s: a file was written in the last %g seconds, so it may not be complete: if it is the same in %.0f "
                    "seconds, it is used, and the run begins then; one that is renamed after it was written is used at once",
                    self.describe(),
                    self._interval,
                    wait,
                )
            time.sleep(wait)
            later = self.look_at(time.time())
            found = [*found, *later] if self._pattern.has_key else [*later] or found
        return found

    def look_at(self, now: float) -> Sequence[NewVersion]:
        """A look at a given time, in seconds as of time.time()."""
        listing = list_models(self._pattern)
        self._outage.report(listing.trouble)
        newest = self._new.look(listing.models, now)
        if self._pattern.has_key:
            return [KeyModelPathMapping([key], path, without_secrets(path)) for key, path in newest if key is not None]
        return [ModelMetadata(path, short_name(path)) for _, path in newest]

    @property
    def is_local(self) -> bool:
        """Whether the models are files of this machine, and not of an object store."""
        return self._pattern.is_local

    def describe(self) -> str:
        """The pattern, without passwords or keys that are in it."""
        return without_secrets(self._pattern.text)


class WatchFilePattern(WatchModels):
    """New models that a pattern names, as they appear: see FilePattern. For RunInference(model_metadata_pcoll=...)."""

    def __init__(
        self,
        file_pattern: str | os.PathLike[str],
        interval: float = INTERVAL,
        stop_timestamp: float | None = None,
    ) -> None:
        """interval: seconds between two looks; less than 0.2 counts as 0.2. stop_timestamp: from then on, as of
        time.time(), nothing is new."""
        super().__init__(FilePattern(file_pattern, interval), interval, stop_timestamp)
