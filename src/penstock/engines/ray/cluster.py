"""The cluster: what its nodes have, and what a worker asks of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.errors import MissingPackageError
from penstock.models.host_address import run_folder
from penstock.models.memory import visible_gpus
from penstock.pipeline.hints import ACCELERATOR_TYPE, cluster_needs
from penstock.run.pools import Machine, Pool

NODE = 12  # of the letters of a node's id that are in the name of a folder
CPU, GPU, MEMORY = "CPU", "GPU", "memory"
_OWN = ("node:", "object_store_memory", ACCELERATOR_TYPE)  # how Ray's names for what no step asks for begin


def import_ray() -> Any:
    """The package ray, or MissingPackageError."""
    try:
        import ray
    except ModuleNotFoundError as exc:
        raise MissingPackageError("ray", "ray") from exc
    return ray


def nodes() -> list[dict[str, Any]]:
    """Those that are alive."""
    return [node for node in import_ray().nodes() if node["Alive"]]


def whole() -> Machine:
    """All nodes together; GPUs are those of the node that has the most."""
    total: Counter[str] = Counter()
    for node in nodes():
        total.update(node["Resources"])
    gpus = max((int(node["Resources"].get(GPU, 0)) for node in nodes()), default=0)
    return Machine(
        cores=max(1, int(total[CPU])),
        ram=int(total[MEMORY]),
        gpus=tuple(map(str, range(gpus))),
        resources={name: value for name, value in total.items() if not name.startswith(_OWN)},
    )


def node_here() -> tuple[str, Machine]:
    """The node that this actor is on, by its id, and what it has."""
    ray = import_ray()
    number = ray.get_runtime_context().get_node_id()
    mine: Mapping[str, float] = {}
    with contextlib.suppress(StopIteration):
        mine = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == number)
    here = Machine.here()
    return number, Machine(max(1, int(mine.get(CPU, here.cores))), int(mine.get(MEMORY, here.ram)), visible_gpus(), mine)


def node_run_folder(run: str, node: str) -> str:
    """Of the hosts of one run on one node: several nodes may be on one machine."""
    return run_folder(f"{run}-{node[:NODE]}")


def gpu_nodes(needs: Mapping[str, float] | None = None) -> dict[str, float]:
    """The nodes with GPUs, by their ids, and how many; of these, those that have what is needed besides."""
    there = [node for node in nodes() if node["Resources"].get(GPU) and _has(node, needs or {})]
    return {node["NodeID"]: node["Resources"][GPU] for node in there}


def _has(node: Mapping[str, Any], needs: Mapping[str, float]) -> bool:
    """Whether it is there, free or not."""
    return all(node["Resources"].get(name, 0) >= value for name, value in needs.items())


def wanted(pool: Pool, pools: int) -> dict[str, Any]:
    """What an actor of this pool asks for, as the options of an actor. The pools of a run share the cores, as on a machine:
    one that waits for another must not keep it from starting."""
    hints = pool.hints
    own = cluster_needs(hints)
    asked: dict[str, Any] = {"num_cpus": round(own.pop(CPU, hints.cpus or 1) / pools, 4)}
    gpus = own.pop(GPU, 0)
    if gpus and not pool.on_device:  # else the keeper of the node has them
        asked["num_gpus"] = gpus
    if hints.min_ram is not None:
        asked["memory"] = hints.min_ram
    if own:
        asked["resources"] = own
    return asked


def by_resource(asked: Mapping[str, Any]) -> dict[str, float]:
    """What the options of an actor ask for, by Ray's names of resources."""
    names = {"num_cpus": CPU, "num_gpus": GPU, "memory": MEMORY}
    return {names[name]: value for name, value in asked.items() if name in names} | dict(asked.get("resources") or {})


def lacking(needs: Mapping[str, float]) -> str | None:
    """What no node has of it, and what they have, for people; None if one node has it all, whether it is free or not."""
    there = nodes()
    if any(_has(node, needs) for node in there):
        return None
    hidden = tuple(start for start in _OWN if not any(name.startswith(start) for name in needs))
    told_of = [{name: value for name, value in node["Resources"].items() if not name.startswith(hidden)} for node in there]
    offers = ["{" + ", ".join(f"{name}: {value:g}" for name, value in sorted(each.items())) + "}" for each in told_of]
    told = ", ".join(f"{name}: {value:g}" for name, value in needs.items())
    return f"a worker needs {{{told}}}, and the {len(offers)} nodes offer {', '.join(offers)}"
