"""What a user can set for a run. Flag over argument over default, written once here."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError

CHANGES = ("inputs", "code", "arguments", "handlers", "models")  # that a user may accept when a run is resumed
ASIDE = "aside"  # the folder in run_dir where sinks may keep what is not published


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How one run is carried out. None means: chosen from the machine and the input."""

    # 0: in this process; n: exactly n worker processes per pool; (m, n): m to n; None: by machine and run
    workers: int | tuple[int, int] | None = None
    threads_per_worker: int = 1  # splits that one worker runs at a time; they share its models
    bundle_attempts: int = 1  # tries of a whole split when a step's own code raises; deaths and I/O have four anyway
    element_timeout: float | None = None  # seconds for one call of a model; beyond, its process is killed
    load_timeout: float = 1800.0  # seconds for loading a model, where it has a process of its own
    deterministic: bool = False  # batches inside a split only, in one fixed way; random numbers that repeat
    seed: int | None = None  # of the random numbers of a deterministic run; None: 0
    progress: bool | None = None  # lines on stderr, live ones in a terminal, and a summary; False: neither
    run_dir: str | os.PathLike[str] | None = None  # a folder for the run's journal: run it again, and it is resumed
    fresh: bool = False  # forget the run that is in run_dir, and start over
    accept_changes: tuple[str, ...] = ()  # resume although these have changed: some of CHANGES
    input_digests: bool | None = None  # of the files in the manifest; None: if they are at most 1 GiB together

    def __post_init__(self) -> None:
        _check_workers(self.workers)
        _check("threads_per_worker", self.threads_per_worker, least=1)
        _check("bundle_attempts", self.bundle_attempts, least=1)
        check_seconds("element_timeout", self.element_timeout, none_ok=True)
        check_seconds("load_timeout", self.load_timeout)
        if not isinstance(self.deterministic, bool):
            raise UsageError(f"deterministic={self.deterministic!r}: expected True or False")
        if self.progress is not None and not isinstance(self.progress, bool):
            raise UsageError(f"progress={self.progress!r}: expected True, False, or None, which is like True")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise UsageError(f"seed={self.seed!r}: expected a whole number")
        self._check_resuming()

    def _check_resuming(self) -> None:
        if self.run_dir is not None:
            path = os.fspath(self.run_dir) if isinstance(self.run_dir, (str, os.PathLike)) else ""
            if not isinstance(path, str) or not path or "://" in path:
                raise UsageError(f"run_dir={self.run_dir!r}: expected the path of a folder on a local disk")
            object.__setattr__(self, "run_dir", os.path.abspath(os.path.expanduser(path)))
        if isinstance(self.accept_changes, str) or not set(self.accept_changes) <= set(CHANGES):
            raise UsageError(f"accept_changes={self.accept_changes!r}: expected some of {', '.join(map(repr, CHANGES))}")
        if self.run_dir is None and (self.fresh or self.accept_changes):
            raise UsageError("fresh and accept_changes are for runs that can be resumed: give run_dir too")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RunOptions:
        """Options from keyword arguments, with an error that names the ones there are."""
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its options are {', '.join(known)}"
            raise UsageError(f"Pipeline() has no option {', '.join(unknown)}; {hint}")
        return cls(**given)

    @property
    def most_workers(self) -> int | None:
        """The maximum for a pool; None where nothing was set."""
        return self.workers[1] if isinstance(self.workers, tuple) else self.workers

    @property
    def least_workers(self) -> int:
        """The minimum for a pool; 0 where only a number was set, of workers that start as splits wait for them."""
        return self.workers[0] if isinstance(self.workers, tuple) else 0

    @property
    def split_seed(self) -> int | None:
        """What the random numbers of a deterministic run begin with; None for any other."""
        return (self.seed or 0) if self.deterministic else None

    def replace(self, given: Mapping[str, Any]) -> RunOptions:
        """These options with others in their place, checked like all. Raises UsageError for a value that does not fit."""
        return dataclasses.replace(self, **given)


def _check(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r}: expected a whole number of at least {least}")


def _check_workers(given: object) -> None:
    if isinstance(given, tuple):
        is_right = len(given) == 2 and all(type(each) is int for each in given) and 1 <= given[0] <= given[1]
    else:
        is_right = given is None or (type(given) is int and given >= 0)
    if not is_right:
        either = "a whole number of at least 0, or a minimum of at least 1 and a maximum, such as (2, 8)"
        raise UsageError(f"workers={given!r}: expected {either}")


def check_seconds(name: str, value: object, none_ok: bool = False) -> None:
    """UsageError unless it is a number of seconds above 0."""
    if value is None and none_ok:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise UsageError(f"{name}={value!r}: expected a number of seconds above 0")
