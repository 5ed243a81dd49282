"""A model's answers to many rows: a list of one for each, one array or tensor whose first axis is the rows, a dict of such
arrays, or an Arrow array. They stay what they are from the model to whoever asks for rows or for a column.

This module never imports a framework: where there is an array, somebody has.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from penstock.row_copies import CONSTANT, loaded_class
from penstock.rows import PredictionResult, without
from penstock.tables import own_column, without_rows


class Together(NamedTuple):
    """Answers that are no list, as the only item of a list that travels."""

    answers: Any


def as_arrays(made: Any) -> Any:
    """What a handler returned, if it is an array or a non-empty dict of arrays: on the CPU, as NumPy's or PyTorch's; None if
    it is neither. A masked array is one of Arrow's, with nulls."""
    if isinstance(made, Mapping):
        parts = {name: as_arrays(part) for name, part in made.items()}
        whole = parts and not any(part is None or isinstance(part, dict) for part in parts.values())
        return parts if whole else None
    kind = type(made)
    if kind is loaded_class("numpy", "ndarray"):
        return made if made.ndim else None
    if _is_tensor(made):
        return made.detach().cpu() if made.dim() else None
    if is_masked(made):
        return without_mask(made) if made.ndim else None
    if hasattr(made, "__array__") and hasattr(made, "shape") and hasattr(made, "dtype"):  # of JAX, TensorFlow, a Series
        array = sys.modules["numpy"].asarray(made)
        return array if array.ndim else None
    return None


def is_masked(answers: Any) -> bool:
    """Whether it is a masked array of NumPy's."""
    return (kind := loaded_class("numpy.ma", "MaskedArray")) is not None and isinstance(answers, kind)


def without_mask(answers: Any) -> Any:
    """A masked array of one axis as Arrow's, with nulls; one of more axes as NumPy's, if nothing in it is masked."""
    if answers.ndim == 1:
        import pyarrow as pa

        return pa.array(answers.data, mask=sys.modules["numpy"].ma.getmaskarray(answers))
    if answers.mask.any():
        what = f"an array of shape {answers.shape} has masked values"
        raise TypeError(f"{what}; nulls can stand for those of one axis alone: fill these, with .filled(...)")
    return answers.data


def is_arrow(answers: Any) -> bool:
    return type(answers).__module__.startswith("pyarrow")


def count_of(answers: Any) -> int:
    """How many rows they answer."""
    return len(next(iter(answers.values()))) if isinstance(answers, dict) else len(answers)


def uneven(answers: Any) -> dict[str, int] | None:
    """The lengths of a dict of arrays that are not all of one length."""
    if not isinstance(answers, dict):
        return None
    lengths = {name: len(part) for name, part in answers.items()}
    return lengths if len(set(lengths.values())) > 1 else None


def cut(answers: Any, start: int, stop: int) -> Any:
    """Those of some rows that follow each other."""
    if isinstance(answers, dict):
        return {name: part[start:stop] for name, part in answers.items()}
    return answers[start:stop]


def pick(answers: Any, positions: Sequence[int]) -> Any:
    """Those of some rows, in the order of the positions."""
    if isinstance(positions, range) and positions.step == 1:
        whole = positions.start == 0 and positions.stop == count_of(answers)
        return answers if whole else cut(answers, positions.start, positions.stop)
    if isinstance(answers, list):
        return [answers[at] for at in positions]
    if isinstance(answers, dict):
        return {name: pick(part, positions) for name, part in answers.items()}
    return answers.take(list(positions)) if is_arrow(answers) else answers[list(positions)]


def leave_out(answers: Any, positions: Collection[int]) -> Any:
    """All but those of the rows at these positions; if they are none, the answers themselves."""
    if not positions:
        return answers
    if isinstance(answers, dict):
        return {name: leave_out(part, positions) for name, part in answers.items()}
    if is_arrow(answers):
        return without_rows(answers, positions)
    if type(answers) is loaded_class("numpy", "ndarray"):
        return sys.modules["numpy"].delete(answers, list(positions), axis=0)
    return pick(answers, without(range(count_of(answers)), positions))


def make_room(answers: Any, rows: int, positions: Collection[int]) -> Any:
    """The answers to so many rows from those to all but the rows at these positions, which have None in a list, and anything
    elsewhere: what leave_out() undoes."""
    if isinstance(answers, dict):
        return {name: make_room(part, rows, positions) for name, part in answers.items()}
    if type(answers) is not loaded_class("numpy", "ndarray"):
        return put_together(rows, [(without(range(rows), positions), answers)])
    numpy = sys.modules["numpy"]
    made, has_answer = numpy.zeros((rows, *answers.shape[1:]), answers.dtype), numpy.ones(rows, bool)
    has_answer[list(positions)] = False
    made[has_answer] = answers
    return made


def as_rows(answers: Any) -> list[Any]:
    """One object for each row, with memory of its own: a view would be pickled, and kept alive, with all others."""
    if isinstance(answers, list):
        return answers
    if isinstance(answers, dict):
        parts = [as_rows(part) for part in answers.values()]
        return [dict(zip(answers, row, strict=True)) for row in zip(*parts, strict=True)]
    if is_arrow(answers):
        rows: list[Any] = answers.to_pylist()
        return rows
    if _is_tensor(answers):
        return list(sys.modules["torch"].unbind_copy(answers))
    return list(answers) if answers.ndim == 1 else [row.copy() for row in answers]


def bare(answers: list[Any]) -> list[Any]:
    """Answers without the examples that a handler has put beside them."""
    if PredictionResult not in map(type, answers):
        return answers
    return [answer.inference if type(answer) is PredictionResult else answer for answer in answers]


