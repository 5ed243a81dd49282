"""The transforms over rows: what each one promises, and nothing of how an engine carries it out."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from penstock.batching.limits import BatchLimits
from penstock.errors import GraphError, UsageError
from penstock.pipeline.functions import describe_function, takes
from penstock.pipeline.graph import MAIN, Node, Outputs, PCollection, PTransform, add_step, single
from penstock.pipeline.handled import Handleable
from penstock.pipeline.traits import Traits
from penstock.rows import many, rows_made

T = TypeVar("T")
U = TypeVar("U")
InT = TypeVar("InT", contravariant=True)
OutT = TypeVar("OutT", covariant=True)

IN_COLUMNS = 'ps.MapBatches(..., format="arrow")'
BATCH_ROWS = 64  # of BatchElements, where nothing else is said

RowOutputs: TypeAlias = Callable[[Any], list[tuple[str, Any]]]  # what one row becomes


class RowFunction(Handleable[PCollection[T], PCollection[U]]):
    """A step made of one function: what Map, FlatMap and Filter share.

    The function is copied (cloudpickle) to every thread that runs the step, also in this process: what it changes in its
    closure stays with its copy. Extra arguments are passed after the row.
    """

    def __init__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        if not callable(fn):
            raise UsageError(f"{name}({fn!r}): expected a function of one row")
        self.function_name = describe_function(fn)
        self.fn: Callable[..., Any] = _bind(fn, args, kwargs) if args or kwargs else fn

    def traits(self) -> Traits:
        return replace(super().traits(), in_columns=IN_COLUMNS)

    def expand(self, pcoll: PCollection[T]) -> PCollection[U]:
        return single(self, pcoll)

    def default_label(self) -> str:
        return f"{type(self).__name__}({self.function_name})"


class Map(RowFunction[T, U]):
    """One output row for each input row: fn(row)."""

    rows_for_one = "one"

    def __init__(self, fn: Callable[..., U], *args: Any, **kwargs: Any) -> None:
        super().__init__(fn, *args, **kwargs)

    def row_function(self) -> RowOutputs:
        return lambda row: [(MAIN, self.fn(row))]


class FlatMap(RowFunction[T, U]):
    """Any number of output rows for each input row: the items of fn(row), taken as they come."""

    def __init__(self, fn: Callable[..., Iterable[U]], *args: Any, **kwargs: Any) -> None:
        super().__init__(fn, *args, **kwargs)

    def row_function(self) -> RowOutputs:
        return lambda row: [(MAIN, made) for made in many(self.fn(row), "the function")]


class Filter(RowFunction[T, T]):
    """The rows for which fn(row) is true."""

    rows_for_one = "at most one"

    def __init__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(fn, *args, **kwargs)

    def row_function(self) -> RowOutputs:
        return lambda row: [(MAIN, row)] if self.fn(row) else []


class MapBatches(PTransform[PCollection[T], PCollection[U]]):
    """A function over many rows at once.

    fn gets a list of at most `batch_size` rows, or with format="arrow" a pyarrow.Table, and returns any number of rows: as
    an iterable of rows, or as columns in a pyarrow.Table, a DataFrame or a dict of lists or arrays of one length. Batches
    are made inside a split, in order; the last one of a split may be smaller.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        *,
        batch_size: int = 1024,
        format: Literal["rows", "arrow"] = "rows",  # noqa: A002
    ) -> None:
        if not callable(fn):
            raise UsageError(f"MapBatches({fn!r}): expected a function of a list of rows")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"MapBatches(batch_size={batch_size!r}): expected a whole number of at least 1")
        if format not in ("rows", "arrow"):
            raise UsageError(f'MapBatches(format={format!r}): expected "rows" or "arrow"')
        self.fn = fn
        self.batch_size = batch_size
        self.format = format

    def traits(self) -> Traits:
        takes: Literal["rows", "columns"] = "columns" if self.format == "arrow" else "rows"
        return Traits(batch=self.batch_size, takes=takes, in_columns=IN_COLUMNS)

    def expand(self, pcoll: PCollection[T]) -> PCollection[U]:
        return single(self, pcoll)

    def default_label(self) -> str:
        return f"MapBatches({describe_function(self.fn)})"


@dataclass(frozen=True, slots=True)
class TaggedOutput(Generic[T]):
    """A row for one of a step's named outputs: yield it from DoFn.process()."""

    tag: str
    value: T


