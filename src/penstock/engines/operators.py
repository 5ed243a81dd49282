"""How each transform works on blocks: push() takes a block and hands on what it makes of it.

One operator is one step's copy in one thread: it is never used by two threads. Only Penstock's own errors come out of it;
they name the step and the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import compress, islice
from typing import Any, TypeAlias

from penstock.batching.batcher import Batcher
from penstock.batching.entry import Entry, Span
from penstock.blocks import Block, Pacer, is_table, join, row_count, rows_of, slice_rows
from penstock.errors import PenstockError, StepError
from penstock.inference.session import Sessions
from penstock.inference.stream import InferenceStream
from penstock.inference.ticket import Caller
from penstock.inference.transform import RunInference
from penstock.observe.result import StepCount
from penstock.pipeline.graph import MAIN
from penstock.pipeline.transforms import (
    BatchElements,
    Filter,
    FlatMap,
    GroupIntoBatches,
    Map,
    MapBatches,
    ParDo,
    TaggedOutput,
)
from penstock.rows import CAUGHT, map_rows, row_error, safe_str, shorten, weigh_rows

Emit: TypeAlias = Callable[[Block], None]


class Operator:
    """A step at work. setup once; then start, push ..., finish for each bundle (or abort); teardown once."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.count = StepCount()
        self._outputs: dict[str, Emit] = {}

    def connect(self, outputs: dict[str, Emit]) -> None:
        self._outputs = outputs

    def emit(self, block: Block, tag: str = MAIN) -> None:
        rows = row_count(block)
        if rows:
            self.count.rows_out += rows
            self._outputs[tag](block)

    def setup(self) -> None: ...

    def start(self) -> None: ...

    def push(self, block: Block) -> None:
        raise NotImplementedError

    def finish(self) -> None: ...

    def abort(self) -> None: ...

    def teardown(self) -> None: ...


class MapOperator(Operator):
    def __init__(self, label: str, transform: Map[Any, Any]) -> None:
        super().__init__(label)
        self._fn = transform.fn
        self._pacer = Pacer()

    def push(self, block: Block) -> None:
        for rows in self._pacer.pieces(rows_of(block)):
            self.count.rows_in += len(rows)
            made = map_rows(self._fn, rows, self.label)
            self._pacer.saw(made)
            self.emit(made)


class FilterOperator(Operator):
    def __init__(self, label: str, transform: Filter[Any]) -> None:
        super().__init__(label)
        self._fn = transform.fn

    def push(self, block: Block) -> None:
        rows = rows_of(block)
        self.count.rows_in += len(rows)
        self.emit(list(compress(rows, map_rows(self._keep, rows, self.label))))

    def _keep(self, row: Any) -> bool:
        return bool(self._fn(row))


class FlatMapOperator(Operator):
    """Takes what the function yields as it comes: one row may become more rows than memory holds."""

    def __init__(self, label: str, transform: FlatMap[Any, Any]) -> None:
        super().__init__(label)
        self._fn = transform.fn
        self._pacer = Pacer()

    def push(self, block: Block) -> None:
        for made in self._made_of(rows_of(block)):
            self._pacer.saw(made)
            self.emit(made)

    def _made_of(self, rows: list[Any]) -> Iterator[list[Any]]:
        made: list[Any] = []
        for row in rows:
            self.count.rows_in += 1
            try:
                items = iter(self._fn(row))
                while True:
                    made.extend(islice(items, self._pacer.rows - len(made)))
                    if len(made) < self._pacer.rows:
                        break
                    yield made
                    made = []
            except CAUGHT as exc:
                raise row_error(self.label, row, exc) from exc
        if made:
            yield made


