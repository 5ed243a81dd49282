"""Preparing rows for a model that may be replaced by one that takes them prepared otherwise."""

from __future__ import annotations

from typing import Any

from penstock.failures import Failure
from penstock.inference.guard import Guard
from penstock.inference.handler import at_path
from penstock.inference.live_versions import prepared_with
from penstock.inference.preparing import ThreadPreparer, Tools
from penstock.inference.spec import InferenceSpec
from penstock.models.place import Surroundings
from penstock.models.version_files import VersionFiles
from penstock.models.versions import ORIGINAL, Version, wanted_of


class VersionPreparer:
    """On the caller's own thread, for one version: that which whoever holds the model said last. Rows that were prepared for
    another come back, and are prepared again."""

    def __init__(self, spec: InferenceSpec, guard: Guard, tools: Tools, around: Surroundings) -> None:
        self._handler = spec.handler
        self._guard = guard
        self._tools = tools
        key = spec.session_key(guard.step)
        self._files = VersionFiles(spec.folder(around), key)
        self._versions = tools.versions  # of this process: what one bundle has learned, the next begins with
        self._key = key
        self._use(self._versions.get(key, ORIGINAL))

    @property
    def prepared(self) -> str | None:
        return self._prepared

    def prepare(self, examples: list[Any], args: Any) -> tuple[list[Any], dict[int, Failure]]:
        return self._preparer.prepare(examples, args)

    def change(self, number: int) -> None:
        """Prepare for the version of this number; for the newest, if that is not known any more."""
        wanted = wanted_of(self._files.wanted(), "")
        version = ORIGINAL if number == 0 else wanted.version(number) or wanted.serve[0]
        if version != self._version:
            before, name, was = self._used, f"version {self._version.number}", self._prepared
            self._use(version)
            if was != self._prepared:
                self._tools.forget(before, self._guard.step, name)

    def close(self) -> None: ...

    def _use(self, version: Version) -> None:
        handler = at_path(self._handler, version.path) if version.path else self._handler
        self._used = handler
        self._version = self._versions[self._key] = version
        self._prepared = prepared_with(handler, version)
        self._preparer = ThreadPreparer(handler, self._tools, self._guard, f"version {version.number}")
