"""The fleet: where bundles run, and what is said between it and the coordinator.

In the process, worker processes and the actors of a cluster are fleets. The coordinator tells none of them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from penstock.blocks import Block
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics
from penstock.run.locality import Locality
from penstock.run.pools import Machine, Pools
from penstock.run.throttling import Throttling
from penstock.steps.bundle import Assignment, BundleResult
from penstock.steps.stage import Outlet
from penstock.transport.reports import ErrorReport


class Payload(Protocol):
    """Rows that lie between two stages, or on their way to the user, wherever that is. The coordinator owns it from Done on
    and releases it once, when nobody will read it again."""

    @property
    def rows(self) -> int: ...

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def locality(self) -> Locality:
        """Which workers are nearer to it than others."""

    def read(self) -> Iterator[Block]:
        """The blocks; may be called again, as when a split is tried again."""

    def release(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(Assignment):
    """To a worker: one split. It is unpickled by the thread that runs it, so that what goes wrong is its own trouble."""

    task: int
    stage: int
    payload: Payload | None = None  # from the stage before, where there is no split of a source
    spread: bool = False  # cut what it makes for other stages into small chunks: there are few splits


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker can be given work."""

    place: str = ""  # its node, where there are several


@dataclass(frozen=True, slots=True)
class Done:
    """A split is done, with all that it made."""

    task: int
    result: BundleResult
    shipped: Sequence[tuple[Outlet, Sequence[Payload]]]
    metrics: Metrics = field(default_factory=Metrics)
    leaks: bool = False  # the worker keeps memory that it does not use, and is to be replaced

    @property
    def payloads(self) -> list[Payload]:
        return [payload for _, payloads in self.shipped for payload in payloads]


@dataclass(frozen=True, slots=True)
class Failed:
    """A split failed and left nothing."""

    task: int
    error: ErrorReport
    leaks: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """A split came to nothing because rows were lost on their way, with a node that died: it is nobody's fault."""

    task: int
    was_input: bool  # what it was to read is gone; else what it made, before anybody had it


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Now and then: rows done of each split that runs, and what was measured since the last word."""

    rows: Mapping[int, int]
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True, slots=True)
class Died:
    """A worker is gone, with all that it ran."""

    how: str  # for people
    killed: bool = False  # by somebody else, rather than that it ended by itself
    blameless: bool = False  # it cannot be the work's fault, such as a node that was taken away


@dataclass(frozen=True, slots=True)
class Resized:
    """Nodes have come or gone: there is room for so many workers of a pool. It is of no worker."""

    pool: int
    workers: int


@dataclass(frozen=True, slots=True)
class Starved:
    """No worker of a pool comes, though there are nodes that could have it: what it needs is taken. It is of no worker."""

    pool: int


Event: TypeAlias = Ready | Done | Failed | Lost | WorkerProgress | Died | Resized | Starved


class Fleet(Protocol):
    """Workers, by the numbers that the scheduler gives them. All is called by the coordinator's thread, but for wake()."""

    def start(self, pool: int, worker: int) -> None:
        """Begin to start a worker: wait() says Ready, or Died."""

    def assign(self, worker: int, work: Work) -> None:
        """Never waits. If the worker is gone, wait() says so."""

    def wait(self, seconds: float | None) -> Sequence[tuple[int, Event]]:
        """What happened, by worker: returns as soon as anything did, after wake(), or with nothing when time is up. The one
        place where a coordinator blocks."""

    def wake(self) -> None:
        """Make wait() return, now or when it is next called. Called from any thread, also after the fleet has ended."""

    def stop(self, worker: int) -> None:
        """Tell a worker that has no work to leave. It is not heard of again."""

    def close(self) -> None:
        """The run is done: every worker tears down its steps and leaves, or is made to."""

    def kill(self) -> None:
        """The run has failed: nothing more is begun, and all workers end at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSpec:
    """What a fleet is made of."""

    programs: Mapping[int, bytes]  # the stages, pickled, as SplitRunner takes them
    pools: Pools
    around: Surroundings  # of every worker, but for the number of its neighbours
    folders: Sequence[str] = ()  # of this machine, to be removed if this process is killed
    shared: Sequence[str] = ()  # that workers write to: wherever they are, they must reach them
    changes: bool = False  # models may change while the run goes on
    throttling: Throttling = field(default_factory=Throttling)  # what the coordinator knows of it


class Site(Protocol):
    """Where runs are carried out: all that the run needs of an engine."""

    def machine(self) -> Machine:
        """What there is to share out among the workers that are side by side."""

    def fleet(self, spec: FleetSpec) -> AbstractContextManager[Fleet]:
        """A fleet for one run. Its end ends all that was started for it: processes, hosts of models, guardians."""
