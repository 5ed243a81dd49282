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
import threading
import time
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

import penstock as ps
import ray_cluster
from penstock.engines.ray import RayEngine, fleet
from penstock.errors import EngineError, UsageError, WorkerDiedError
from penstock.testing import check_engine
from ray_cluster import ROWS, write_numbers, written

ray = pytest.importorskip("ray")

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
    check_engine("ray", [group])


# Placement.


def node_of(row):
    return row, ray.get_runtime_context().get_node_id()


def nodes_with(name):
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and name in node["Resources"]}


def test_stages_run_on_the_nodes_that_their_hints_name(cluster):
    p = ps.Pipeline(engine="ray")
    first = p | ps.Create(range(3000)) | ps.Map(node_of).with_resource_hints(resources={"ram_node": 1})
    second = first | "second" >> ps.Map(node_of).with_resource_hints(resources={"accel_node": 1})
    rows = second.collect()
    assert [row for (row, _), _ in rows] == list(range(3000))
    assert {node for (_, node), _ in rows} == nodes_with("ram_node")
    assert {node for _, node in rows} == nodes_with("accel_node")


class Where(ps.ModelHandler):
    """Answers with the node and the process that it runs in."""

    def load_model(self):
        return os.environ.get("RAY_NODE_ID", ""), os.getpid()

    def run_inference(self, batch, model, inference_args=None):
        return [(row, os.getpid()) for row in batch]


def test_a_large_model_is_one_process_on_each_node(cluster):
    p = ps.Pipeline(engine="ray")
    rows = p | ps.Create(range(4000)) | ps.Map(node_of) | ps.RunInference(Where(large_model=True))
    answers = rows.collect()
    assert [row for (row, _), _ in answers] == list(range(4000))
    holders = {}
    for (_, node), pid in answers:
        holders.setdefault(node, set()).add(pid)
    assert {len(pids) for pids in holders.values()} == {1}
    pids = set.union(*holders.values())
    assert len(pids) == len(holders)
    wait_until(lambda: not any(map(is_alive, pids)), "the hosts have ended")


def is_alive(pid):
    return os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


