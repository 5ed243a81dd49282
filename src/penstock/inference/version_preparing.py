"""Preparing rows for a model that may be replaced by one that takes them prepared otherwise."""

from __future__ import annotations

from typing import Any

from penstock.errors import ModelLoadError
from penstock.failures import Failure
from penstock.inference.guard import Guard
from penstock.inference.handler_copies import at_path
from penstock.inference.live_versions import prepared_with
from penstock.inference.preparing import ThreadPreparer, Tools, VersionTool, load_tool
from penstock.inference.spec import InferenceSpec
from penstock.models.place import Surroundings
from penstock.models.version_files import VersionFiles
from penstock.models.versions import ORIGINAL, Version, wanted_of

TRIES = 3  # to read files that are replaced meanwhile


class VersionPreparer:
    """On the caller's own thread, for one version: that which whoever holds the model said last. Rows that were prepared for
    another come back, and are prepared again."""

    def __init__(self, spec: InferenceSpec, guard: Guard, tools: Tools, around: Surroundings) -> None:
        self._handler = spec.handler
        self._guard = guard
        self._tools = tools
        self._key = spec.session_key(guard.step)
        self._files = VersionFiles(spec.folder(around), self._key)
        last = tools.last_version(self._key)
        self._use(ORIGINAL if last is None else last.version)

    @property
    def prepared(self) -> str | None:
        return self._used.prepared

    def prepare(self, examples: list[Any], args: Any) -> tuple[list[Any], dict[int, Failure]]:
        return self._preparer.prepare_with(self._used.tool, examples, args)

    def change(self, number: int) -> bool:
        """Prepare for the version of this number; for the newest, if that is not known any more. Whether that is another."""
        wanted, before = wanted_of(self._files.wanted(), ""), self._used.version
        version = ORIGINAL if number == 0 else wanted.version(number) or wanted.serve[0]
        if version != before:
            self._use(version)
        return version != before

    def _use(self, version: Version) -> None:
        self._used = self._tools.of_version(self._key, version, lambda: self._loaded(version))
        self._preparer = ThreadPreparer(self._used.handler, self._tools, self._guard)

    def _loaded(self, version: Version) -> VersionTool:
        handler = at_path(self._handler, version.path) if version.path else self._handler
        for _ in range(TRIES):
            prepared = prepared_with(handler, version)
            tool = load_tool(handler, self._guard.step)
            if prepared_with(handler, version) == prepared:
                return VersionTool(version, handler, prepared, tool)
        raise ModelLoadError(f"step {self._guard.step!r}: what rows are prepared with changes whenever it is loaded")
