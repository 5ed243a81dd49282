"""What the dispatch of a host tells its broker to do."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from penstock.models.host_batches import Batch


class StartCopy(NamedTuple):
    copy: int


class KillCopy(NamedTuple):
    copy: int
    why: str


class RunBatch(NamedTuple):
    copy: int
    batch: Batch


class BreakBatch(NamedTuple):
    """Nobody will answer these rows."""

    batch: Batch
    kind: str
    message: str


class GiveUp(NamedTuple):
    """No copy can be loaded: the host ends, and everybody is told why."""

    message: str


class End(NamedTuple):
    """Nobody is there any more."""


Command: TypeAlias = StartCopy | KillCopy | RunBatch | BreakBatch | GiveUp | End
