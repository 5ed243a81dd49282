"""The pipeline: it builds the graph and hands it to an engine."""

from __future__ import annotations

import contextvars
import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from penstock.display import Displayed, Look
from penstock.errors import GraphError, RowError, UsageError
from penstock.options import RunOptions
from penstock.pipeline.beam_options import PipelineOptions
from penstock.pipeline.graph import MAIN, Node, PCollection, PTransform, apply
from penstock.pipeline.hints import NO_HINTS, ResourceHints
from penstock.pipeline.unused import has_sink, is_used
from penstock.rows import cut_own_frames

if TYPE_CHECKING:
    from penstock.observe.progress import StageProgress
    from penstock.observe.result import RunResult

T = TypeVar("T")
OutT = TypeVar("OutT")


class RunHandle(Protocol):
    """A run that was started."""

    @property
    def rows(self) -> Mapping[PCollection[Any], list[Any]]:
        """After wait(): the rows of the collections in `graph.collect`."""

    def wait(self) -> RunResult:
        """Until the run is done; raises when it fails. Called once. An engine may do all of its work here, on the caller's
        thread: so Ctrl-C stops a run whose wait() is called by the main thread."""

    def stop(self) -> None:
        """Ask the run to end: wait() raises StoppedError. With `run_dir` it can be resumed. Called from any thread, also
        before wait(); a run that is done stays so."""

    def progress(self) -> Sequence[StageProgress]:
        """How far each stage has come, as far as that is known. Called from any thread."""


@runtime_checkable
class Engine(Protocol):
    """What runs a graph. The default is the local engine; any object with these two methods works."""

    def start(self, graph: Graph, options: RunOptions) -> RunHandle:
        """Check what can be checked in advance, and return the run. What it writes appears by the end of its wait()."""
        ...

    def explain(self, graph: Graph, options: RunOptions) -> str:
        """Say how the graph would be run, and why so, without running it."""
        ...


