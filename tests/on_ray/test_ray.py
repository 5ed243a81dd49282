"""Pipelines on a Ray cluster of three nodes on one machine: the contract of engines, placement, deaths, errors."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

import penstock as ps
import ray_cluster
from penstock.engines.ray import RayEngine, fleet, keeper, worker
from penstock.engines.ray.payloads import shipped
from penstock.errors import EngineError, StoppedError, UsageError, WorkerDiedError
from penstock.remote.nodes import Nodes
from penstock.run.fleet import Work
from penstock.steps.stage import Outlet
from penstock.testing import check_engine
from ray_cluster import ROWS, wait_until, write_numbers, written

pytestmark = pytest.mark.timeout(300)  # more than all that one of them waits for by its own limits

ray = pytest.importorskip("ray")
placement_group_table = ray.util.placement_group_table

for module in (sys.modules[__name__], ray_cluster):
    cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="module")
def cluster():
    made = ray_cluster.started()
    os.environ["RAY_ADDRESS"] = made.address
    ray.init(made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    del os.environ["RAY_ADDRESS"]


@pytest.mark.parametrize("group", ["rows", "order", "resume"])
def test_the_contract_of_engines(cluster, group):
    check_engine("ray", [group], workers=2)


# Placement.


def node_of(row):
    return row, ray.get_runtime_context().get_node_id()


def nodes_with(name):
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and name in node["Resources"]}


def test_stages_run_on_the_nodes_that_their_hints_name(cluster):
    p = ps.Pipeline(engine="ray", workers=2)
    first = p | ps.Create(range(3000)) | ps.Map(node_of).with_resource_hints(resources={"ram_node": 1})
    second = first | "second" >> ps.Map(node_of).with_resource_hints(resources={"accel_node": 1})
    rows = second.collect()
    assert [row for (row, _), _ in rows] == list(range(3000))
    assert {node for (_, node), _ in rows} == nodes_with("ram_node")
    assert {node for _, node in rows} == nodes_with("accel_node")


def on_many_nodes(row, folder, nodes):
    """Rows wait until some are on that many nodes: actors may come one after the other."""
    seen = Path(folder, "seen")
    if len(list(seen.glob("*"))) < nodes:
        seen.mkdir(exist_ok=True)
        (seen / node_of(row)[1]).touch()
        wait_until(lambda: len(list(seen.glob("*"))) >= nodes, f"rows are on {nodes} nodes", 90)
    return row


def padded_node_of(row):
    return row, ray.get_runtime_context().get_node_id(), f"{row:04000}"


def test_rows_stay_on_their_node_where_it_is_free(cluster, tmp_path):
    p = ps.Pipeline(engine="ray")
    first = p | ps.Create(range(10_000)) | ps.Map(on_many_nodes, str(tmp_path), 3) | ps.Map(padded_node_of) | ps.Reshuffle()
    rows = (first | ps.Map(lambda row: (*row[:2], node_of(row)[1]))).collect()
    assert [row for row, _, _ in rows] == list(range(10_000))
    assert len({made for _, made, _ in rows}) == 3
    stayed = sum(made == used for _, made, used in rows)
    assert stayed > 7_500, "a third would do so by chance"


def until_a_node_comes(row, folder, there):
    """Rows on the nodes that were there first wait until one is on another."""
    here, marker = node_of(row)[1], Path(folder, "marker")
    if here not in there:
        marker.touch()
    wait_until(marker.exists, "a row is on a node that came later", 90)
    return row, here


def test_a_node_that_joins_a_run_gets_work(cluster, tmp_path):
    there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    p = ps.Pipeline(engine="ray", workers=6)
    rows = p | ps.Create(range(4000)) | ps.Map(until_a_node_comes, str(tmp_path), there)
    rows | ps.Map(repr) | ps.WriteToText(tmp_path / "out")
    assert "5 cores, of workers=6" in p.explain()
    run, added = p.start(), []

    def add_node(wait):
        wait(lambda: list(demanded(1)), "one more is asked for")
        added.append(cluster.add_node(num_cpus=1))

    try:
        meanwhile(add_node, run)
    finally:
        for node in added:
            cluster.remove_node(node, allow_graceful=False)
    found = read_rows(tmp_path)
    assert [row for row, _ in found] == list(range(4000))
    assert {node for _, node in found} - there
    assert not list(demanded(1))


def until_more_is_asked_for(row, folder):
    wait_until(Path(folder, "asked").exists, "more is asked for", 90)
    return row


def test_the_minimum_of_workers_is_asked_for_whatever_waits(cluster, tmp_path):
    """There is one split, and room for five."""
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, "nodes of other tests are known to be gone")
    p = ps.Pipeline(engine="ray", workers=(7, 9))
    rows = p | ps.Create([1]) | ps.Map(until_more_is_asked_for, str(tmp_path))
    rows | ps.Map(str) | ps.WriteToText(tmp_path / "out")
    assert "pool 0: 5 workers, 1 thread each" in p.explain()
    run = p.start()

    def ask(wait):
        wait(lambda: ray.available_resources().get("CPU", 0) == 0, "five are there")
        wait(lambda: list(demanded(2)), "two more are asked for")
        (tmp_path / "asked").touch()

    meanwhile(ask, run)
    assert not list(demanded(2))


def demanded(workers):
    """Placement groups that wait for so many places, as an autoscaler sees them."""
    for group in placement_group_table().values():
        if group["state"] in ("PENDING", "RESCHEDULING") and len(group["bundles"]) == workers:
            yield group


class Shares(ps.RemoteModelHandler):
    """Answers with the number of nodes among which its limit is shared out; not before it may."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def create_client(self):
        return Nodes(self.run_place.nodes_file)

    def request(self, batch, client, inference_args=None):
        wait_until(Path(self.folder, "go").exists, "it may answer", 90)
        return [client.count()] * len(batch)


