"""The plan: a graph cut into stages. Pure; any engine that runs stages can use it.

Steps fuse into one stage until a Reshuffle or a change of resource hints. What comes after a Flatten is copied into each
branch that leads to it, so a Flatten costs nothing; each copy remembers which inputs it came by (its `path`), and sorting
by that path puts the rows of the first input before those of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import GraphError
from penstock.inference.neighbours import with_neighbours
from penstock.inference.service_handler import rows_at_once
from penstock.inference.spec import check_shared_models
from penstock.io.source import Source
from penstock.models.place import Surroundings, choose_place
from penstock.pipeline.graph import MAIN, Node, PCollection
from penstock.pipeline.hints import ResourceHints
from penstock.pipeline.pipeline import Graph
from penstock.steps.stage import Outlet, Path, Stage, Step

MAX_COPIES = 64  # of one step, behind Flattens
LIKE_LENGTHS = 256  # rows to choose from, where batches are made of rows of like length
TYPICAL_BATCH = 64  # rows, where the size is found while running
MAX_DEPTH = 100  # steps in a row: each calls the next one


@dataclass(frozen=True)
class Plan:
    stages: Sequence[Stage]
    sinks: dict[int, Node]  # the Write nodes, by number

    def sources(self) -> list[tuple[Stage, int, Step, Source[Any]]]:
        """Every source, with its stage and which of the stage's roots it is."""
        return [
            (stage, position, root, source)
            for stage in self.stages
            for position, root in enumerate(stage.roots)
            if (source := root.traits.source) is not None
        ]


def make_plan(graph: Graph) -> Plan:
    return _Planner(graph).plan()


class _Planner:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.stages: list[Stage] = []
        self.source_stages: dict[ResourceHints, Stage] = {}
        self.fed_stages: dict[Any, Stage] = {}  # by what leads into them
        self.unplanned: list[tuple[Stage, PCollection[Any], list[tuple[Node, int]]]] = []
        self.copies: dict[int, int] = {}
        self.depth = 0
        self.models = {node.label: model for node in graph.nodes if (model := node.traits.model) is not None}
        self.neighbours = with_neighbours(self.models)

    def plan(self) -> Plan:
        for node in self.graph.nodes:
            if node.traits.watches:
                raise GraphError(
                    f"step {node.label!r} watches for new models during the whole run, so its rows can only be used "
                    "as RunInference(..., model_metadata_pcoll=...)"
                )
            if node.traits.source is not None:
                stage = self._source_stage(node.hints)
                stage.roots.append(self._grow(stage, node, ()))
        while self.unplanned:
            stage, pcoll, consumers = self.unplanned.pop(0)
            root = Step(pcoll.producer.label, None)
            root.next[MAIN] = self._consume(stage, consumers, ())
            if self.fed_stages.get(pcoll.producer) is stage:  # the rows of a Reshuffle begin here
                root.next[MAIN] += self._collected(pcoll, ())
            stage.roots.append(root)
        check_shared_models(self.models)
        sinks = {node.index: node for node in self.graph.nodes if node.traits.sink is not None}
        return Plan(self.stages, sinks)

    def _source_stage(self, hints: ResourceHints) -> Stage:
        """Sources with equal hints share a stage: their splits run side by side on the same workers."""
        if hints not in self.source_stages:
            self.source_stages[hints] = self._new_stage(hints, "starts at a source")
        return self.source_stages[hints]

    def _new_stage(self, hints: ResourceHints, why: str) -> Stage:
        stage = Stage(len(self.stages), hints, why)
        self.stages.append(stage)
        return stage

    def _count_copy(self, node: Node) -> None:
        self.copies[node.index] = self.copies.get(node.index, 0) + 1
        if self.copies[node.index] > MAX_COPIES:
            raise GraphError(
                f"step {node.label!r} can be reached in more than {MAX_COPIES} ways through Flatten: "
                "put ps.Reshuffle() after a Flatten, which joins the ways"
            )

    def _grow(self, stage: Stage, node: Node, path: Path) -> Step:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise GraphError(
                f"step {node.label!r} is the {self.depth}th of a row of steps; at most {MAX_DEPTH} can run together: "
                "put ps.Reshuffle() between some of them, or several functions into one step"
            )
        transform = node.transform
        if (changed := node.traits.with_model) is not None and node.label in self.neighbours:
            transform = changed(self.neighbours[node.label])
        step = Step(node.label, transform)
        for tag, pcoll in node.outputs.items():
            step.next[tag] = self._after(stage, pcoll, path)
        self.depth -= 1
        return step

    def _after(self, stage: Stage, pcoll: PCollection[Any], path: Path) -> list[Step | Outlet]:
        return self._consume(stage, self.graph.consumers(pcoll), path) + self._collected(pcoll, path)

    def _collected(self, pcoll: PCollection[Any], path: Path) -> list[Step | Outlet]:
        return [
            Outlet("collect", at, path, pcoll.producer.label)
            for at, wanted in enumerate(self.graph.collect)
            if wanted is pcoll
        ]

    def _consume(self, stage: Stage, consumers: list[tuple[Node, int]], path: Path) -> list[Step | Outlet]:
        found: list[Step | Outlet] = []
        for node, position in consumers:
            self._count_copy(node)
            if node.traits.joins:
                found += self._after(stage, node.outputs[MAIN], (position, *path))
            elif node.traits.cuts:
                found.append(self._into_reshuffle(stage, node, path))
            elif node.hints != stage.hints:
                found.append(self._into_hinted(stage, node, path))
            elif node.traits.sink is not None:
                found.append(Outlet("sink", node.index, path, node.inputs[position].producer.label))
            else:
                found.append(self._grow(stage, node, path))
        return list(dict.fromkeys(found))  # steps with equal hints are one way into one stage

    def _into_reshuffle(self, stage: Stage, node: Node, path: Path) -> Outlet:
        out = node.outputs[MAIN]
        consumers = self.graph.consumers(out)
        hints = consumers[0][0].hints if consumers else node.hints
        return self._into(stage, node, hints, (out, consumers), f"Reshuffle {node.label!r}", path)

    def _into_hinted(self, stage: Stage, node: Node, path: Path) -> Outlet:
        pcoll = node.inputs[0]
        alike = [(other, at) for other, at in self.graph.consumers(pcoll) if self._moves(other, node.hints)]
        return self._into(stage, (pcoll, node.hints), node.hints, (pcoll, alike), f"resource hints: {node.hints}", path)

    def _moves(self, node: Node, hints: ResourceHints) -> bool:
        return node.hints == hints and node.traits.is_counted

    def _into(
        self,
        stage: Stage,
        entrance: Any,
        hints: ResourceHints,
        rest: tuple[PCollection[Any], list[tuple[Node, int]]],
        why: str,
        path: Path,
    ) -> Outlet:
        """The way into the stage behind an entrance, which is made the first time that it is met."""
        if entrance not in self.fed_stages:
            self.fed_stages[entrance] = self._new_stage(hints, why)
            self.unplanned.append((self.fed_stages[entrance], *rest))
        fed = self.fed_stages[entrance]
        stage.feeds.add(fed.index)
        return Outlet("stage", fed.index, path, rest[0].producer.label, _keys(rest[1]))


