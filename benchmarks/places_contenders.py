"""Calls to a model in another process: Penstock's host, Beam's MultiProcessShared, and memcpy for the limit.

Every function runs in a fresh process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from workload import Stopwatch, outcome

import penstock as ps
from penstock.inference.lane import Caller
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.models.host_address import end_hosts, run_folder
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics

PROCESSES = 4  # that call
_loaded_here: list[Any] = []  # models: a host that is not there would be a model in the caller's process


def _where() -> str:
    return "in the caller's process" if _loaded_here else "in another process"


@contextlib.contextmanager
def _run() -> Iterator[Surroundings]:
    """What the engine tells its processes; the hosts that they start end with it."""
    around = Surroundings(folder=run_folder(uuid.uuid4().hex), workers=PROCESSES, cores=os.cpu_count() or 1)
    try:
        yield around
    finally:
        end_hosts(around.folder)


# A batch of images there, and as many bytes back.

IMAGE, IMAGES, WARM_UP, TRIPS = (3, 224, 224), 64, 5, 40


class Images:
    """A model whose answers are ready: other arrays than its inputs, as many and as large."""

    def __init__(self, read: bool) -> None:
        _loaded_here.append(self)
        self._read = read
        self._answers = np.ones((IMAGES, *IMAGE), np.float32)

    def predict(self, batch: Any) -> Any:
        """Images in a list, or stacked in one array; the answers come in the same form."""
        look_at(batch, self._read)
        return list(self._answers) if isinstance(batch, list) else self._answers


def look_at(images: Iterable[Any], read: bool) -> float:
    """The first value of each image, or the sum of all its values: memory that is mapped late has to be there then."""
    return float(sum(image.sum() if read else image[0, 0, 0] for image in images))


class ImageHandler(ps.ModelHandler[Any, Any, Images]):
    def __init__(self, read: bool, **settings: Any) -> None:
        super().__init__(min_batch_size=IMAGES, max_batch_size=IMAGES, **settings)
        self.read = read

    def load_model(self) -> Images:
        return Images(self.read)

    def run_inference(self, batch: Sequence[Any], model: Images, inference_args: Any = None) -> Any:
        return model.predict(list(batch))


def penstock_trips(read: bool) -> dict[str, Any]:
    """A list of arrays, as rows are, from its submission to its answers."""
    with _run() as around, contextlib.closing(ProcessSessions(Metrics(), around)) as sessions:
        session = sessions.open("step", InferenceSpec.of(ImageHandler(read, large_model=True)))
        lane = session.join(Caller())

        def trip(batch: Any) -> Any:
            ticket = Ticket(batch)
            lane.submit(ticket)
            return lane.wait(ticket)

        return _trips(trip, read)


def beam_trips(read: bool, stacked: bool) -> dict[str, Any]:
    """The model in a process of its own, which is more than RunInference asks for: it leaves it with the first caller."""
    from apache_beam.utils.multi_process_shared import MultiProcessShared

    server = MultiProcessShared(_Make(Images, read), tag="images", always_proxy=True, spawn_process=True)
    return _trips(server.acquire().predict, read, stacked)


def memcpy_trips(read: bool) -> dict[str, Any]:
    """Every array copied there, and one of the model's copied back, into memory that is ready."""
    model = Images(read)
    there, back = ([np.zeros(IMAGE, np.float32) for _ in range(IMAGES)] for _ in range(2))

    def trip(batch: Any) -> Any:
        for target, image in zip(there, batch, strict=True):
            np.copyto(target, image)
        for target, image in zip(back, model.predict(there), strict=True):
            np.copyto(target, image)
        return back

    return _trips(trip, read)


def _trips(trip: Callable[[Any], Any], read: bool, stacked: bool = False) -> dict[str, Any]:
    """The median over many batches, one at a time, after those that load the model and warm up. The caller lets go of
    the answers before it sends the next batch."""
    images = np.full((IMAGES, *IMAGE), 2, np.float32)
    batch = images if stacked else list(images)
    seconds, total = [], 0.0
    for _ in range(WARM_UP + TRIPS):
        with Stopwatch() as watch:
            answers = trip(batch)
            total = look_at(answers, read)
        del answers
        seconds.append(watch.seconds)
    watch.seconds = statistics.median(seconds[WARM_UP:])
    return outcome(watch, IMAGES, f"{total:.0f}, {_where()}")


class _Make:
    """A constructor with its arguments that other processes can unpickle."""

    def __init__(self, kind: type, *args: Any) -> None:
        self._kind, self._args = kind, args

    def __call__(self) -> Any:
        return self._kind(*self._args)


# Single rows from many threads, to a model that takes as long for one row as for many.

THREADS, ROWS_PER_THREAD, CALL_SECONDS = 8, 50, 0.01

Visit = Callable[[Iterable[int]], int]  # one thread's rows, each asked when the one before is answered: their sum


class Device:
    """One call at a time, and each takes the same."""

    def __init__(self) -> None:
        _loaded_here.append(self)
        self._lock = threading.Lock()

    def predict(self, batch: list[int]) -> list[int]:
        with self._lock:
            time.sleep(CALL_SECONDS)
        return [row + 1 for row in batch]


class DeviceHandler(ps.ModelHandler[int, int, Device]):
    def load_model(self) -> Device:
        return Device()

    def run_inference(self, batch: Sequence[int], model: Device, inference_args: Any = None) -> list[int]:
        return model.predict(list(batch))


def penstock_crowd() -> dict[str, Any]:
    with _run() as around:
        return _crowd(_through_host, around)


def _through_host(around: Surroundings) -> Visit:
    session = ProcessSessions(Metrics(), around).open("step", InferenceSpec.of(DeviceHandler(large_model=True)))

    def visit(rows: Iterable[int]) -> int:
        lane, total = session.join(Caller()), 0
        for row in rows:
            ticket = Ticket([row])
            lane.submit(ticket)
            total += lane.wait(ticket)[0]
        lane.close()
        return total

    return visit


def beam_crowd() -> dict[str, Any]:
    """As RunInference shares a model: every caller calls it for itself. It lives in this process, which does not call."""
    _through_proxy(Device)  # the first who asks for it serves it
    return _crowd(_through_proxy, Device)


def _through_proxy(model: type[Device]) -> Visit:
    from apache_beam.utils.multi_process_shared import MultiProcessShared

    device = MultiProcessShared(model, tag="device", always_proxy=True).acquire()
    return lambda rows: sum(device.predict([row])[0] for row in rows)


def _crowd(connect: Callable[[Any], Visit], given: Any) -> dict[str, Any]:
    """The clock runs from when all threads of all processes have had one answer until all have had the rest."""
    context = multiprocessing.get_context("spawn")
    gate, said = context.Barrier(PROCESSES + 1, timeout=60), context.SimpleQueue()
    given_to_each = (connect, given, gate, said)
    processes = [context.Process(target=_call_from_threads, args=given_to_each) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    gate.wait()
    with Stopwatch() as watch:
        gate.wait()
    checksum = " / ".join(sorted({said.get() for _ in processes}))
    for process in processes:
        process.join()
    return outcome(watch, PROCESSES * THREADS * ROWS_PER_THREAD, checksum)


def _call_from_threads(connect: Callable[[Any], Visit], given: Any, gate: Any, said: Any) -> None:
    visit = connect(given)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(visit, [[0]] * THREADS))
        gate.wait()
        total = sum(pool.map(visit, [range(ROWS_PER_THREAD)] * THREADS))
        gate.wait()
    said.put(f"{total} for each process, {_where()}")
