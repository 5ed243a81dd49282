"""How each transform works on blocks: push() takes a block and hands on what it makes of it.

One operator is one step's copy in one thread: it is never used by two threads. Only Penstock's own errors come out of it;
they name the step and the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import compress, islice
from typing import Any

from penstock.blocks import Block, Pacer, rows_of
from penstock.forks import end_if_forked
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.pipeline.transforms import BatchElements, Filter, FlatMap, GroupIntoBatches, Map, MapBatches, ParDo
from penstock.rows import let_through, many, map_rows, row_error
from penstock.steps.batch_operators import BatchElementsOperator, GroupIntoBatchesOperator, MapBatchesOperator
from penstock.steps.failing_rows import GuardedFilter, GuardedFlatMap, GuardedMap
from penstock.steps.inference_operator import InferenceOperator
from penstock.steps.operator import Operator
from penstock.steps.pardo_operators import GuardedParDo, ParDoOperator
from penstock.steps.subprocess_steps import IsolatedOperator


class MapOperator(Operator):
    def __init__(self, label: str, transform: Map[Any, Any]) -> None:
        super().__init__(label)
        self._fn = transform.fn
        self._pacer = Pacer()

    def start(self) -> None:
        self._pacer = Pacer()

    def push(self, block: Block) -> None:
        for rows in self._pacer.pieces(rows_of(block)):
            made = map_rows(self._fn, rows, self.label)
            self.count.rows_in += len(rows)
            self._pacer.saw(made)
            self.emit(made)


class FilterOperator(Operator):
    def __init__(self, label: str, transform: Filter[Any]) -> None:
        super().__init__(label)
        self._fn = transform.fn

    def push(self, block: Block) -> None:
        rows = rows_of(block)
        kept = list(compress(rows, map_rows(self._keep, rows, self.label)))
        self.count.rows_in += len(rows)
        self.emit(kept)

    def _keep(self, row: Any) -> bool:
        return bool(self._fn(row))


class FlatMapOperator(Operator):
    """Takes what the function yields as it comes: one row may become more rows than memory holds."""

    def __init__(self, label: str, transform: FlatMap[Any, Any]) -> None:
        super().__init__(label)
        self._fn = transform.fn
        self._pacer = Pacer()

    def start(self) -> None:
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
                items = iter(many(self._fn(row), "the function"))
                while True:
                    made.extend(islice(items, self._pacer.rows - len(made)))
                    end_if_forked(self.process, self.label)
                    if len(made) < self._pacer.rows:
                        break
                    yield made
                    made = []
            except BaseException as exc:
                let_through(exc)
                raise row_error(self.label, row, exc) from exc
        if made:
            yield made


def make_operator(label: str, transform: Any, sessions: ProcessSessions, caller: Caller) -> Operator:
    """The operator that carries out a primitive transform."""
    traits = transform.traits()
    if traits.model is not None:
        return InferenceOperator(label, traits.model, sessions, caller)
    if traits.in_host:
        return IsolatedOperator(label, transform, sessions, caller)
    guarded = traits.handling is not None or traits.retry is not None
    operators = _GUARDED if guarded else _OPERATORS
    for kind in type(transform).__mro__:
        if kind in operators:
            return operators[kind](label, transform)
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

_GUARDED: dict[type, Callable[[str, Any], Operator]] = {
    Map: GuardedMap,
    Filter: GuardedFilter,
    FlatMap: GuardedFlatMap,
    ParDo: GuardedParDo,
}
