"""The local engine: runs on this machine."""

from __future__ import annotations

import contextlib
import os
import resource
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.options import RunOptions
from penstock.pipeline.pipeline import Graph

# What runs a pipeline is imported by the methods: `import penstock`, which every worker does too, composes pipelines only.
if TYPE_CHECKING:
    from penstock.engines.local.processes import Guardian
    from penstock.run.fleet import Fleet, FleetSpec
    from penstock.run.pools import Machine
    from penstock.run.run import Run

FILES = 65_536  # open at once, at most


class LocalEngine:
    """Runs a pipeline on this machine: in the user's process, or over worker processes."""

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
        """The cores, the memory and the GPUs that a run on this machine may use."""
        from penstock.run.pools import Machine

        return Machine.here()

    @contextlib.contextmanager
    def fleet(self, spec: FleetSpec) -> Iterator[Fleet]:
        """The hosts of models end last. A guardian cleans up if this process is killed; a run in this process has none if it
        is small, or leaves nothing behind."""
        from penstock.models.folder_use import remove_unused
        from penstock.models.host_address import end_hosts

        pools, around = spec.pools, spec.around
        remove_unused(os.path.dirname(around.folder))
        _raise_file_limit()
        with contextlib.ExitStack() as stack:  # left in the opposite order: the guardian says farewell before hosts end
            stack.callback(end_hosts, around.folder)
            if pools.in_process:
                if spec.folders and not pools.small:
                    stack.enter_context(_guardian(spec))
                if pools.short:  # libraries set the filters aside while they work, and would restore those of each other
                    stack.enter_context(warnings.catch_warnings())
                yield _inline(spec)
            else:
                yield _over_processes(spec, stack.enter_context(_guardian(spec)))


def _inline(spec: FleetSpec) -> Fleet:
    from penstock.engines.local.inline import InlineFleet

    return InlineFleet(spec.programs, spec.pools.slots, spec.around)


def _over_processes(spec: FleetSpec, guardian: Guardian) -> Fleet:
    from penstock.engines.local.worker_processes import ProcessFleet

    return ProcessFleet(spec.programs, {pool.index: pool for pool in spec.pools.pools}, guardian, spec.around)


def _guardian(spec: FleetSpec) -> Guardian:
    from penstock.engines.local.processes import Guardian

    return Guardian([*spec.folders, spec.around.folder])


def _raise_file_limit() -> None:
    """What waits between stages are open files: as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
