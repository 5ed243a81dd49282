"""What all sessions of a process have in common."""

from __future__ import annotations

import threading

from penstock.inference.device_turns import DeviceTurns
from penstock.inference.lane import Caller
from penstock.inference.thread_turns import Turn
from penstock.inference.ticket import Ticket
from penstock.models.native_threads import NativeThreads
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics


class SessionState:
    """One lock for all sessions, `changed`, held only to decide, never while a model runs: a bundle that waits at one model
    is a bundle that cannot add rows at another. It guards tickets, callers, fronts and the metrics."""

    def __init__(self, metrics: Metrics, around: Surroundings | None = None) -> None:
        # Notified by whatever lets somebody go on: rows, answers, a lane that waits or closes, a model that is free, the
        # end. All who wait share it, so each looks again at what it waits for.
        self.changed = threading.Condition()
        self.metrics = metrics
        self.around = around or Surroundings()
        self.turn = Turn(self.around.in_turn)
        self.native_threads = NativeThreads(max(1, self.around.cores // self.around.threads))
        self.device_turns = DeviceTurns(self.changed)
        self.leaks = False  # whether the memory of models that were unloaded is not free; only ever set: no lock to read it
        self._waiting: set[Caller] = set()  # whose answers are not all there; guarded by `changed`

    # Who waits, for the fronts of all sessions here. The lock is held. A caller that has its answers can add rows, even if
    # its thread does not know yet.

    def waits(self, caller: Caller, ticket: Ticket) -> None:
        caller.waits_for = ticket
        self._waiting.add(caller)
        for lane, front in caller.fronts.items():
            front.waits(lane)
        self.changed.notify_all()  # the last lane that could add has stopped: what waits at a front may leave now

    def goes(self, caller: Caller) -> None:
        caller.waits_for = None
        self._waiting.discard(caller)
        for lane, front in caller.fronts.items():
            front.goes(lane)

    def settled(self) -> None:
        """Some tickets are: whoever waited for them goes on."""
        if self._waiting:  # by the thread that has the answers: fronts are not to wait until the caller's thread wakes
            for caller in [each for each in self._waiting if not each.waiting]:
                self.goes(caller)
        self.changed.notify_all()