def wait_until(holds, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def test_modules_of_the_drivers_path_are_found(cluster, tmp_path, monkeypatch):
    (tmp_path / "of_the_driver.py").write_text("def tripled(row):\n    return 3 * row\n")
    monkeypatch.syspath_prepend(tmp_path)
    tripled = importlib.import_module("of_the_driver").tripled
    assert (ps.Pipeline(engine="ray") | ps.Create([1, 2]) | ps.Map(tripled)).collect() == [3, 6]


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
    p = ps.Pipeline(engine="ray")
    watched = ps.RunInference(
        FromFile(tmp_path / "models" / "1.txt"), watch_model_pattern=str(tmp_path / "models" / "*.txt"), interval=0.2
    )
    rows = p | ps.Create(range(8000)) | ps.Map(node_of) | watched
    rows | ps.Map(repr) | ps.WriteToText(tmp_path / "out")
    run = p.start()

    def change():
        wait_until(lambda: any(stage.rows > 500 for stage in run.progress()), "rows are done")
        (tmp_path / "models" / "new").write_text("two")
        (tmp_path / "models" / "new").rename(tmp_path / "models" / "2.txt")

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    run.wait()
    thread.join()
    lines = read_rows(tmp_path)
    assert [row for row, _, _ in lines] == list(range(8000))
    assert {node for _, node, model in lines if model == "two"} == {node for _, node, _ in lines}
    assert {model for *_, model in lines} == {"one", "two"}


# Deaths.


def killed_once(row, marker):
    if row == 1500:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return row
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def test_an_actor_that_is_killed_costs_its_splits_one_more_try(cluster, tmp_path):
    p = ps.Pipeline(engine="ray")
    rows = p | ps.Create(range(3000)) | ps.Map(killed_once, str(tmp_path / "marker"))
    assert rows.collect() == list(range(3000))
    assert p.result.worker_deaths >= 1


def killed_always(row):
    if row == 1500:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def test_a_row_that_always_kills_ends_the_run(cluster):
    p = ps.Pipeline(engine="ray")
    with pytest.raises(WorkerDiedError, match="died 4 times while it ran split"):
        (p | ps.Create(range(3000)) | ps.Map(killed_always)).collect()


class Slow(Where):
    def run_inference(self, batch, model, inference_args=None):
        time.sleep(0.01 * len(batch))
        return super().run_inference(batch, model)


def test_the_owner_of_hosts_and_a_host_that_are_killed(cluster, tmp_path):
    """The next host is started by the next owner."""
    p = ps.Pipeline(engine="ray", workers=1)
    rows = p | ps.Create(range(600)) | ps.RunInference(Slow(large_model=True, max_batch_size=10))
    rows | ps.Map(repr) | ps.WriteToText(tmp_path / "out")
    run = p.start()
    killed = []

    def kill():
        wait_until(lambda: any(stage.rows >= 20 for stage in run.progress()), "rows are done")
        for host in hosts():
            owner = int(Path(f"/proc/{host}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(owner, signal.SIGKILL)
            os.killpg(host, signal.SIGKILL)
            killed.extend([owner, host])

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    run.wait()
    thread.join()
    assert [row for row, _ in read_rows(tmp_path)] == list(range(600))
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


def slowly(line):
    time.sleep(0.0002)
    return line


def test_a_node_that_dies_loses_nothing(cluster, tmp_path):
    write_numbers(tmp_path, 20_000)
    node = cluster.add_node(num_cpus=2, resources={"doomed": 2})
    try:
        wait_until(lambda: nodes_with("doomed"), "the node is there")
        p = ps.Pipeline(engine="ray")
        lines = p | ps.ReadFromText(str(tmp_path / "in/*.txt")) | ps.Map(slowly) | ps.Map(ray_cluster.doubled)
        (lines | ps.Reshuffle() | ps.WriteToText(tmp_path / "out"))
        run = p.start()

        def end_node():
            wait_until(lambda: any(stage.rows > 2000 for stage in run.progress()), "rows are done")
            cluster.remove_node(node, allow_graceful=False)

        thread = threading.Thread(target=end_node, daemon=True)
        thread.start()
        run.wait()
        thread.join()
        assert written(tmp_path) == [2 * number for number in range(20_000)]
    finally:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)


def test_a_driver_that_is_killed_is_started_again_and_goes_on(cluster, tmp_path):
    write_numbers(tmp_path)
    script = [sys.executable, ray_cluster.__file__, str(tmp_path)]
    with subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        wait_until(lambda: driver.poll() is not None or len(list((tmp_path / "out").glob("part-*"))) >= 4, "parts are out")
        driver.kill()
    before = len(list((tmp_path / "out").glob("part-*")))
    assert 4 <= before < 20
    subprocess.run(script, stdout=subprocess.DEVNULL, check=True)
    sessions = json.loads((tmp_path / "run" / "manifest.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert written(tmp_path) == [2 * number for number in range(ROWS)]


# Errors.


def test_what_no_node_has_is_an_error_that_names_it(cluster):
    p = ps.Pipeline(engine=RayEngine(resource_wait=1.0))
    with pytest.raises(
        EngineError, match=r"resource hints: resources=\{'moon': 2\}.* a worker needs \{CPU: 0.5, moon: 2\}.*ram_node: 2"
    ):
        (p | ps.Create(range(10)) | ps.Map(str).with_resource_hints(resources={"moon": 2})).collect()


class Elsewhere(RayEngine):
    """As if the driver had a disk of its own."""

    def fleet(self, spec):
        return super().fleet(replace(spec, folders=["/nowhere/at/all"]))


def test_outputs_that_a_node_does_not_reach(cluster, monkeypatch):
    monkeypatch.setattr("penstock.io.folders.make_folder", lambda path, *mode: None)
    rows = ps.Pipeline(engine=Elsewhere()) | ps.Create(range(10)) | ps.Map(str)
    with pytest.raises(EngineError, match="/nowhere/at/all is not there on node .* must be on storage that all nodes reach"):
        rows.collect()


def test_the_command_line(cluster, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import penstock as ps\n"
        "with ps.Pipeline() as p:\n"
        f"    p | ps.Create(range(5)) | ps.Map(str) | ps.WriteToText({str(tmp_path / 'out')!r})\n"
    )
    command = [sys.executable, "-m", "penstock.cli", "run"]
    there = ["--engine", "ray", "--address", cluster.address]
    done = subprocess.run([*command, *there, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for path in sorted((tmp_path / "out").glob("part-*")) for line in path.read_text().splitlines()]
    assert lines == ["0", "1", "2", "3", "4"]
    done = subprocess.run([*command, "--address", "x", str(script)], capture_output=True, text=True, check=False)
    assert "--address x: it is for --engine ray" in done.stderr


def test_another_version_of_penstock_is_refused(cluster, monkeypatch):
    monkeypatch.setattr(fleet, "__version__", "99.0")
    with pytest.raises(EngineError, match=r"a node of the Ray cluster has Penstock .*, and this machine 99.0"):
        (ps.Pipeline(engine="ray") | ps.Create(range(10)) | ps.Map(str)).collect()


def test_a_cluster_that_cannot_be_reached():
    code = """if True:
        import penstock as ps
        from penstock.engines.ray import RayEngine
        (ps.Pipeline(engine=RayEngine("nowhere")) | ps.Create([1])).collect()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "EngineError: the Ray cluster at 'nowhere' cannot be used" in done.stderr


def test_without_ray_it_says_what_to_install():
    code = """if True:
        import sys
        sys.modules["ray"] = None
        import penstock as ps
        (ps.Pipeline(engine="ray") | ps.Create([1])).collect()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
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