def test_the_limit_of_a_service_is_shared_out_among_the_nodes(cluster, tmp_path):
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, "nodes of other tests are known to be gone")
    (tmp_path / "go").touch()
    p = ps.Pipeline(engine="ray", workers=2)
    rows = p | ps.Create(range(4))
    anywhere = rows | "anywhere" >> ps.RunInference(Shares(str(tmp_path), requests_per_minute=60_000))
    one = ps.RunInference(Shares(str(tmp_path), requests_per_minute=60_000)).with_resource_hints(resources={"ram_node": 1})
    there = rows | ps.Reshuffle() | "there" >> one
    (anywhere, there) | ps.Flatten() | ps.Map(str) | ps.WriteToText(tmp_path / "out")
    p.run()
    assert sorted(line for path in (tmp_path / "out").glob("part-*") for line in path.read_text().split()) == [*"11113333"]


def test_no_more_places_are_asked_for_while_a_service_is_the_limit(cluster, tmp_path):
    p = ps.Pipeline(engine="ray", workers=6)
    p | ps.Create(range(4000)) | ps.RunInference(Shares(str(tmp_path), requests_per_minute=60, max_batch_size=1))
    run = p.start()

    def watch(wait):
        wait(lambda: list(demanded(1)), "one more is asked for")
        (tmp_path / "go").touch()
        wait(lambda: not list(demanded(1)), "it is asked for no more")
        run.stop()

    with pytest.raises(StoppedError):
        meanwhile(watch, run)


class Where(ps.ModelHandler):
    """Answers with the node and the process that it runs in."""

    def load_model(self):
        return os.environ.get("RAY_NODE_ID", ""), os.getpid()

    def run_inference(self, batch, model, inference_args=None):
        return [(row, os.getpid()) for row in batch]


def test_a_large_model_is_one_process_on_each_node(cluster, tmp_path):
    """Three workers are on two nodes at least."""
    p = ps.Pipeline(engine="ray", workers=3)
    seen = p | ps.Create(range(4000)) | ps.Map(on_many_nodes, str(tmp_path), 2)
    rows = seen | ps.Map(node_of) | ps.RunInference(Where(large_model=True))
    answers = rows.collect()
    assert [row for (row, _), _ in answers] == list(range(4000))
    holders = {}
    for (_, node), pid in answers:
        holders.setdefault(node, set()).add(pid)
    assert {len(pids) for pids in holders.values()} == {1}
    pids = set.union(*holders.values())
    assert len(pids) == len(holders) >= 2
    assert p.result.metrics.counter("num_inferences") == 4000, "those of all nodes"
    assert p.result.metrics.distribution("inference_request_batch_size").sum == 4000
    wait_until(lambda: not any(map(is_alive, pids)), "the hosts have ended")


class TwoCopies(Where):
    """No row is answered before two processes of its node answer."""

    def __init__(self, folder):
        super().__init__(model_copies=2, max_batch_size=10)
        self.folder = folder

    def run_inference(self, batch, model, inference_args=None):
        _, node = batch[0]
        Path(self.folder, f"{node}.{os.getpid()}").touch()
        wait_until(lambda: len(list(Path(self.folder).glob(f"{node}.*"))) >= 2, "both copies have rows", 90)
        return super().run_inference(batch, model)


