"""Plans: how graphs are cut into stages, that no cut changes rows or their order, and how pools are sized."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.engines.ray.cluster import wanted
from penstock.errors import GraphError
from penstock.inference.service_handler import AsyncModelHandler
from penstock.io.source import Read, Source
from penstock.options import RunOptions
from penstock.pipeline.graph import MAIN
from penstock.pipeline.pipeline import Graph
from penstock.pipeline.transforms import Flatten, Reshuffle
from penstock.run.plan import MAX_COPIES, MAX_DEPTH, make_plan
from penstock.run.pools import SMALL_RUN_ROWS, Machine, RunSize, choose_pools, run_size
from penstock.run.splits import FLOWS, WAITING_ROWS, split_goals
from penstock.steps.stage import Outlet


def plan_of(p, collect=()):
    return make_plan(Graph(p.graph().nodes, collect))


def shape(plan):
    """The plan as plain data: for each stage its roots, each a tree of [label, followers ...]."""
    return [[tree(root) for root in stage.roots] for stage in plan.stages]


def tree(end):
    if isinstance(end, Outlet):
        return (end.kind, end.target, end.path)
    followers = [tree(each) if not tag else (tag, tree(each)) for tag, nexts in end.next.items() for each in nexts]
    return [end.label, *followers]


def step(name, **hints):
    made = name >> ps.Map(str)
    return made.with_resource_hints(**hints) if hints else made


def source(p, name="read"):
    return p | name >> ps.Create([1])


# Where stages are cut.


def test_steps_fuse_into_one_stage():
    p = ps.Pipeline()
    _ = source(p) | step("a") | step("b") | step("c")
    assert shape(plan_of(p)) == [[["read", ["a", ["b", ["c"]]]]]]


def test_a_step_with_several_consumers_is_one_tree():
    p = ps.Pipeline()
    a = source(p) | step("a")
    _ = a | step("b")
    _ = a | step("c")
    assert shape(plan_of(p)) == [[["read", ["a", ["b"], ["c"]]]]]


def test_a_reshuffle_cuts():
    p = ps.Pipeline()
    _ = source(p) | step("a") | "cut" >> ps.Reshuffle() | step("b")
    plan = plan_of(p)
    assert shape(plan) == [[["read", ["a", ("stage", 1, ())]]], [["cut", ["b"]]]]
    assert [stage.feeds for stage in plan.stages] == [{1}, set()]
    assert plan.stages[1].why == "Reshuffle 'cut'"
    assert plan.stages[1].roots[0].transform is None


def test_reshuffles_in_a_row_and_at_the_end():
    p = ps.Pipeline()
    _ = source(p) | "one" >> ps.Reshuffle() | "two" >> ps.Reshuffle()
    assert shape(plan_of(p)) == [[["read", ("stage", 1, ())]], [["one", ("stage", 2, ())]], [["two"]]]


def test_a_change_of_hints_cuts_there_and_back():
    p = ps.Pipeline()
    _ = source(p) | step("a") | step("big", cpus=2) | step("also big", cpus=2) | step("b")
    plan = plan_of(p)
    assert shape(plan) == [
        [["read", ["a", ("stage", 1, ())]]],
        [["a", ["big", ["also big", ("stage", 2, ())]]]],
        [["also big", ["b"]]],
    ]
    assert [stage.hints.cpus for stage in plan.stages] == [None, 2, None]


def test_a_reshuffle_before_hints_cuts_once():
    p = ps.Pipeline()
    _ = source(p) | "cut" >> ps.Reshuffle() | step("big", cpus=2)
    assert shape(plan_of(p)) == [[["read", ("stage", 1, ())]], [["cut", ["big"]]]]


def test_consumers_with_equal_hints_share_the_way_into_one_stage():
    p = ps.Pipeline()
    rows = source(p)
    for name, cpus in [("b", 2), ("c", 2), ("d", 3)]:
        _ = rows | step(name, cpus=cpus)
    assert shape(plan_of(p)) == [
        [["read", ("stage", 1, ()), ("stage", 2, ())]],
        [["read", ["b"], ["c"]]],
        [["read", ["d"]]],
    ]


def test_consumers_of_a_reshuffle_with_other_hints_get_a_stage_of_their_own():
    p = ps.Pipeline()
    cut = source(p) | "cut" >> ps.Reshuffle()
    _ = cut | step("a")
    _ = cut | step("big", cpus=2)
    assert shape(plan_of(p)) == [[["read", ("stage", 1, ())]], [["cut", ["a"], ("stage", 2, ())]], [["cut", ["big"]]]]


def test_sources_share_a_stage_unless_their_hints_differ():
    p = ps.Pipeline()
    source(p, "x"), source(p, "y")
    _ = p | "z" >> ps.Create([1]).with_resource_hints(min_ram="1GB")
    plan = plan_of(p)
    assert shape(plan) == [[["x"], ["y"]], [["z"]]]
    assert [(stage.index, position, root.label) for stage, position, root, _ in plan.sources()] == [
        (0, 0, "x"),
        (0, 1, "y"),
        (1, 0, "z"),
    ]


def test_sinks_are_outlets(tmp_path):
    p = ps.Pipeline()
    rows = source(p) | step("a")
    _ = rows | "write" >> ps.WriteToText(str(tmp_path / "out"))
    plan = plan_of(p)
    (number,) = plan.sinks
    assert plan.sinks[number].label.startswith("write")
    assert ("sink", number, ()) in flat(plan)


def flat(plan):
    """Every outlet of the plan, as tree() tells it."""
    return [
        (each.kind, each.target, each.path)
        for stage in plan.stages
        for found in stage.steps()
        for nexts in found.next.values()
        for each in nexts
        if isinstance(each, Outlet)
    ]


# Flatten.


def test_what_follows_a_flatten_is_copied_into_its_branches():
    p = ps.Pipeline()
    a, b = source(p, "a"), source(p, "b")
    _ = (a, b) | Flatten() | step("c")
    assert shape(plan_of(p)) == [[["a", ["c"]], ["b", ["c"]]]]


def test_paths_through_nested_flattens():
    p = ps.Pipeline()
    a, b, c = (source(p, name) for name in "abc")
    both = (b, c) | Flatten()
    made = (a, both, b) | Flatten()
    assert shape(plan_of(p, [made])) == [
        [
            ["a", ("collect", 0, (0,))],
            ["b", ("collect", 0, (1, 0)), ("collect", 0, (2,))],
            ["c", ("collect", 0, (1, 1))],
        ]
    ]


def test_the_same_collection_twice():
    p = ps.Pipeline()
    a = source(p, "a")
    made = (a, a) | Flatten()
    assert shape(plan_of(p, [made])) == [[["a", ("collect", 0, (0,)), ("collect", 0, (1,))]]]


def test_a_diamond():
    p = ps.Pipeline()
    a = source(p, "a")
    made = (a | step("left"), a | step("right")) | Flatten() | step("end")
    assert shape(plan_of(p, [made])) == [
        [["a", ["left", ["end", ("collect", 0, (0,))]], ["right", ["end", ("collect", 0, (1,))]]]]
    ]


def test_a_reshuffle_behind_a_flatten_joins_the_ways():
    p = ps.Pipeline()
    made = (source(p, "a"), source(p, "b")) | Flatten() | "cut" >> ps.Reshuffle() | step("c")
    assert shape(plan_of(p, [made])) == [
        [["a", ("stage", 1, (0,))], ["b", ("stage", 1, (1,))]],
        [["cut", ["c", ("collect", 0, ())]]],
    ]


def test_hints_behind_a_flatten_join_the_ways():
    p = ps.Pipeline()
    _ = (source(p, "a"), source(p, "b")) | Flatten() | step("big", cpus=2)
    plan = plan_of(p)
    assert [len(stage.roots) for stage in plan.stages] == [2, 1]
    assert flat(plan) == [("stage", 1, (0,)), ("stage", 1, (1,))]


def doubled(times, between=None):
    p = ps.Pipeline()
    rows = source(p)
    for _ in range(times):
        rows = (rows, rows) | Flatten()
        if between is not None:
            rows = rows | between()
    return p, rows


def test_as_many_copies_as_allowed():
    assert MAX_COPIES == 64
    p, rows = doubled(6)
    _ = rows | step("end")
    plan = plan_of(p)
    assert sum(found.label == "end" for stage in plan.stages for found in stage.steps()) == MAX_COPIES


def test_too_many_copies_are_refused_with_what_to_do():
    p, rows = doubled(7)
    _ = rows | step("end")
    with pytest.raises(GraphError, match=r"can be reached in more than 64 ways.*\n?.*ps\.Reshuffle\(\)"):
        plan_of(p)


def test_reshuffles_keep_the_copies_down():
    p, rows = doubled(12, between=ps.Reshuffle)
    _ = rows | step("end")
    assert len(plan_of(p).stages) == 13


@pytest.mark.parametrize("end", ["collect", "reshuffle", "sink"])
def test_too_many_ways_out_are_refused_too(end, tmp_path):
    p, rows = doubled(12)
    if end == "reshuffle":
        _ = rows | ps.Reshuffle()
    elif end == "sink":
        _ = rows | ps.WriteToText(str(tmp_path / "out"))
    with pytest.raises(GraphError, match="more than 64 ways"):
        plan_of(p, [rows] if end == "collect" else ())


@pytest.mark.parametrize("steps", [MAX_DEPTH - 1, 500])
def test_a_long_chain_of_steps_runs_or_is_refused(steps):
    rows = ps.Pipeline(workers=0) | ps.Create([0])
    for number in range(steps):
        rows = rows | f"step {number}" >> ps.Map(lambda x: x + 1)
    if steps < MAX_DEPTH:
        assert rows.collect() == [steps]
    else:
        with pytest.raises(GraphError, match=f"at most {MAX_DEPTH} can run together"):
            rows.collect()


# Tagged outputs and collecting.


def test_tagged_outputs():
    p = ps.Pipeline()
    outs = source(p) | "split" >> ps.ParDo(lambda x: None).with_outputs("good", "bad", main="rest")
    _ = outs.good | step("a")
    _ = outs.rest | step("b")
    assert shape(plan_of(p, [outs.bad])) == [[["read", ["split", ["b"], ("good", ["a"]), ("bad", ("collect", 0, ()))]]]]


def test_tags_of_one_step_in_one_flatten_keep_their_places():
    p = ps.Pipeline()
    outs = source(p) | "split" >> ps.ParDo(lambda x: None).with_outputs("good", "bad")
    made = (outs.bad, outs.good) | Flatten()
    found = plan_of(p, [made]).stages[0].steps()[-1]
    assert {tag: [end.path for end in nexts] for tag, nexts in found.next.items()} == {
        MAIN: [],
        "good": [(1,)],
        "bad": [(0,)],
    }


def test_collecting_in_the_middle():
    p = ps.Pipeline()
    a = source(p) | step("a")
    b = a | step("b")
    assert shape(plan_of(p, [a, b])) == [[["read", ["a", ["b", ("collect", 1, ())], ("collect", 0, ())]]]]


def test_collecting_before_a_change_of_hints():
    p = ps.Pipeline()
    a = source(p) | step("a")
    _ = a | step("big", cpus=2)
    assert [end for end in flat(plan_of(p, [a])) if end[0] == "collect"] == [("collect", 0, ())]


def test_collecting_a_reshuffle():
    p = ps.Pipeline()
    cut = source(p) | "cut" >> ps.Reshuffle()
    _ = cut | step("a")
    assert shape(plan_of(p, [cut])) == [[["read", ("stage", 1, ())]], [["cut", ["a"], ("collect", 0, ())]]]


def test_collecting_a_reshuffle_that_feeds_two_stages():
    p = ps.Pipeline()
    cut = source(p) | "cut" >> ps.Reshuffle()
    _ = cut | step("a")
    _ = cut | step("big", cpus=2)
    assert [end for end in flat(plan_of(p, [cut])) if end[0] == "collect"] == [("collect", 0, ())]


# No cut changes rows or their order: plans of random graphs, carried out here on symbols, against the graph itself.


class Letters(Source):
    """Two splits of one row each."""

    def __init__(self, name):
        self.name = name

    def splits(self, goal):
        return [f"{self.name}{number}" for number in range(2)]


@st.composite
def graphs(draw):
    p = ps.Pipeline()
    made = [p | f"source {n}" >> Read(Letters("xyz"[n])) for n in range(draw(st.integers(1, 3)))]
    for number in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(["map", "map", "hinted", "flatten", "flatten", "reshuffle"]))
        if kind == "flatten":
            inputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))
            made.append(inputs | f"{number}" >> Flatten())
            continue
        left = draw(st.sampled_from(made))
        hints = {"cpus": draw(st.integers(1, 2))} if kind == "hinted" else {}
        made.append(left | (f"{number}" >> ps.Reshuffle() if kind == "reshuffle" else step(f"{number}", **hints)))
    return p, draw(st.sampled_from(made))


def by_the_graph(pcoll):
    """The rows of a collection, straight from what its producer means."""
    transform = pcoll.producer.transform
    if isinstance(transform, Read):
        return transform.source.splits(None)
    rows = [row for given in pcoll.producer.inputs for row in by_the_graph(given)]
    if isinstance(transform, (Flatten, Reshuffle)):
        return rows
    return [f"{row}.{pcoll.producer.label}" for row in rows]


def by_the_plan(plan):
    """The rows that a run of the plan would collect, in the order of their keys."""
    collected = []
    tasks = [
        (stage, position, (number,), split)
        for stage, position, _, source in plan.sources()
        for number, split in enumerate(source.splits(None))
    ]

    def walk(found, key, row):
        for end in found.next[MAIN]:
            if not isinstance(end, Outlet):
                walk(end, key, f"{row}.{end.label}")
            elif end.kind == "stage":
                tasks.append((plan.stages[end.target], 0, (*end.path, *key, 0), row))
            else:
                collected.append(((*end.path, *key, 0), row))

    while tasks:
        stage, position, key, row = tasks.pop()
        walk(stage.roots[position], key, row)
    assert len({key for key, _ in collected}) == len(collected), "two runs of rows have the same place"
    return [row for _, row in sorted(collected)]


@settings(max_examples=200)
@given(graphs())
def test_a_plan_gives_the_rows_of_its_graph_in_order(made):
    p, wanted = made
    try:
        plan = make_plan(p.graph(wanted))
    except GraphError as exc:
        if f"more than {MAX_COPIES} ways" not in str(exc):
            raise
        reject()
    assert by_the_plan(plan) == by_the_graph(wanted)
    for stage in plan.stages:
        ends = [end for found in stage.steps() for end in found.next[MAIN] if isinstance(end, Outlet)]
        assert stage.feeds == {end.target for end in ends if end.kind == "stage"}


# Pools.

MACHINE = Machine(cores=8, ram=64 * 10**9)


def pools_of(rows=10**6, machine=MACHINE, hints=(), **options):
    p = ps.Pipeline()
    made = p | ps.Create(range(rows)) if rows is not None else p | Read(Letters("x"))
    for number, each in enumerate(hints):
        made = made | step(f"{number}", **each)
    plan = plan_of(p)
    return chosen(plan, machine, **options)


def chosen(plan, machine=MACHINE, **options):
    size = run_size(plan, (source for _, _, _, source in plan.sources()))
    return choose_pools(plan, RunOptions(**options), machine, size)


def test_small_runs_stay_in_the_process():
    pools = pools_of(SMALL_RUN_ROWS, hints=[{"cpus": 2}], threads_per_worker=3)
    assert pools.in_process
    assert [(pool.stages, pool.size.workers, pool.size.slots) for pool in pools.pools] == [([0, 1], 1, 3)]
    assert pools.slots == 3
    assert "1000 rows" in pools.why
    assert not pools_of(SMALL_RUN_ROWS + 1).in_process


def test_rows_of_all_sources_count():
    p = ps.Pipeline()
    for name in "ab":
        _ = p | name >> ps.Create(range(600))
    plan = plan_of(p)
    assert not chosen(plan).in_process, "one unknown makes the sum unknown"


def test_workers_decide_over_size():
    assert pools_of(10**6, workers=0).in_process
    assert pools_of(10**6, workers=0).why == "workers=0"
    pools = pools_of(1, workers=3)
    assert not pools.in_process
    assert [pool.size.workers for pool in pools.pools] == [3]
    assert pools.pools[0].cores == 2


def test_one_worker_per_core():
    (pool,) = pools_of().pools
    assert (pool.size.workers, pool.size.slots, pool.cores) == (8, 1, 1)


@pytest.mark.parametrize(
    ("hints", "workers", "cores", "why"),
    [
        ({"cpus": 3}, 2, 3, "8 cores, 3 for each"),
        ({"cpus": 99}, 1, 99, "8 cores, 99 for each"),
        ({"min_ram": "20GB"}, 3, 2, "64GB of memory, 20GB for each"),
        ({"min_ram": "999GB"}, 1, 8, "64GB of memory, 999GB for each"),
        ({"min_ram": "1MB"}, 8, 1, "8 cores"),
        ({"min_ram": "10GB", "cpus": 4}, 2, 4, "8 cores, 4 for each"),
        ({"accelerator": "gpu"}, 1, 8, "one worker for accelerator=gpu"),
        ({"accelerator": "gpu", "cpus": 2}, 1, 2, "one worker for accelerator=gpu"),
    ],
)
def test_hints_size_a_pool(hints, workers, cores, why):
    pools = pools_of(hints=[hints])
    plain, hinted = pools.pools
    assert plain.size.workers == 8
    assert (hinted.size.workers, hinted.cores, hinted.why) == (workers, cores, why)
    assert pools.of_stage(1) is hinted


def test_workers_given_hold_for_every_pool_whatever_the_hints():
    pools = pools_of(hints=[{"accelerator": "gpu"}], workers=5)
    assert [pool.size.workers for pool in pools.pools] == [5, 5]


CLUSTER = Machine(24, 96 * 10**9, ("0",), {"CPU": 24, "GPU": 2, "TPU": 4, "memory": 96e9, "ssd": 3})


@pytest.mark.parametrize(
    ("hints", "workers", "cores", "asked"),
    [
        ({}, 24, 1, {"num_cpus": 1}),
        ({"cpus": 4}, 6, 4, {"num_cpus": 4}),
        ({"min_ram": "12GB"}, 8, 1, {"num_cpus": 1, "memory": 12 * 10**9}),
        ({"resources": {"ssd": 1}}, 3, 1, {"num_cpus": 1, "resources": {"ssd": 1}}),
        ({"accelerator": "gpu"}, 2, 1, {"num_cpus": 1, "num_gpus": 1}),
        ({"accelerator": "cuda:1"}, 2, 1, {"num_cpus": 1, "num_gpus": 1}),
        ({"accelerator": "xpu"}, 2, 1, {"num_cpus": 1, "num_gpus": 1}),
        ({"accelerator": "gpu", "resources": {"GPU": 0.5}}, 4, 1, {"num_cpus": 1, "num_gpus": 0.5}),
        ({"accelerator": "TPU"}, 4, 1, {"num_cpus": 1, "resources": {"TPU": 1}}),
        (
            {"accelerator": "type:nvidia-tesla-t4;count:2;install-nvidia-driver"},
            *(1, 1, {"num_cpus": 1, "num_gpus": 2, "resources": {"accelerator_type:T4": 0.001}}),
        ),
        (
            {"accelerator": "type:nvidia-h100-80gb"},
            *(2, 1, {"num_cpus": 1, "num_gpus": 1, "resources": {"accelerator_type:H100": 0.001}}),
        ),
        (
            {"accelerator": "type:TPU-V4;count:4"},
            *(1, 1, {"num_cpus": 1, "resources": {"TPU": 4, "accelerator_type:TPU-V4": 0.001}}),
        ),
    ],
)
def test_what_a_worker_asks_of_a_cluster(hints, workers, cores, asked):
    (pool,) = [pool for pool in pools_of(machine=CLUSTER, hints=[hints]).pools if pool.stages[-1] == (1 if hints else 0)]
    assert (pool.size.workers, pool.cores, wanted(pool, 1)) == (workers, cores, asked)


def test_fewer_workers_than_a_cluster_has_cores_are_told_what_they_ask_for():
    (pool,) = pools_of(machine=CLUSTER, workers=4).pools
    assert (pool.size.workers, pool.cores, wanted(pool, 1)) == (4, 1, {"num_cpus": 1})


def test_stages_with_equal_hints_share_a_pool():
    pools = pools_of(hints=[{"cpus": 2}, {}, {"cpus": 2}])
    assert [list(pool.stages) for pool in pools.pools] == [[0, 2], [1, 3]]
    assert pools.slots == 8 + 4


def test_a_machine_that_is_here():
    machine = Machine.here()
    assert machine.cores >= 1
    assert machine.ram > 1 << 20


# In front of a device.


class OnDevice(ps.ModelHandler[str, Any, None]):
    """A model on a pretend GPU that is given rows of like length."""

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return batch

    def accelerator(self):
        return "gpu"

    def measures_length(self):
        return True

    def new_shapes_cost(self):
        return True


class SetsUp(ps.DoFn):
    def setup(self):
        self.much = bytes(10)

    def process(self, row):
        yield row


def fed_pools(tmp_path, *before, machine=None, **options):
    pq.write_table(pa.table({"text": ["x"] * 5_000}), tmp_path / "texts.parquet")
    p = ps.Pipeline()
    made = p | ps.ReadFromParquet(str(tmp_path / "texts.parquet"))
    for each in before:
        made = made | each
    _ = made | ps.RunInference(OnDevice(columns="text"))
    plan = plan_of(p)
    return plan, chosen(plan, machine or Machine(cores=8, ram=64 * 10**9, gpus=("0",)), **options)


@pytest.mark.parametrize("before", [[], [ps.Map(dict)]], ids=["columns", "a step of the user's"])
def test_workers_that_feed_a_device_begin_the_next_split_meanwhile(tmp_path, before):
    _, pools = fed_pools(tmp_path, *before)
    assert [(pool.size.workers, pool.size.slots, pool.ahead) for pool in pools.pools] == [(8, 2, True)]


@pytest.mark.parametrize(
    ("before", "options"),
    [
        ([ps.ParDo(SetsUp())], {}),
        ([], {"machine": MACHINE}),
        ([], {"deterministic": True}),
    ],
    ids=["something is set up", "no device", "deterministic"],
)
def test_others_run_one_split_at_a_time(tmp_path, before, options):
    _, pools = fed_pools(tmp_path, *before, **options)
    assert [(pool.size.slots, pool.ahead) for pool in pools.pools] == [(1, False)]


def test_rows_for_a_device_are_cut_so_that_many_wait(tmp_path):
    plan, pools = fed_pools(tmp_path)
    (goal,) = split_goals(plan, pools)
    assert goal.min_rows * pools.slots >= WAITING_ROWS


def test_splits_for_a_service_are_long_beside_what_is_in_flight():
    """Also where a run can be resumed: answers are kept one by one."""
    p = ps.Pipeline(workers=4)
    p | ps.Create([0]) | ps.RunInference(Asks())
    plan, options = plan_of(p), RunOptions(workers=4)
    pools = choose_pools(plan, options, Machine(4, 1 << 34), RunSize(100_000))
    assert [goal.min_rows for goal in split_goals(plan, pools, journaled=True)] == [FLOWS * 64]


class Asks(AsyncModelHandler):
    def load_model(self):
        return None

    async def answer(self, example, model, inference_args=None):
        return example
