"""A stage: steps that run together on one split, and where their rows go. Made by a plan; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.pipeline.graph import PTransform
from penstock.pipeline.hints import ResourceHints
from penstock.pipeline.traits import STEP, Traits

if TYPE_CHECKING:
    from penstock.inference.spec import InferenceSpec

Path: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outlet:
    """An end of a stage: rows leave it for a sink, for another stage, or for the user."""

    kind: str  # "sink", "stage" or "collect"
    target: int  # the sink's node, the stage's number, or the position in graph.collect
    path: Path
    after: str  # the step whose rows these are
    keys: str | None = None  # a model of their key is next: the column that has it, or "" for pairs; None: there is none


@dataclass(eq=False, slots=True)
class Step:
    """One step inside a stage, and what takes its outputs, by tag."""

    label: str
    transform: PTransform[Any, Any] | bytes | None  # None: the way in of a stage that another one feeds; bytes: pickled
    next: dict[str, list[Step | Outlet]] = field(default_factory=dict)

    @property
    def traits(self) -> Traits:
        """Of its transform, which is not pickled; of a way in, those of a plain step."""
        return self.transform.traits() if isinstance(self.transform, PTransform) else STEP

    def walk(self) -> Iterator[Step]:
        """This step and all behind it."""
        yield self
        for end in (end for ends in self.next.values() for end in ends):
            if isinstance(end, Step):
                yield from end.walk()


@dataclass(eq=False)
class Stage:
    """Steps that run together on one split, as trees: one for each way in."""

    index: int
    hints: ResourceHints
    why: str
    roots: list[Step] = field(default_factory=list)
    feeds: set[int] = field(default_factory=set)  # stages that this one's rows go to

    def with_transforms(self, change: Callable[[Step], Any]) -> Stage:
        """A copy of the stage in which every transform is what `change` makes of its step."""

        def changed(step: Step) -> Step:
            transform = None if step.transform is None else change(step)
            nexts = {tag: [changed(e) if isinstance(e, Step) else e for e in ends] for tag, ends in step.next.items()}
            return Step(step.label, transform, nexts)

        return Stage(self.index, self.hints, self.why, [changed(root) for root in self.roots], self.feeds)

    def steps(self) -> list[Step]:
        return [step for root in self.roots for step in root.walk()]

    def models(self) -> list[tuple[Step, InferenceSpec]]:
        """The steps that rows go through a model in, each with what it says of that."""
        return [(step, spec) for step in self.steps() if (spec := step.traits.model) is not None]