class DoFn(Generic[T, U]):
    """A step with a life cycle. Every thread that runs the step has its own copy; a bundle is one split.

    setup and teardown are called once per copy, start_bundle and finish_bundle around every split. process returns an
    iterable of rows (or of TaggedOutput), or None. finish_bundle may return rows too: the last ones of its split.
    """

    def setup(self) -> None:
        """Called once for each copy, on the thread that will run it, before its first split."""

    def start_bundle(self) -> None:
        """Called before the first row of each split."""

    def process(self, element: T, *args: Any, **kwargs: Any) -> Iterable[U | TaggedOutput[Any]] | None:
        """Return the rows that one row becomes, or None for none of them. Called once for each row, in order; again if its
        split runs again. What it raises ends the run, unless with_exception_handling() makes it a failure of the row."""
        raise NotImplementedError(f"{type(self).__name__} must define process(self, element)")

    def finish_bundle(self) -> Iterable[U | TaggedOutput[Any]] | None:
        """Called after the last row of each split; not after an error. May return rows, which belong to that split."""

    def teardown(self) -> None:
        """Called once for each copy that was set up, when the run ends or after an error; not if its process dies. What it
        raises is printed to stderr, and changes nothing."""


class _CallableDoFn(DoFn[Any, Any]):
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.process = fn  # type: ignore[method-assign]


