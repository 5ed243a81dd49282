"""Tensors between processes, as NumPy arrays: only who asks for a tensor needs PyTorch."""

from __future__ import annotations

import sys
from typing import Any


class SentTensor:
    """A tensor that comes from another process: its rows can be cut and picked as they are."""

    __slots__ = ("array", "is_bfloat16")

    def __init__(self, array: Any, is_bfloat16: bool = False) -> None:
        self.array = array
        self.is_bfloat16 = is_bfloat16  # NumPy has no such type: the bits are in numbers of 16 bits

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, at: Any) -> SentTensor:
        return SentTensor(self.array[at], self.is_bfloat16)

    def numpy(self) -> Any:
        """The numbers; bfloat16 as float32."""
        if not self.is_bfloat16:
            return self.array
        return (self.array.view("uint16").astype("uint32") << 16).view("float32")

    def tensor(self) -> Any:
        return tensor_of(self.array, "bfloat16" if self.is_bfloat16 else None)


def sent(answers: Any) -> Any:
    """Answers on their way: plain tensors as arrays, and whatever else as it is."""
    if isinstance(answers, dict):
        return {name: sent(part) for name, part in answers.items()}
    parts = parts_of(answers)
    if parts is None or parts[1] not in (None, "bfloat16"):
        return answers
    return SentTensor(parts[0], parts[1] is not None)


def received(answers: Any, *, as_tensors: bool) -> Any:
    """Answers that came: tensors, or NumPy arrays for whoever makes columns of them."""
    if isinstance(answers, dict):
        return {name: received(part, as_tensors=as_tensors) for name, part in answers.items()}
    if not isinstance(answers, SentTensor):
        return answers
    return answers.tensor() if as_tensors else answers.numpy()


def parts_of(value: Any) -> tuple[Any, str | None] | None:
    """What tensor_of() makes a plain tensor of the CPU of, with what a tensor on a device has in it; None for anything else.
    Of a view, its own elements only."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not getattr(torch, "Tensor", None):
        return None
    if value.device.type not in ("cpu", "meta") and not value.requires_grad:
        value = value.cpu()  # whoever reads it may have no such device, and would need a share of its memory
    if not is_plain(torch, value):
        return None
    if is_beyond_numpy(value.dtype):
        bits = torch.int16 if value.itemsize == 2 else torch.int8
        return value.contiguous().view(bits).numpy(), str(value.dtype).removeprefix("torch.")
    return value.contiguous().numpy(), None


def is_plain(torch: Any, tensor: Any) -> bool:
    strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return strided and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def is_beyond_numpy(dtype: Any) -> bool:
    """Whether it is a type of tensors of which NumPy has no arrays."""
    return str(dtype).startswith(("torch.bfloat16", "torch.float8"))


def tensor_of(array: Any, kind: str | None = None) -> Any:
    """kind: of tensors that NumPy has no arrays of, whose bits are in the array's numbers."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor if kind is None else tensor.view(getattr(torch, kind))
