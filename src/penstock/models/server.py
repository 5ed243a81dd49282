"""The process of a model host that holds the model. It does what the broker says, and ends with it.

Its main thread runs batches, or several threads do where the handler allows it; one more thread reads messages and unpacks
rows, so that the next batch is at hand when one ends. Where there are many models, further threads load them beside that.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from penstock.answers import Together, pick
from penstock.blocks import Block, gather
from penstock.errors import ModelLostError, NotShippableError
from penstock.failures import LOADING, Failure
from penstock.models.freed_memory import FreedMemory
from penstock.models.messages import (
    Bring,
    Calling,
    Freed,
    HostReady,
    Leaks,
    Load,
    Loaded,
    LoadFailed,
    ModelLost,
    ModelResized,
    Payload,
    Raised,
    Ran,
    RunRows,
    Unload,
)
from penstock.models.outcome import Outcome
from penstock.models.residency import LOADS_AT_ONCE
from penstock.rows import PredictionResult, safe_str
from penstock.transport.channel import INLINE_BYTES, Channel
from penstock.transport.packing import length, load_pickle, pack, unpack
from penstock.transport.reports import ErrorReport
from penstock.transport.segments import Leases, Segment, Segments
from penstock.transport.tensors import sent

GC_THRESHOLD = 100_000
MOST_SEGMENTS = 200  # in a message: each has a descriptor


class Served(Protocol):
    """What a host holds: it arrives pickled, and is all of the user's that a host runs."""

    def open(self, resized: Callable[[str, int], None]) -> None:
        """Called once, before anything else, in the process that the models will be in. resized(model, bytes): to be told
        of one of many models that a new version has taken its place."""

    def load(self, model: str | None) -> Loaded:
        """Load a model."""

    def unload(self, model: str) -> None:
        """Let go of it."""

    def run(
        self,
        model: str | None,
        batch: Block,
        how: Any,
        calling: Callable[[], None],
        final: bool,
        read_again: Callable[[], Block],
    ) -> Outcome:
        """The answers to a batch; calling() before each call of the model. Unless it is final, rows that do not fit alone
        are left for a fresh process. The model may change the batch; read_again() gives it as it was."""

    def is_out_of_memory(self, model: str, error: BaseException) -> bool:
        """Whether the last load of one of many models, which has raised this, failed for the lack of memory."""

    def without_unpackable(self, outcome: Outcome, how: Any) -> Outcome | None:
        """The outcome with failures instead of answers that cannot be sent; None where that helps nothing."""

    step: str
    device_bytes: int | None  # that they may take, if they are on a device; known after open()
    many: bool  # models, by name; else there is one, None


class _Job(NamedTuple):
    batch: int
    model: str | None
    rows: Block
    how: Any
    readers: list[int]
    sizes: list[int]  # rows of each piece
    final: bool
    read_again: Callable[[], Block]


class _Entry(NamedTuple):
    """Rows that were submitted together."""

    block: Block
    how: Any
    read_again: Callable[[], memoryview]

    def anew(self) -> Block:
        """The rows as they came, whatever a model has made of the block."""
        (block,) = unpack(self.read_again())
        return block


