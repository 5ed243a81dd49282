"""What the dispatch of a host tells its broker to do."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from penstock.models.host_batches import HostBatch
from penstock.models.messages import LoadFailed
from penstock.models.residency import LoadNow, UnloadNow


class StartCopy(NamedTuple):
    copy: int


class KillCopy(NamedTuple):
    copy: int
    why: str


class RunBatch(NamedTuple):
    copy: int
    batch: HostBatch


class BreakBatch(NamedTuple):
    """Nobody will answer these rows."""

    batch: HostBatch
    kind: str
    message: str
    error: LoadFailed | None = None  # that kept their model from being loaded
    together: bool = True  # any of them may be to blame


class GiveUp(NamedTuple):
    """No copy can be loaded: the host ends, and everybody is told why."""

    message: str


class End(NamedTuple):
    """Nobody is there any more."""


Command: TypeAlias = StartCopy | KillCopy | RunBatch | BreakBatch | LoadNow | UnloadNow | GiveUp | End
