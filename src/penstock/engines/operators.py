"""How each transform works on blocks: push() takes a block and hands on what it makes of it.

One operator is one step's copy in one thread: it is never used by two threads. Only Penstock's own errors come out of it;
they name the step and the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import compress, islice
from typing import Any

from penstock.blocks import Block, Pacer, rows_of
from penstock.engines.batch_operators import BatchElementsOperator, GroupIntoBatchesOperator, MapBatchesOperator
from penstock.engines.operator import Operator
from penstock.errors import PenstockError, StepError
from penstock.inference.handling import HandlingStream
from penstock.inference.session import Sessions
from penstock.inference.stream import InferenceStream
from penstock.inference.ticket import Caller
from penstock.inference.transform import RunInference
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
from penstock.rows import CAUGHT, map_rows, row_error, safe_str


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


class InferenceOperator(Operator):
    def __init__(self, label: str, transform: RunInference[Any, Any], sessions: Sessions, caller: Caller) -> None:
        super().__init__(label)
        self._transform = transform
        self._sessions = sessions
        self._caller = caller
        self._stream: InferenceStream | None = None

    def start(self) -> None:
        session = self._sessions.open(self.label, self._transform)
        kind = InferenceStream if self._transform.handling is None else HandlingStream
        self._stream = kind(self.label, self._transform, session, self._caller)

    def push(self, block: Block) -> None:
        assert self._stream is not None
        for answers in self._stream.push(block):
            self.emit(answers)
        self._emit_failures(self._stream)

    def finish(self) -> None:
        assert self._stream is not None
        for answers in self._stream.finish():
            self.emit(answers)
        self._emit_failures(self._stream)
        self.count.rows_in += self._stream.rows_in
        self._close()

    def unanswered(self) -> int:
        return self._stream.unanswered() if self._stream is not None else 0

    def abort(self) -> None:
        self._close()

    def _emit_failures(self, stream: InferenceStream) -> None:
        for tag, failed in stream.take_failed().items():
            self.fail(failed, tag)

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
