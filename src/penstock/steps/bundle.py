"""One bundle: the rows of one split through the steps of one stage, on one thread.

source.read(split) or blocks of the stage before
    -> operator -> operator -> ...          (a tree: a step may have several consumers)
         -> a sink's writer, aside | blocks for the next stage | blocks for collect()
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from penstock.blocks import Block, row_count
from penstock.errors import (
    AccountingError,
    InputError,
    NotShippableError,
    OutputError,
    PenstockError,
    RefusedError,
    StepError,
    TransientError,
)
from penstock.forks import end_if_forked
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.io.files import hiding_secrets, open_cause, without_secrets
from penstock.io.sink import Part, Sink, Writer, part_name
from penstock.io.source import FileSource
from penstock.observe.metrics import Metrics
from penstock.observe.result import StepCount
from penstock.pipeline.graph import MAIN
from penstock.row_copies import own_rows
from penstock.rows import let_through, safe_str
from penstock.steps.bundle_progress import RowsLine
from penstock.steps.inference_operator import InferenceOperator
from penstock.steps.operator import Emit, Operator
from penstock.steps.operators import make_operator
from penstock.steps.stage import Outlet, Stage, Step
from penstock.transport.packing import load_pickle

Key: TypeAlias = tuple[int, ...]  # where a split's rows stand among all rows: keys sort in the order of the rows


class Shipment(Protocol):
    """Blocks that leave a bundle for another stage or for the user."""

    packs: bool  # for another process: what cannot be pickled is refused

    def add(self, block: Block) -> None: ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a bundle works on, and under which name its output goes."""

    run: str
    key: Key
    attempt: int
    root: int  # which of the stage's ways in
    split: Any = None  # of a source, or its bytes
    journaled: bool = False  # the run can be resumed


class FinishedPart(NamedTuple):
    """A part that lies aside."""

    node: int  # the sink's
    token: Any  # to publish
    rows: int  # in it


@dataclass(slots=True)
class BundleResult:
    """What a bundle did. It counts only when the whole bundle did."""

    counts: dict[str, StepCount] = field(default_factory=dict)
    parts: list[FinishedPart] = field(default_factory=list)
    rows_read: int = 0
    metrics: Metrics = field(default_factory=Metrics)  # of rows; those of batches are the sessions'


class StageRunner:
    """A stage's steps, copied for one thread. Runs one bundle after another; close() ends the steps' lives."""

    def __init__(self, stage: Stage, sinks: dict[int, tuple[str, Sink[Any]]], sessions: ProcessSessions) -> None:
        self._caller = Caller()
        self._sessions = sessions
        self._sinks = sinks
        self._operators: list[list[Operator]] = []  # for each root, in an order where consumers come later
        self._entries: list[tuple[str, Any, Emit]] = []  # label, transform, and where its rows go
        self._lines: list[RowsLine] = []  # for each root
        self._line = RowsLine()  # of the bundle that runs
        for root in stage.with_transforms(lambda step: load_copy(step.transform, step.label)).roots:
            operators: list[Operator] = []
            self._lines.append(RowsLine())
            self._entries.append((root.label, root.transform, self._wire(root, operators, self._lines[-1])[MAIN]))
            self._operators.append(operators)
        ready: list[Operator] = []
        try:
            for operator in (each for operators in self._operators for each in operators):
                operator.setup()
                ready.append(operator)
        except BaseException:
            _tear_down(ready)
            raise

    def run(self, work: Assignment, ship: Callable[[Outlet], Shipment], blocks: Iterable[Block] = ()) -> BundleResult:
        """Run one bundle over a split, or over the blocks that the stage before made. On an error nothing of it is kept:
        parts written aside are thrown away."""
        label, transform, emit = self._entries[work.root]
        operators = self._operators[work.root]
        line = self._line = self._lines[work.root]
        line.start()
        for operator in operators:
            operator.count, operator.metrics = StepCount(), Metrics()
            if isinstance(operator, SinkOperator):
                operator.work = work
            elif isinstance(operator, ShipOperator):
                operator.ship = ship
        try:
            for operator in operators:
                operator.start()
            for block in blocks if transform is None else _read(label, transform, work):
                line.push(block, emit)
            for operator in operators:
                operator.finish()
        except BaseException as exc:
            for operator in operators:
                end_if_forked(operator.process, operator.label)  # what is half done is not the child's to undo
            for operator in operators:
                operator.abort()
            if isinstance(exc, RefusedError):
                raise exc.plainly() from exc.__cause__
            raise
        else:
            return self._result(None if transform is None else label, StepCount(rows_out=line.rows_read), operators)
        finally:
            line.start()  # the next bundle has done nothing yet

    @property
    def rows_done(self) -> int:
        """How many rows of the bundle that runs are through its steps. For progress: read from other threads."""
        return self._line.rows_done()

    def close(self) -> None:
        _tear_down([operator for operators in self._operators for operator in operators])

    def _wire(self, step: Step, operators: list[Operator], line: RowsLine | None) -> dict[str, Emit]:
        """Make the operators behind a step's outputs, each before its consumers, and connect them."""
        onward = None if line is None else _onward(step)
        return {tag: self._fan(nexts, operators, line, onward) for tag, nexts in step.next.items()}

    def _fan(
        self, ends: Sequence[Step | Outlet], operators: list[Operator], line: RowsLine | None, onward: Step | None
    ) -> Emit:
        """Those that pack come first: what they refuse, nobody has seen. Then what is kept, and then other steps."""
        shipped = [end for end in ends if isinstance(end, Outlet) and end.kind != "sink"]
        shipped.sort(key=lambda end: end.kind == "collect")
        ships = [ShipOperator(end) for end in shipped]
        operators.extend(ships)
        others = [self._connected(end, operators, line if end is onward else None) for end in ends if end not in shipped]
        return others[0] if len(others) == 1 and not ships else Fan(ships, others)

    def _connected(self, end: Step | Outlet, operators: list[Operator], line: RowsLine | None) -> Emit:
        """The way into a step or a sink."""
        operator: Operator
        if isinstance(end, Step):
            operator = make_operator(end.label, end.transform, self._sessions, self._caller)
            operators.append(operator)
            push = operator.push if line is None else line.gauged(operator)
            operator.connect(self._wire(end, operators, line))
            if isinstance(operator, InferenceOperator):
                following = _onward(end)
                operator.has_model_behind = following is not None and _has_model(following)
            return push
        label, sink = self._sinks[end.target]
        operator = SinkOperator(label, sink, end)
        operators.append(operator)
        return operator.push

    def _result(self, source: str | None, read: StepCount, operators: Sequence[Operator]) -> BundleResult:
        result = BundleResult(rows_read=read.rows_out)
        if source is not None:
            result.counts[source] = read
        for operator in operators:
            if not isinstance(operator, ShipOperator):
                result.counts.setdefault(operator.label, StepCount()).add(operator.count)
                result.metrics.merge(operator.metrics)
            if isinstance(operator, SinkOperator) and operator.token is not None:
                result.parts.append(FinishedPart(operator.outlet.target, operator.token, operator.count.rows_in))
        return result


