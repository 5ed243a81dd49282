"""Loading versions of a model in this process, and checking them; those that were refused once are not tried again."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import ModelLoadError
from penstock.inference.live_versions import Live, Reports, prepared_with, told_error
from penstock.inference.loading_beside import load_beside
from penstock.inference.model import ModelCopy
from penstock.inference.refresh import Refresh
from penstock.models.versions import ORIGINAL, Version, Wanted
from penstock.rows import let_through

DEATHS = 2  # of processes that loaded a version, after which nobody tries


class VersionLoader:
    """Of one model, by name. make(version): its copy, which is not loaded."""

    def __init__(
        self,
        name: str,
        make: Callable[[Version], ModelCopy],
        refresh: Refresh,
        reports: Reports,
        prepares_alike: bool,
    ) -> None:
        self._name = name
        self._make = make
        self._refresh = refresh
        self._reports = reports
        self._prepares_alike = prepares_alike
        self._refused: set[int] = set()

    def is_refused(self, version: Version) -> bool:
        return version.number in self._refused

    def candidates(self, wanted: Wanted) -> list[Version]:
        """The newest first. The last is the one that is used whatever happened."""
        found = [version for version in wanted.serve if version.number not in self._refused]
        return found or [wanted.serve[-1]]

    def try_to_load(self, version: Version, *, beside: bool = False) -> Live | None:
        try:
            return self.load(version, beside=beside)
        except BaseException as exc:
            let_through(exc)
            self.refuse(version, told_error(exc))
            return None

    def load(self, version: Version, *, beside: bool = False) -> Live:
        """Load a version, and check it. beside: batches run meanwhile, and come first."""
        for what, limit in [("load", DEATHS), ("trial", 1)] if version.number else ():
            if self._reports.deaths(version, what) >= limit:
                done = "loaded it" if what == "load" else "answered its first rows"
                raise ModelLoadError(f"processes that {done} have died")
        with self._reports.at_work(version, "load"):
            copy = self._make(version)
            load_beside(copy.load, copy.handler) if beside else copy.load()
            assert copy.loaded is not None
            if not self._reports.is_as_announced(version):
                raise ModelLoadError("its files were changed after it was found")
            if version != ORIGINAL and self._refresh.validate is not None:
                good = self._refresh.validate(copy.loaded.model, self._refresh.golden_rows)
                if good is not None and not good:
                    raise ModelLoadError(f"validate= returned {good!r}")
        prepared = prepared_with(copy.handler, version)
        if not self._prepares_alike:
            return Live(version, copy, prepared)
        if prepared != prepared_with(self._make(ORIGINAL).handler, ORIGINAL):
            raise ModelLoadError(
                "its rows are prepared otherwise (prepare_key()), which cannot change where there is a model for each key, "
                "or a timeout for preparing; start a new run with it"
            )
        return Live(version, copy, None)

    def lacks_room(self, version: Version, serving: Live) -> str | None:
        try:
            expected = max(serving.copy.bytes, self._make(version).file_bytes() or 0)
        except Exception:  # its load says what is wrong
            return None
        return self._reports.room_for(expected, serving.copy.handler)

    def refuse(self, version: Version, why: str) -> None:
        self._refused.add(version.number)
        self._reports.refused(self._name, version, why)