class MapBatchesOperator(Operator):
    def __init__(self, label: str, transform: MapBatches[Any, Any]) -> None:
        super().__init__(label)
        self._fn = transform.fn
        self._size = transform.batch_size
        self._arrow = transform.format == "arrow"
        self._waiting: list[Block] = []
        self._rows = 0

    def start(self) -> None:
        self._waiting, self._rows = [], 0

    def push(self, block: Block) -> None:
        self.count.rows_in += row_count(block)
        self._waiting.append(self._as_table(block) if self._arrow else rows_of(block))
        self._rows += row_count(block)
        if self._rows >= self._size:
            self._flush(self._size)

    def finish(self) -> None:
        if self._rows:
            self._flush(1)

    def _flush(self, least: int) -> None:
        """Call the function with full batches, until fewer than `least` rows wait."""
        try:
            block, at = join(self._waiting), 0
        except Exception as exc:
            raise StepError(f"step {self.label!r}: rows do not make one table: {safe_str(exc)}") from exc
        self._waiting = []
        while self._rows >= least:
            stop = min(at + self._size, row_count(block))
            self._call(slice_rows(block, at, stop))
            self._rows -= stop - at
            at = stop
        if self._rows:
            self._waiting = [slice_rows(block, at, row_count(block))]

    def _call(self, batch: Block) -> None:
        try:
            made = self._fn(list(batch) if isinstance(batch, list) else batch)
            if made is None:
                raise TypeError("the function returned None; expected a list of rows or a pyarrow.Table")
            made = _as_table(made) if _is_arrow(made) else list(made)
        except Exception as exc:
            first = shorten(rows_of(slice_rows(batch, 0, 1))[0])
            raise StepError(
                f"step {self.label!r}: {type(exc).__name__}: {safe_str(exc)}\n  in a batch of {row_count(batch)} rows, "
                f"the first: {first}"
            ) from exc
        self.emit(made)

    def _as_table(self, block: Block) -> Block:
        if is_table(block):
            return block
        import pyarrow as pa

        try:
            names = dict.fromkeys(name for row in rows_of(block) for name in row)
            return pa.table({name: [row.get(name) for row in rows_of(block)] for name in names})
        except Exception as exc:
            raise StepError(
                f'step {self.label!r}: format="arrow" needs columns or dict rows, got {shorten(rows_of(block)[0])}'
            ) from exc


def _is_arrow(made: Any) -> bool:
    return type(made).__module__.startswith("pyarrow") and hasattr(made, "num_rows")


