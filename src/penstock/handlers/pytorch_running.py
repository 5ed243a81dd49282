"""Running a batch on its device."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
InputsT = TypeVar("InputsT", bound="torch.Tensor | dict[str, torch.Tensor]")

# One thread launches, while the device is at work behind it: modules need not be thread-safe, and cuDNN plans each shape
# once for a thread.
_LAUNCHER = ThreadPoolExecutor(1, "penstock-launch")

_OWN = threading.local()  # of each thread: seconds of its batches


def run_on(device: torch.device, inputs: InputsT, run: Callable[[InputsT], Any], fetch: Callable[[Any], T]) -> T:
    """fetch(run(inputs)), with the inputs, a tensor or a dict of them, on the device; fetch() brings answers from it. On a
    GPU this thread waits for its own batch alone, on a stream of its own, so that another can set up the next one meanwhile;
    the device runs them in turn."""
    import torch

    if device.type != "cuda":
        with torch.inference_mode():
            output = run(_moved(inputs, lambda tensor, _: tensor.to(device)))
        return fetch(output)
    staged = _moved(inputs, _PINNED.staged)
    output, began, done = _LAUNCHER.submit(_launch, staged, run, device).result()  # launched, and not yet computed
    with torch.cuda.stream(torch.cuda.Stream(device)):  # not the launcher's, where others were launched since
        done.wait()
        fetched = fetch(output)
    done.synchronize()  # before this thread fills its pinned memory again, and for the time that it took
    _OWN.seconds = getattr(_OWN, "seconds", 0.0) + began.elapsed_time(done) / 1e3
    return fetched


def attention_without_plans(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Inside, attention on a GPU is computed by kernels that take every shape as it comes. cuDNN's make a plan for each new
    one: where lengths differ from batch to batch they ran at 0.65 to 0.85 of this speed, at known shapes at 1.04 (H200)."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    context: contextlib.AbstractContextManager[None] = sdpa_kernel(kernels)
    return context


def take_device_seconds() -> float | None:
    """How long a GPU was at work on what this thread ran by run_on() since it last asked; None: on nothing."""
    seconds: float = getattr(_OWN, "seconds", 0.0)
    _OWN.seconds = 0.0
    return seconds or None


def _launch(
    staged: InputsT, run: Callable[[InputsT], Any], device: torch.device
) -> tuple[Any, torch.cuda.Event, torch.cuda.Event]:
    """What it gives, and when the device began and ended it: all batches are on one stream, where one begins when the one
    before has ended."""
    import torch

    stream = torch.cuda.current_stream(device)
    began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        began.record(stream)
        output = run(_moved(staged, lambda tensor, _: tensor.to(device, non_blocking=True)))
        done.record(stream)
        return output, began, done


def _moved(inputs: InputsT, move: Callable[[torch.Tensor, int], torch.Tensor]) -> InputsT:
    """The inputs with every tensor moved; each has a number."""
    if isinstance(inputs, dict):
        made: Any = {name: move(tensor, at) for at, (name, tensor) in enumerate(inputs.items())}
    else:
        made = move(inputs, 0)
    return made  # type: ignore[no-any-return]


class _Pinned(threading.local):
    """Memory that a device reads by itself, so that a copy does not wait for what the device is at: of each thread, used
    again for each of its batches, because making it takes longer than filling it. A thread has one batch at a time."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def staged(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The tensor in the buffer of this number."""
        import torch

        if tensor.device.type != "cpu" or not tensor.numel():
            return tensor
        size = tensor.numel() * tensor.element_size()
        buffer = self._buffers.get(number)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[number] = torch.empty(size + size // 2, dtype=torch.uint8, pin_memory=True)
        return buffer[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


_PINNED = _Pinned()


def on_gpu(device: str) -> bool:
    """Whether a model on the device of this name is on a GPU. It is asked where rows are prepared, too: torch is not
    imported for it."""
    return device.startswith("cuda") and _sees_cuda()


def _sees_cuda() -> bool:
    """Whether there is a CUDA device for the model: by torch where it is loaded, else by what the system shows."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return bool(torch.cuda.is_available())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen not in ("", "-1") and any(re.fullmatch(r"nvidia\d+", path.name) for path in Path("/dev").glob("nvidia*"))
