"""A loaded version of a model, a batch that is called with one, and whether a new one is any good."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from penstock.answers import as_rows, bare, named
from penstock.blocks import Block
from penstock.errors import ModelLoadError
from penstock.failures import Handling
from penstock.inference.calls import How
from penstock.inference.handler import ModelHandler
from penstock.inference.model import ModelCopy
from penstock.models.freed_memory import trim
from penstock.models.outcome import Outcome
from penstock.models.versions import Version
from penstock.rows import let_through, safe_str

ANY_ERROR = Handling()
BREATH = 0.1  # seconds between two signs of life of a batch that waits for a model to be loaded


OLD_FIRST = "after the old one had gone"  # how a change went for which there was no room for both


class Live:
    """A version that is loaded here."""

    __slots__ = ("_names", "copy", "is_proven", "leases", "on_trial", "prepared", "version")

    def __init__(self, version: Version, copy: ModelCopy, prepared: str | None, names: Collection[str] = ()) -> None:
        """names: what its handler may call it."""
        self.version = version
        self.copy = copy
        self._names = names
        self.prepared = prepared  # with what its rows have to be; None: as they come
        self.leases = 0  # batches that run on it; guarded by the lock of its RefreshedModel
        self.is_proven = True  # it has answered a batch, or another is asked for what it cannot answer
        self.on_trial = False  # others answer most of the rows, until it is decided on

    def named(self, made: Outcome) -> Outcome:
        """Its answers; those that are marked by the handler itself have its id, too."""
        return made if made.model_id is None else made._replace(answers=named(made.answers, made.model_id, self._names))


class VersionCall(NamedTuple):
    """A batch, and how it is called."""

    batch: Block
    how: How
    holds_back: bool
    read_again: Callable[[], Block] | None

    def on(self, live: Live) -> Outcome:
        options: dict[str, Any] = {"holds_back": self.holds_back, "read_again": self.read_again}
        return live.named(live.copy.outcomes(self.batch, self.how, **options))

    def for_another(self) -> VersionCall:
        """The rows as they were: a model may have changed those that it was given."""
        return self if self.read_again is None else self._replace(batch=self.read_again())


def names_of(handler: ModelHandler[Any, Any, Any]) -> set[str]:
    """What its model may be called: by model_id(), or as the file that it is loaded from."""
    model_id = handler.model_id()
    return {*map(str, handler.model_files()), *([] if model_id is None else [str(model_id)])}


def prepared_with(handler: ModelHandler[Any, Any, Any], version: Version) -> str | None:
    """Equal for versions that take rows which are prepared alike; None: as they come."""
    if not handler.prepares():
        return None
    return handler.prepare_key() or f"version {version.number}"


def tried(new: Live, call: VersionCall) -> tuple[Outcome | None, str]:
    """What a new version makes of a batch, errors included, and one of them; None: nothing."""
    try:
        made = call._replace(how=call.how._replace(handling=ANY_ERROR, retry=None), holds_back=False).on(new)
    except BaseException as exc:
        let_through(exc)
        return None, told_error(exc)
    return made, one_error(made)


def one_error(made: Outcome) -> str:
    failure = next(iter(made.failures.values()), None)
    return "" if failure is None else f"{failure.error_type}: {failure.message}"


def differing(compare: Callable[[Any, Any], Any], old: Outcome, new: Outcome) -> tuple[set[int], str]:
    """The rows whose answers are not alike, by the user's own function."""
    found, why = set(), ""
    pairs = zip(bare(as_rows(old.answers)), bare(as_rows(new.answers)), strict=True)
    for at, (before, after) in enumerate(pairs):
        if at in old.failures or at in new.failures:
            continue
        try:
            alike = bool(compare(before, after))
        except Exception as exc:
            alike, why = False, f"compare= raised {told_error(exc)}"
        if not alike:
            found.add(at)
    return found, why or "compare= says that answers differ"


def free(unused: Sequence[Live]) -> None:
    """Let go of models that nobody uses, and give their memory back."""
    for live in unused:
        _let_go(live)
    if unused:
        trim()


def _let_go(live: Live) -> None:
    """Garbage is collected, which stops every thread, only if the model is in it."""
    loaded = live.copy.loaded
    try:
        gone = None if loaded is None else weakref.ref(loaded.model)
    except TypeError:  # a list or a dict
        gone = None
    del loaded
    live.copy.let_go()
    if gone is None or gone() is not None:
        gc.collect()


@contextmanager
def untimed(calling: Callable[[], None] | None) -> Iterator[None]:
    """Whoever times calls, and is told of each by calling(), is not to count what happens inside: a load."""
    over = threading.Event()

    def breathe() -> None:
        while calling is not None and not over.wait(BREATH):
            calling()

    thread = threading.Thread(target=breathe, daemon=True)
    thread.start()
    try:
        yield
    finally:  # joined: no sign of life after the next call has begun
        over.set()
        thread.join()


def told_error(exc: BaseException) -> str:
    return safe_str(exc) if isinstance(exc, ModelLoadError) else f"{type(exc).__name__}: {safe_str(exc)}"
