"""The sessions of this process, for engines that make many workers of one run in it, none of which is the last to be made.

Each is inside `with process_sessions(...)` for as long as it lives, or calls enter() and leave(): all of them meet in the
same sessions, so that each model is loaded once and their rows share batches. The last one to leave closes the sessions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from penstock.inference.sessions import ProcessSessions
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics


@dataclass(kw_only=True, eq=False)
class UsedSessions:
    """Those of one run in this process."""

    sessions: ProcessSessions
    users: int = 0


UsedT = TypeVar("UsedT", bound=UsedSessions)

_lock = threading.Lock()  # guards the dict and the counts; never held while sessions close, which may take seconds
in_use: dict[Hashable, UsedSessions] = {}


def enter(run: Hashable, make: Callable[[], UsedT]) -> UsedT:
    """The sessions of a run, with one more user. make: called under the lock, if there are none."""
    with _lock:
        if run not in in_use:
            in_use[run] = make()
        used = cast(UsedT, in_use[run])
        used.users += 1
        return used


def leave(run: Hashable, used: UsedSessions) -> bool:
    """One user less. True for the last one, which has to close the sessions; whoever enters from now on begins anew."""
    with _lock:
        used.users -= 1
        if used.users:
            return False
        del in_use[run]  # before they are closed, without the lock: nobody finds sessions that are closing
        return True


@contextlib.contextmanager
def process_sessions(run: str, around: Surroundings | None = None) -> Iterator[ProcessSessions]:
    """The sessions of one run in this process. Steps of the same name are one step in them: another run has others. The
    last user closes them, in its own thread."""
    place = around or Surroundings()
    used = enter((run, place), lambda: UsedSessions(sessions=ProcessSessions(Metrics(), place)))
    try:
        yield used.sessions
    finally:
        if leave((run, place), used):
            used.sessions.close()
