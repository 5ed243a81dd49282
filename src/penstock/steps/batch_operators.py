"""How the transforms that put rows together work on blocks: MapBatches, BatchElements, GroupIntoBatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.batching.batcher import Batcher
from penstock.batching.entry import Entry, Span
from penstock.batching.fixed import FixedBatches, Pieces
from penstock.blocks import Block, is_table, join, row_count, rows_of, slice_rows
from penstock.errors import StepError
from penstock.pipeline.transforms import BatchElements, GroupIntoBatches, MapBatches
from penstock.rows import row_error, safe_str, shorten, weigh_rows
from penstock.steps.operator import Operator


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
        self.count.rows_in += row_count(batch)
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


class BatchElementsOperator(Operator):
    def __init__(self, label: str, transform: BatchElements[Any]) -> None:
        super().__init__(label)
        self._limits = transform.limits
        self._batches: FixedBatches[list[Any]] = FixedBatches(self._limits, by_length=False)

    def start(self) -> None:
        self._batches = FixedBatches(self._limits, by_length=False)

    def push(self, block: Block) -> None:
        rows = rows_of(block)
        self.count.rows_in += len(rows)
        weights = None
        if self._limits.weigh is not None:
            weights = weigh_rows(self._limits.weigh, rows, self.label)
        self._emit_batches(self._batches.add(Entry(rows, len(rows), weights=weights)))

    def finish(self) -> None:
        self._emit_batches(self._batches.flush())

    def _emit_batches(self, batches: Iterator[Pieces[list[Any]]]) -> None:
        for pieces in batches:
            self.emit([[row for rows, start, stop in pieces for row in rows[start:stop]]])


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
