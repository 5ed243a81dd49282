"""The versions of a model that changes during a run: which one is wanted, and what becomes of a new one. Pure.

A version never changes, and has a number: 0 is the model that the handler itself describes. Those who hold models follow
what is wanted; whether a version on trial is any good is decided here, for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

KEPT = 3  # versions that are named beside the handler's own: where the newest cannot be used, the one before it is


class Version(NamedTuple):
    number: int = 0
    path: str = ""  # what it is loaded from; empty: what the handler says
    model_id: str | None = None  # what its answers are marked with; None: what the handler says
    stamp: str = ""  # of its files, when it was announced: it changes with them
    name: str = ""  # for people
    since: float = 0.0  # seconds as of time.time(), of those that several processes announce: see Wanted.announced()


ORIGINAL = Version()
REPLACED = Version(stamp="replaced")  # where it was, there is something else: it cannot be loaded any more


class Wanted(NamedTuple):
    """What whoever holds a copy of a model is to do."""

    serve: tuple[Version, ...] = (ORIGINAL,)  # the newest first; the next one where that cannot be used; the original last
    trial: Version | None = None  # is to answer a share of the rows
    share: float = 0.0

    def to_json(self) -> list[Any]:
        return [self.serve, self.trial, self.share]

    @classmethod
    def from_json(cls, told: list[Any]) -> Wanted:
        serve, trial, share = told
        return cls(tuple(Version(*each) for each in serve), None if trial is None else Version(*trial), share)

    def serving(self, version: Version, bad: Collection[int]) -> Wanted:
        """What is wanted from this version on. One that nobody could use takes no place of one that somebody can fall back
        on."""
        *before, original = self.serve
        useful = [each for each in before if each.number not in bad]
        return Wanted((version, *useful[: KEPT - 1], original))

    def announced(self, version: Version, bad: Collection[int]) -> Wanted:
        """What is wanted when one of several who watch says so, some of whom are behind the others: the newest wins, by its
        `since`. The same one that is said again is no other version."""
        newest, *others = self.serve
        if newest.number and version.since <= newest.since:
            return self
        if newest.number and (newest.path, newest.stamp) == (version.path, version.stamp):
            return self._replace(serve=(newest._replace(since=version.since), *others))
        return self.serving(version, bad)

    def version(self, number: int) -> Version | None:
        """The one of that number, if it is still named."""
        every = [*self.serve, *([] if self.trial is None else [self.trial])]
        return next((version for version in every if version.number == number), None)


class Trial(NamedTuple):
    """What is known of a version that some rows were given to."""

    rows: int = 0
    errors: int = 0  # rows that it failed for, and the version in service did not; or answered otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRule:
    """How a new version has to prove itself."""

    share: float  # of the rows
    rows: int  # after which it is decided
    max_error_rate: float

    def decide(self, trial: Trial) -> bool | None:
        """Whether it is promoted; None: not yet."""
        if trial.errors > self.max_error_rate * max(self.rows, trial.rows):
            return False
        return True if trial.rows >= self.rows else None


class Rollout:
    """Of one model: the versions that were announced, and which of them is wanted."""

    def __init__(self, rule: TrialRule | None, numbers: Iterator[int], own_ids: Iterable[str] = ()) -> None:
        """numbers: for versions, from 1 on; those of several models may share them. own_ids: of the handler's own model."""
        self.wanted = Wanted()
        self._rule = rule
        self._numbers = numbers
        self._newest = ORIGINAL
        self._announced: dict[int, Version] = {}
        self._ids = dict.fromkeys(own_ids, 1)  # how many versions have had a name
        self._good: set[int] = set()  # were in service somewhere
        self._bad: set[int] = set()  # were refused somewhere
        self.is_open = False  # rows are being answered: from now on, a new version has to prove itself

    def announce(self, path: str, model_id: str, stamp: str, *, original_is_gone: bool = False) -> Version | None:
        """A version that is to be used from now on. None: it is that which was announced last. original_is_gone: what the
        handler describes is not what it was, so nobody may fall back on it."""
        newest = self._newest
        if newest.number and (newest.path, newest.stamp) == (path, stamp):
            return None
        times = self._ids[model_id] = self._ids.get(model_id, 0) + 1
        named = model_id if times == 1 else f"{model_id}#{times}"  # the same file, with something else in it
        version = self._newest = Version(next(self._numbers), path, named, stamp)
        self._announced[version.number] = version
        if original_is_gone:
            self.wanted = self.wanted._replace(serve=(*self.wanted.serve[:-1], REPLACED))
        if self._rule is not None and self.is_open:
            self.wanted = self.wanted._replace(trial=version, share=self._rule.share)
        else:
            self._serve(version)
        return version

    def tried(self, number: int, trial: Trial) -> bool | None:
        """What all who hold copies have seen of a version on trial. Whether it was promoted just now, or (False) rolled
        back; None: neither."""
        version = self.wanted.trial
        if version is None or version.number != number or self._rule is None:
            return None
        promoted = self._rule.decide(trial)
        if promoted is True:
            self._serve(version)
        elif promoted is False:
            self.wanted = self.wanted._replace(trial=None, share=0.0)
        return promoted

    def version(self, number: int) -> Version | None:
        """One that was announced."""
        return self._announced.get(number)

    def became(self, good: Iterable[int], bad: Iterable[int]) -> None:
        """Versions that were in service somewhere, and that were refused somewhere."""
        self._good |= set(good)
        self._bad |= set(bad)

    def refused(self, number: int) -> None:
        """A version on trial that could not be loaded, or failed its check."""
        if self.wanted.trial is not None and self.wanted.trial.number == number:
            self.wanted = self.wanted._replace(trial=None, share=0.0)

    def _serve(self, version: Version) -> None:
        self.wanted = self.wanted.serving(version, self._bad - self._good)


def wanted_of(told: Mapping[str, Wanted], model: str) -> Wanted:
    """What is wanted of one of many models, by name; of most, no version was announced."""
    return told.get(model, UNCHANGED)


UNCHANGED = Wanted()
