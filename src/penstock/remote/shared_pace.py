"""One pace for all processes of a machine that ask one service in one run."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.remote.nodes import Nodes
from penstock.remote.pace import NAMES, PaceRules, RequestPace
from penstock.remote.shared_numbers import SharedNumbers


class SharedPace:
    """Used by any thread. path: of the file that the processes share; None: there is one process. nodes: that have a share
    of the limits each."""

    def __init__(
        self,
        rules: PaceRules,
        path: str | None = None,
        clock: Callable[[], float] = time.monotonic,  # the system's: the same in all processes
        chance: Callable[[], float] = random.random,
        nodes: Nodes | None = None,
    ) -> None:
        self._whole = rules
        self._nodes = nodes or Nodes()
        self._shares = 1, rules  # of so many nodes, and the rules of one
        self.now = clock
        self.chance = chance
        self._own = RequestPace() if path is None else None  # of one process: no file, and no numbers to unpack
        self._lock = threading.Lock()  # guards it
        self._numbers = SharedNumbers(path, list(dataclasses.astuple(RequestPace())))

    @property
    def rules(self) -> PaceRules:
        nodes, rules = self._shares  # as one tuple, which threads may set at once: both are right
        if (count := self._nodes.count()) != nodes:
            rules = self._whole.of_one(count)
            self._shares = count, rules
        return rules

    def ask(self, tokens: float = 0.0) -> float:
        """0: send now. Else seconds after which to ask again."""
        with self._held() as pace:
            return self.rules.ask(pace, self.now(), tokens)

    def answered(self) -> None:
        with self._held() as pace:
            self.rules.answered(pace, self.now())

    def used(self, tokens: float) -> None:
        """So many more than was thought."""
        if self.rules.tokens_per_minute is not None:
            with self._held() as pace:
                self.rules.used(pace, self.now(), tokens)

    def refused(self, sent: float, retry_after: float | None, limits: bool = True) -> float:
        """Seconds that the request has to wait at least."""
        with self._held() as pace:
            return self.rules.refused(pace, self.now(), sent, retry_after, self.chance(), limits=limits)

    def unreachable(self, sent: float) -> None:
        with self._held() as pace:
            self.rules.unreachable(pace, self.now(), sent, self.chance())

    def silent_for(self) -> float:
        """Seconds since the service has last answered anybody."""
        with self._held() as pace:
            return self.rules.silent_for(pace, self.now())

    def look(self) -> RequestPace:
        with self._held() as pace:
            return dataclasses.replace(pace)

    def close(self) -> None:
        self._numbers.close()
        self._nodes.close()

    @contextmanager
    def _held(self) -> Iterator[RequestPace]:
        if self._own is not None:
            with self._lock:
                yield self._own
            return
        with self._numbers.held() as values:
            pace = RequestPace(*values)
            yield pace
            values[:] = [getattr(pace, name) for name in NAMES]