def test_copies_of_a_model_are_so_many_on_each_node(cluster, tmp_path):
    p = ps.Pipeline(engine="ray", workers=3)
    seen = p | ps.Create(range(4000)) | ps.Map(on_many_nodes, str(tmp_path), 2)
    answers = (seen | ps.Map(node_of) | ps.RunInference(TwoCopies(str(tmp_path)))).collect()
    assert [row for (row, _), _ in answers] == list(range(4000))
    holders = {(node, pid) for (_, node), pid in answers}
    assert sorted(Counter(node for node, _ in holders).values()) in ([2, 2], [2, 2, 2])


class Breaks(Where):
    """Hangs at one row, or dies of it."""

    def run_inference(self, batch, model, inference_args=None):
        for row, _ in batch:
            if row == "hangs":
                time.sleep(1000)
            if row == "dies":
                os.kill(os.getpid(), signal.SIGSEGV)
        return super().run_inference(batch, model)


@pytest.mark.parametrize(
    ("what", "handling", "kind"), [("hangs", {"timeout": 3.0}, "timed out"), ("dies", {"use_subprocess": True}, "crashed")]
)
def test_a_row_that_breaks_its_model_fails_alone(cluster, tmp_path, what, handling, kind):
    p = ps.Pipeline(engine="ray")
    seen = p | ps.Create([*range(1000), what, *range(1000, 2000)]) | ps.Map(on_many_nodes, str(tmp_path), 3)
    step = ps.RunInference(Breaks(max_batch_size=20)).with_exception_handling(**handling)
    good, failures = seen | ps.Map(node_of) | step
    good | "to text" >> ps.Map(repr) | "good" >> ps.WriteToText(tmp_path / "out")
    failed = failures.failed_inferences | ps.Map(lambda failure: repr((failure[0][0], failure[1].kind)))
    failed | "bad" >> ps.WriteToText(tmp_path / "failed" / "out")
    p.run()
    answers = read_rows(tmp_path)
    assert [row for (row, _), _ in answers] == list(range(2000))
    assert read_rows(tmp_path / "failed") == [(what, kind)]


class Counted(Where):
    """Leaves a trace of each of its copies."""

    def __init__(self, folder):
        super().__init__(max_batch_size=20)
        self.folder = folder

    def load_model(self):
        Path(self.folder, str(os.getpid())).touch()
        return super().load_model()


def test_processes_of_models_are_as_many_as_their_node_has_workers(cluster, tmp_path):
    (tmp_path / "copies").mkdir()
    p = ps.Pipeline(engine="ray")
    seen = p | ps.Create(range(2000)) | ps.Map(on_many_nodes, str(tmp_path), 3)
    step = ps.RunInference(Counted(str(tmp_path / "copies"))).with_exception_handling(timeout=60)
    good, _ = seen | step
    assert len(good.collect()) == 2000
    assert len(list((tmp_path / "copies").iterdir())) == 5, "a worker for each core of the three nodes, with a copy each"


