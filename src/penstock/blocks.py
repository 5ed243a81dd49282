"""A block: a run of rows, as a list of row objects or as the columns of one Arrow table.

Blocks are what flows between steps. A step that can take columns takes the table whole; any other step sees rows. This
module never imports Arrow itself: where there is a table, the caller has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from penstock.rows import PredictionResult, without
from penstock.tables import without_rows

if TYPE_CHECKING:
    import pyarrow as pa

Block: TypeAlias = "list[Any] | pa.Table"

ANSWERS = {b"penstock": b"answers"}  # in the schema of a table whose columns `inference` and `model_id` a model added

MAX_ROWS = 4096
MAX_BYTES = 8 << 20


def is_table(block: Block) -> bool:
    """Whether the block holds columns."""
    return type(block) is not list


def rows_of(block: Block) -> list[Any]:
    """The block as row objects: the list itself, or one dict per row of the table. A model's answers to a table are
    PredictionResults, whose example is the dict of the other columns."""
    if isinstance(block, list):
        return block
    rows = cast("list[Any]", block.to_pylist())
    if holds_answers(block):
        return [PredictionResult(inference=row.pop("inference"), model_id=row.pop("model_id"), example=row) for row in rows]
    return rows


def holds_answers(table: Any) -> bool:
    """Whether the rows of a table are a model's answers."""
    marked = (table.schema.metadata or {}).items() >= ANSWERS.items()
    return marked and {"inference", "model_id"} <= set(table.column_names)


def row_count(block: Block) -> int:
    return len(block) if isinstance(block, list) else cast(int, block.num_rows)


def slice_rows(block: Block, start: int, stop: int) -> Block:
    """Rows start to stop. A slice of a table shares its columns; a slice of all rows is the block itself."""
    if start == 0 and stop == row_count(block):
        return block
    return block[start:stop] if isinstance(block, list) else block.slice(start, stop - start)


def join(blocks: Sequence[Block]) -> Block:
    """Blocks of one kind as one block."""
    if len(blocks) == 1:
        return blocks[0]
    if isinstance(blocks[0], list):
        return [row for block in blocks for row in block]
    import pyarrow as pa

    return pa.concat_tables(blocks, promote_options="default")


def pick_rows(block: Block, positions: Sequence[int]) -> Block:
    """These rows, in this order; if they are all of them, the block itself."""
    if len(positions) == row_count(block) and positions in (range(len(positions)), list(range(len(positions)))):
        return block
    return [block[at] for at in positions] if isinstance(block, list) else block.take(list(positions))


def drop_rows(block: Block, positions: Collection[int]) -> Block:
    """All rows but these; if that is all of them, the block itself."""
    if not positions:
        return block
    return list(without(block, positions)) if isinstance(block, list) else cast("pa.Table", without_rows(block, positions))


def row_at(block: Block, index: int) -> Any:
    """One row."""
    return block[index] if isinstance(block, list) else block.slice(index, 1).to_pylist()[0]


def gather(pieces: Sequence[tuple[Block, int, int]]) -> Block:
    """Rows of several blocks of one kind, each from and to, as one block."""
    if len(pieces) == 1:
        return slice_rows(*pieces[0])
    if len(pieces) > 1 and all(stop - start == 1 for _, start, stop in pieces) and isinstance(pieces[0][0], list):
        return [block[start] for block, start, _ in pieces]
    return join([slice_rows(block, start, stop) for block, start, stop in pieces])


_SCALARS = frozenset({bool, int, float, complex, type(None)})  # most rows, or what is in them: quickly told


def size_of(row: object) -> int:
    """About how many bytes a row holds: exact for arrays, tensors, strings and bytes; containers to two levels."""
    return _size_of(row, 2)


def _size_of(value: Any, depth: int) -> int:
    kind = type(value)
    if kind in _SCALARS:
        return sys.getsizeof(value)
    if kind is str:
        return _own_size(value)
    try:
        nbytes = getattr(value, "nbytes", None)
    except Exception:  # sparse tensors refuse to tell
        nbytes = None
    if isinstance(nbytes, int):
        return nbytes
    size = _own_size(value)
    fields = getattr(value, "__dict__", None) or {name: getattr(value, name, None) for name in _slots(value)}
    if depth and isinstance(fields, dict) and not isinstance(value, type):
        size += sum(_size_of(v, depth - 1) for v in fields.values())
    if depth and isinstance(value, dict):
        size += sum(_size_of(v, depth - 1) for v in value.values())
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        size += sum(_size_of(v, depth - 1) for v in value)
    return size


def _own_size(value: Any) -> int:
    """Without what it holds. Equal values have equal sizes in every process, whatever room Python keeps for them to grow."""
    if isinstance(value, str):
        return 50 + len(value) * (1 if value.isascii() else 2)
    if isinstance(value, (bytes, bytearray)):
        return 57 + len(value)
    if isinstance(value, (list, tuple)):
        return 56 + 8 * len(value)
    if isinstance(value, (dict, set, frozenset)):
        return 64 + 64 * len(value)
    return sys.getsizeof(value, 64)


def _slots(value: Any) -> tuple[str, ...]:
    slots = getattr(type(value), "__slots__", ())
    return slots if isinstance(slots, tuple) else ()


def byte_size(block: Block) -> int:
    """About how many bytes a block holds, from a sample of its rows."""
    if not isinstance(block, list):
        return cast(int, block.nbytes)
    sample = block[:: max(1, len(block) // 8)]
    size = sys.getsizeof if _SCALARS.issuperset(map(type, sample)) else size_of
    return sum(map(size, sample)) * len(block) // max(1, len(sample))


def fitting_rows(block: list[Any]) -> int:
    """How many rows like these make one block: bounded in rows and in bytes."""
    if not block:
        return MAX_ROWS
    per_row = max(1, byte_size(block) // len(block))
    return max(1, min(MAX_ROWS, MAX_BYTES // per_row))


class Pacer:
    """Cuts rows into pieces, so that what a function makes of one piece stays about one block: paths may become images."""

    def __init__(self) -> None:
        self.rows = 16

    def pieces(self, rows: list[Any]) -> Iterator[list[Any]]:
        at = 0
        while at < len(rows):
            piece = rows[at : at + self.rows] if at or len(rows) > self.rows else rows
            at += len(piece)
            yield piece

    def saw(self, made: list[Any]) -> None:
        """Learn from what was made of a piece."""
        self.rows = fitting_rows(made)
