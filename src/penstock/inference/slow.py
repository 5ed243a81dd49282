"""A word about a call of a model that does not end."""

from __future__ import annotations

import logging
import threading
import time

SLOW = 60.0  # seconds that a call may take before it is logged

logger = logging.getLogger(__name__)


class SlowCalls:
    """Warns once of a call that has run for SLOW seconds, while it runs. For models in workers and hosts that nobody kills:
    without a timeout, a call that hangs there says nothing.

    Its thread starts with the first call and wakes about once in SLOW seconds; to begin and to end a call costs nothing."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._since: dict[int, float] = {}  # when the call that a thread is in began; each writes its own: no lock
        self._over = threading.Event()
        self._starting = threading.Lock()  # so that one thread is started
        self._thread: threading.Thread | None = None  # ends by itself when it has warned; else close() ends it

    def begin(self) -> None:
        self._since[threading.get_ident()] = time.monotonic()
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._watch, name="penstock-slow-calls", daemon=True)
                    self._thread.start()

    def end(self) -> None:
        del self._since[threading.get_ident()]

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()  # at once: it does nothing but wait

    def _watch(self) -> None:
        while True:
            now = time.monotonic()
            oldest = min(list(self._since.values()), default=now)
            if now - oldest >= SLOW:
                break
            if self._over.wait(oldest + SLOW - now):
                return
        logger.warning(
            "step %r: a call of the model has run for %.0f s and has not ended; if it may hang, set a limit in seconds "
            "(with_exception_handling(timeout=...) or Pipeline(element_timeout=...)), which also finds the row",
            self._step,
            now - oldest,
        )
