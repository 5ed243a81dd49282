"""What happens to rows before the model: preprocess functions, keys, columns, weights, prepare(), lengths.

a piece of a block -> preprocess -> key taken off -> preprocess -> example -> prepared -> submitted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.blocks import Block, drop_rows, is_table, join, pick_rows, row_count, rows_of, size_of, slice_rows
from penstock.errors import StepError, UsageError
from penstock.failures import Failure
from penstock.inference.guard import Guard
from penstock.inference.handler import measures_examples
from penstock.inference.preparing import Preparer
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Part, Ticket
from penstock.rows import PredictionResult, many, measured, row_error, weigh_rows, without

if TYPE_CHECKING:
    from penstock.inference.model_ways import ModelWays

PER_ROW = ("kept", "keys", "models", "values", "weights", "lengths")


@dataclass(slots=True)
class Passage:
    """Rows on their way to the model, and those of their piece that failed before it."""

    piece: Block  # the rows as they came in
    positions: Sequence[int]  # of these
    rows: Block  # what became of those that are still on their way: examples, or a table of the input columns
    at: Sequence[int]  # where in the piece they stood
    kept: list[Any] | None = None  # rows that PredictionResults are of; None: for a table
    keys: list[Any] | None = None
    models: list[str] | None = None  # of each row, where there are many: rows of one model stand together
    values: list[Any] | None = None  # prepared
    weights: list[int] | None = None
    lengths: list[int] | None = None
    failed: dict[int, Failure] = field(default_factory=dict)  # by place in the piece
    prepared: str | None = None  # with what the values were, where that may change
    alone: bool = False  # they are one batch as they are
    is_sorted: bool = False  # by model: the order is another than that in which the rows came

    def drop(self, failed: Collection[int]) -> None:
        """Go on without the rows at these positions."""
        if not failed:
            return
        self.rows = drop_rows(self.rows, failed)
        self.at = without(self.at, failed)
        for name in PER_ROW:
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, without(held, failed))

    def fail(self, failed: dict[int, Failure]) -> None:
        """These rows failed in front of the model."""
        self.failed |= {self.at[at]: failure for at, failure in failed.items()}
        self.drop(failed)

    def reorder(self, order: Sequence[int]) -> None:
        """The rows that are still on their way, in another order."""
        self.rows = pick_rows(self.rows, order)
        self.at = [self.at[at] for at in order]
        for name in PER_ROW:
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, [held[at] for at in order])

    def part(self, start: int, stop: int) -> Passage:
        """Some of the rows, on a way of their own."""
        part = Passage(self.piece, self.positions, slice_rows(self.rows, start, stop), self.at[start:stop], alone=self.alone)
        for name in PER_ROW:
            held = getattr(self, name)
            if held is not None:
                setattr(part, name, held[start:stop])
        return part

    def put_together(self, parts: Sequence[Passage]) -> None:
        """What became of the rows, from parts that went on by themselves, one after the other."""
        for part in parts:
            self.failed |= part.failed
        left = [part for part in parts if row_count(part.rows)]
        for part in left:  # what one has, all have
            if part.values is None and any(each.values is not None for each in left):
                part.values = rows_of(part.rows)
            if part.weights is None and any(each.weights is not None for each in left):
                part.weights = [0] * row_count(part.rows)
        self.rows = join([part.rows for part in left]) if left else []
        self.at = [at for part in left for at in part.at]
        for name in PER_ROW:
            held = [getattr(part, name) for part in left]
            setattr(self, name, None if None in held else [each for some in held for each in some])
        self.models = self.models or []


class Intake:
    """Of one step, for one bundle. `note` is told of rows that preprocessing failed for, with the number of the function."""

    def __init__(
        self,
        spec: InferenceSpec,
        guard: Guard,
        preparer: Preparer | None,
        note: Callable[[int, Passage, dict[int, Failure]], None],
        by_model: ModelWays | None = None,
    ) -> None:
        """by_model: where there are many, the way of rows into each."""
        self._handler = spec.handler
        self._path = spec.path
        self._args = spec.inference_args
        self._step = guard.step
        self._guard = guard
        self._preparer = preparer
        self._note = note
        self._names = spec.handler.input_columns()
        self._weigh = spec.limits.weigh if spec.limits.max_weight is not None else None
        self._measures = spec.handler.measures_length()
        self._of_examples = measures_examples(spec.handler)
        self._counts_bytes = spec.fixed_batches and self._measures
        self._models = by_model

    def table(self, table: Any, positions: Sequence[int]) -> Passage:
        """Rows that stay columns."""
        passage = Passage(table, positions, self.inputs_of(table), range(len(positions)))
        if self._models is not None:
            return self._models.lead(passage, self._models.keys_in_table(table), Intake.columns_in)
        return self.columns_in(passage)

    def rows(self, rows: list[Any], positions: Sequence[int]) -> Passage:
        passage = Passage(rows, positions, rows, range(len(rows)))
        self.preprocess(passage)
        return self.unkeyed(passage)

    def preprocess(self, passage: Passage) -> None:
        self._preprocess(passage, self._path.before, 0)

    def unkeyed(self, passage: Passage) -> Passage:
        """The rest of the way, for rows after the functions that see keys."""
        self._split_keys(passage)
        if self._models is None:
            return self.rows_in(passage)
        keys = self._models.keys_in_rows(rows_of(passage.rows)) if passage.keys is None else passage.keys
        return self._models.lead(passage, keys, Intake.rows_in)

    def rows_in(self, passage: Passage) -> Passage:
        """Rows without keys, to their model."""
        self._preprocess(passage, self._path.before_model, len(self._path.before))
        passage.kept = rows_of(passage.rows)
        if self._names is not None and passage.kept:
            examples, failed = self._guard.all_or_each(self._examples_of_rows, passage.kept)
            passage.rows = examples
            passage.fail(failed)
        return self._measured(passage)

    def columns_in(self, passage: Passage) -> Passage:
        """A table of the input columns, to its model."""
        if self._preparer is not None or not self._handler.takes_columns():
            inputs, places = passage.rows, list(range(row_count(passage.rows)))
            passage.rows, failed = self._guard.all_or_each(lambda own: self._examples(pick_rows(inputs, own)), places)
            passage.fail(failed)
        return self._measured(passage)

    def ticket(self, passage: Passage) -> Ticket:
        sizes = [size_of(row) for row in rows_of(passage.rows)] if self._counts_bytes else None
        parts = None if passage.models is None else parts_of(passage.models)
        block = passage.rows if passage.values is None else passage.values
        measured: dict[str, Any] = {"weights": passage.weights, "lengths": passage.lengths, "alone": passage.alone}
        return Ticket(block, sizes, parts, passage.prepared, as_columns=is_table(passage.piece), **measured)

    def prepare_again(self, passage: Passage) -> None:
        """Rows whose model was replaced by one that takes them prepared otherwise."""
        passage.values = passage.lengths = passage.weights = None
        self._measured(passage)

    def inputs_of(self, table: Any) -> Any:
        """The columns that the model takes."""
        if self._names is None:
            return table
        if missing := [name for name in self._names if name not in table.column_names]:
            raise UsageError(f"step {self._step!r}: {_missing(missing, table.column_names)}")
        return table.select(list(self._names))

    # One after the other.

    def _preprocess(self, passage: Passage, functions: Sequence[Callable[[Any], Any]], first: int) -> None:
        for number, function in enumerate(functions, first):
            passage.rows, failed = self._guard.each(function, rows_of(passage.rows), "preprocess")
            if failed:
                self._note(number, passage, {passage.at[at]: why for at, why in failed.items()})
                passage.drop(failed)

    def _split_keys(self, passage: Passage) -> None:
        def split(rows: list[Any]) -> list[tuple[Any, Any]]:
            examples, keys = self._path.split_keys(rows, self._step)
            return list(zip(examples, keys or (), strict=True))

        if self._path.keys is not None:
            pairs, failed = self._guard.all_or_each(split, rows_of(passage.rows))
            passage.fail(failed)
            pairs = list(without(pairs, failed))
            passage.rows, passage.keys = [example for example, _ in pairs], [key for _, key in pairs]

    def _examples(self, inputs: Any) -> list[Any]:
        examples = list(self._handler.examples_of(inputs))
        if len(examples) != inputs.num_rows:
            what = f"examples_of() returned {len(examples)} examples for {inputs.num_rows} rows; expected one for each"
            raise StepError(f"step {self._step!r}: {what}")
        return examples

    def _examples_of_rows(self, rows: list[Any]) -> list[Any]:
        """The examples in records. An error names the row."""
        import pyarrow as pa

        assert self._names is not None
        for row in rows:
            missing = [name for name in self._names if name not in row] if isinstance(row, dict) else None
            error: Exception | None = None
            if missing is None:
                error = TypeError(f"columns={list(self._names)} need dicts, or a table; got {_named_kind(row)}")
            elif missing:
                error = LookupError(_missing(missing, list(row)))
            if error is not None:
                raise row_error(self._step, row, error) from error
        try:
            inputs = pa.table({name: [row[name] for row in rows] for name in self._names})
        except pa.ArrowException as exc:
            raise row_error(self._step, rows[0], exc) from exc
        return self._examples(inputs)

    def _measured(self, passage: Passage) -> Passage:
        """With weights, prepared values and lengths, where they are needed."""
        if self._weigh is not None and not passage.alone and row_count(passage.rows):
            passage.weights, failed = self._guard.all_or_each(self._weights_of, rows_of(passage.rows))
            passage.fail(failed)
        if self._preparer is not None and row_count(passage.rows):
            passage.prepared = self._preparer.prepared
            passage.values, failed = self._preparer.prepare(rows_of(passage.rows), self._args)
            passage.fail(failed)
        if self._measures and not passage.alone and row_count(passage.rows):
            of = passage.rows if passage.values is None or self._of_examples else passage.values
            passage.lengths, failed = self._guard.all_or_each(self._lengths_of, rows_of(of))
            passage.fail(failed)
        return passage

    def _weights_of(self, rows: list[Any]) -> list[int]:
        assert self._weigh is not None
        return weigh_rows(self._weigh, rows, self._step)

    def _lengths_of(self, rows: list[Any]) -> list[int]:
        try:
            return measured(self._handler.get_lengths, rows, self._step)
        except StepError as exc:
            if isinstance(exc.__cause__, UsageError):  # a tokenizer that is not there: no row is to blame
                raise exc.__cause__ from exc.__cause__.__cause__
            raise


def _named_kind(row: Any) -> str:
    """What a row is, and how it could have been a dict."""
    advice = ""
    if isinstance(row, PredictionResult):
        advice = ": give output_column= to the handler of the model before, and its rows stay dicts"
    elif isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict) and "error_type" in row[1]:
        advice = ", a dead letter: take its row out, with ps.Map(lambda failed: failed[0])"
    return f"{type(row).__name__}{advice}"


def examples_in(batch: Any, step: str) -> list[Any]:
    """A row that is a batch, as examples."""
    try:
        return list(many(batch, "", ""))
    except TypeError as exc:
        expected = "with_no_batching() expects rows that are lists of examples"
        raise StepError(f"step {step!r}: {expected}, got {type(batch).__name__}") from exc


def _missing(names: Sequence[str], seen: Sequence[str]) -> str:
    return f"columns {list(names)} are missing: the rows have {list(seen)}; check columns="


def parts_of(models: Sequence[str]) -> list[Part]:
    """Which rows are for which model, where those of one stand together."""
    parts: list[Part] = []
    start = 0
    for model, rows in Counter(models).items():  # in the order in which they first come
        parts.append((model, start, start + rows))
        start += rows
    return parts
