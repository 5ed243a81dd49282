"""Rows of tensors of different lengths as one batch: padded at the end of their first axis, with a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRowsError, RowError, UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Which keys are padded, each with its value, and what the mask is called. Checked when made."""

    values: Mapping[str, float]
    mask: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping) or not self.values:
            raise UsageError(f'pad={self.values!r}: expected keys and what fills them up, such as {{"input_ids": 0}}')
        if self.mask in self.values:
            raise UsageError(f"mask={self.mask!r} is one of the keys that pad= names; give it another name, or None")

    def length_of(self, row: Any) -> int:
        """How long a row is; 1 where it is none that could be padded, which the batch says."""
        first: Any = row.get(next(iter(self.values))) if isinstance(row, Mapping) else None
        is_list = hasattr(first, "__len__") and getattr(first, "shape", True) != ()
        return max(len(first), 1) if is_list else 1

    def padded(
        self, rows: Sequence[Mapping[str, torch.Tensor]], pad_to: Callable[[int], int]
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        """The keys that are padded, and the mask, as one tensor each; and the rows with the other keys."""
        self._check(rows)
        lengths = [self.length_of(row) for row in rows]
        length = pad_to(max(lengths))
        made = {name: _filled([row[name] for row in rows], length, value) for name, value in self.values.items()}
        if self.mask is not None:
            made[self.mask] = self._masks(rows, length)
        return made, [{name: value for name, value in row.items() if name not in made} for row in rows]

    def _masks(self, rows: Sequence[Mapping[str, torch.Tensor]], length: int) -> torch.Tensor:
        """1 where a row has a value; of rows with masks of their own, these."""
        import torch

        lengths = [len(row[next(iter(self.values))]) for row in rows]
        if any(self.mask in row for row in rows):
            made = [torch.ones(own).long() for own in lengths]
            return _filled([row.get(str(self.mask), ones) for row, ones in zip(rows, made, strict=True)], length, 0)
        return (torch.arange(length) < torch.tensor(lengths).unsqueeze(1)).long()

    def _check(self, rows: Sequence[Any]) -> None:
        bad: dict[int, Exception] = {}
        for at, row in enumerate(rows):
            names = [*self.values, *([self.mask] if isinstance(row, Mapping) and self.mask in row else [])]
            seen = {name: _length(row.get(name)) for name in names} if isinstance(row, Mapping) else {}
            if not seen or None in seen.values() or len(set(seen.values())) > 1:
                bad[at] = RowError(f"the keys {names}, which pad= names, must be tensors of one length, but saw {seen}")
        if bad:
            raise BadRowsError(bad)


def _length(value: Any) -> int | None:
    return len(value) if getattr(value, "ndim", 0) else None


def _filled(tensors: Sequence[torch.Tensor], length: int, value: float) -> torch.Tensor:
    first = tensors[0]
    if any(tensor.dtype != first.dtype for tensor in tensors):  # they would become those of the first
        seen = sorted({str(tensor.dtype) for tensor in tensors})
        raise RowError(f"the rows of one batch must have one type, but saw {', '.join(seen)}; convert them in a step before")
    made = first.new_full((len(tensors), length, *first.shape[1:]), value)
    for at, tensor in enumerate(tensors):
        made[at, : len(tensor)] = tensor
    return made