def _references_of_one_variable() -> int:
    made = object()
    return sys.getrefcount(made)


ALONE = _references_of_one_variable()  # which depends on the version of Python


def is_handed_over(value: Any, references: int) -> bool:
    """Whether this is an array whose memory is its own and which nobody else has, so that nobody will fill it anew.
    references: sys.getrefcount(made), said in the function whose variable `made` it came back in."""
    if references > ALONE or type(value) is not loaded_class("numpy", "ndarray"):
        return False
    return bool(value.flags.owndata) and not weakref.getweakrefcount(value)


def own_answers(answers: Any) -> Any:
    """Answers that share no memory with what their handler may keep, and fill anew for its next batch; on the CPU."""
    if isinstance(answers, dict):
        return {name: own_answers(part) for name, part in answers.items()}
    if not isinstance(answers, list):
        return own_column(answers) if is_arrow(answers) else _own(answers)
    kinds = set(map(type, answers))
    if kinds <= CONSTANT:
        return answers.copy()
    if kinds == {dict} and set(map(type, chain.from_iterable(map(dict.values, answers)))) <= CONSTANT:
        return list(map(dict.copy, answers))
    return list(map(_own, answers))


def _own(value: Any) -> Any:
    kind = type(value)
    if kind in CONSTANT:
        return value
    if kind is PredictionResult:
        return value._replace(inference=_own(value.inference))
    if kind is dict:
        return {name: _own(part) for name, part in value.items()}
    if kind is list or kind is tuple:
        return kind(value if not value or type(value[0]) in CONSTANT else map(_own, value))
    if (array := loaded_class("numpy", "ndarray")) is not None and isinstance(value, array):
        return value.copy()
    if not _is_tensor(value) or value.requires_grad:
        return value
    return value.clone() if value.device.type in ("cpu", "meta") else value.cpu()


def named(answers: Any, model_id: str, same: Collection[str]) -> Any:
    """Answers whose PredictionResults, which a handler has made, name the model that gave them: in place of none, or of
    another name of the same model. Any other name is the handler's own affair."""
    kinds = set(map(type, answers)) if isinstance(answers, list) else set()
    results = {kind for kind in kinds if getattr(kind, "_fields", ()) == PredictionResult._fields}  # Beam's, too
    if not results:
        return answers

    def is_named(answer: Any) -> bool:
        return type(answer) in results and (answer.model_id is None or str(answer.model_id) in same)

    return [answer._replace(model_id=model_id) if is_named(answer) else answer for answer in answers]


def put_together(rows: int, pieces: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """The answers to so many rows from those to some of them, each with its positions. A row that is in no piece has None in
    a list, and anything elsewhere: it has failed."""
    if len(pieces) == 1 and pieces[0][0] == range(rows):
        return pieces[0][1]
    kinds = {_kind(answers) for _, answers in pieces}
    if len(kinds) == 1 and (fill := kinds.pop()) is not None:
        return fill(rows, pieces)
    return _list_of(rows, [(positions, as_rows(answers)) for positions, answers in pieces])


def _kind(answers: Any) -> Callable[[int, Sequence[tuple[Sequence[int], Any]]], Any] | None:
    if isinstance(answers, list):
        return _list_of
    if isinstance(answers, dict):
        return _dict_of
    return _arrow_of if is_arrow(answers) else _array_of


def _list_of(rows: int, pieces: Sequence[tuple[Sequence[int], Any]]) -> list[Any]:
    made: list[Any] = [None] * rows
    for positions, answers in pieces:
        if isinstance(positions, range):
            made[positions.start : positions.stop] = answers
        else:
            for at, answer in zip(positions, answers, strict=True):
                made[at] = answer
    return made


def _dict_of(rows: int, pieces: Sequence[tuple[Sequence[int], Any]]) -> Any:
    names = pieces[0][1].keys()
    if any(answers.keys() != names for _, answers in pieces):
        return _list_of(rows, [(positions, as_rows(answers)) for positions, answers in pieces])
    parts = {name: put_together(rows, [(positions, answers[name]) for positions, answers in pieces]) for name in names}
    if any(isinstance(part, list) for part in parts.values()):  # of one output, the axes differ between batches
        return [dict(zip(parts, row, strict=True)) for row in zip(*map(as_rows, parts.values()), strict=True)]
    return parts


def _array_of(rows: int, pieces: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """One array, where all are of one kind and shape; else a list of arrays."""
    first = pieces[0][1]
    kind, shape, dtype = type(first), first.shape[1:], first.dtype
    if any(type(each) is not kind or each.shape[1:] != shape or each.dtype != dtype for _, each in pieces):
        return _list_of(rows, [(positions, as_rows(answers)) for positions, answers in pieces])
    size = (rows, *shape)
    made = first.new_zeros(size) if _is_tensor(first) else sys.modules["numpy"].zeros(size, dtype)
    for positions, answers in pieces:
        if isinstance(positions, range):
            made[positions.start : positions.stop] = answers
        else:
            made[list(positions)] = answers
    return made


def _arrow_of(rows: int, pieces: Sequence[tuple[Sequence[int], Any]]) -> Any:
    import pyarrow as pa

    tables = [pa.table({"": answers}) for _, answers in pieces]
    column = pa.concat_tables(tables, promote_options="permissive").column(0)
    places: list[int | None] = [None] * rows
    order = [at for positions, _ in pieces for at in positions]
    if order == list(range(rows)):
        return column
    for at, place in enumerate(order):
        places[place] = at
    return column.take(pa.array(places, pa.int64()))


def _is_tensor(array: Any) -> bool:
    tensor = loaded_class("torch", "Tensor")
    return tensor is not None and isinstance(array, tensor)
