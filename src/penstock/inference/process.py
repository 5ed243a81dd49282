"""The sessions of this process, for engines that make many workers of one run in it, none of which is the last to be made.

Each is inside `with process_sessions(...)` for as long as it lives: all of them meet in the same sessions, so that each
model is loaded once and their rows share batches. The last one to leave closes the sessions, in its own thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.inference.session import Sessions
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics


@dataclass(slots=True)
class _Used:
    sessions: Sessions
    users: int = 0


_lock = threading.Lock()  # guards the dict and the counts; never held while sessions close, which may take seconds
_used: dict[tuple[str, Surroundings], _Used] = {}


@contextlib.contextmanager
def process_sessions(run: str, around: Surroundings | None = None) -> Iterator[Sessions]:
    """The sessions of one run in this process. Steps of the same name are one step in them: another run has others."""
    key = run, around or Surroundings()
    with _lock:
        used = _used.setdefault(key, _Used(Sessions(Metrics(), key[1])))
        used.users += 1
    try:
        yield used.sessions
    finally:
        with _lock:
            used.users -= 1
            last = not used.users
            if last:
                del _used[key]  # whoever comes from now on begins anew
        if last:
            used.sessions.close()