def main(descriptor: str, concurrent: str, timed: str, dumps: str) -> None:
    """The entry of a fresh interpreter: the socket's descriptor, how many batches run at once, whether calls are timed,
    and whether it says where it crashed: a row that kills one process after the other does so in one place."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the broker ignores them, and what a process ignores its children do
        signal.signal(number, signal.SIG_DFL)
    _die_with_parent()
    if sys.stderr is not None and dumps == "dumps":
        faulthandler.enable(all_threads=False)
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    _Server(Channel(socket.socket(fileno=int(descriptor)), plain=True), int(concurrent), timed == "timed").serve()


class _Server:
    def __init__(self, channel: Channel, concurrent: int, timed: bool) -> None:
        self._channel = channel
        self._timed = timed
        self._sending = threading.Lock()  # the channel's other end reads whole messages: one thread writes at a time
        self._concurrent = concurrent
        # From the listening thread to those that run batches, and to those that load. Nothing is taken back: a batch that
        # nobody wants any more is run, and its answers are dropped by the broker.
        self._jobs: queue.SimpleQueue[_Job | Raised] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[str] = queue.SimpleQueue()  # models
        self._memory = FreedMemory()  # any thread's; has a lock of its own
        self._entries: dict[int, _Entry | BaseException] = {}  # the listening thread's own: no lock
        self._step = ""  # set before any other thread starts
        self._segments = Segments()  # any thread's; has a lock of its own
        self._leases = Leases(private=True)  # rows may have to run again, in another process: a model cannot change them

    def serve(self) -> None:
        program, _ = self._channel.receive()  # the broker sends it first; until the model is loaded nothing else is read
        try:
            served: Served = load_pickle(program)
            self._step = served.step
            served.open(lambda model, size: self._send(ModelResized(model, size)))
            loaded = HostReady(served.device_bytes) if served.many else served.load(None)
        except ModelLostError as exc:
            self._end(exc)
        except BaseException as exc:
            self._send(LoadFailed(ErrorReport.of(exc)))
            return
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self._send(loaded)  # the broker sends rows only after this
        # Daemons all: this process ends by os._exit() when the broker is gone, whatever they are in.
        threading.Thread(target=self._listen, args=[served], daemon=True).start()
        for _ in range(LOADS_AT_ONCE if served.many else 0):
            threading.Thread(target=self._load_models, args=[served], daemon=True).start()
        for _ in range(self._concurrent - 1):
            threading.Thread(target=self._work, args=[served], daemon=True).start()
        self._work(served)

    def _work(self, served: Served) -> None:
        try:
            while True:
                job = self._jobs.get()
                if isinstance(job, Raised):
                    self._send(job)
                else:
                    self._run(served, job)
                del job  # before take_freed(): its rows are free, if the handler has not kept them
                with contextlib.suppress(Exception):  # what it prints appears; stdout may be closed
                    sys.stdout.flush()
                for owner, numbers in self._leases.take_freed().items():
                    self._send(Freed(owner, numbers))
        except BaseException:  # what the user's code raises does not come here
            traceback.print_exc()
            os._exit(1)

    def _load_models(self, served: Served) -> None:
        """Of many, one after the other."""
        try:
            while True:
                model = self._loads.get()
                self._memory.loads()
                answer = self._load(served, model)
                if isinstance(answer, Loaded):
                    self._memory.loaded(model, answer.in_ram, on_device=answer.on_device)
                else:
                    self._memory.load_failed()
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                self._send(answer)
        except BaseException:  # what the user's code raises does not come here
            traceback.print_exc()
            os._exit(1)

    def _load(self, served: Served, model: str) -> Loaded | LoadFailed:
        try:
            return served.load(model)._replace(model=model)
        except BaseException as exc:  # SystemExit too: it is the handler's error
            failure = Failure.of(exc.__cause__ or exc, served.step, kind=LOADING)
            return LoadFailed(ErrorReport.of(exc), model, failure, served.is_out_of_memory(model, exc))

    def _unload(self, served: Served, model: str) -> None:
        served.unload(model)
        leak = self._memory.unloaded(model)
        if leak is not None:
            self._send(Leaks(*leak))

    def _run(self, served: Served, job: _Job) -> None:
        started = time.perf_counter()
        try:
            calling = lambda: self._send(Calling(job.batch)) if self._timed else None  # noqa: E731
            outcome = served.run(job.model, job.rows, job.how, calling, job.final, job.read_again)
            seconds = time.perf_counter() - started
            again = list(outcome.again)
            if len(again) == sum(job.sizes):
                self._send(_ran(job, seconds, [], outcome))
                return
            outcome = outcome._replace(failures={**outcome.failures, **dict.fromkeys(again)})
            bare = _unwrapped(outcome, job.rows)
            try:
                packed = _packed_by_reader(bare, job, served.step)
            except NotShippableError:
                mended = served.without_unpackable(outcome, job.how)
                if mended is None:
                    raise
                bare = mended
                packed = _packed_by_reader(mended, job, served.step)
        except ModelLostError as exc:
            self._end(exc)
        except BaseException as exc:  # SystemExit too: it is the handler's error
            self._send(Raised(job.batch, ErrorReport.of(exc)))
            return
        segments: list[Segment] = []
        answers: list[tuple[int, Payload, Any]] = []
        for reader, (buffers, failures) in packed.items():
            payload: Payload
            if sum(map(length, buffers)) <= INLINE_BYTES // 4 or len(segments) == MOST_SEGMENTS:
                payload = b"".join(buffers)
            else:
                segments.append(self._segments.write(buffers))
                payload = self._segments.ref(segments[-1], len(segments) - 1)
            answers.append((reader, payload, failures))
        fds = [segment.fd for segment in segments]
        self._send(_ran(job, seconds, answers, bare), fds)
        for segment in segments:  # after they are sent: a segment that is free may be written to at once
            self._segments.done(segment)

    def _listen(self, served: Served) -> None:
        """The listening thread. It runs no model, so that rows are unpacked, and models unloaded, while a batch runs."""
        try:
            while True:
                message, fds = self._channel.receive()
                if isinstance(message, Freed):
                    self._segments.freed(message.numbers)
                elif isinstance(message, Bring):
                    self._unpack(message.new, fds)
                elif isinstance(message, Load):
                    self._loads.put(message.model)
                elif isinstance(message, Unload):
                    self._unload(served, message.model)
                else:
                    assert isinstance(message, RunRows)
                    self._jobs.put(self._job(message, fds))
        except (EOFError, OSError):
            os._exit(1)  # the broker is gone, and so is the reason to be here
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _job(self, message: RunRows, fds: list[int]) -> _Job | Raised:
        try:
            self._unpack(message.new, fds)
            pieces = [(self._entry(number), start, stop) for number, start, stop in message.pieces]
            rows = gather([(entry.block, start, stop) for entry, start, stop in pieces])
            sizes = [stop - start for _, start, stop in pieces]
            anew = lambda: gather([(entry.anew(), start, stop) for entry, start, stop in pieces])  # noqa: E731
            return _Job(message.batch, message.model, rows, pieces[0][0].how, message.readers, sizes, message.final, anew)
        except BaseException as exc:  # a row whose class cannot be imported here, or whose unpickling raises
            what = f"rows cannot be unpickled in the model's process ({type(exc).__name__}: {safe_str(exc)})"
            error = NotShippableError(f"step {self._step!r}: {what}")
            error.__cause__ = exc
            return Raised(message.batch, ErrorReport.of(error))
        finally:  # after the rows were gathered, which have their own references
            for number in message.done:
                self._entries.pop(number, None)

    def _entry(self, number: int) -> _Entry:
        entry = self._entries[number]
        if isinstance(entry, BaseException):
            raise entry
        return entry

    def _unpack(self, new: list[tuple[int, Payload, bytes]], fds: list[int]) -> None:
        """Rows that came along. What cannot be unpickled is the error of the batches that need it."""
        for number, payload, how in new:
            try:
                (block,) = unpack(self._leases.read(payload, fds))
                self._entries[number] = _Entry(block, pickle.loads(how), self._leases.read_again(payload, fds))
            except BaseException as exc:
                self._entries[number] = exc
        for fd in fds:  # what is mapped stays mapped
            os.close(fd)

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(message, fds)

    def _end(self, error: ModelLostError) -> NoReturn:
        """Without a model this process is of no use: what it held is the broker's to run again."""
        with self._sending:  # not given back: no other thread is in the middle of a message when the process ends
            with contextlib.suppress(OSError):
                self._channel.send(ModelLost(safe_str(error)))
            os._exit(1)


