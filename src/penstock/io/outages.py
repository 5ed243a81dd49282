"""Places that cannot be reached for a while: reported when that begins, and when it is over."""

from __future__ import annotations

import logging

from penstock.io.files import without_secrets

logger = logging.getLogger(__name__)


class Outage:
    """Logs one line when a place begins to have trouble, and one when that is over. Never a secret of a URL."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._is_on = False

    def report(self, trouble: str) -> None:
        """What is wrong as of now; empty: nothing is."""
        if trouble and not self._is_on:
            text = "%s; new versions of models are not seen while this lasts, those in use stay in service"
            logger.warning(text, without_secrets(f"{self._place}: {trouble}"))
        elif self._is_on and not trouble:
            logger.warning("%s: can be read again", without_secrets(self._place))
        self._is_on = bool(trouble)