class ParDo(Handleable[PCollection[T], PCollection[U]]):
    """Run a DoFn (or a function that returns an iterable or None) over every row."""

    def __init__(self, fn: DoFn[T, U] | Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if isinstance(fn, type) and issubclass(fn, DoFn):
            raise UsageError(f"ParDo({fn.__name__}): expected an object; call it: ParDo({fn.__name__}())")
        if not isinstance(fn, DoFn) and not callable(fn):
            raise UsageError(f"ParDo({fn!r}): expected a DoFn or a function of one row")
        self.dofn: DoFn[Any, Any] = fn if isinstance(fn, DoFn) else _CallableDoFn(fn)
        self.function_name = type(fn).__name__ if isinstance(fn, DoFn) else describe_function(fn)
        self.args = args
        self.kwargs = kwargs
        self.tags: tuple[str, ...] = ()

    def traits(self) -> Traits:
        to_one = isinstance(self.dofn, _ToPartition)  # each row goes to just one of the outputs
        traits = replace(super().traits(), sets_up=type(self.dofn).setup is not DoFn.setup)
        return replace(traits, rows="one") if to_one else traits

    def check_isolated(self) -> None:
        for method in ("start_bundle", "finish_bundle"):
            if getattr(type(self.dofn), method) is not getattr(DoFn, method):
                raise UsageError(
                    f"timeout= and use_subprocess= run {type(self.dofn).__name__}.process() in a process of many bundles, "
                    f"where there is no {method}(); leave them out, or do without that method"
                )

    def compared(self) -> dict[str, Any]:
        given = {"args": self.args, "kwargs": self.kwargs}
        return {"dofn": self.dofn, **{name: value for name, value in given.items() if value}}

    def row_function(self) -> RowOutputs:
        self.dofn.setup()
        return self.outputs_of

    def outputs_of(self, row: Any) -> list[tuple[str, Any]]:
        """All that process() gives for a row, each with its output."""
        items = self.dofn.process(row, *self.args, **self.kwargs)
        return [] if items is None else [self.tagged(item) for item in rows_made(items, "process()")]

    def good_tags(self) -> tuple[str, ...]:
        """The outputs for rows that have not failed: the main one, then those of with_outputs()."""
        return MAIN, *self.tags

    def tagged(self, item: Any) -> tuple[str, Any]:
        """What process() gave, and for which output."""
        if type(item) is not TaggedOutput:
            return MAIN, item
        if item.tag not in self.good_tags():
            raise ValueError(f"yielded a row for output {item.tag!r}, which is not named in with_outputs(...)")
        return item.tag, item.value

    def with_outputs(self, *tags: str, main: str | None = None) -> TaggedParDo:
        """Named outputs: rows yielded as TaggedOutput(tag, row). `main` names the output of the plain rows."""
        return TaggedParDo(self, tags, main)

    def expand(self, pcoll: PCollection[T]) -> PCollection[U]:
        return single(self, pcoll)

    def default_label(self) -> str:
        return f"ParDo({self.function_name})"


class TaggedParDo(Handleable[PCollection[Any], Outputs[Any]]):
    """ParDo with named outputs: what with_outputs() returns."""

    def __init__(self, pardo: ParDo[Any, Any], tags: Sequence[str], main: str | None) -> None:
        names = [*tags, *([] if main is None else [main])]
        if len(set(names)) < len(names) or not all(isinstance(n, str) and n for n in names):
            raise UsageError(f"with_outputs({', '.join(map(repr, names))}): expected different, non-empty names")
        self.pardo = pardo
        self.names = tuple(tags)
        self.main = main
        self.label, self.hints = pardo.label, pardo.hints
        self.handling, self.retry = pardo.handling, pardo.retry

    def check_isolated(self) -> None:
        self.pardo.check_isolated()

    def expand(self, pcoll: PCollection[Any]) -> Outputs[Any]:
        return self.good(add_step(self.primitive(), pcoll, self.good_tags()))

    def good(self, node: Node) -> Outputs[Any]:
        made = node.outputs
        by_tag = {tag: made[tag] for tag in self.names}
        order = list(self.names)
        if self.main is not None:
            by_tag[self.main] = made[MAIN]
            order.insert(0, self.main)
        return Outputs(by_tag, order)

    def good_tags(self) -> tuple[str, ...]:
        return MAIN, *self.names

    def primitive(self) -> ParDo[Any, Any]:
        primitive = copy.copy(self.pardo)
        primitive.tags = self.names
        primitive.handling, primitive.retry = self.handling, self.retry
        return primitive

    def default_label(self) -> str:
        return self.pardo.default_label()


class Flatten(PTransform[Sequence[PCollection[T]], PCollection[T]]):
    """The rows of several collections as one: all of the first, then all of the second, and so on."""

    def traits(self) -> Traits:
        return Traits(joins=True, takes="either")

    def expand(self, pcolls: Sequence[PCollection[T]]) -> PCollection[T]:
        if isinstance(pcolls, PCollection) or not len(pcolls):
            raise GraphError("Flatten needs a tuple or list of collections on its left: (a, b) | ps.Flatten()")
        inputs = list(pcolls)
        return inputs[0].pipeline.add(self, inputs).outputs[MAIN]


class _ToPartition(DoFn[Any, Any]):
    def __init__(self, fn: Callable[..., int], n: int) -> None:
        self.fn = fn
        self.n = n

    def process(self, element: Any, *args: Any, **kwargs: Any) -> Iterable[TaggedOutput[Any]]:
        chosen = self.fn(element, self.n)
        is_bool = getattr(getattr(chosen, "dtype", None), "kind", "") == "b"  # NumPy's has no __index__
        try:
            number = operator.index(bool(chosen) if is_bool else chosen)
        except TypeError:
            number = -1
        if not 0 <= number < self.n:
            raise ValueError(
                f"the partition function returned {chosen!r}; expected 0 to {self.n - 1}, as a whole number (int)"
            )
        return (TaggedOutput(str(number), element),)


class Partition(PTransform[PCollection[T], Outputs[T]]):
    """n collections: each row goes to the one whose number fn(row, n) returns, from 0 on. False is 0, True is 1."""

    def __init__(self, fn: Callable[..., int], n: int) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1 or not takes(fn, None, n):
            raise UsageError(f"Partition({fn!r}, {n!r}): expected a function of (row, n), and n of at least 1")
        self.fn = fn
        self.n = n

    def expand(self, pcoll: PCollection[T]) -> Outputs[T]:
        return ParDo(_ToPartition(self.fn, self.n)).with_outputs(*map(str, range(self.n))).expand(pcoll)

    def default_label(self) -> str:
        return f"Partition({describe_function(self.fn)})"


class Reshuffle(PTransform[PCollection[T], PCollection[T]]):
    """A stage boundary: splits that are done before it are redistributed among the workers. The rows stay in order."""

    def traits(self) -> Traits:
        return Traits(cuts=True, takes="either")

    def expand(self, pcoll: PCollection[T]) -> PCollection[T]:
        return single(self, pcoll)


class _Batching(PTransform[InT, OutT]):
    """A step that puts rows together, inside a split."""

    limits: BatchLimits

    def compared(self) -> dict[str, Any]:
        limits = self.limits
        return {"batch size": limits.max_size, "batch weight": limits.max_weight, "element_size_fn": limits.weigh}


class BatchElements(_Batching[PCollection[T], PCollection[list[T]]]):
    """Lists of rows: at most `max_batch_size` rows (64), and at most `max_batch_weight` by `element_size_fn`.

    Batches are made inside a split, in order, as large as they may be: only the last of a split, and those that the weight
    cuts, have fewer than `min_batch_size` rows. A row that alone is over the weight makes a batch of its own.
    """

    def __init__(
        self,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        *,
        max_batch_weight: int | None = None,
        element_size_fn: Callable[[T], int] | None = None,
    ) -> None:
        least = BatchLimits(min_size=min_batch_size).min_size
        most = max(BATCH_ROWS, least) if max_batch_size is None else max_batch_size
        self.limits = BatchLimits(min_size=least, max_size=most, max_weight=max_batch_weight, weigh=element_size_fn)

    def traits(self) -> Traits:
        return Traits(batch=self.limits.max_size)

    def expand(self, pcoll: PCollection[T]) -> PCollection[list[T]]:
        return single(self, pcoll)


class GroupIntoBatches(_Batching[PCollection[tuple[Any, T]], PCollection[tuple[Any, list[T]]]]):
    """Rows (key, value) in, rows (key, values) out: up to `batch_size` values of one key, in order.

    Batches are made inside a split: a key whose rows are spread over several splits has a small batch in each.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        max_batch_weight: int | None = None,
        element_size_fn: Callable[[T], int] | None = None,
    ) -> None:
        self.limits = BatchLimits(max_size=batch_size, max_weight=max_batch_weight, weigh=element_size_fn)

    def expand(self, pcoll: PCollection[tuple[Any, T]]) -> PCollection[tuple[Any, list[T]]]:
        return single(self, pcoll)


def _bind(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """fn with extra arguments after the row."""
    return lambda row: fn(row, *args, **kwargs)
