"""What becomes of the versions of models that change during a run."""

from __future__ import annotations

from typing import NamedTuple

# What may happen to a version.
SERVED = "in service"
REFUSED = "refused"  # it could not be loaded, failed its check, or failed for all its first rows
PROMOTED = "promoted"
ROLLED_BACK = "rolled back"

METRICS = {  # that count it
    SERVED: "model_refreshes",
    REFUSED: "model_refreshes_refused",
    PROMOTED: "canaries_promoted",
    ROLLED_BACK: "canaries_rolled_back",
}


class RefreshEvent(NamedTuple):
    """Something that has happened to a version, where it happened first."""

    at: float  # as of time.time()
    step: str
    what: str
    version: int  # in the order in which they were announced
    model_id: str | None
    why: str
    model: str | None = None  # of many, its name

    def told(self) -> str:
        """For people."""
        which = f" of key {self.model!r}" if self.model is not None else ""
        is_or_was = "is" if self.what == SERVED else "was"
        kept = "; the model that was there stays" if self.what in (REFUSED, ROLLED_BACK) else ""
        return f"step {self.step!r}: the model {self.model_id}{which} {is_or_was} {self.what}: {self.why}{kept}"