def _onward(step: Step) -> Step | None:
    """Where a bundle's line goes on behind a step: to the last that is given its rows, if possible with a model."""
    main_last = sorted(step.next.items(), key=lambda item: item[0] == MAIN)
    steps = [end for _, nexts in main_last for end in nexts if isinstance(end, Step)]
    return next((each for each in reversed(steps) if _has_model(each)), steps[-1] if steps else None)


def _has_model(step: Step) -> bool:
    return any(each.traits.in_host for each in step.walk())


class ShipOperator(Operator):
    """Hands blocks to whoever carries them on."""

    def __init__(self, outlet: Outlet) -> None:
        super().__init__("")
        self.outlet = outlet
        self.ship: Callable[[Outlet], Shipment] | None = None
        self._shipment: Shipment | None = None

    def start(self) -> None:
        assert self.ship is not None
        self._shipment = self.ship(self.outlet)

    @property
    def is_packing(self) -> bool:
        return self._shipment is not None and self._shipment.packs

    def push(self, block: Block) -> None:
        assert self._shipment is not None
        self._shipment.add(block)


class SinkOperator(Operator):
    """Writes a split's rows to one part, aside. The part is opened with the first row."""

    def __init__(self, label: str, sink: Sink[Any], outlet: Outlet) -> None:
        super().__init__(label)
        self.outlet = outlet
        self.token: Any = None
        self.work: Assignment | None = None
        self._sink = sink
        self._writer: Writer[Any] | None = None

    def start(self) -> None:
        self.token = None
        self._writer = None

    def push(self, block: Block) -> None:
        self.count.rows_in += row_count(block)
        with _writing(self.label, self._sink):
            if self._writer is None:
                self._writer = self._open()
            self._writer.write(block)

    def finish(self) -> None:
        if self._writer is not None:
            with _writing(self.label, self._sink):
                self.token = self._writer.close()
                self._check_written(self._writer.rows_written)
            self._writer = None

    def _check_written(self, rows: int | None) -> None:
        given, written = self.count.rows_in, 0 if self.token is None else rows
        if written is not None and written != given:
            raise AccountingError(
                f"sink {self.label!r} was given {given} rows, and its part has {written}; the defect is in the writer of "
                f"{self._sink.describe()}: close() returns None, and rows_written is 0, for a part without rows alone"
            )

    def abort(self) -> None:
        if self._writer is not None:
            with suppress(Exception):  # the error that led here is the one to show
                self._writer.abort()
            self._writer = None

    def _open(self) -> Writer[Any]:
        assert self.work is not None
        work = self.work
        name = part_name((*self.outlet.path, *work.key))
        return self._sink.open(Part(run=work.run, name=name, attempt=work.attempt, journaled=work.journaled))


