"""Building a PyTorch module whose weights come from a state dict, without drawing random ones first.

    model, first = FirstWeights.of(make)   # a random draw into a tensor waits, until anything looks at the tensor
    first.load(model, weights)             # what is overwritten is never drawn, and takes over the memory that was read,
                                           # on the device where that is

The model is the one that the ordinary way gives, whatever its class does with its weights. Draws are made in their order,
from the random state that they would have found; those that are never made leave that state as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_ATEN = torch.ops.aten
_DRAWS = frozenset((_ATEN.uniform_.default, _ATEN.normal_.default))
_FILLS = frozenset((_ATEN.fill_.Scalar, _ATEN.zero_.default))  # wait behind a draw: the row of nn.Embedding's padding_idx
_MAY_WAIT = _DRAWS | _FILLS
_MEMORY = frozenset(("numpy", "tolist", "data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_")) | {
    *("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__", "__setstate__")
}  # methods that reach a tensor's memory without an operator


class FirstWeights:
    """The draws of one model that wait. Used by the thread that makes the model."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._unseen: dict[int, list[int]] = {}  # by storage: which of these are for it
        self._state = torch.get_rng_state()  # that the first of them would have found
        self._given: frozenset[int] = frozenset()  # storages that may be taken over
        self._is_open = False  # memory was reached past the operators: from then on all goes the ordinary way

    @classmethod
    def of(cls, make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, FirstWeights]:
        """The module that make() returns, and what waits. If it raises, it is called again, in the ordinary way: there are
        operators that cannot be watched."""
        first = cls()
        try:
            with first._watching():
                return make(), first
        except Exception:
            torch.set_rng_state(first._state)
        return make(), cls()

    def load(self, model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
        """model.load_state_dict(weights), and what is left to be drawn. Nobody else may use the weights, then or later."""
        if isinstance(weights, Mapping):
            self._given = frozenset(_key(each) for each in weights.values() if _is_strided(each))
        with self._watching():
            model.load_state_dict(weights)
        if self._unseen:
            self._draw()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with _Operators(self), _Methods(self):
            yield

    # What is watched.

    def reach_memory(self) -> None:
        """Somebody may read or write memory from now on without being seen."""
        self._is_open = True
        self._draw()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator, now or later."""
        if self._can_wait(func, args, kwargs):
            self._wait(func, args)
            return args[0]
        if func is _ATEN.copy_.default and self._is_overwritten(*args[:2]):
            self._overwrite(args[0])
            if _is_strided(args[1]) and _key(args[1]) in self._given and _may_take_over(args[0], args[1]):
                return _taken_over(args[0], args[1])
        elif self._waiting and not _is_view(func) and (_is_random(func) or self._is_any_unseen(args, kwargs)):
            self._draw()
        return func(*args, **kwargs)

    def _can_wait(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._is_open or kwargs or func not in _MAY_WAIT or not _is_own(args[0]):
            return False
        return bool(args[0].is_contiguous() and args[0].numel()) if func in _DRAWS else self._is_unseen(args[0])

    def _wait(self, func: Any, args: tuple[Any, ...]) -> None:
        state = torch.get_rng_state()
        if self._waiting and not torch.equal(state, self._state):  # somebody has set the seed
            self._draw()
        self._state = state
        self._unseen.setdefault(_key(args[0]), []).append(len(self._waiting))
        self._waiting.append(_Waiting(func, args[0], args[1:]))

    def _is_unseen(self, value: object) -> bool:
        if not self._unseen or not isinstance(value, torch.Tensor):
            return False
        return _key(value) in self._unseen if _has_memory(value) else type(value) not in _ORDINARY  # made of others, maybe

    def _is_any_unseen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        for value in (*args, *kwargs.values()):
            if any(map(self._is_unseen, value)) if isinstance(value, (list, tuple)) else self._is_unseen(value):
                return True
        return False

    def _is_overwritten(self, tensor: torch.Tensor, by: object) -> bool:
        """Whether nothing of what is there is left, or looked at."""
        return not self._is_open and _is_own(tensor) and _is_whole(tensor) and not self._is_unseen(by)

    def _overwrite(self, tensor: torch.Tensor) -> None:
        """Nobody will see what was to be drawn there; who draws after it gets the numbers that come after it."""
        for at in self._unseen.pop(_key(tensor), ()):
            self._waiting[at] = self._waiting[at].for_nobody()

    def _draw(self) -> None:
        """As if nothing had waited."""
        waiting, self._waiting, self._unseen = self._waiting, [], {}
        if not waiting:
            return
        now = torch.get_rng_state()
        is_reset = not torch.equal(now, self._state)
        if is_reset:
            torch.set_rng_state(self._state)
        with torch.no_grad():
            for each in waiting:
                each.run()
        if is_reset:
            torch.set_rng_state(now)


class _Waiting(NamedTuple):
    """An operator that was not run."""

    func: Any
    tensor: torch.Tensor
    numbers: tuple[Any, ...]

    def for_nobody(self) -> _Waiting:
        return self._replace(tensor=torch.empty_like(self.tensor, device="meta"))

    def run(self) -> None:
        tensor = torch.empty_like(self.tensor, device="cpu") if self.tensor.is_meta else self.tensor
        self.func(tensor, *self.numbers)


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    """All operators of this thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second and is not used here

    def __init__(self, first: FirstWeights) -> None:
        super().__init__()
        self._first = first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # what is looked at here is no look of the model's
            return self._first.run(func, args, kwargs or {})


class _Methods(TorchFunctionMode):  # type: ignore[misc]
    """All methods and functions of tensors that this thread calls."""

    def __init__(self, first: FirstWeights) -> None:
        super().__init__()
        self._first = first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _MEMORY:
            self._first.reach_memory()
        return func(*args, **(kwargs or {}))


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether it only looks at where a tensor is, not at what is in it. Some that are made of others, such as reshape(), may
    copy; they come here whole in inference mode."""
    return bool(func.is_view) and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_strided(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is an ordinary tensor."""
    return type(value) in _ORDINARY and cast(torch.Tensor, value).layout is torch.strided


def _has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is an ordinary tensor on the CPU."""
    return _is_strided(value) and value.device.type == "cpu"


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    return _is_strided(value) and not value.is_quantized and not value.is_conj() and not value.is_neg()


def _is_own(value: object) -> TypeGuard[torch.Tensor]:
    """Whether its memory is torch's own: what NumPy or another process has, they may look at unseen."""
    if not _has_memory(value) or not _is_plain(value):
        return False
    return bool(value.untyped_storage().resizable()) and not value.is_shared()


def _key(tensor: torch.Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether it is all that its storage has."""
    return (
        _is_plain(tensor)
        and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor has a part of its storage."""
    count = getattr(torch._C, "_storage_Use_Count", None)  # not public
    return count is not None and count(tensor.untyped_storage()._cdata) == 2  # the tensor, and the one who asks


def _is_exchangeable(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor of the one device can become one of the other."""
    test = getattr(torch, "_has_compatible_shallow_copy_type", None)  # not public
    return tensor.device == other.device or (test is not None and bool(test(tensor, other)))


def _may_take_over(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it makes no difference if a tensor has the storage of another from now on, instead of a copy. One that is on
    a device takes the tensor there, where the model is to be."""
    return (
        _is_whole(other)
        and (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride())
        and bool(tensor.numel())
        and _is_exchangeable(tensor, other)
        and not tensor._is_view()
        and _is_alone(tensor)
        and _is_alone(other)
    )


def _taken_over(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The tensor, with the storage of the other."""
    if tensor.device == other.device:
        return tensor.set_(other.untyped_storage(), 0, tensor.size(), tensor.stride())
    tensor.data = other
    return tensor