def _keys(consumers: Sequence[tuple[Node, int]]) -> str | None:
    """As an outlet has it, for rows that go to these."""
    models = [node.traits.model.by_key for node, _ in consumers if node.traits.model is not None]
    return next((model.key_column or "" for model in models if model is not None), None)


def largest_batch(stage: Stage) -> int:
    """The most rows that a step of the stage takes at once; 1 where all take single rows."""
    sizes = [step.traits.batch or TYPICAL_BATCH for step in stage.steps()]
    return max([*sizes, LIKE_LENGTHS] if measures_length(stage) else sizes)


def measures_length(stage: Stage) -> bool:
    """Whether a model of the stage is given rows of like length."""
    return any(step.traits.by_length for step in stage.steps())


def window(stage: Stage) -> int:
    """How many rows should be under way at once, in front of many models."""
    return max((step.traits.window for step in stage.steps()), default=0)


def default_budgets(plan: Plan) -> int:
    """How many steps have many models and no budget of their own; those that share their models count once."""
    specs = {spec.session_key(step.label): spec for stage in plan.stages for step, spec in stage.models()}
    return sum(spec.by_key is not None and spec.by_key.budget.bytes is None for spec in specs.values())


def in_flight(stage: Stage) -> int:
    """How many rows a model of the stage answers at once, each by itself; 0: all take batches."""
    return max((rows_at_once(spec.handler) for _, spec in stage.models()), default=0)


def waits_for_device(stage: Stage) -> bool:
    """Whether a model of the stage is on an accelerator, and is given rows of like length."""
    return any(step.traits.by_length and spec.handler.new_shapes_cost() for step, spec in stage.models())


def feeds_device(stages: Sequence[Stage], around: Surroundings) -> bool:
    """Whether the models of these stages are all on devices of other processes, and no step sets up something for each
    thread that runs it."""
    places = [choose_place(spec.wishes(), around) for stage in stages for _, spec in stage.models()]
    on_devices = [place.hosted and bool(place.devices) for place in places]
    return bool(places) and all(on_devices) and not any(step.traits.sets_up for stage in stages for step in stage.steps())
