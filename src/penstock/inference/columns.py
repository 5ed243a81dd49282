"""A model's answers as columns of an Arrow table."""

from __future__ import annotations

from typing import Any

from penstock.blocks import ANSWERS, Block


def as_column(answers: Any) -> Any:
    """Answers (Arrow, NumPy of one or two dimensions, any sequence) as an Arrow array of one value per row."""
    import pyarrow as pa

    if isinstance(answers, (pa.Array, pa.ChunkedArray)):
        return answers
    if getattr(answers, "ndim", 1) == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(answers.reshape(-1)), answers.shape[1])
    return pa.array(answers)


def concat_columns(columns: list[Any]) -> Any:
    """Columns one after the other; one may be all null, or all whole numbers, where another is not."""
    import pyarrow as pa

    tables = [pa.table({"inference": column}) for column in columns]
    return pa.concat_tables(tables, promote_options="permissive").column(0)


def with_answers(table: Any, pieces: list[tuple[int, Any, str | None]]) -> Block:
    """The table with the columns `inference` and `model_id`; pieces are answers with the row where each starts, and the id
    of the model that gave them."""
    import pyarrow as pa

    pieces = sorted(pieces, key=lambda piece: piece[0])
    answers = concat_columns([piece for _, piece, _ in pieces])
    models = list(dict.fromkeys(model_id for _, _, model_id in pieces))
    numbers = [pa.repeat(pa.scalar(models.index(model_id), pa.int32()), len(piece)) for _, piece, model_id in pieces]
    ids = pa.DictionaryArray.from_arrays(pa.concat_arrays(numbers), pa.array(models, pa.string()))
    answered = _replace(_replace(table, "inference", answers), "model_id", ids)
    return answered.replace_schema_metadata({**(table.schema.metadata or {}), **ANSWERS})


def _replace(table: Any, name: str, column: Any) -> Any:
    """The table with this column, in the place of an older one of the same name."""
    at = table.schema.get_field_index(name)
    return table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
