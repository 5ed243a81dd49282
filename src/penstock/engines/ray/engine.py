"""The Ray engine: the same coordinator, journal and outputs, with a fleet of Ray's actors.

Ray is imported where a run needs it: composing a pipeline for it needs none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import UsageError
from penstock.options import RunOptions, check_seconds
from penstock.pipeline.pipeline import Graph

if TYPE_CHECKING:
    from penstock.run.fleet import Fleet, FleetSpec
    from penstock.run.pools import Machine
    from penstock.run.run import Run

CONNECT_WAIT = 30.0  # seconds
RESOURCE_WAIT = 120.0  # seconds


class RayEngine:
    """Runs a pipeline on a Ray cluster.

    address: of the cluster, as ray.init() takes it. None: the one that this process is connected to, or that RAY_ADDRESS
        names, or that runs on this machine, or else one that is started here for as long as the process lives.
    connect_wait: seconds until a cluster at an address that does not answer ends the run.
    resource_wait: seconds until a step that asks for what no node has ends the run; an autoscaler has that long to add one.
    """

    def __init__(
        self, address: str | None = None, *, connect_wait: float = CONNECT_WAIT, resource_wait: float = RESOURCE_WAIT
    ) -> None:
        if address is not None and (not isinstance(address, str) or not address):
            raise UsageError(f"address={address!r}: expected the address of a Ray cluster, as ray.init() takes it, or None")
        check_seconds("connect_wait", connect_wait)
        check_seconds("resource_wait", resource_wait)
        self.address = address
        self.connect_wait = connect_wait
        self.resource_wait = resource_wait

    def start(self, graph: Graph, options: RunOptions) -> Run:
        """Check what can be checked in advance, and return the run. Its wait() does the work, on the thread that calls it.
        Raises PenstockError for what cannot run."""
        from penstock.journal.starting import start_run

        return start_run(graph, options, self)

    def explain(self, graph: Graph, options: RunOptions) -> str:
        """Say how the graph would be run, and why so, without running it."""
        from penstock.journal.starting import explain_run

        return explain_run(graph, options, self)

    def machine(self) -> Machine:
        """All nodes of the cluster together. Connects to it; raises EngineError if it does not answer in time."""
        from penstock.engines.ray.cluster import whole
        from penstock.engines.ray.connecting import connect

        connect(self.address, self.connect_wait)
        return whole()

    @contextlib.contextmanager
    def fleet(self, spec: FleetSpec) -> Iterator[Fleet]:
        """Ray ends the actors if this process is killed, a guardian removes what lies aside. With workers=0 the run stays in
        this process."""
        from penstock.engines.local import LocalEngine
        from penstock.engines.local.processes import Guardian
        from penstock.engines.ray.connecting import connect
        from penstock.engines.ray.fleet import RayFleet
        from penstock.io.folders import make_folder
        from penstock.models.host_address import end_hosts

        if spec.pools.in_process:
            with LocalEngine().fleet(spec) as here:
                yield here
            return
        connect(self.address, self.connect_wait)
        with Guardian(spec.folders):  # around the fleet: it has to outlive whatever writes into these folders
            for folder in spec.shared:
                make_folder(folder)  # workers look whether their node has it
            fleet = RayFleet(spec, self.resource_wait)
            try:
                yield fleet
            finally:
                fleet.kill()  # first: actors could start hosts again
                end_hosts(spec.around.folder)
                for folder in spec.shared:
                    with contextlib.suppress(OSError):  # parts are in it
                        os.rmdir(folder)
