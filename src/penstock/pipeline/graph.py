"""The graph that a pipeline builds: transforms applied to collections, as nodes in the order they were applied."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.display import Displayed, Look
from penstock.errors import GraphError
from penstock.pipeline.hints import NO_HINTS, ResourceHints, resource_hints
from penstock.pipeline.traits import STEP, Traits
from penstock.rows import shorten

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

T = TypeVar("T")
InT = TypeVar("InT", contravariant=True)
OutT = TypeVar("OutT", covariant=True)
SelfT = TypeVar("SelfT", bound="PTransform[Any, Any]")

MAIN = ""  # the tag of a step's main output
FAILURES = "(failures)"  # that of the rows it failed for, beside those that the user names
NOT_OF_ROWS = frozenset({"label", "hints", "function_name", "handling", "retry", "tags"})


class PTransform(Displayed, Generic[InT, OutT]):
    """A step, or a composite of steps: override expand() to build one out of others.

    Applying a transform to a collection (`rows | transform`) calls expand() once, while the pipeline is built, in the
    user's process. The same transform object may be applied any number of times.
    """

    label: str | None = None
    hints: ResourceHints = NO_HINTS

    def expand(self, pcoll: InT) -> OutT:
        """Apply other transforms to `pcoll` and return the result: a PCollection, or a tuple or dict of them."""
        raise NotImplementedError(f"{type(self).__name__} must define expand(self, pcoll)")

    def traits(self) -> Traits:
        """What engines must know of a primitive step. Composites are not asked."""
        return STEP

    def compared(self) -> dict[str, Any]:
        """The settings of a primitive step that decide what becomes of rows: a run is resumed with the same ones. How a step
        is named, where it runs, and what it does with errors is left out: rows that passed would pass again."""
        return {name: value for name, value in vars(self).items() if name not in NOT_OF_ROWS}

    def default_label(self) -> str:
        """The step's name where the user gives none. It need not be unique."""
        return type(self).__name__

    def _look(self) -> Look:
        return Look(self.default_label() if self.label is None else f"{self.label!r} >> {self.default_label()}")

    def with_resource_hints(
        self: SelfT,
        *,
        min_ram: str | int | None = None,
        cpus: int | None = None,
        accelerator: str | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> SelfT:
        """The same transform on workers that have at least these resources. `resources`: by the names that a cluster has
        given to its own; one machine has none, and does not look at them."""
        hinted = copy.copy(self)
        hinted.hints = resource_hints(min_ram, cpus, accelerator, resources).over(self.hints)
        return hinted

    def __rrshift__(self: SelfT, label: str) -> SelfT:
        if not isinstance(label, str) or not label:
            raise GraphError(f"{label!r} >> {type(self).__name__}: a step's name must be a non-empty string")
        named = copy.copy(self)
        named.label = label
        return named

    def __ror__(self, left: Any) -> OutT:
        """`left | transform` for what has no `|` of its own: a tuple, list or dict of collections."""
        made: OutT = apply(self, left)
        return made

    def __or__(self, right: Any) -> Any:
        raise GraphError(
            f"{type(self).__name__} | {shorten(right, 60)}: a pipeline starts with a Pipeline or a PCollection on the left, "
            "as in: pipeline | ps.Create(rows) | ps.Map(f)"
        )


@dataclass(eq=False)
class Node:
    """One primitive step in a pipeline. Engines look at its traits to know what to do."""

    index: int
    label: str
    transform: PTransform[Any, Any]
    inputs: tuple[PCollection[Any], ...]
    hints: ResourceHints
    outputs: dict[str, PCollection[Any]] = field(default_factory=dict)
    metadata: PCollection[Any] | None = None  # new versions of its model: a run looks at them while rows go through it

    @property
    def traits(self) -> Traits:
        return self.transform.traits()


class PCollection(Displayed, Generic[T]):
    """What a step gives: rows in order, not computed until a run needs them."""

    def __init__(self, pipeline: Pipeline, producer: Node, tag: str = MAIN) -> None:
        self.pipeline = pipeline
        self.producer = producer
        self.tag = tag

    def __or__(self, transform: PTransform[PCollection[T], OutT]) -> OutT:
        made: OutT = apply(transform, self)
        return made

    def collect(self) -> list[T]:
        """Run what this collection needs and hand back its rows, in order. For notebooks, tests and small results."""
        return self.pipeline.collect(self)

    def __iter__(self) -> Iterator[T]:
        raise GraphError(f"{self!r} has no rows until it has run: use .collect(), or | ps.Map(f) to work on each row")

    def _look(self) -> Look:
        line = f"<PCollection {self.producer.label}{'.' + self.tag if self.tag else ''}>"
        return Look(line, text="not computed until a run needs it: .collect() runs what it needs and gives its rows")


class Outputs(Displayed, Generic[T]):
    """The tagged outputs of one step: `outs.tag`, `outs["tag"]`, or unpacked in the order they were named. Outputs whose
    names are numbers, those of a Partition, can be had by them: `outs[0]`."""

    def __init__(self, by_tag: Mapping[str, PCollection[T]], order: Sequence[str]) -> None:
        self._by_tag = dict(by_tag)
        self._order = tuple(order)

    def __getitem__(self, tag: str | int) -> PCollection[T]:
        name = str(tag) if isinstance(tag, int) and not isinstance(tag, bool) else tag
        try:
            return self._by_tag[name]  # type: ignore[index]
        except KeyError:
            hint = f": take one of them, as in [{self._order[0]!r}].{tag}()" if hasattr(PCollection, str(tag)) else ""
            outputs = ", ".join(map(repr, self._order))
            raise GraphError(f"there is no output {tag!r}; the outputs are {outputs}{hint}") from None

    def __getattr__(self, tag: str) -> PCollection[T]:
        if tag.startswith("__"):
            raise AttributeError(tag)
        return self[tag]

    def _look(self) -> Look:
        names = [(tag, self._by_tag[tag].producer.label) for tag in self._order]
        return Look(f"<{type(self).__name__} {', '.join(self._order)}>", ("output", "of step"), names)

    def __iter__(self) -> Iterator[PCollection[T]]:
        return (self._by_tag[tag] for tag in self._order)

    def __len__(self) -> int:
        return len(self._order)


def single(transform: PTransform[Any, Any], pcoll: PCollection[Any]) -> PCollection[Any]:
    """Add a primitive step with one input and one output."""
    return add_step(transform, pcoll).outputs[MAIN]


def add_step(
    transform: PTransform[Any, Any],
    pcoll: PCollection[Any],
    tags: Sequence[str] = (MAIN,),
    metadata: PCollection[Any] | None = None,
) -> Node:
    """Add a primitive step with one input."""
    if not isinstance(pcoll, PCollection):
        _refuse_handled(pcoll)
        raise GraphError(
            f"{type(transform).__name__} needs one PCollection on its left, not {type(pcoll).__name__}: "
            "start with pipeline | ps.Create(rows) or a ps.ReadFrom... transform; put several together with ps.Flatten()"
        )
    if metadata is not None and metadata.pipeline is not pcoll.pipeline:
        raise GraphError("model_metadata_pcoll= belongs to another pipeline than the rows: make it of the same one")
    return pcoll.pipeline.add(transform, [pcoll], tags, metadata)


def apply(transform: Any, left: Any) -> Any:
    """What `left | transform` does: check both, and expand the transform in the left side's pipeline."""
    if not isinstance(transform, PTransform):
        hint = "wrap it in ps.Map(...)" if callable(transform) else "expected a transform such as ps.Map(f)"
        if hasattr(transform, "run_inference"):  # a handler of a model, which this layer does not know
            hint = "wrap it in ps.RunInference(...)"
        if isinstance(transform, type) and issubclass(transform, PTransform):
            hint = f"call it: {transform.__name__}(...)"
        raise GraphError(f"{shorten(transform, 60)} on the right of | is not a transform: {hint}")
    return _pipeline_of(transform, left).expand(transform, left)


def _pipeline_of(transform: PTransform[Any, Any], left: Any) -> Pipeline:
    from penstock.pipeline.pipeline import Pipeline

    if isinstance(left, Pipeline):
        return left
    collections = _collections_in(left)
    if not collections:
        _refuse_handled(left)
        raise GraphError(
            f"{shorten(left, 60)} on the left of | {type(transform).__name__}: expected a Pipeline or a PCollection; "
            "rows in memory become one with pipeline | ps.Create(rows)"
        )
    pipeline = collections[0].pipeline
    for other in collections[1:]:
        if other.pipeline is not pipeline:
            raise GraphError(f"{collections[0]!r} and {other!r} belong to different pipelines: build both in one Pipeline")
    return pipeline


def _refuse_handled(left: Any) -> None:
    """GraphError for what with_exception_handling() gives, where one collection is expected."""
    second = left[1] if isinstance(left, tuple) and len(left) == 2 else None
    if isinstance(second, Outputs) or getattr(second, "tag", None) == FAILURES:
        raise GraphError(
            "a step with_exception_handling() gives two things, what it made and the rows that it failed for: "
            "good, failures = rows | ...; then good | ..."
        )


def _collections_in(left: Any) -> list[PCollection[Any]]:
    if isinstance(left, PCollection):
        return [left]
    members = list(left.values()) if isinstance(left, Mapping) else left
    if isinstance(members, (list, tuple, Outputs)):
        found = list(members)
        if all(isinstance(member, PCollection) for member in found):
            return found
    return []
