"""A model's answers beside the rows they answer: as columns of an Arrow table, or in records."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.answers import bare, is_arrow, is_masked, without_mask
from penstock.blocks import ANSWERS
from penstock.errors import UsageError
from penstock.rows import PredictionResult


@dataclass(frozen=True, slots=True)
class Output:
    """What the columns of a model's answers are called."""

    column: str | None = None
    prefix: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether the user named them; otherwise rows are PredictionResults."""
        return self.column is not None or self.prefix is not None

    @property
    def model_id(self) -> str:
        if self.column is not None:
            return f"{self.column}_model_id"
        return f"{self.prefix or ''}model_id"

    def add_to_table(self, table: Any, answers: Any, model_ids: Any) -> Any:
        """The table with the answers and the ids of their models."""
        columns = [*self._columns_of(answers), (self.model_id, model_ids)]
        self._check_new([name for name, _ in columns], table.column_names)
        for name, column in columns:
            table = table.append_column(name, column)
        return table if self.is_named else table.replace_schema_metadata({**(table.schema.metadata or {}), **ANSWERS})

    def check_schema(self, names: Sequence[str]) -> None:
        """UsageError if a table has a column of such a name already."""
        self._check_new([self.column or "inference", self.model_id] if self.prefix is None else [self.model_id], names)

    def add_to_rows(self, rows: Sequence[Any], answers: list[Any], model_ids: Sequence[str | None]) -> list[Any]:
        """Records with the answers; PredictionResults where the user named no column."""
        if not self.is_named:
            return list(map(PredictionResult, rows, answers, model_ids))
        made = []
        for row, answer, model_id in zip(rows, answers, model_ids, strict=True):
            if not isinstance(row, dict):
                what = f"output_{'column' if self.prefix is None else 'prefix'}="
                raise UsageError(f"{what} adds to dicts, or to a table; got a {type(row).__name__}: leave it out")
            new = [*self._fields_of(answer), (self.model_id, model_id)]
            self._check_new([name for name, _ in new], row)
            made.append({**row, **dict(new)})
        return made

    def _columns_of(self, answers: Any) -> list[tuple[str, Any]]:
        if self.prefix is None:
            return [(self.column or "inference", as_column(answers))]
        column = as_column(answers)
        import pyarrow as pa

        if not pa.types.is_struct(column.type):
            raise UsageError(f"output_prefix={self.prefix!r} is for several outputs, {_SEVERAL} {column.type}")
        parts = _whole(column)
        return [(f"{self.prefix}{field.name}", parts.field(at)) for at, field in enumerate(column.type)]

    def _fields_of(self, answer: Any) -> list[tuple[str, Any]]:
        if self.prefix is None:
            return [(self.column or "inference", answer)]
        if not isinstance(answer, Mapping):
            kind = type(answer).__name__
            raise UsageError(f"output_prefix={self.prefix!r} is for several outputs, {_SEVERAL} {kind}")
        return [(f"{self.prefix}{name}", part) for name, part in answer.items()]

    def _check_new(self, new: Sequence[str], names: Collection[str]) -> None:
        if twice := [name for name in new if name in names]:
            raise UsageError(
                f"the rows have a column {twice[0]!r} already, and the model's answers would take its place; name another "
                'with output_column="..." (or output_prefix) on the handler'
            )
        if len(set(new)) < len(new):
            what = f"the model's outputs would be the columns {list(new[:-1])}, and the model's id {new[-1]!r}"
            raise UsageError(
                f"{what}, of which two have one name; name the outputs otherwise in the handler, or give output_column= in "
                "place of output_prefix="
            )


_SEVERAL = "answers that are dicts; use output_column= for answers that are"


def as_column(answers: Any) -> Any:
    """Answers of any kind as an Arrow array of one value per row: arrays with more axes as lists of fixed size, dicts of
    arrays as structs."""
    import pyarrow as pa

    if is_arrow(answers):
        return answers
    if isinstance(answers, dict):
        parts = [_whole(as_column(part)) for part in answers.values()]
        return pa.StructArray.from_arrays(parts, names=_field_names(answers))
    if isinstance(answers, list):
        return _listed_column([_numpy(each) for each in bare(answers)])
    from penstock.arrow_columns import array_column

    return array_column(_numpy(answers))


def _listed_column(answers: list[Any]) -> Any:
    """Answers that came one by one as an Arrow array: of arrays with their type of number, of dicts with arrays a struct."""
    import pyarrow as pa

    from penstock.arrow_columns import column_of_arrays, holds_arrays

    kinds = set(map(type, answers)) - {type(None)}
    if holds_arrays(kinds) and (column := column_of_arrays(answers)) is not None:
        return column
    if kinds == {dict} and any(_has_type(part) for answer in answers for part in (answer or {}).values()):
        return _struct_column(answers)
    try:
        return pa.array([_plain(answer) for answer in answers])
    except pa.ArrowException:  # numbers of different types, which only NumPy's own do not mix
        return pa.array([_as_lists(answer) for answer in answers])


def _has_type(part: Any) -> bool:
    """Whether a part of an answer is an array, or may have arrays in it."""
    return hasattr(part, "dtype") or (type(part) is dict and part != {})


def _struct_column(answers: list[dict[Any, Any] | None]) -> Any:
    import pyarrow as pa

    names = dict.fromkeys(name for answer in answers for name in answer or {})
    parts = [as_column([(answer or {}).get(name) for answer in answers]) for name in names]
    nulls = pa.array([answer is None for answer in answers]) if None in answers else None
    return pa.StructArray.from_arrays(parts, names=_field_names(names), mask=nulls)


def _field_names(names: Collection[Any]) -> list[str]:
    """What the outputs of a model are called."""
    texts = list(map(str, names))
    if len(set(texts)) < len(texts):
        raise UsageError(f"the model's outputs are called {list(names)}, and two of them are the same as texts: rename one")
    return texts


def chunked_column(rows: int, pieces: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """The answers to the rows of a table, in arrays of one form that follow each other: one column, no number copied. None
    for anything else."""
    import pyarrow as pa

    arrays = [(places, part) for places, part in pieces if isinstance(places, range) and hasattr(part, "ndim")]
    ordered = sorted(arrays, key=lambda piece: piece[0].start)
    ends = [0, *(places.stop for places, _ in ordered)]
    forms = {(type(part), part.dtype, part.shape[1:]) for _, part in ordered}
    if len(arrays) < len(pieces) or [places.start for places, _ in ordered] != ends[:-1] or ends[-1] != rows:
        return None
    if len(forms) > 1 or len(ordered) < 2:
        return None
    return pa.chunked_array([as_column(part) for _, part in ordered])


def _whole(column: Any) -> Any:
    """A column in one piece."""
    import pyarrow as pa

    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _numpy(value: Any) -> Any:
    """An array or a tensor as NumPy's; any other value as it is."""
    if is_masked(value):
        return without_mask(value.reshape(1, *value.shape))[0] if value.ndim else value.tolist()
    if not hasattr(value, "dtype"):
        return value
    if not hasattr(value, "detach") and not hasattr(value, "astype"):
        import numpy as np

        value = np.asarray(value)
    from penstock.arrow_columns import numpy_of

    return numpy_of(value)


