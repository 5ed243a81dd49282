"""The actor of a node that owns the hosts of models there: it has the node's GPUs, and outlives the workers."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.engines.ray.cluster import gpu_nodes, import_ray, node_here, node_run_folder, nodes
from penstock.models.folder_use import FolderUse
from penstock.models.host_address import Address, end_hosts
from penstock.models.memory import visible_gpus
from penstock.models.messages import HostSpec
from penstock.models.version_files import add_reports, exchange, wanted_files
from penstock.run.pools import Pool

HOSTS_END = 10.0  # seconds for all hosts of models to end

logger = logging.getLogger(__name__)


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
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": on_node(node)}
        if gpus:
            options["num_gpus"] = gpus
        self.node = node
        self.actor = ray.remote(HostKeeper).options(**options).remote(run)
        self.gpus = self.actor.gpus.remote()  # passed on to workers as it is: Ray waits for it
        self.versions = self.actor.exchange.remote(wanted)  # the same
        self.is_asked = True  # what its processes say: by that call, first of all
        self.stays = self.actor.stay.remote()


class Keepers:
    """Those of all nodes that have workers which need one. The thread of the fleet alone uses it."""

    def __init__(self, folder: str, pools: Iterable[Pool]) -> None:
        """folder: the run's own on this machine, where versions of models are wanted and reported."""
        self._ray = import_ray()
        self._folder = folder
        self._run = folder.rpartition("/")[2]
        self._gpus = gpu_nodes() if any(pool.on_device for pool in pools) else {}
        self._by_node: dict[str, Keeper] = {}
        self._failing: set[str] = set()  # nodes whose last exchange of versions failed

    def of(self, node: str) -> Keeper | None:
        return self._by_node.get(node)

    def start(self, node: str) -> Keeper:
        wanted = wanted_files(self._folder)
        keeper = self._by_node[node] = Keeper(self._ray, node, self._run, self._gpus.get(node, 0), wanted)
        return keeper

    def lost(self, node: str) -> bool:
        """A keeper is gone; whether its node is still there. Hosts that it has started live on."""
        return self._by_node.pop(node, None) is not None and node in {each["NodeID"] for each in nodes()}

    def exchange(self, hear: Callable[[str, Any], None]) -> None:
        """What is wanted of models that change goes to all nodes, and what became of it is heard from there."""
        wanted = wanted_files(self._folder)
        for node, keeper in self._by_node.items():
            if not keeper.is_asked:
                keeper.is_asked = True
                hear(node, keeper.actor.exchange.remote(wanted))

    def take_reports(self, node: str, call: Any) -> None:
        """An exchange has ended: with what became of versions there, or with an error. That is logged once until one
        succeeds: the next exchange says the same again."""
        if node in self._by_node:
            self._by_node[node].is_asked = False
        error = call.exception()
        if error is None:
            self._failing.discard(node)
            add_reports(self._folder, node, call.result())
        elif not isinstance(error, self._ray.exceptions.RayActorError) and node not in self._failing:
            self._failing.add(node)
            logger.warning("node %s cannot be told which versions of models are wanted, and is asked again: %s", node, error)

    def last_exchange(self) -> None:
        """When the run is done: what became of versions since the last exchange belongs to the result."""
        for node, keeper in self._by_node.items():
            try:
                there = self._ray.get(keeper.actor.exchange.remote(wanted_files(self._folder)), timeout=5)
                add_reports(self._folder, node, there)
                self._failing.discard(node)
            except self._ray.exceptions.RayError:
                self._failing.add(node)
        for node in self._failing:
            logger.warning("node %s has not said to the end of the run which versions of models it used", node)

    def end(self) -> None:
        """The hosts of all nodes end, and the keepers."""
        keepers, self._by_node = list(self._by_node.values()), {}
        if keepers:  # one that never came has nothing to end
            self._ray.wait([keeper.actor.leave.remote() for keeper in keepers], num_returns=len(keepers), timeout=HOSTS_END)
        for keeper in keepers:
            self._ray.kill(keeper.actor)

    def have_all_gpus(self) -> bool:
        """Whether nobody else gets a GPU before the run ends."""
        return bool(self._gpus) and all(node in self._by_node for node in gpu_nodes())

    def gpu_node(self, meant_for: Iterable[str], needs: Mapping[str, float]) -> str:
        """Workers that feed a device are on a node that has one: that which has the fewest of them (`meant_for`: the node of
        each) for its GPUs, also if it came later. `needs`: what else it must have. Empty: there is no such node now."""
        self._gpus = gpu_nodes()
        there = Counter(meant_for)
        suitable = gpu_nodes(needs)
        return min(suitable, key=lambda node: (there[node] / suitable[node], node), default="")


def on_node(node: str) -> Any:
    """The scheduling strategy of an actor that is on this node, or nowhere."""
    return import_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