def _ran(job: _Job, seconds: float, answers: list[tuple[int, Payload, Any]], outcome: Outcome) -> Ran:
    return Ran(job.batch, seconds, answers, outcome._replace(answers=None, failures={}))


def _unwrapped(outcome: Outcome, rows: Block) -> Outcome:
    """Answers without the examples, where those are the rows themselves: the callers have them."""
    answers = outcome.answers
    if outcome.failures or not isinstance(answers, list) or type(answers[0]) is not PredictionResult:
        return outcome
    model_id = answers[0].model_id
    if not (model_id is None or type(model_id) is str):
        return outcome
    for answer, row in zip(answers, rows, strict=True):
        if type(answer) is not PredictionResult or answer.example is not row or answer.model_id != model_id:
            return outcome
    return outcome._replace(answers=[answer.inference for answer in answers], model_id=model_id, wrapped=True)


def _packed_by_reader(outcome: Outcome, job: _Job, step: str) -> dict[int, tuple[list[Any], dict[int, Any]]]:
    """The answers of a batch, packed once for each client that has rows in it."""
    places: dict[int, list[int]] = {reader: [] for reader in job.readers}
    at = 0
    for reader, size in zip(job.readers, job.sizes, strict=True):
        places[reader].extend(range(at, at + size))
        at += size
    packed = {}
    for reader, own in places.items():
        answers = outcome.answers if len(places) == 1 else pick(outcome.answers, own)
        failures = (
            {n: outcome.failures[at] for n, at in enumerate(own) if at in outcome.failures} if outcome.failures else {}
        )
        packed[reader] = _packed(answers, step), failures
    return packed


def _packed(answers: Any, step: str) -> list[Any]:
    try:
        return pack(answers if isinstance(answers, list) else [Together(sent(answers))], step, checked=True)
    except NotShippableError as exc:
        raise NotShippableError(str(exc).replace("a row of type", "an answer of type", 1)) from exc.__cause__


def _die_with_parent() -> None:
    """If the broker is killed, this process is too, even while it is stuck in C code. The broker has one thread: the
    signal is about threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
