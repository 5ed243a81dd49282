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


def run_on(device: torch.device, inputs: InputsT, run: Callable[[InputsT], Any], fetch: Callable[[Any], T]) -> T:
    """fetch(run(inputs)), with the inputs, a tensor or a dict of them, on the device; fetch() brings answers from it. On a
    GPU this thread copies its own batch there and its answers back, on a stream of its own, and waits for these alone, so
    that batches are copied while the one before is computed; the device computes them in turn."""
    import torch

    if device.type != "cuda":
        with torch.inference_mode():
            output = run(_moved(inputs, lambda tensor, _: tensor.to(device)))
        return fetch(output)
    staged, own = _moved(inputs, _OWN.staged), _OWN.stream(device)
    with torch.inference_mode(), torch.cuda.stream(own):  # not the launcher's, where the batch before is computed
        copied = _moved(staged, lambda tensor, _: tensor.to(device, non_blocking=True))
        there = own.record_event()
        launched = _LAUNCHER.submit(_launch, copied, there, run, device)
        output, began, done = launched.result()  # it is not yet computed
        done.wait()
        fetched = fetch(output)
    done.synchronize()  # before the inputs are freed and the pinned memory is filled again, and for the time that it took
    _OWN.seconds += began.elapsed_time(done) / 1e3
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
    seconds, _OWN.seconds = _OWN.seconds, 0.0
    return seconds or None


def _launch(
    copied: InputsT, there: torch.cuda.Event, run: Callable[[InputsT], Any], device: torch.device
) -> tuple[Any, torch.cuda.Event, torch.cuda.Event]:
    """What it gives, and when the device began and ended it: all batches are on one stream, where one begins when the one
    before has ended. `there`: when the inputs, which another stream copies, are on the device."""
    import torch

    stream = torch.cuda.current_stream(device)
    began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        stream.wait_event(there)
        began.record(stream)
        output = run(copied)
        done.record(stream)
        return output, began, done


def _moved(inputs: InputsT, move: Callable[[torch.Tensor, int], torch.Tensor]) -> InputsT:
    """The inputs with every tensor moved; each has a number."""
    if isinstance(inputs, dict):
        made: Any = {name: move(tensor, at) for at, (name, tensor) in enumerate(inputs.items())}
    else:
        made = move(inputs, 0)
    return made  # type: ignore[no-any-return]


class _Own(threading.local):
    """What each thread has for its batches, of which it runs one at a time: a stream for copies, and memory that a device
    reads by itself, so that a copy does not wait for what the device is at. Both are used again: making the memory takes
    longer than filling it, and each stream keeps memory of the device."""

    def __init__(self) -> None:
        self.seconds = 0.0  # that a GPU was at work
        self._buffers: dict[int, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        import torch

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

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


_OWN = _Own()


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
