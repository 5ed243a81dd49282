"""One model in this process that may be replaced while batches run: the version that answers, and one that has yet to prove
itself beside it.

    batches  -> outcomes(): the version in service; or a new one, with the old one behind it for what the new one fails
    thread   -> follow(): loads what is wanted beside what is there; takes what nobody uses any more out of memory

A version is never changed: whoever runs a batch holds a lease on one, and gives it back afterwards. A new version takes over
when it has answered a batch: if it fails for every row of it, and the old one does not, it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.blocks import Block, row_count
from penstock.errors import ModelLoadError
from penstock.inference.calls import How
from penstock.inference.live_versions import (
    BREATH,
    OLD_FIRST,
    Live,
    VersionCall,
    free,
    told_error,
    tried,
    untimed,
)
from penstock.inference.model import ModelCopy
from penstock.inference.proving import Proving
from penstock.inference.refresh import Refreshing
from penstock.inference.version_loading import VersionLoader
from penstock.models.loading import LoadedModel
from penstock.models.outcome import Outcome
from penstock.models.versions import ORIGINAL, Version, Wanted
from penstock.rows import let_through

if TYPE_CHECKING:
    from penstock.inference.refresher import Refresher


class RefreshedModel:
    """What a ModelCopy is to whoever calls it, with one version or another behind it."""

    def __init__(
        self,
        name: str,
        make: Callable[[Version], ModelCopy],
        told: Refreshing,
        reports: Refresher,
    ) -> None:
        self.name = name
        self._reports = reports
        self._loader = VersionLoader(name, make, told, reports)
        self._proving = Proving(reports, told.refresh.compare, self._judge)
        self._loading = threading.Lock()  # whoever comes first loads the first version; taken before _changed, never inside
        self._own = threading.local()  # whom to tell of a call, of each thread
        # Guards what follows, and the leases of versions; never held while a model is loaded, called or freed. Notified when
        # a lease is given back, for _replace(), and when _replace() is over, for batches.
        self._changed = threading.Condition()
        self._serving: Live | None = None
        self._new: Live | None = None  # is to take over, when it has answered a batch
        self._is_proving = False  # it is being called for the first time
        self._trial: Live | None = None  # answers a share of the rows
        self._share = self._owed = 0.0
        self._is_paused = False  # the old one goes before the new one is loaded
        self._broken: ModelLoadError | None = None  # there is none
        self._retired: list[Live] = []  # batches may still run on these; tidy() frees them

    # As a ModelCopy.

    def load(self) -> LoadedModel | None:
        """The newest that can be loaded, if none is here. The error of the last one that was tried, if none can."""
        with self._loading:
            if self.is_loaded:
                return None
            loaded = self._load_first()
        self._reports.follow(self)  # from here on the refresher's thread calls follow()
        return loaded

    def _load_first(self) -> LoadedModel:
        live = self._loader.load_newest(self._reports.wanted(self.name))
        live.is_proven = live.version == ORIGINAL
        with self._changed:
            self._serving = live
        self._reports.served(self.name, live, "when the model was first needed")
        assert live.copy.loaded is not None
        return live.copy.loaded

    @property
    def is_loaded(self) -> bool:
        """Asked without the lock: _replace() says that it is paused before it takes the old one away."""
        return self._serving is not None or self._is_paused or self._broken is not None  # else a caller loads one

    @property
    def bytes(self) -> int:
        with self._changed:
            return 0 if self._serving is None else self._serving.copy.bytes

    def is_thread_safe(self) -> bool:
        with self._changed:
            return self._serving is not None and self._serving.copy.is_thread_safe()

    def byte_size(self, batch: Block) -> int | None:
        serving = self._serving
        return None if serving is None else serving.copy.byte_size(batch)

    def announce(self, calling: Callable[[], None]) -> None:
        self._own.calling = calling

    def outcomes(
        self,
        batch: Block,
        how: How,
        *,
        holds_back: bool = False,
        read_again: Callable[[], Block] | None = None,
    ) -> Outcome:
        """As of a ModelCopy. Where no version here takes rows that are prepared like these, nothing is called, and the
        outcome says for which version they are to be prepared again."""
        call, prepared = VersionCall(batch, how, holds_back, read_again), how.prepared
        with self._leased(row_count(batch), prepared) as (live, old):
            if live.prepared != prepared:
                return Outcome([None] * row_count(batch), stale=live.version.number)
            if old is None and live.is_proven:
                return call.on(live)
            if not live.copy.handler.retry_safe:
                return self._proving.once(live, call)
            made = self._proved_alone(live, call) if old is None else self._proving.beside(live, old, call)
        return made or self.outcomes(call.for_another().batch, how, holds_back=holds_back, read_again=read_again)

    # A version for a batch.

    @contextmanager
    def _leased(self, rows: int, prepared: str | None) -> Iterator[tuple[Live, Live | None]]:
        """The version that is called; and, if that has to prove itself, the one in service."""
        with self._changed:
            while self._is_paused:
                self._changed.wait(BREATH)  # until _replace() is over
                if (calling := getattr(self._own, "calling", None)) is not None:
                    calling()  # whoever times this batch is not to count the load
            live, old = self._chosen(rows, prepared)
            held = [live] if old is None else [live, old]
            is_first = live is self._new and old is not None
            self._is_proving |= is_first
            for each in held:
                each.leases += 1
        if (calling := getattr(self._own, "calling", None)) is not None:
            for each in held:
                each.copy.announce(calling)
        try:
            yield live, old
        finally:
            with self._changed:
                self._is_proving &= not is_first
                for each in held:
                    each.leases -= 1
                self._changed.notify_all()  # _replace() may wait for the last lease

    def _chosen(self, rows: int, prepared: str | None) -> tuple[Live, Live | None]:
        if self._broken is not None:
            raise self._broken
        serving = self._serving
        assert serving is not None, "it is loaded before it is called"
        is_for_new = self._new is not None and self._new.prepared == prepared != serving.prepared
        if self._new is not None and (is_for_new or not self._is_proving):
            return self._new, serving
        if self._trial is not None and self._trial.prepared == prepared:
            self._owed += self._share * rows
            if self._owed >= rows:
                self._owed -= rows
                return self._trial, serving
        return serving, None

    def _proved_alone(self, first: Live, call: VersionCall) -> Outcome | None:
        """The answers of the version that was loaded first, with nothing behind it: if it fails for all rows, the one before
        it is loaded, and takes its place if it does not. None: another one is there by now."""
        rows = row_count(call.batch)
        with self._reports.at_work(first.version, "trial", rows):
            made, why = tried(first, call)
        if made is not None and len(made.failures) < rows:
            first.is_proven = True
            return call.for_another().on(first) if made.failures or made.again else made
        with self._loading, untimed(getattr(self._own, "calling", None)):
            with self._changed:
                if self._serving is not first:  # another batch has failed on it as well, and was faster
                    return None
            before = self._before(first)
        if before is None:
            first.is_proven = True
            return call.for_another().on(first)
        if before.prepared != first.prepared:
            kept = Outcome([None] * rows, stale=before.version.number)
        else:
            kept = call.for_another().on(before)
        if len(kept.failures) < rows:
            with self._changed:  # again: the refresher's thread may have brought another one meanwhile
                if self._serving is first:
                    self._retire(first)
                    self._serving = before
            self._loader.refuse(first.version, f"it failed for all {rows} rows of its first batch: {why}")
            self._reports.served(self.name, before, "after a newer one had failed")
        return kept

    def _before(self, first: Live) -> Live | None:
        """The version to fall back on, loaded; None if there is none."""
        for version in self._loader.candidates(self._reports.wanted(self.name)):
            if version.number != first.version.number and (live := self._loader.try_to_load(version)) is not None:
                live.is_proven = True
                return live
        return None

    def _judge(self, new: Live, rows: int, errors: int, why: str) -> None:
        if new.on_trial:
            self._reports.tried(self.name, new.version, rows, errors)
        elif new is not self._new:  # without the lock: _take_over() and _drop() look again with it
            return  # it is not wanted any more
        elif errors >= rows:
            self._loader.refuse(new.version, f"it failed for all {rows} rows of its first batch: {why}")
            self._drop(new)
        else:
            self._take_over(new, "while the old one answered")

    def _take_over(self, new: Live, how: str) -> None:
        with self._changed:
            if new not in (self._new, self._trial):
                return  # another thread was first, or it is not wanted any more
            self._retire(self._serving)
            self._serving = new
            new.on_trial = False
            self._new = None if new is self._new else self._new
            self._trial = None if new is self._trial else self._trial
        self._reports.served(self.name, new, how)

    def _drop(self, live: Live) -> None:
        with self._changed:
            if live is self._new:
                self._new = None
            elif live is self._trial:
                self._trial = None
            else:
                return
            self._retire(live)

    def _retire(self, live: Live | None) -> None:
        """The lock is held."""
        if live is not None:
            self._retired.append(live)

    # What the refresher's thread does. No other thread gives _new, _trial and _broken a value; batches let a version take
    # over, or drop it.

    def follow(self, wanted: Wanted) -> None:
        """Load what is wanted, beside what is here; called by one thread, while batches run."""
        self.tidy()
        with self._changed:
            if self._serving is None and self._broken is None:
                return  # whoever needs it first loads the newest
            serving, new, trial = self._serving, self._new, self._trial
        target = self._loader.candidates(wanted)[0].number
        if new is not None and new.version.number != target:
            self._drop(new)
            new = None
        if trial is not None and wanted.trial != trial.version and trial.version.number == target:
            self._take_over(trial, "after its canary")
            serving, trial = trial, None
        elif trial is not None and wanted.trial != trial.version:
            self._drop(trial)
            trial = None
        here = {live.version.number for live in (serving, new) if live is not None}
        if target not in here:
            self._bring(wanted)
        self._share = wanted.share
        if wanted.trial is not None and trial is None and not self._loader.is_refused(wanted.trial):
            self._begin_trial(wanted.trial)

    def tidy(self) -> None:
        """Free versions that nobody uses any more."""
        with self._changed:
            unused = [live for live in self._retired if not live.leases]
            self._retired = [live for live in self._retired if live.leases]
        free(unused)

    def _bring(self, wanted: Wanted) -> None:
        """The newest version that can be had, if it is newer than what is here."""
        with self._changed:
            serving = self._serving
        for version in self._loader.candidates(wanted):
            if serving is not None and version.number <= serving.version.number:
                return
            if serving is None:
                self._replace(version, None, None, "nothing was in service")
                return
            live, why = self._loader.try_beside(version, serving)
            if why is not None:
                self._replace(version, serving, wanted.version(serving.version.number) or serving.version, why)
                return
            if live is not None:
                with self._changed:
                    self._new = live
                return

    def _replace(self, version: Version, old: Live | None, last: Version | None, why: str) -> None:
        """The old one goes before the new one is loaded; if that cannot be, the old one is loaded again, as the version that
        it is by now. Batches wait."""
        live, error = None, self._broken
        with self._changed:
            self._is_paused = True  # first: no batch takes a lease from now on, so that the wait below ends
            while old is not None and old.leases:
                self._changed.wait()
            self._serving = None
        try:
            free([] if old is None else [old])
            live = self._loader.try_to_load(version)
            if live is None and last is not None:
                try:
                    live = self._loader.load(last, limited=True)
                except BaseException as exc:
                    let_through(exc)
                    what = f"{self.name or 'the model'}: no version can be loaded any more"
                    error = ModelLoadError(f"{what}: {told_error(exc)}")
            if live is not None:
                error = None
                if live.version == version:
                    self._reports.served(self.name, live, f"{OLD_FIRST}: {why}")
        finally:  # whatever was raised: batches wait
            with self._changed:
                self._serving, self._broken = live, error
                self._is_paused = False
                self._changed.notify_all()

    def _begin_trial(self, version: Version) -> None:
        with self._changed:
            serving = self._serving
        if serving is None:
            return
        live, why = self._loader.try_beside(version, serving)
        if why is not None:
            self._loader.refuse(version, f"there is no room for it beside the model in service, which a canary needs: {why}")
        elif live is not None and live.prepared != serving.prepared:
            self._loader.refuse(
                version, "it takes rows that are prepared differently (prepare_key()), and a canary needs the same"
            )
            free([live])
        elif live is not None:
            with self._changed:
                live.on_trial = True
                self._trial, self._owed = live, 0.0