class OnGpu(ps.ModelHandler):
    """Answers with the GPUs that its process sees; not before it may."""

    def __init__(self, folder):
        super().__init__(large_model=True)
        self.folder = folder

    def accelerator(self):
        return "gpu"

    def load_model(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def run_inference(self, batch, model, inference_args=None):
        wait_until(Path(self.folder, "go").exists, "it may answer", 90)
        return [(*row, model) for row in batch]


def test_a_model_on_a_gpu_has_that_of_its_node(cluster, tmp_path):
    """The node says that it has one: this is about who gets it."""
    node = cluster.add_node(num_cpus=2, num_gpus=1)
    try:
        wait_until(lambda: ray.available_resources().get("GPU") == 1, "the node is there")
        p = ps.Pipeline(engine="ray")
        rows = p | ps.Create(range(2000)) | ps.Map(node_of) | ps.RunInference(OnGpu(str(tmp_path)))
        rows | ps.Map(repr) | ps.WriteToText(tmp_path / "out")
        run = p.start()

        def let_go(wait):
            wait(lambda: not ray.available_resources().get("GPU"), "the run has the GPU")
            (tmp_path / "go").touch()

        meanwhile(let_go, run)
        found = read_rows(tmp_path)
        assert [row for row, _, _ in found] == list(range(2000))
        assert {node for _, node, _ in found} == nodes_with("GPU")
        assert {gpus for _, _, gpus in found} == {"0"}
        wait_until(lambda: ray.available_resources().get("GPU") == 1, "the GPU is free again")
    finally:
        cluster.remove_node(node, allow_graceful=False)


def test_stages_that_need_the_same_scarce_thing_take_turns(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.run.schedule.QUEUED_TASKS", 4)
    monkeypatch.setattr("penstock.engines.ray.fleet.STARVED", 1.0)
    node = cluster.add_node(num_cpus=2, resources={"only": 1})
    try:
        wait_until(lambda: nodes_with("only"), "the node is there")
        p = ps.Pipeline(engine="ray")
        first = p | ps.Create(range(200)).with_resource_hints(resources={"only": 1})
        second = first | ps.Map(abs).with_resource_hints(resources={"only": 1}, min_ram="1MB")
        assert second.collect() == list(range(200))
        assert p.result.splits > 4, "the first stage was held back"
    finally:
        cluster.remove_node(node, allow_graceful=False)


class OfKey(ps.ModelHandler):
    """Answers with its name, and leaves a line for each time that it was loaded."""

    def __init__(self, name, folder):
        super().__init__(large_model=True)
        self.name, self.folder = name, folder

    def load_model(self):
        with Path(self.folder, self.name).open("a") as file:
            file.write("loaded\n")
        return self.name

    def run_inference(self, batch, model, inference_args=None):
        return [(row, model) for row in batch]


def test_models_by_key_are_one_for_each_node_at_most(cluster, tmp_path):
    """Behind a Reshuffle, rows whose key comes again go to the node that has its model, when that is free."""
    names = [f"model{number}" for number in range(4)]
    handler = ps.KeyedModelHandler([ps.KeyModelMapping([name], OfKey(name, str(tmp_path))) for name in names])
    rows = [(names[at // 250 % 4], at) for at in range(8000)]
    found = ps.Pipeline(engine="ray", workers=3) | ps.Create(rows) | ps.Reshuffle() | ps.RunInference(handler)
    assert found.collect() == [(name, (at, name)) for name, at in rows]
    assert all(1 <= len((tmp_path / name).read_text().splitlines()) <= 3 for name in names)


@pytest.mark.parametrize(
    ("column", "block"),
    [("", [("a", 1), ("b", 2), ("a", 3), 7, ([], 8)]), ("k", [{"k": "a"}, {"k": "b"}, {"x": 1, "k": "a"}])],
)
def test_what_is_sent_on_says_whose_models_it_is_for(column, block):
    shipment = shipped(Work("run", (0,), 1, 0, task=0, stage=0), Outlet("stage", 1, (), "before", column))
    shipment.add(block)
    (chunk,) = shipment.seal()
    assert len(chunk.locality.models) == 2


def is_alive(pid):
    return os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


def meanwhile(act, run):
    """The result of a run; `act` is called while it goes on, on this thread: Ray starts nodes on no other. What it is given
    is as wait_until, and ends with the run: with the run's own error, if there is one."""
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(run.wait)

        def ends_or(holds, what):
            has_ended = result.done()  # first: what holds then was not missed
            if not holds() and has_ended:
                result.result()
                raise AssertionError(f"the run ended before: {what}")
            return holds()

        try:
            act(lambda holds, what: wait_until(lambda: ends_or(holds, what), what))
        except BaseException:
            run.stop()
            raise
        return result.result()


def test_modules_of_the_drivers_path_are_found(cluster, tmp_path, monkeypatch):
    (tmp_path / "of_the_driver.py").write_text("def tripled(row):\n    return 3 * row\n")
    monkeypatch.syspath_prepend(tmp_path)
    tripled = importlib.import_module("of_the_driver").tripled
    assert (ps.Pipeline(engine="ray", workers=1) | ps.Create([1, 2]) | ps.Map(tripled)).collect() == [3, 6]


class FromFile(ps.ModelHandler):
    """Answers with what its file says."""

    def __init__(self, path):
        super().__init__(max_batch_size=10)
        self.update_model_path(path)

    def update_model_path(self, model_path):
        self.path = str(model_path)

    def load_model(self):
        return Path(self.path).read_text()

    def run_inference(self, batch, model, inference_args=None):
        time.sleep(0.005 * len(batch))
        return [(*row, model) for row in batch]


def test_models_change_on_all_nodes(cluster, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "1.txt").write_text("one")
    p = ps.Pipeline(engine="ray", workers=4)
    watched = ps.RunInference(
        FromFile(tmp_path / "models" / "1.txt"), watch_model_pattern=str(tmp_path / "models" / "*.txt"), interval=0.2
    )
    rows = p | ps.Create(range(5000)) | ps.Map(node_of) | watched
    rows | ps.Map(repr) | ps.WriteToText(tmp_path / "out")
    run = p.start()

    def change(wait):
        wait(lambda: any(stage.rows > 500 for stage in run.progress()), "rows are done")
        (tmp_path / "models" / "new").write_text("two")
        (tmp_path / "models" / "new").rename(tmp_path / "models" / "2.txt")

    meanwhile(change, run)
    lines = read_rows(tmp_path)
    assert [row for row, _, _ in lines] == list(range(5000))
    assert {node for _, node, model in lines if model == "two"} == {node for _, node, _ in lines}
    assert {model for *_, model in lines} == {"one", "two"}


# Deaths.


def killed_once(row, marker):
    if row == ROWS // 2:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return row
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def test_an_actor_that_is_killed_costs_its_splits_one_more_try(cluster, tmp_path):
    p = ps.Pipeline(engine="ray", workers=2)
    rows = p | ps.Create(range(ROWS)) | ps.Map(killed_once, str(tmp_path / "marker"))
    assert rows.collect() == list(range(ROWS))
    assert p.result.worker_deaths >= 1


def killed_always(row):
    if row == 1500:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def test_a_row_that_always_kills_ends_the_run(cluster):
    p = ps.Pipeline(engine="ray", workers=1)
    with pytest.raises(WorkerDiedError, match="died 4 times while it ran split"):
        (p | ps.Create(range(3000)) | ps.Map(killed_always)).collect()


class Slow(Where):
    def run_inference(self, batch, model, inference_args=None):
        time.sleep(2e-5 * len(batch))
        return super().run_inference(batch, model)


def test_the_owner_of_hosts_and_a_host_that_are_killed(cluster, tmp_path):
    """The next host is started by the next owner."""
    p = ps.Pipeline(engine="ray", workers=1)
    rows = p | ps.Create(range(ROWS)) | ps.RunInference(Slow(large_model=True, max_batch_size=500))
    rows | ps.Map(repr) | ps.WriteToText(tmp_path / "out")
    run = p.start()
    killed = []

    def kill(wait):
        wait(lambda: any(stage.rows >= 1000 for stage in run.progress()), "rows are done")
        for host in hosts():
            owner = int(Path(f"/proc/{host}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(owner, signal.SIGKILL)
            os.killpg(host, signal.SIGKILL)
            killed.extend([owner, host])

    meanwhile(kill, run)
    assert [row for row, _ in read_rows(tmp_path)] == list(range(ROWS))
    assert len(killed) == 2


def hosts():
    """The processes of brokers on the nodes of this cluster."""
    nodes = [node["NodeID"][:12] for node in ray.nodes()]
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = path.joinpath("cmdline").read_text()
            if "penstock.models.broker" in command and any(node in command for node in nodes):
                found.append(int(path.name))
    return found


def read_rows(folder):
    paths = sorted((folder / "out").glob("part-*"))
    return [ast.literal_eval(line) for path in paths for line in path.read_text().splitlines()]


def around_a_death(line, folder):
    """Rows wait for the doomed node, and those of the last quarter for its death. It dies with rows in its hands."""
    folder = Path(folder)
    is_doomed = node_of(line)[1] == (folder / "doomed").read_text()
    if not (folder / "worked").exists():
        if is_doomed:
            (folder / "worked").touch()
        wait_until((folder / "worked").exists, "the doomed node works", 90)
    if int(line) >= ROWS * 3 // 4 or (is_doomed and (folder / "enough").exists()):
        if is_doomed:
            (folder / "held").touch()
        wait_until((folder / "gone").exists, "the doomed node is gone", 90)
    return line


def test_a_node_that_dies_loses_nothing_and_is_not_the_works_fault(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.run.schedule.ATTEMPTS", 1)
    write_numbers(tmp_path)
    node = cluster.add_node(num_cpus=2, resources={"doomed": 2})
    try:
        wait_until(lambda: nodes_with("doomed"), "the node is there")
        (tmp_path / "doomed").write_text(*nodes_with("doomed"))
        p = ps.Pipeline(engine="ray")
        lines = p | ps.ReadFromText(str(tmp_path / "in/*.txt")) | ps.Map(around_a_death, str(tmp_path))
        lines = lines | ps.Map(ray_cluster.doubled)
        (lines | ps.Reshuffle() | ps.WriteToText(tmp_path / "out"))
        run = p.start()

        def end_node(wait):
            wait((tmp_path / "worked").exists, "the node works")
            wait(lambda: any(stage.rows > ROWS // 10 for stage in run.progress()), "rows are done")
            (tmp_path / "enough").touch()
            wait((tmp_path / "held").exists, "the node has rows")
            cluster.remove_node(node, allow_graceful=False)
            (tmp_path / "gone").touch()

        assert meanwhile(end_node, run).worker_deaths > 0
        assert written(tmp_path) == [2 * number for number in range(ROWS)]
    finally:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)


def made_once(row, folder):
    """Leaves a trace: how often a row was made, and on which node last. Both nodes make some."""
    on_many_nodes(row, folder, 2)
    path = Path(folder, f"{row // 1000}")
    with path.open("a") as file:
        file.write(f"{row % 1000} {node_of(row)[1]}\n")
    return row, f"{row:01000}"


def test_rows_between_stages_that_a_node_took_along_are_made_again(cluster, tmp_path):
    """The second stage has no node until all rows are made: then one of the two that have them dies, and a third comes."""
    added = [cluster.add_node(num_cpus=1, resources={"maker": 1}) for _ in range(2)]
    try:
        wait_until(lambda: len(nodes_with("maker")) == 2, "the nodes are there")
        p = ps.Pipeline(engine="ray")
        first = p | ps.Create(range(6000)) | ps.Map(made_once, str(tmp_path)).with_resource_hints(resources={"maker": 1})
        rows = first | ps.Map(lambda row: repr((row[0],))).with_resource_hints(accelerator="gpu")
        rows | ps.WriteToText(tmp_path / "out")
        run = p.start()

        def end_node(wait):
            wait(lambda: run.progress() and run.progress()[1].rows == 6000, "all rows are made")
            cluster.remove_node(added.pop(0), allow_graceful=False)
            added.append(cluster.add_node(num_cpus=1, num_gpus=1))

        result = meanwhile(end_node, run)
        assert [row for (row,) in read_rows(tmp_path)] == list(range(6000))
        assert result.retries > 0
        assert result.counts["Map(made_once)"].rows_out == 6000
        lines = [line.split() for path in tmp_path.glob("[0-9]*") for line in path.read_text().splitlines()]
        assert len({node for _, node in lines}) == 2, "both nodes made rows"
        assert 6000 < len(lines) < 12_000, "some rows were made twice, and not all"
    finally:
        for node in added:
            cluster.remove_node(node, allow_graceful=False)


def parts(folder):
    return {path.name: path.read_bytes() for path in (folder / "out").glob("part-*")}


def test_a_driver_that_is_killed_is_started_again_and_goes_on(cluster, tmp_path):
    """What it writes is what one that nobody kills writes, file for file."""
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for folder in (killed, undisturbed):
        folder.mkdir()
        write_numbers(folder)
    script = [sys.executable, ray_cluster.__file__, str(killed)]
    with subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            wait_until(lambda: driver.poll() is not None or len(parts(killed)) >= 4, "parts are out")
        finally:
            driver.kill()
    before = parts(killed)
    for folder in (killed, undisturbed):
        (folder / "go").touch()
        subprocess.run([*script[:-1], str(folder)], stdout=subprocess.DEVNULL, check=True, timeout=100)
    sessions = json.loads((killed / "run" / "manifest.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert written(killed) == [2 * number for number in range(ROWS)]
    assert 4 <= len(before) < len(parts(killed)), "it was killed in the middle"
    assert before.items() <= parts(killed).items()
    assert parts(killed) == parts(undisturbed)


def test_a_driver_that_is_stopped_leaves_no_actor_and_says_how_to_go_on(cluster, tmp_path):
    write_numbers(tmp_path)
    script = [sys.executable, ray_cluster.__file__, str(tmp_path)]
    with subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
        try:
            wait_until(lambda: driver.poll() is not None or parts(tmp_path), "a part is out")
            driver.terminate()
            _, said = driver.communicate(timeout=60)
        finally:
            driver.kill()
    assert driver.returncode == -signal.SIGTERM
    assert "run the same command again" in said
    wait_until(lambda: ray.available_resources().get("CPU") == 5, "all actors have ended")


# Errors.


def test_what_no_node_has_is_an_error_that_names_it(cluster):
    p = ps.Pipeline(engine=RayEngine(resource_wait=1.0), workers=1)
    with pytest.raises(
        EngineError, match=r"resource hints: resources=\{'moon': 2\}.* a worker needs \{CPU: 0.5, moon: 2\}.*ram_node: 2"
    ):
        (p | ps.Create(range(10)) | ps.Map(str).with_resource_hints(resources={"moon": 2})).collect()


def holding(row, folder):
    """Says that it is there, and waits for a node that never comes back."""
    Path(folder, "holds").touch()
    wait_until(Path(folder, "go").exists, "it may go on", 90)
    return row


def test_a_stage_whose_last_node_dies_is_an_error_that_names_what_it_needs(cluster, tmp_path):
    node = cluster.add_node(num_cpus=1, resources={"last": 1})
    try:
        wait_until(lambda: nodes_with("last"), "the node is there")
        p = ps.Pipeline(engine=RayEngine(resource_wait=2.0), workers=1)
        rows = p | ps.Create(range(10)) | ps.Map(holding, str(tmp_path)).with_resource_hints(resources={"last": 1})
        rows | ps.Map(str) | ps.WriteToText(tmp_path / "out")
        run = p.start()

        def end_node(wait):
            wait((tmp_path / "holds").exists, "the node works")
            cluster.remove_node(node, allow_graceful=False)

        with pytest.raises(
            EngineError, match=r"resources=\{'last': 1\}.* a worker needs \{.*last: 1\}, and the 3 nodes offer"
        ):
            meanwhile(end_node, run)
    finally:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)


def test_a_model_on_a_gpu_is_on_no_node_without_one(cluster, tmp_path):
    """No node has what the step needs besides: nor is it anywhere else."""
    node = cluster.add_node(num_cpus=1, num_gpus=1)
    try:
        wait_until(lambda: ray.available_resources().get("GPU") == 1, "the node is there")
        (tmp_path / "go").touch()
        p = ps.Pipeline(engine=RayEngine(resource_wait=2.0), workers=1)
        step = ps.RunInference(OnGpu(str(tmp_path))).with_resource_hints(resources={"ram_node": 1})
        with pytest.raises(EngineError, match=r"a worker needs \{.*ram_node: 1, GPU: 1\}, and the 4 nodes offer .*GPU: 1"):
            (p | ps.Create([(1,)]) | step).collect()
    finally:
        cluster.remove_node(node, allow_graceful=False)


def test_a_node_with_a_gpu_is_asked_for_where_none_that_is_there_will_do(cluster, tmp_path):
    """The one that has a GPU has not what the step needs besides; so has one that comes later."""
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1)]
    try:
        wait_until(lambda: ray.available_resources().get("GPU") == 1, "the node is there")
        (tmp_path / "go").touch()
        p = ps.Pipeline(engine="ray", workers=1)
        step = ps.RunInference(OnGpu(str(tmp_path))).with_resource_hints(resources={"late_node": 1})
        p | ps.Create([(1,)]) | step | ps.Map(repr) | ps.WriteToText(tmp_path / "out")
        run = p.start()

        def add_node(wait):
            wait(lambda: any("GPU" in group["bundles"][0] for group in demanded(1)), "a GPU is asked for")
            nodes.append(cluster.add_node(num_cpus=1, num_gpus=1, resources={"late_node": 1}))

        meanwhile(add_node, run)
        assert len(read_rows(tmp_path)) == 1
    finally:
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)


class Elsewhere(RayEngine):
    """As if the driver had a disk of its own."""

    def fleet(self, spec):
        return super().fleet(replace(spec, shared=[f"/nowhere{folder}" for folder in spec.shared]))


@pytest.mark.parametrize("options", [{}, {"run_dir": "run"}], ids=["plain", "journaled"])
def test_outputs_that_a_node_does_not_reach(cluster, monkeypatch, tmp_path, options):
    monkeypatch.setattr("penstock.io.folders.make_folder", lambda path, *mode: None)
    monkeypatch.chdir(tmp_path)
    p = ps.Pipeline(engine=Elsewhere(), workers=1, **options)
    p | ps.Create(range(10)) | ps.Map(str) | ps.WriteToText(tmp_path / "out")
    with pytest.raises(
        EngineError, match="/nowhere/.*out/.* does not exist on node .* must be on storage that all nodes reach"
    ):
        p.run()
    assert not list((tmp_path / "out").glob("part-*"))


def test_the_command_line(cluster, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import penstock as ps\n"
        "with ps.Pipeline() as p:\n"
        f"    p | ps.Create(range(5)) | ps.Map(str) | ps.WriteToText({str(tmp_path / 'out')!r})\n"
    )
    command = [sys.executable, "-m", "penstock.cli", "run"]
    there = ["--engine", "ray", "--address", cluster.address]
    done = subprocess.run([*command, *there, str(script)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [line for path in sorted((tmp_path / "out").glob("part-*")) for line in path.read_text().splitlines()]
    assert lines == ["0", "1", "2", "3", "4"]
    done = subprocess.run(
        [*command, "--address", "x", str(script)], capture_output=True, text=True, check=False, timeout=100
    )
    assert "--address x: it is for --engine ray" in done.stderr


def test_versions_of_models_that_a_node_cannot_be_told(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "wanted_files", lambda folder: {"no/such.versions": b"{}"})
    (tmp_path / "1.txt").write_text("one")
    watched = ps.RunInference(FromFile(tmp_path / "1.txt"), watch_model_pattern=str(tmp_path / "*.txt"), interval=0.2)
    with pytest.raises(EngineError, match=r"on node .* could not be told which versions .*: FileNotFoundError: "):
        (ps.Pipeline(engine="ray", workers=1) | ps.Create(range(10)) | ps.Map(node_of) | watched).collect()


def test_a_node_that_fails_to_say_which_versions_it_uses_is_named_once(cluster, tmp_path, caplog):
    keepers, broken, fine = keeper.Keepers(str(tmp_path), []), Future(), Future()
    broken.set_exception(OSError("no space left"))
    fine.set_result({})
    for call in (broken, broken, fine, broken, broken):
        keepers.take_reports("some node", call)
    assert [record.message.partition(" cannot")[0] for record in caplog.records] == ["node some node"] * 2
    assert "no space left" in caplog.text
    caplog.clear()
    keepers.last_exchange()
    assert "node some node has not said to the end" in caplog.text


@pytest.mark.parametrize("what", ["Python", "Ray", "Penstock"])
def test_another_version_is_refused(cluster, monkeypatch, what):
    monkeypatch.setattr(fleet, "versions", lambda: worker.versions() | {what: "99.0"})
    with pytest.raises(EngineError, match=rf"node .* of the Ray cluster has {what} \d.*, and this machine 99.0"):
        (ps.Pipeline(engine="ray", workers=1) | ps.Create(range(10)) | ps.Map(str)).collect()


def test_a_cluster_that_cannot_be_reached():
    code = """if True:
        import penstock as ps
        from penstock.engines.ray import RayEngine
        (ps.Pipeline(engine=RayEngine("nowhere")) | ps.Create([1])).collect()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert "EngineError: the Ray cluster at 'nowhere' cannot be used" in done.stderr


def test_a_cluster_that_does_not_answer():
    code = """if True:
        import penstock as ps
        from penstock.engines.ray import RayEngine
        engine = RayEngine("127.0.0.1:1", connect_wait=2.0)
        (ps.Pipeline(engine=engine) | ps.Create([1])).collect()
    """
    environment = {**os.environ, "RAY_AUTH_TOKEN": "x" * 40, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert "EngineError: the Ray cluster at '127.0.0.1:1' has not answered within 2 s" in done.stderr
    assert "set RAY_AUTH_MODE=token" in done.stderr
    assert "SIGTERM handler" not in done.stderr


def test_without_ray_it_says_what_to_install():
    code = """if True:
        import sys
        sys.modules["ray"] = None
        import penstock as ps
        (ps.Pipeline(engine="ray") | ps.Create([1])).collect()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert "ray is not installed; run: pip install 'penstock[ray]'" in done.stderr


@pytest.mark.parametrize("given", ["", 7])
def test_an_address_that_is_none(given):
    with pytest.raises(UsageError, match="expected the address of a Ray cluster"):
        RayEngine(given)


@pytest.mark.parametrize("given", [{"ssd": 0}, {"ssd": True}, {1: 1}, "ssd", {"ssd": float("inf")}])
def test_resources_that_are_none(given):
    with pytest.raises(UsageError, match="expected names and how much a worker needs of each"):
        ps.Map(str).with_resource_hints(resources=given)


def test_one_machine_does_not_look_at_the_names_of_a_cluster():
    rows = ps.Pipeline(workers=0) | ps.Create([1]) | ps.Map(str).with_resource_hints(resources={"moon": 2})
    assert rows.collect() == ["1"]
