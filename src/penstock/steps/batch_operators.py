"""How the transforms that put rows together work on blocks: MapBatches, BatchElements, GroupIntoBatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from penstock.answers import own_answers
from penstock.batching.batcher import Batcher
from penstock.batching.entry import Entry, Span
from penstock.batching.fixed import FixedBatches, Pieces
from penstock.blocks import Block, is_table, join, row_count, rows_of, slice_rows
from penstock.errors import REPORT, AccountingError, StepError
from penstock.pipeline.transforms import BatchElements, GroupIntoBatches, MapBatches
from penstock.rows import let_through, many, row_error, safe_str, shorten, weigh_rows
from penstock.steps.operator import Operator
from penstock.tables import own_table


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
            made = self._fn(list(batch) if isinstance(batch, list) else own_table(batch))
            made = _as_block(made)
            made = own_table(made) if is_table(made) else made.copy()  # it may fill the same anew for its next batch
        except BaseException as exc:
            let_through(exc)
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


def _as_block(made: Any) -> Block:
    """What the function returned: rows, or columns as a table, a frame or a dict."""
    if type(made) is list:
        return made
    if made is None:
        raise TypeError("the function returned None; expected a list of rows, or columns: a pyarrow.Table, a frame, a dict")
    if isinstance(made, Mapping):
        return _block_of_columns(made)
    if hasattr(made, "columns"):
        return _table_of_frame(made)
    if hasattr(made, "to_pylist"):  # one column of Arrow
        return cast("list[Any]", made.to_pylist())
    return list(many(made, "the function"))


def _table_of_frame(frame: Any) -> Block:
    """A frame or a record batch as a table. Of pandas' index only levels with a name are columns."""
    import pyarrow as pa

    if isinstance(frame, pa.Table):
        return frame
    if not hasattr(frame, "iloc"):
        return pa.table(frame)
    named = frame.reset_index() if any(name is not None for name in frame.index.names) else frame
    return pa.Table.from_pandas(named, preserve_index=False).replace_schema_metadata(None)


def _block_of_columns(made: Mapping[Any, Any]) -> Block:
    """Columns of numbers as a table, which shares them; other values as they are, row by row."""
    import pyarrow as pa

    lengths = {name: _length(column) for name, column in made.items()}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        raise TypeError(
            f"the function returned a dict, which is taken as columns, and its values are not lists or arrays of one length "
            f"({shorten(lengths)}); for one row, return [row]"
        )
    if all(_is_plain_column(column) and isinstance(name, str) for name, column in made.items()):
        return pa.table(dict(made))
    columns = [_values(column) for column in made.values()]
    return [dict(zip(made, values, strict=True)) for values in zip(*columns, strict=True)]


def _length(column: Any) -> int | None:
    if isinstance(column, (str, bytes, bytearray, Mapping)) or not hasattr(column, "__len__"):
        return None
    return len(column) if getattr(column, "ndim", 1) else None


def _is_plain_column(column: Any) -> bool:
    if type(column).__module__.startswith("pyarrow"):
        return True
    return type(column).__module__ == "numpy" and column.ndim == 1 and column.dtype.kind in "biuf"


def _values(column: Any) -> Any:
    """The values for rows: Python's own numbers and text where a column of an array library has such."""
    if hasattr(column, "to_pylist"):
        return column.to_pylist()
    kind = getattr(getattr(column, "dtype", None), "kind", "")
    return column.tolist() if getattr(column, "ndim", 0) == 1 and kind not in ("m", "M") else own_answers(column)


class BatchElementsOperator(Operator):
    def __init__(self, label: str, transform: BatchElements[Any]) -> None:
        super().__init__(label)
        self._limits = transform.limits
        self._batches: FixedBatches[list[Any]] = FixedBatches(self._limits, by_length=False)

        self._batched = 0  # rows of the bundle that have left

    def start(self) -> None:
        self._batches = FixedBatches(self._limits, by_length=False)
        self._batched = 0

    def push(self, block: Block) -> None:
        rows = rows_of(block)
        self.count.rows_in += len(rows)
        weights = None
        if self._limits.weigh is not None:
            weights = weigh_rows(self._limits.weigh, rows, self.label)
        self._emit_batches(self._batches.add(Entry(rows, len(rows), weights=weights)))

    def finish(self) -> None:
        self._emit_batches(self._batches.flush())

        check_batched(self.label, self.count.rows_in, self._batched)

    def _emit_batches(self, batches: Iterator[Pieces[list[Any]]]) -> None:
        for pieces in batches:
            batch = [row for rows, start, stop in pieces for row in rows[start:stop]]
            self._batched += len(batch)
            self.emit([batch])


class GroupIntoBatchesOperator(Operator):
    def __init__(self, label: str, transform: GroupIntoBatches[Any]) -> None:
        super().__init__(label)
        self._limits = transform.limits
        self._batcher: Batcher[tuple[Any, Any]] = Batcher(self._limits)

        self._batched = 0  # rows of the bundle that have left

    def start(self) -> None:
        self._batcher = Batcher(self._limits)
        self._batched = 0

    def push(self, block: Block) -> None:
        for row in rows_of(block):
            self.count.rows_in += 1
            self._batcher.add(self._entry(row), 0.0)
            while (spans := self._batcher.take(0.0)) is not None:
                self._emit(spans)

    def finish(self) -> None:
        while (spans := self._batcher.take(0.0, flush=True)) is not None:
            self._emit(spans)
        check_batched(self.label, self.count.rows_in, self._batched)

    def _entry(self, row: Any) -> Entry[tuple[Any, Any]]:
        try:
            key, value = row
            hash(key)
        except (TypeError, ValueError) as exc:
            raise row_error(self.label, row, TypeError("expected a (key, value) pair whose key can be hashed")) from exc
        weights = None if self._limits.weigh is None else weigh_rows(self._limits.weigh, [value], self.label)
        return Entry((key, value), 1, weights=weights, group=key)

    def _emit(self, spans: list[Span[tuple[Any, Any]]]) -> None:
        self._batched += len(spans)
        self.emit([(spans[0].entry.item[0], [span.entry.item[1] for span in spans])])


def check_batched(step: str, taken: int, batched: int) -> None:
    """The batches of a bundle hold all of its rows."""
    if taken != batched:
        raise AccountingError(f"step {step!r} took {taken} rows and put {batched} into batches; {REPORT}")
