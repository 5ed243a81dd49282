"""What a model returned for a batch, as one answer for each row. The same for all frameworks:

- an array has the rows first; a list, or whatever can be iterated, has one answer for each;
- a dict is several outputs by name, and gives one dict per row; so do a named tuple and a dataclass, by their fields;
- a tuple of arrays is several outputs without names, and gives one tuple per row; in a table they are called "0", "1", ...

Where a model's outputs are in lists in lists, these are ModelOutputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import PredictionCountError

NO_ROWS = (str, bytes, set, frozenset)  # have a length, but are no answers in order


class ModelOutputs(tuple[Any, ...]):
    """ModelOutputs of a model, in order, whatever they are: any other tuple may hold an answer for each row."""


def answers_of(output: Any, rows: int, name: str = "") -> Any:
    """What the model returned, if it is exactly one answer per row: a sequence, or a dict of arrays. A dict of anything else
    becomes one dict per row. An error says the name of the output that has another number."""
    output = by_name(output)
    if isinstance(output, Mapping) and output:
        parts = {key: answers_of(part, rows, f"{name}[{key!r}]") for key, part in output.items()}
        if all(hasattr(part, "dtype") for part in parts.values()):
            return parts
        return [dict(zip(parts, answers, strict=True)) for answers in zip(*map(as_rows, parts.values()), strict=True)]
    if is_several(output):
        split = [as_rows(answers_of(part, rows, f"{name}[{at}]")) for at, part in enumerate(output)]
        return list(zip(*split, strict=True))
    if hasattr(output, "to_numpy"):  # a frame would be iterated by column
        output = output.to_numpy()
    elif isinstance(output, Iterator):
        output = list(output)
    check_count(output, rows, name)
    return output


def column_answers_of(output: Any, rows: int) -> Any:
    """answers_of() for a table, where the parts of a tuple are named by their numbers: "0", "1", ..."""
    return answers_of(_numbered(output), rows)


def _numbered(output: Any) -> Any:
    output = by_name(output)
    if is_several(output):
        return {str(at): _numbered(part) for at, part in enumerate(output)}
    return {name: _numbered(part) for name, part in output.items()} if isinstance(output, Mapping) else output


def tuples_by_number(answers: Any) -> Any:
    """Answers for a table: of a list of tuples, dicts with the same names."""
    if not isinstance(answers, list) or not all(type(answer) is tuple for answer in answers):
        return answers
    return [{str(at): part for at, part in enumerate(answer)} for answer in answers]


def by_name(output: Any) -> Any:
    """A named tuple or a dataclass as a dict of its fields, without those that are None; all else as it is. What is a dict
    already, as the outputs of transformers are, stays one."""
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        fields = output._asdict()
    elif dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    else:
        return output
    return {name: part for name, part in fields.items() if part is not None}


def is_several(output: Any) -> bool:
    """Whether it is a tuple of arrays, each an output with the rows first."""
    if isinstance(output, ModelOutputs):
        return bool(output)
    return isinstance(output, tuple) and bool(output) and all(getattr(part, "shape", None) for part in output)


def check_count(output: Any, rows: int, name: str = "", told: str = "") -> None:
    """PredictionCountError unless it has so many answers. told: which rows these are."""
    count = _count_of(output)
    if count != rows:
        shape = f" of shape {tuple(output.shape)}" if hasattr(output, "shape") else ""
        where = f" as output{name}" if name else ""
        raise PredictionCountError(
            f"the model returned {count} answers ({type(output).__name__}{shape}){where} for {rows} rows{told}; it must "
            "return one per row, in the same order, with the rows first: see inference_fn"
        )


def _count_of(output: Any) -> int:
    if hasattr(output, "shape"):
        return output.shape[0] if output.shape else 0
    return len(output) if hasattr(output, "__len__") and not isinstance(output, NO_ROWS) else 0


def as_rows(answers: Any) -> Any:
    """Of a dict of arrays, one dict for each row; all else has its rows first."""
    if not isinstance(answers, dict):
        return answers
    return [dict(zip(answers, row, strict=True)) for row in zip(*answers.values(), strict=True)]
