"""The actor of a node that owns the hosts of models there: it has the node's GPUs, and outlives the workers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from penstock.engines.ray.cluster import node_here, node_run_folder
from penstock.models.folder_use import FolderUse
from penstock.models.host_address import Address, end_hosts
from penstock.models.memory import visible_gpus
from penstock.models.messages import HostSpec
from penstock.models.version_files import exchange


class HostKeeper:
    """Workers of its node ask it to start hosts; whom they find there, they reach by themselves."""

    def __init__(self, run: str) -> None:
        node, _ = node_here()
        self._use = FolderUse(node_run_folder(run, node))  # until leave(); the system takes it back if the actor is killed
        self._end = threading.Event()  # set by leave(), for stay(), which has a thread of Ray's to itself

    def gpus(self) -> tuple[str, ...]:
        """That this actor was given, by the names that CUDA_VISIBLE_DEVICES takes."""
        return visible_gpus()

    def start(self, address: Address, spec: HostSpec) -> None:
        """Called by a worker that holds the lock of this address: see Address.reach()."""
        address.start(spec)

    def exchange(self, wanted: Mapping[str, bytes]) -> dict[str, bytes]:
        """Which versions of models are wanted on this node; what its processes say of them."""
        return exchange(self._use.folder, wanted)

    def stay(self) -> None:
        """Returns when it leaves: whoever waits for this hears of its death."""
        self._end.wait()

    def leave(self) -> None:
        """The run is over: the hosts of this node end."""
        end_hosts(self._use.folder)
        self._use.leave()  # after the hosts, whose sockets are in the folder
        self._end.set()


class Keeper:
    """The driver's side of one node's."""

    def __init__(self, ray: Any, node: str, run: str, gpus: float, wanted: Mapping[str, bytes]) -> None:
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": here}
        if gpus:
            options["num_gpus"] = gpus
        self.node = node
        self.actor = ray.remote(HostKeeper).options(**options).remote(run)
        self.gpus = self.actor.gpus.remote()  # passed on to workers as it is: Ray waits for it
        self.versions = self.actor.exchange.remote(wanted)  # the same
        self.is_asked = True  # what its processes say: by that call, first of all
        self.stays = self.actor.stay.remote()
