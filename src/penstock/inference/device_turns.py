"""Plain models of several steps on the devices of this process. Where one finds no memory, the others make room for it, and
are loaded again with their next batch. (In hosts, steps that share a device have a budget: models/residency.py.)"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from penstock.errors import ModelLoadError
from penstock.inference.model import ModelCopy
from penstock.models.freed_memory import free_devices
from penstock.models.loading import LoadedModel
from penstock.rows import safe_str

if TYPE_CHECKING:
    from penstock.inference.session_models import OneModel

logger = logging.getLogger(__name__)


class DeviceTurns:
    """`changed`: the lock of all sessions; it guards the members, and is notified when a batch has ended."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._members: weakref.WeakSet[OneModel] = weakref.WeakSet()
        self._making_room = threading.Lock()  # taken before `changed`; held while a model loads that has found no memory

    def join(self, model: OneModel) -> None:
        """It may make room for others."""
        with self._changed:
            self._members.add(model)

    def load(self, model: OneModel, step: str) -> LoadedModel | None:
        """Load it, if nobody has; without the others, if there is no memory for it beside them."""
        try:
            return model.copy.load()
        except ModelLoadError as exc:
            with self._changed:
                others = [each for each in self._members if each is not model]
            if model not in self._members or not others or not model.is_out_of_memory(exc):
                raise
            what = "its model takes turns with those of other steps: no memory was left for it"
            logger.warning("step %r: %s: %s", step, what, safe_str(exc))  # text: the error's frames may lead to a model
        with self._making_room:  # of two that found none at the same time, one after the other
            for other in others:
                self._let_go(other)
            free_devices()
            return model.copy.load()

    def _let_go(self, model: OneModel) -> None:
        """As soon as no batch runs. A batch that waits for it to be loaded again does not count: nor is it waited for."""
        with self._changed:
            while model.copy.is_loaded and model.is_called:
                self._changed.wait()
            assert isinstance(model.copy, ModelCopy)  # one that is refreshed does not join
            model.copy.let_go()