@contextmanager
def _writing(label: str, sink: Sink[Any]) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except PermissionError as exc:
        raise OutputError(f"step {label!r}: cannot write to {sink.describe()}: {without_secrets(str(exc))}") from open_cause(
            exc
        )
    except OSError as exc:
        told = f"{type(exc).__name__}: {without_secrets(str(exc))}"
        raise TransientError(f"step {label!r}: writing to {sink.describe()} failed: {told}") from open_cause(exc)
    except BaseException as exc:
        let_through(exc)
        raise StepError(f"step {label!r}: {type(exc).__name__} while writing: {safe_str(exc)}") from exc


def _tear_down(operators: Sequence[Operator]) -> None:
    """End the steps' lives. One that fails changes nothing of what was done, nor does it keep the others."""
    for operator in operators:
        try:
            operator.teardown()
        except Exception:
            traceback.print_exc(file=sys.stderr)


def load_copy(data: Any, label: str) -> Any:
    """A step's own copy of its transform, or of a split."""
    if not isinstance(data, bytes):
        return data
    try:
        return load_pickle(data)
    except PenstockError:
        raise
    except Exception as exc:
        raise NotShippableError(
            f"step {label!r} could not be loaded in a worker process ({type(exc).__name__}: {safe_str(exc)}); "
            "can everything that it refers to be imported there?"
        ) from exc


def _read(label: str, transform: Any, work: Assignment) -> Iterator[Block]:
    source = transform.traits().source
    split = load_copy(work.split, label)
    paths = source.paths_of(split) if isinstance(source, FileSource) else ()
    blocks: Iterator[Any] | None = None
    while True:
        try:
            with hiding_secrets(paths):
                blocks = iter(source.read(split)) if blocks is None else blocks
                block = _as_block(next(blocks))
        except StopIteration:
            return
        except PenstockError:
            raise
        except (FileNotFoundError, PermissionError) as exc:
            raise InputError(f"step {label!r}: {without_secrets(str(exc))}") from open_cause(exc)
        except OSError as exc:
            told = f"{type(exc).__name__}: {without_secrets(str(exc))}"
            raise TransientError(f"step {label!r}: reading failed: {told}") from open_cause(exc)
        except BaseException as exc:
            let_through(exc)
            told = without_secrets(safe_str(exc))
            raise StepError(f"step {label!r}: {type(exc).__name__} while reading: {told}") from open_cause(exc)
        yield block


def _as_block(block: Any) -> Block:
    """What read() yielded. A NamedTuple is a row."""
    if type(block) is list:
        return block
    if isinstance(block, list) or type(block) is tuple:
        return list(block)
    if type(block).__module__.startswith("pyarrow") and hasattr(block, "num_rows"):
        import pyarrow as pa

        return pa.Table.from_batches([block]) if isinstance(block, pa.RecordBatch) else block
    raise TypeError(
        f"read() yielded {type(block).__name__}; expected a list of rows or a pyarrow.Table: for one row, yield [row]"
    )


class Fan:
    """One emit for several consumers; each gets rows of its own, because user code may change what it is given."""

    def __init__(self, ships: list[ShipOperator], others: list[Emit]) -> None:
        self._ships = ships
        self._others = others

    @property
    def packs(self) -> bool:
        return any(ship.is_packing for ship in self._ships)

    def __call__(self, block: Block) -> None:
        takers = [ship.push for ship in self._ships if not ship.is_packing] + self._others
        first = self._own(block) if len(takers) > 1 else block  # before anybody is given any of it
        for ship in self._ships:
            try:
                if ship.is_packing:
                    ship.push(block)
            except NotShippableError as exc:
                raise RefusedError(str(exc), block) from exc.__cause__
        for left, take in zip(range(len(takers) - 1, -1, -1), takers, strict=True):
            take(first if left == len(takers) - 1 else self._own(block) if left else block)

    def _own(self, block: Block) -> Block:
        uncopied: dict[int, Exception] = {}
        own = own_rows(block, uncopied)
        for at, why in uncopied.items():
            told = f"{type(block[at]).__name__} cannot be copied ({type(why).__name__}: {safe_str(why)})"
            advice = "several steps read it, and each may change its own; make what cannot be copied inside those steps"
            raise RefusedError(f"a row of type {told}: {advice}", block)
        return list(block) if own is block and isinstance(block, list) else own
