"""The thread of a process that follows which versions of its models are wanted, and says what became of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from penstock.inference.handler import ModelHandler
from penstock.inference.live_versions import Live
from penstock.inference.refresh import Refreshing
from penstock.io.file_pattern import stamp_of
from penstock.models.budget import MemoryBudget
from penstock.models.memory import available_bytes, free_device_bytes
from penstock.models.sizing import RAM
from penstock.models.uses import bytes_told
from penstock.models.version_files import Status, VersionFiles
from penstock.models.versions import Trial, Version, Wanted, wanted_of

if TYPE_CHECKING:
    from penstock.inference.refreshed_model import RefreshedModel

logger = logging.getLogger(__name__)

LOOK = 0.2  # seconds between two looks at what is wanted


class Refresher:
    """Of the models of one step in this process, by name; the only model of a step is called ""."""

    def __init__(self, told: Refreshing, resized: Callable[[str, int], None] | None = None) -> None:
        """resized: is told of a model that a new version of it takes so many bytes."""
        self._files = VersionFiles(told.folder, told.key)
        self._holders, self._on_device = told.holders, told.on_device
        self._resized = resized
        # Guards what follows; not held while a model is told, which may load a version, nor while resized() is called.
        self._lock = threading.Lock()
        self._models: dict[str, RefreshedModel] = {}
        self._status = Status()
        self._is_news = False  # of the status: it is not written yet
        self._mark: tuple[int, int] | None = None  # of the file that _wanted was read from
        self._wanted: dict[str, Wanted] = {}
        self._own: dict[str, str] = {}  # stamps of the handler's own files when the run began, once they are known
        self._told: dict[str, tuple[int, int] | None] = {}  # the mark of what a model was told last
        self._over = threading.Event()
        self._thread: threading.Thread | None = None  # started with the first model; close() ends it

    def follow(self, model: RefreshedModel) -> None:
        """Tell this one from now on what is wanted."""
        with self._lock:
            self._models[model.name] = model
            self._told.pop(model.name, None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="penstock-refresh", daemon=True)
                self._thread.start()

    def remove(self, name: str) -> None:
        with self._lock:
            self._models.pop(name, None)
            self._told.pop(name, None)

    def close(self) -> None:
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LOOK * 5)  # unless it is loading: then it ends with the process
        self._report()

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            with self._lock:
                self._look()
                models = list(self._models.values())
            for model in models:
                try:
                    self._tell(model)
                except BaseException:  # what a handler raises is handled there; without this thread no model would change
                    logger.exception("model %r could not be changed (a bug in Penstock)", model.name)
            self._report()  # trials: what is served or refused was reported at once

    def _tell(self, model: RefreshedModel) -> None:
        """What it was not told yet, whoever else has looked since, or was loaded since."""
        with self._lock:
            if self._models.get(model.name) is not model:
                return  # it was unloaded
            wanted, is_new = wanted_of(self._wanted, model.name), self._told.get(model.name) != self._mark
            self._told[model.name] = self._mark  # before follow(): what changes meanwhile is told at the next look
        if is_new:
            model.follow(wanted)
        else:
            model.tidy()

    def _look(self) -> None:
        """The lock is held."""
        mark = self._files.mark()
        if mark != self._mark:
            self._mark, self._wanted = mark, self._files.wanted()

    def _report(self) -> None:
        with self._lock:
            if self._is_news:
                self._files.report(self._status)
                self._is_news = False

    # What models ask and say; called by any thread.

    def wanted(self, model: str) -> Wanted:
        with self._lock:
            self._look()
            return wanted_of(self._wanted, model)

    def room_for(self, places: Mapping[str, int]) -> str | None:
        """Why a model that takes so many bytes, by where they are, does not fit beside what is there; None: it does."""
        in_ram = 0
        for device, expected in places.items():
            free = None if device == RAM else free_device_bytes(device)
            if free is None:  # or its memory is not seen, or is that of the machine
                in_ram += expected
            elif expected * self._on_device > free:
                return _lacking(expected, self._on_device, f"{bytes_told(free)} of the GPU")
        available = available_bytes()
        if MemoryBudget.of_free(available).shared(self._holders).holds(in_ram):
            return None
        return _lacking(in_ram, self._holders, bytes_told(available))

    def served(self, model: str, live: Live, how: str) -> None:
        loaded = live.copy.loaded
        size = 0 if loaded is None else loaded.bytes
        seconds = 0.0 if loaded is None else loaded.seconds
        if live.version.number:  # nobody asks about the handler's own, of which there may be thousands
            with self._lock:
                self._status.served.setdefault(model, {})[live.version.number] = f"loaded in {seconds:.3g} s, {how}"
                self._is_news = True
            self._report()  # before any of its answers leaves: nobody sees one of a version that is not known
        if self._resized is not None:
            self._resized(model, size)

    def refused(self, model: str, version: Version, why: str) -> None:
        with self._lock:
            self._status.refused.setdefault(model, {})[version.number] = why
            self._is_news = True
        self._report()

    def is_refused(self, model: str, version: Version) -> bool:
        """Whether it was refused in this process; never the handler's own model, which is tried whatever happened."""
        with self._lock:
            return version.number != 0 and version.number in self._status.refused.get(model, ())

    def tried(self, model: str, version: Version, rows: int, errors: int) -> None:
        with self._lock:
            trials = self._status.trials.setdefault(model, {})
            before = trials.get(version.number, Trial())
            trials[version.number] = Trial(before.rows + rows, before.errors + errors)
            self._is_news = True

    def at_work(self, version: Version, what: str, rows: int = 0) -> AbstractContextManager[None]:
        return self._files.at_work(version, what, rows)

    def deaths(self, version: Version, what: str) -> int:
        return len(self._files.deaths(version, what))

    def is_as_announced(self, version: Version) -> bool:
        """Whether its files are still what they were when it was announced."""
        return not version.stamp or stamp_of(version.path) == version.stamp

    def replaced_by(self, handler: ModelHandler[Any, Any, Any]) -> str:
        """The stamp of what has replaced the handler's own model; empty: nothing has since the run began."""
        with self._lock:
            own = self._own = self._own or self._files.own()
        pairs = ((own.get(path), stamp_of(path)) for path in map(str, handler.model_files()))
        return next((now for began, now in pairs if began and now and now != began), "")


def _lacking(expected: int, holders: int, free: str) -> str:
    many = "" if holders == 1 else f", in each of {holders} processes"
    return f"it takes about {bytes_told(expected)}{many}, and {free} are free"
