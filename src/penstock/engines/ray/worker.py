"""An actor of Ray: threads that run splits and share the models of its process, as those of a worker process do."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from penstock.engines.ray.cluster import import_ray, node_here, node_run_folder
from penstock.engines.ray.payloads import InStore, shipped, taken_apart
from penstock.errors import TransientError
from penstock.inference.sessions import ProcessSessions
from penstock.models.folder_use import FolderUse
from penstock.models.host_address import Address, start_hosts_by
from penstock.models.messages import HostSpec
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics
from penstock.remote.nodes import tell
from penstock.run.execute import SplitRunner
from penstock.run.fleet import Done, Failed, Work, WorkerProgress
from penstock.run.pools import Machine, Pool, room_for
from penstock.transport.interpreters import thread_variables
from penstock.transport.reports import ErrorReport
from penstock.version import __version__

KEEPER_WAIT = 120.0  # seconds for the driver to start another keeper


@dataclass(frozen=True)
class Where:
    """An actor that is ready."""

    node: str
    versions: Mapping[str, str]  # see versions()
    missing: tuple[str, ...]  # of the folders that the run writes to


def versions() -> dict[str, str]:
    """What has to be the same on all machines of a run; of Python the minor version, which code that travels depends on."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"Python": python, "Ray": import_ray().__version__, "Penstock": __version__}


class RayWorker:
    """Ray calls its methods, each on a thread of Ray's own; splits run on threads of its own, which keep their steps."""

    def __init__(
        self,
        programs: Mapping[int, bytes],
        script: tuple[list[str], list[str]],
        pool: Pool,
        around: Surroundings,
        run: str,
        nodes: int,
    ) -> None:
        """script: the driver's sys.path and sys.argv; what of the first is on this node is looked through last. nodes: see
        share()."""
        path, sys.argv = script
        sys.path += [entry for entry in path if entry not in sys.path and os.path.exists(entry)]
        os.environ.update(thread_variables(pool.cores))  # for what is imported later; Ray has told OpenMP before
        self._node, machine = node_here()
        self._use = FolderUse(node_run_folder(run, self._node))
        nodes_file = os.path.join(self._use.folder, f"{around.nodes_file}.nodes")
        around = replace(around, folder=self._use.folder, cores=machine.cores, gpus=machine.gpus, nodes_file=nodes_file)
        self._sessions = ProcessSessions(Metrics(), replace(around, **_neighbours(pool, machine)))
        self.share(nodes)
        self._keeper: Any = None
        self._changed = threading.Condition()  # guards the keeper; notified by settle(), for _start_host()
        # From Ray's threads to ours; each waits for its future. None: a thread ends.
        self._queue: queue.SimpleQueue[tuple[Work, Future[Done | Failed]] | None] = queue.SimpleQueue()
        # One for each thread of ours; Ray's, in progress(), read how far they are.
        self._runners = [SplitRunner(programs, self._sessions, shipped) for _ in range(pool.size.slots)]
        self._threads = [threading.Thread(target=self._serve, args=[each], daemon=True) for each in self._runners]
        for thread in self._threads:
            thread.start()

    def where(self, folders: Sequence[str] = ()) -> Where:
        return Where(self._node, versions(), tuple(folder for folder in folders if not os.path.isdir(folder)))

    def share(self, nodes: int) -> None:
        """So many nodes may have workers like this one: limits of services are shared out among them."""
        tell(self._sessions.around.nodes_file, nodes)

    def settle(self, keeper: Any, gpus: tuple[str, ...], versions: object) -> Where:
        """Before any work, and when a keeper was lost: who starts the hosts of models on this node, and with which GPUs.
        versions: are known on this node, once this is called."""
        with self._changed:  # splits may be running: a host may be waited for
            self._keeper = keeper
            self._changed.notify_all()
        # No lock: it is replaced whole, and a session that is opened meanwhile sees the one or the other.
        self._sessions.around = replace(self._sessions.around, gpus=gpus)
        start_hosts_by(self._start_host)
        return self.where()

    def _start_host(self, address: Address, spec: HostSpec) -> None:
        """By the keeper; if it is gone, the driver starts another one."""
        ray = import_ray()
        while True:
            keeper = self._keeper  # that which is asked: another one may be there when this one has failed
            try:
                ray.get(keeper.start.remote(address, spec))
                return
            except ray.exceptions.RayActorError as exc:
                with self._changed:
                    if not self._changed.wait_for(lambda: self._keeper is not keeper, KEEPER_WAIT):  # noqa: B023
                        raise TransientError(f"no actor starts models on node {self._node}: {exc}") from exc

    def run(self, work: Work, buffer: Any = None) -> Iterator[Any]:
        """One split; `buffer`: the rows of a stage before. First the word of it, with empty chunks, then what was in each:
        Ray keeps these in the object store of this node, and they are the driver's, so that they outlive this actor."""
        if work.payload is not None:
            work = replace(work, payload=InStore(buffer, work.payload.rows, work.payload.size))
        answer: Future[Done | Failed] = Future()
        self._queue.put((work, answer))
        event = answer.result()
        sys.stdout.flush()
        buffers: list[Any] = []
        if isinstance(event, Done):
            try:
                event, buffers = taken_apart(event)
            except Exception as exc:
                event = Failed(work.task, ErrorReport.of(exc))
        yield event
        while buffers:  # no `yield from`: Ray sends into generators
            yield buffers.pop(0)

    def progress(self) -> WorkerProgress:
        rows = {work.task: runner.rows_done for runner in self._runners if (work := runner.work) is not None}
        return WorkerProgress(rows, self._sessions.drain_metrics() if rows else Metrics())

    def leave(self) -> None:
        """Tear down the steps, and let go of the models."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._sessions.close()  # after the threads, which use its models
        self._use.leave()  # last: the sessions' files are in the folder

    def _serve(self, runner: SplitRunner) -> None:
        while (given := self._queue.get()) is not None:
            work, answer = given
            try:
                answer.set_result(runner.run(work))
            except BaseException as exc:  # whoever waits must hear of it
                answer.set_exception(exc)
        runner.close()  # on the thread that ran the steps


def _neighbours(pool: Pool, node: Machine) -> dict[str, Any]:
    """What Surroundings say of the workers beside this one: so many as have room on its node share its memory and budgets.
    Whether models are in hosts is decided for the whole pool: the driver has asked for GPUs accordingly."""
    is_spread = pool.size.workers > 1
    return {"workers": room_for(pool.hints, pool.most, node)[0] if is_spread else 1, "spread": is_spread}
