"""What a PyTorch model computes with: the type of its weights, autocast, and whether it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    import torch

_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Checked when made. Types are names, so that describing a model imports no torch."""

    dtype: str | None = None
    autocast: str | None = None
    compiles: Mapping[str, Any] | None = None  # arguments of torch.compile(); None: it is not called

    @classmethod
    def of(cls, dtype: Any, autocast: Any, compile_: Any) -> Precision:
        """Out of a handler's arguments: torch's types or their names. Raises UsageError for what they cannot be."""
        if not isinstance(compile_, (bool, Mapping)):
            raise UsageError(f"compile={compile_!r}: expected True, False, or a dict of arguments of torch.compile()")
        options = {} if compile_ is True else compile_
        compiles = None if options is False else dict(options)
        return cls(dtype=_name("dtype", dtype), autocast=_name("autocast", autocast), compiles=compiles)

    def applied(self, model: torch.nn.Module) -> torch.nn.Module:
        """The loaded model, as it is to be called."""
        import torch

        if self.dtype is not None:
            model = model.to(getattr(torch, self.dtype))
        if self.compiles is not None:
            try:
                model = torch.compile(model, **self.compiles)
            except (TypeError, ValueError, RuntimeError) as exc:
                raise UsageError(f"compile={dict(self.compiles)}: torch.compile() does not take that: {exc}") from exc
        return model

    def calling(self, call: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """The call, under autocast if that is wanted, with outputs that the next call leaves as they are."""
        if self.compiles is not None and device.type == "cuda":
            call = _keeping_outputs(call)
        if self.autocast is None:
            return call
        import torch

        kind = getattr(torch, self.autocast)

        def cast(*inputs: Any, **named: Any) -> Any:
            with torch.autocast(device.type, kind):
                return call(*inputs, **named)

        return cast


def _keeping_outputs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Models that are compiled to CUDA graphs give the same memory each time, and the next batch runs while the answers of
    this one are fetched."""
    import torch
    from torch.utils import _pytree as trees

    def kept(*inputs: Any, **named: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return trees.tree_map_only(torch.Tensor, torch.Tensor.clone, call(*inputs, **named))

    return kept


def _name(setting: str, given: Any) -> str | None:
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    if name not in _FLOATS:
        raise UsageError(f"{setting}={given!r}: expected one of {', '.join(_FLOATS)}, or None")
    return name