def _as_table(made: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches([made]) if isinstance(made, pa.RecordBatch) else made


class ParDoOperator(Operator):
    def __init__(self, label: str, transform: ParDo[Any, Any]) -> None:
        super().__init__(label)
        self._dofn = transform.dofn
        self._args, self._kwargs = transform.args, transform.kwargs
        self._made: dict[str, list[Any]] = {tag: [] for tag in (MAIN, *transform.tags)}
        self._pacers = {tag: Pacer() for tag in self._made}

    def setup(self) -> None:
        self._guarded("setup", self._dofn.setup)

    def start(self) -> None:
        self._made = {tag: [] for tag in self._made}
        self._guarded("start_bundle", self._dofn.start_bundle)

    def push(self, block: Block) -> None:
        process, args, kwargs = self._dofn.process, self._args, self._kwargs
        for row in rows_of(block):
            self.count.rows_in += 1
            try:
                items = process(row, *args, **kwargs)
            except CAUGHT as exc:
                raise row_error(self.label, row, exc) from exc
            if items is not None:
                self._take(items, lambda exc, row=row: row_error(self.label, row, exc))  # type: ignore[misc]
        self._emit_all()

    def finish(self) -> None:
        items = self._guarded("finish_bundle", self._dofn.finish_bundle)
        if items is not None:
            self._take(items, lambda exc: self._error("finish_bundle", exc))
        self._emit_all()

    def teardown(self) -> None:
        self._guarded("teardown", self._dofn.teardown)

    def _take(self, items: Iterable[Any], error: Callable[[BaseException], StepError]) -> None:
        try:
            iterator = iter(items)
        except TypeError as exc:
            raise error(
                TypeError(f"process() returned {type(items).__name__}; expected an iterable of rows, or None")
            ) from exc
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except CAUGHT as exc:
                raise error(exc) from exc
            self._put(item, error)

    def _put(self, item: Any, error: Callable[[BaseException], StepError]) -> None:
        tag, value = (item.tag, item.value) if type(item) is TaggedOutput else (MAIN, item)
        made = self._made.get(tag)
        if made is None:
            raise error(ValueError(f"yielded a row for output {tag!r}, which is not named in with_outputs(...)"))
        made.append(value)
        if len(made) >= self._pacers[tag].rows:
            self._emit_made(tag)

    def _emit_all(self) -> None:
        for tag in self._made:
            self._emit_made(tag)

    def _emit_made(self, tag: str) -> None:
        made, self._made[tag] = self._made[tag], []
        if made:
            self._pacers[tag].saw(made)
            self.emit(made, tag)

    def _guarded(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PenstockError:
            raise
        except Exception as exc:
            raise self._error(method, exc) from exc

    def _error(self, method: str, exc: BaseException) -> StepError:
        return StepError(f"step {self.label!r}: {type(exc).__name__} in {method}(): {safe_str(exc)}")


class BatchElementsOperator(Operator):
    def __init__(self, label: str, transform: BatchElements[Any]) -> None:
        super().__init__(label)
        self._limits = transform.limits
        self._batcher: Batcher[list[Any]] = Batcher(self._limits)

    def start(self) -> None:
        self._batcher = Batcher(self._limits)

    def push(self, block: Block) -> None:
        rows = rows_of(block)
        self.count.rows_in += len(rows)
        weights = None
        if self._limits.weigh is not None:
            weights = weigh_rows(self._limits.weigh, rows, self.label)
        self._batcher.add(Entry(rows, len(rows), weights=weights), 0.0)
        self._emit_batches(flush=False)

    def finish(self) -> None:
        self._emit_batches(flush=True)

    def _emit_batches(self, flush: bool) -> None:
        while (spans := self._batcher.take(0.0, flush=flush)) is not None:
            self.emit([_rows_in(spans)])


class GroupIntoBatchesOperator(Operator):
    def __init__(self, label: str, transform: GroupIntoBatches[Any]) -> None:
        super().__init__(label)
        self._limits = transform.limits
        self._batcher: Batcher[tuple[Any, Any]] = Batcher(self._limits)

    def start(self) -> None:
        self._batcher = Batcher(self._limits)

    def push(self, block: Block) -> None:
        for row in rows_of(block):
            self.count.rows_in += 1
            self._batcher.add(self._entry(row), 0.0)
            while (spans := self._batcher.take(0.0)) is not None:
                self._emit(spans)

    def finish(self) -> None:
        while (spans := self._batcher.take(0.0, flush=True)) is not None:
            self._emit(spans)

    def _entry(self, row: Any) -> Entry[tuple[Any, Any]]:
        try:
            key, value = row
            hash(key)
        except (TypeError, ValueError) as exc:
            raise row_error(self.label, row, TypeError("expected a (key, value) pair whose key can be hashed")) from exc
        weights = None if self._limits.weigh is None else weigh_rows(self._limits.weigh, [value], self.label)
        return Entry((key, value), 1, weights=weights, group=key)

    def _emit(self, spans: list[Span[tuple[Any, Any]]]) -> None:
        self.emit([(spans[0].entry.item[0], [span.entry.item[1] for span in spans])])


def _rows_in(spans: list[Span[list[Any]]]) -> list[Any]:
    return [row for entry, start, stop in spans for row in entry.item[start:stop]]


class InferenceOperator(Operator):
    def __init__(self, label: str, transform: RunInference[Any, Any], sessions: Sessions, caller: Caller) -> None:
        super().__init__(label)
        self._transform = transform
        self._sessions = sessions
        self._caller = caller
        self._stream: InferenceStream | None = None

    def start(self) -> None:
        session = self._sessions.open(self.label, self._transform)
        self._stream = InferenceStream(self.label, self._transform, session, self._caller)

    def push(self, block: Block) -> None:
        assert self._stream is not None
        for answers in self._stream.push(block):
            self.emit(answers)

    def finish(self) -> None:
        assert self._stream is not None
        for answers in self._stream.finish():
            self.emit(answers)
        self.count.rows_in += self._stream.rows_in
        self._close()

    def unanswered(self) -> int:
        return self._stream.unanswered() if self._stream is not None else 0

    def abort(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def make_operator(label: str, transform: Any, sessions: Sessions, caller: Caller) -> Operator:
    """The operator that carries out a primitive transform."""
    if isinstance(transform, RunInference):
        return InferenceOperator(label, transform, sessions, caller)
    for kind, operator in _OPERATORS.items():
        if isinstance(transform, kind):
            return operator(label, transform)
    raise TypeError(f"step {label!r}: the local engine cannot run a {type(transform).__name__}")


_OPERATORS: dict[type, Callable[[str, Any], Operator]] = {
    Map: MapOperator,
    Filter: FilterOperator,
    FlatMap: FlatMapOperator,
    MapBatches: MapBatchesOperator,
    ParDo: ParDoOperator,
    BatchElements: BatchElementsOperator,
    GroupIntoBatches: GroupIntoBatchesOperator,
}
