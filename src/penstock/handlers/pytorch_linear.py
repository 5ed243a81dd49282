"""Linear layers on AMD's processors, where torch leaves them to MKL.

MKL computes with half of the width of these processors' registers; oneDNN, which torch has for convolutions, with all of it:
2.1 to 2.3 times the speed (EPYC, Zen 5). Both compute in float32, with sums in another order.
"""

from __future__ import annotations

import functools
import weakref
from pathlib import Path

import torch

_LEAST = 1 << 21  # multiplications in a call that are worth the 12 us which oneDNN needs by itself
_SEEN: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class OneDnnLinear(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer that oneDNN computes where that is quicker; what it cannot take, torch computes as ever."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that torch has for it
        if input.numel() * self.out_features < _LEAST or not self._takes(input):
            return super().forward(input)
        return _computed(input, self.weight, self.bias)

    def _takes(self, rows: torch.Tensor) -> bool:
        weight = self.weight
        return (
            type(rows) is torch.Tensor
            and type(weight) is torch.nn.Parameter  # and none of torchao's tensors, say, which say that they are floats
            and rows.dtype is weight.dtype is torch.float32
            and rows.layout is weight.layout is torch.strided
            and rows.device.type == weight.device.type == "cpu"
            and rows.dim() > 1
            and rows.shape[-1] == self.in_features
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
        )


def quicken(model: object) -> None:
    """Have the linear layers of a model that is to be called computed by oneDNN where that is quicker. They are looked for
    when this is first called for the model: until then it is as load_model() made it, for subclasses which change it."""
    if not isinstance(model, torch.nn.Module) or model in _SEEN:
        return
    if _is_quicker() and torch.backends.mkldnn.enabled:
        for module in model.modules():
            if type(module) is torch.nn.Linear and module.weight.device.type == "cpu":
                module.__class__ = OneDnnLinear
    _SEEN.add(model)


def _computed(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return made


@functools.cache
def _is_quicker() -> bool:
    """By the kind of processor and not by a clock, so that all processes of a run compute in one way."""
    if not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return is_amd and _is_known()


def _is_known() -> bool:
    """Whether this torch has the operator, which it has for its own compiler, as it is called here."""
    rows, weight = torch.linspace(-1, 1, 4_096).view(64, 64), torch.linspace(1, 2, 4_096).view(64, 64)
    try:
        with torch.inference_mode():
            return bool(torch.allclose(_computed(rows, weight, None), rows @ weight.T, atol=1e-3))
    except (AttributeError, RuntimeError, TypeError):
        return False
