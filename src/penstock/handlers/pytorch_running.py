"""Running a batch on its device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Move: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"

# One thread launches, while the device is at work behind it: modules need not be thread-safe, and cuDNN plans each shape
# once for a thread.
_LAUNCHER = ThreadPoolExecutor(1, "penstock-launch")

_OWN = threading.local()  # of each thread: seconds of its batches


def run_on(device: torch.device, run: Callable[[Move], Any], fetch: Callable[[Any], T]) -> T:
    """fetch(run(move)), where move() brings a tensor to the device, and fetch() brings answers from it. On a GPU this thread
    waits for its own batch alone, on a stream of its own, so that another can set up the next one meanwhile; the device
    runs them in turn."""
    import torch

    if device.type != "cuda":
        with torch.inference_mode():
            output = run(lambda tensor: tensor.to(device))
        return fetch(output)
    output, began, done = _LAUNCHER.submit(_launch, run, device).result()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        done.wait()
        fetched = fetch(output)
    done.synchronize()
    _OWN.seconds = getattr(_OWN, "seconds", 0.0) + began.elapsed_time(done) / 1e3
    return fetched


def take_device_seconds() -> float | None:
    """How long a GPU was at work on what this thread ran by run_on() since it last asked; None: on nothing."""
    seconds: float = getattr(_OWN, "seconds", 0.0)
    _OWN.seconds = 0.0
    return seconds or None


def _launch(run: Callable[[Move], Any], device: torch.device) -> tuple[Any, torch.cuda.Event, torch.cuda.Event]:
    """What it gives, and when the device began and ended it: all batches are on one stream, where one begins when the one
    before has ended."""
    import torch

    stream = torch.cuda.current_stream(device)
    began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        began.record(stream)
        output = run(lambda tensor: _pinned(tensor).to(device, non_blocking=True))
        done.record(stream)
        return output, began, done


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that a device reads by itself: the copy does not wait for what the device is at."""
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
