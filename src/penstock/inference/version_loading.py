"""Loading versions of a model in this process, and checking them; those that were refused once are not tried again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import ModelLoadError
from penstock.inference.live_versions import Live, names_of, prepared_with, told_error
from penstock.inference.loading_beside import load_beside, load_within
from penstock.inference.model import ModelCopy
from penstock.inference.refresh import Refreshing
from penstock.models.versions import ORIGINAL, REPLACED, Version, Wanted
from penstock.rows import let_through

if TYPE_CHECKING:
    from penstock.inference.refresher import Refresher

DEATHS = 2  # of processes that loaded a version, after which nobody tries


class VersionLoader:
    """Of one model, by name. make(version): its copy, which is not loaded."""

    def __init__(
        self,
        name: str,
        make: Callable[[Version], ModelCopy],
        told: Refreshing,
        reports: Refresher,
    ) -> None:
        self._name = name
        self._make = make
        self._told = told
        self._reports = reports
        self._prepared: tuple[str | None] | None = None  # with what rows are, once it was looked at

    def is_refused(self, version: Version) -> bool:
        return self._reports.is_refused(self._name, version)

    def candidates(self, wanted: Wanted) -> list[Version]:
        """The newest first. The last is the handler's own model, whatever happened to it."""
        return [version for version in wanted.serve if not self.is_refused(version)]

    def load_newest(self, wanted: Wanted) -> Live:
        """The newest that can be loaded; one on trial, if there is no other. The error of the handler's own model, if none
        can."""
        error: BaseException = ModelLoadError(f"{self._name}: there is no version to load")
        for version in [*self.candidates(wanted), *([] if wanted.trial is None else [wanted.trial])]:
            try:
                return self.load(version)
            except BaseException as exc:
                let_through(exc)
                error = error if version == wanted.trial else exc
                self.refuse(version, told_error(exc))
        raise error

    def try_to_load(self, version: Version) -> Live | None:
        try:
            return self.load(version, limited=True)
        except BaseException as exc:
            let_through(exc)
            self.refuse(version, told_error(exc))
            return None

    def try_beside(self, version: Version, serving: Live) -> tuple[Live | None, str | None]:
        """Load it while another one answers. The version, or why there is no room for both; neither: it was refused."""
        if (why := self._lacks_room(version, serving)) is not None:
            return None, why
        try:
            return self.load(version, beside=True, limited=True), None
        except BaseException as exc:
            let_through(exc)
            why = told_error(exc)
            if not self._is_out_of_memory(version, exc):
                self.refuse(version, why)
                return None, None
        gc.collect()  # what was loaded of it: the error has led there until now
        return None, f"beside it, memory ran out: {why}"

    def load(self, version: Version, *, beside: bool = False, limited: bool = False) -> Live:
        """Load a version, and check it. beside: batches run meanwhile, and come first. limited: it may take load_timeout;
        the first load of a process has its limit elsewhere, if it has one."""
        if version == REPLACED:
            what = "the model that the handler describes was replaced during the run, and no other version can be used"
            raise ModelLoadError(f"{self._name or 'the model'}: {what}; put one there that can, or start a new run")
        for what, limit in [("load", DEATHS), ("trial", 1)] if version.number else ():
            if self._reports.deaths(version, what) >= limit:
                done = "loaded it" if what == "load" else "answered its first rows"
                raise ModelLoadError(f"processes that {done} have died")
        with self._reports.at_work(version, "load"):
            replaced = "" if version != ORIGINAL else self._reports.replaced_by(self._make(version).handler)
            copy = self._make(version) if not replaced else self._unannounced(replaced)
            prepared = self._prepared_for(copy, version)
            load = partial(load_beside, copy.load, copy.handler) if beside else copy.load
            load_within(self._told.load_timeout, load) if limited else load()
            assert copy.loaded is not None
            if not self._reports.is_as_announced(version):
                raise ModelLoadError("its files were changed after it was found")
            if version == ORIGINAL and self._reports.replaced_by(copy.handler) != replaced:
                return self.load(version, beside=beside, limited=limited)
            refresh = self._told.refresh
            if (version != ORIGINAL or replaced) and refresh.validate is not None:
                good = refresh.validate(copy.loaded.model, refresh.golden_rows)
                if good is not None and not good:
                    raise ModelLoadError(f"validate= returned {good!r}")
        names = {version.path, *names_of(copy.handler), *names_of(self._make(ORIGINAL).handler)}
        return Live(version, copy, prepared, names)

    def _unannounced(self, stamp: str) -> ModelCopy:
        """What is in the place of the handler's own model, before whoever watches has seen it: it has another id."""
        model_id = self._make(ORIGINAL).model_id()
        return self._make(ORIGINAL._replace(model_id=None if model_id is None else f"{model_id}#{stamp[:8]}"))

    def _prepared_for(self, copy: ModelCopy, version: Version) -> str | None:
        """With what its rows have to be prepared; None: as they come, or as they are in any case."""
        prepared = prepared_with(copy.handler, version)
        if not self._told.prepares_alike:
            return prepared
        if self._prepared is None and self._reports.wanted(self._name).serve[-1] == ORIGINAL:  # later its files are others
            self._prepared = (prepared_with(self._make(ORIGINAL).handler, ORIGINAL),)
        if self._prepared != (prepared,):
            raise ModelLoadError(
                "its rows are prepared differently (prepare_key()), which cannot change where there is a model for each "
                "key, or a timeout for preparing; start a new run with it"
            )
        return None

    def _is_out_of_memory(self, version: Version, error: BaseException) -> bool:
        try:
            handler = self._make(version).handler
            if not handler.is_out_of_memory(error.__cause__ or error):
                return False
            handler.after_out_of_memory()
            return True
        except Exception:  # of a handler that cannot be made, or an error that cannot be read
            return False

    def _lacks_room(self, version: Version, serving: Live) -> str | None:
        """Why it does not fit beside the one in service; None: it does, as far as can be told."""
        loaded = serving.copy.loaded
        try:
            least = self._make(version).file_bytes() or 0
        except Exception:  # its load says what is wrong
            return None
        return None if loaded is None else self._reports.room_for(loaded.places(least, serving.copy.handler.accelerator()))

    def refuse(self, version: Version, why: str) -> None:
        self._reports.refused(self._name, version, why)