def _plain(answer: Any) -> Any:
    """One answer as Arrow takes it, with its type of number: an array of one axis, or lists of them."""
    if isinstance(answer, dict):
        return {name: _plain(part) for name, part in answer.items()}
    answer = _numpy(answer)
    if not hasattr(answer, "dtype") or answer.ndim == 1:
        return answer
    if answer.ndim:
        return [_plain(item) for item in answer]
    return answer.item() if answer.dtype.kind in "bSU" else answer[()]  # Arrow takes NumPy's bools for numbers


def _as_lists(answer: Any) -> Any:
    """One answer in which arrays are lists of Python's numbers."""
    if isinstance(answer, dict):
        return {name: _as_lists(part) for name, part in answer.items()}
    if isinstance(answer, (list, tuple)):
        return [_as_lists(part) for part in answer]
    return _numpy(answer).tolist() if hasattr(answer, "dtype") else answer


def model_ids_column(rows: int, model_id: str | None, others: Mapping[int, str | None]) -> Any:
    """Which model answered each row."""
    import pyarrow as pa

    from penstock.arrow_columns import repeated_text

    if model_id is not None and not others:
        return repeated_text(model_id, rows)
    ids = [each for each in dict.fromkeys([model_id, *others.values()]) if each is not None]
    place = {each: at for at, each in enumerate(ids)}  # None: a null, which cannot be one of the values
    numbers = pa.repeat(pa.scalar(place.get(model_id), pa.int32()), rows)  # type: ignore[arg-type]
    if others:
        numbers = pa.array([place.get(others.get(at, model_id)) for at in range(rows)], pa.int32())  # type: ignore[arg-type]
    return pa.DictionaryArray.from_arrays(numbers, pa.array(ids, pa.string()))


def numpy_columns(table: Any, *, own: bool) -> dict[str, Any]:
    """The columns of a table as NumPy arrays: lists of one size as matrices; nulls of numbers as NaN. own: they may be
    changed; else they cannot be where they are the table's memory."""
    columns = {name: _numpy_column(table.column(name)) for name in table.column_names}
    return {name: column.copy() for name, column in columns.items()} if own else columns


def _numpy_column(column: Any) -> Any:
    import pyarrow as pa

    from penstock.arrow_columns import numbers_of

    if pa.types.is_fixed_size_list(column.type):
        values = _whole(column)
        if not values.null_count:
            items = _numpy_column(values.flatten())
            return items.reshape(len(values), column.type.list_size, *items.shape[1:])
    return numbers_of(column)