class Graph:
    """The part of a pipeline that one run needs: nodes in an order where inputs come first."""

    def __init__(
        self,
        nodes: Sequence[Node],
        collect: Sequence[PCollection[Any]] = (),
        branches: Mapping[Node, Graph] | None = None,
    ) -> None:
        """branches: what gives the new versions of a step's model, which are no part of the rows' own way."""
        self.nodes = tuple(nodes)
        self.collect = tuple(collect)
        self.branches = branches or {}
        self._consumers: dict[PCollection[Any], list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for position, pcoll in enumerate(node.inputs):
                self._consumers.setdefault(pcoll, []).append((node, position))

    def consumers(self, pcoll: PCollection[Any]) -> list[tuple[Node, int]]:
        """The nodes that read a collection, each with the position of that input."""
        return self._consumers.get(pcoll, [])


# Engines by name, imported when a run needs them: composing a pipeline knows nothing of how it is run.
ENGINES = {"local": ("penstock.engines.local", "LocalEngine"), "ray": ("penstock.engines.ray", "RayEngine")}


def engine_named(name: str, **settings: Any) -> Engine:
    """A new engine of the table."""
    module, engine = ENGINES[name]
    made: Engine = getattr(importlib.import_module(module), engine)(**settings)
    return made


# The command line decides here how the pipelines of the script that it runs are run.
engine_override: contextvars.ContextVar[Callable[[Engine, RunOptions], tuple[Engine, RunOptions]] | None]
engine_override = contextvars.ContextVar("penstock_engine_override", default=None)


class Pipeline(Displayed):
    """A graph of transforms. Run it with run(), with pcoll.collect(), or by leaving its `with` block.

    `settings` are those of RunOptions: workers, threads_per_worker, bundle_attempts, progress ...
    """

    def __init__(self, engine: str | Engine = "local", *, options: PipelineOptions | None = None, **settings: Any) -> None:
        """settings: the options of the run; they come before `options`, those of a pipeline written for Beam."""
        if options is not None and not isinstance(options, PipelineOptions):
            raise UsageError(f"Pipeline(options={options!r}): expected ps.PipelineOptions(...); others by name, workers=2")
        self.options = RunOptions.of(({} if options is None else options.run_options()) | settings)
        self._engine = engine
        self._nodes: list[Node] = []
        self._labels: Counter[str] = Counter()
        self._scope: list[tuple[str, ResourceHints]] = []
        self._collected: set[PCollection[Any]] = set()
        self._windows: dict[str, PCollection[Any]] = {}  # what a WindowInto of this name was applied to
        self._ran: set[Node] = set()  # steps of runs that were started
        self._replaced: set[Node] = set()  # of them, sinks in whose place a later step writes
        self._mark = object()  # by which warnings of pipelines that were never run know it
        self.has_run = False
        self.result: RunResult | None = None
        if not isinstance(engine, Engine) and engine not in ENGINES:
            names = ", ".join(map(repr, ENGINES))
            raise UsageError(f"engine={engine!r}: expected {names}, or an object with start() and explain()")

    def __or__(self, transform: PTransform[Pipeline, OutT]) -> OutT:
        result: OutT = apply(transform, self)
        return result

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        is_used(self._mark)
        if exc_type is None and (pending := self._not_collected()):
            self._finish(self._graph_for(pending))

    def run(self) -> RunResult:
        """Run the whole pipeline; raise when it fails. Returns counts and metrics, also kept in `self.result`."""
        return self._finish(self.graph())[0]

    def start(self) -> RunHandle:
        """Start a run of the whole pipeline and return its handle: wait(), stop() and progress()."""
        return self._start(self.graph())

    def collect(self, pcoll: PCollection[T]) -> list[T]:
        """Run what `pcoll` needs and return its rows, in order."""
        self._collected.add(pcoll)
        return self._finish(self.graph(pcoll))[1].get(pcoll, [])

    def explain(self) -> str:
        """How this pipeline would run: stages, pools of workers, where models live, and why."""
        is_used(self._mark)
        engine, options = self._resolve()
        text = engine.explain(self.graph(), options)
        found = (
            [] if self.result is None else sorted(f"  {key.step}: {note}" for key, note in self.result.metrics.notes.items())
        )
        return "\n".join([text, "", "found in the last run:", *found]) if found else text

    def graph(self, collect: PCollection[Any] | None = None) -> Graph:
        """The steps as run() would run them, inputs first: those that lead to `collect`, or all."""
        if collect is None:
            return self._graph_for(self._leaves())
        return self._graph_for([collect.producer], [collect])

    def expand(self, transform: PTransform[Any, OutT], left: Any) -> OutT:
        """Expand a transform in this pipeline, under its name and its hints."""
        outer_label, outer_hints = self._scope[-1] if self._scope else ("", NO_HINTS)
        name = transform.label or transform.default_label()
        label = self._unique(f"{outer_label}/{name}" if outer_label else name)
        self._scope.append((label, transform.hints.over(outer_hints)))
        try:
            return transform.expand(left)
        except BaseException:
            is_used(self._mark)
            raise
        finally:
            self._scope.pop()

    def add(
        self,
        transform: PTransform[Any, Any],
        inputs: Sequence[PCollection[Any]],
        tags: Sequence[str] = (MAIN,),
        metadata: PCollection[Any] | None = None,
    ) -> Node:
        """Add a primitive step; called from the expand() of transforms that an engine carries out itself."""
        for pcoll in inputs:
            if not isinstance(pcoll, PCollection):
                raise GraphError(
                    f"{type(transform).__name__} needs a PCollection on its left, not {type(pcoll).__name__}: "
                    "start with pipeline | ps.Create(rows), or a ps.ReadFrom... transform"
                )
        label, hints = self._scope[-1]
        node = Node(len(self._nodes), label, transform, tuple(inputs), hints)
        node.outputs = {tag: PCollection(self, node, tag) for tag in tags}
        node.metadata = metadata
        self._nodes.append(node)
        if not tags:
            self._add_sink(node)
        return node

    def _add_sink(self, node: Node) -> None:
        """A step that writes where another wrote in an earlier run takes its place: a notebook cell was run again."""
        if not self.has_run:
            has_sink(self._mark, node.label)
        self._replaced |= {old for old in self._ran if _write_to_one_place(old, node)}

    def put_into_windows(self, pcoll: PCollection[Any]) -> None:
        """Called by WindowInto, which gives the rows as they are; a run finds out whether that will do."""
        self._windows[self._scope[-1][0]] = pcoll

    def _check_windows(self) -> None:
        """UsageError if windows would mean something: they do not in front of a model that changes, and where its versions
        come from."""
        refreshed = [node for node in self._nodes if node.metadata is not None]
        above = self._graph_for([*refreshed, *(node.metadata.producer for node in refreshed if node.metadata is not None)])
        made = {pcoll for node in above.nodes for pcoll in node.outputs.values()}
        if wrong := [label for label, pcoll in self._windows.items() if pcoll not in made]:
            raise UsageError(
                f"step {wrong[0]!r}: Penstock has no windows, because its inputs have an end; leave WindowInto out. It is "
                "only accepted, and does nothing, in front of RunInference(model_metadata_pcoll=...) and on that branch"
            )

    def _look(self) -> Look:
        """The steps, and what they are applied to."""
        ran = "not run yet" if self.result is None else f"last run: {self.result!r}".partition("\n")[0]
        rows = [(node.label, ", ".join(pcoll.producer.label for pcoll in node.inputs)) for node in self._nodes]
        return Look(f"<Pipeline of {len(rows)} step{'' if len(rows) == 1 else 's'}; {ran}>", ("step", "reads"), rows)

    def _unique(self, label: str) -> str:
        self._labels[label] += 1
        return label if self._labels[label] == 1 else f"{label}#{self._labels[label]}"

    def _leaves(self) -> list[Node]:
        """The steps that nothing follows; what only leads to the versions of a model is none of them."""
        consumed = {pcoll for node in self._nodes for pcoll in node.inputs}
        consumed |= {node.metadata for node in self._nodes if node.metadata is not None}
        nodes = [node for node in self._nodes if node not in self._replaced]
        return [n for n in nodes if not any(p in consumed for p in n.outputs.values())]

    def _not_collected(self) -> list[Node]:
        return [n for n in self._leaves() if not any(p in self._collected for p in n.outputs.values())]

    def _graph_for(self, ends: Sequence[Node], collect: Sequence[PCollection[Any]] = ()) -> Graph:
        needed: set[int] = set()
        waiting = list(ends)
        while waiting:
            node = waiting.pop()
            if node.index not in needed:
                needed.add(node.index)
                waiting.extend(pcoll.producer for pcoll in node.inputs)
        nodes = [node for node in self._nodes if node.index in needed]
        versions = [(node, node.metadata) for node in nodes if node.metadata is not None]
        branches = {node: self._graph_for([pcoll.producer], [pcoll]) for node, pcoll in versions}
        return Graph(nodes, collect, branches)

    def _start(self, graph: Graph) -> RunHandle:
        if not graph.nodes:
            raise GraphError("the pipeline has no steps; start with pipeline | ps.Create(rows)")
        is_used(self._mark)
        self._check_windows()
        engine, options = self._resolve()
        self.has_run = True
        self._ran.update(graph.nodes)
        return engine.start(graph, options)

    def _finish(self, graph: Graph) -> tuple[RunResult, Mapping[PCollection[Any], list[Any]]]:
        """Start a run and wait for it. The traceback of an error that the user can mend shows the user's code alone."""
        try:
            run = self._start(graph)
            self.result = run.wait()
        except (RowError, UsageError) as exc:
            cut_own_frames(exc)
            raise exc.with_traceback(None) from exc.__cause__
        return self.result, run.rows

    def _resolve(self) -> tuple[Engine, RunOptions]:
        engine = engine_named(self._engine) if isinstance(self._engine, str) else self._engine
        override = engine_override.get()
        return override(engine, self.options) if override else (engine, self.options)


def _write_to_one_place(old: Node, new: Node) -> bool:
    one, other = old.traits.sink, new.traits.sink
    if one is None or other is None or type(one) is not type(other):
        return False
    return one.describe() == other.describe() != type(one).__name__  # that is what a sink says which names no place
