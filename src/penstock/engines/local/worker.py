"""A worker process: its main thread talks to the coordinator, its other threads run splits and share its models.

It ends when it is told to, or when the coordinator is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace

from penstock.engines.local.wire import Install, Stop, take_files, travelling
from penstock.inference.sessions import ProcessSessions
from penstock.models.place import Surroundings
from penstock.observe.metrics import Metrics
from penstock.run.chunks import packed
from penstock.run.execute import SplitRunner
from penstock.run.fleet import Done, Failed, Ready, Work, WorkerProgress
from penstock.run.garbage import seldom_collected
from penstock.transport.channel import Channel
from penstock.transport.reports import ErrorReport

PROGRESS_EVERY = 0.5  # seconds


def main(descriptor: str, threads: str, around: str) -> None:
    """The entry of a fresh interpreter: the socket's descriptor, how many threads run splits, and what is around it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    if sys.stderr is not None:
        faulthandler.enable(all_threads=False)
    with seldom_collected():
        sessions = ProcessSessions(Metrics(), Surroundings(**json.loads(around)))
        _WorkerSide(Channel(socket.socket(fileno=int(descriptor))), int(threads), sessions).serve()
    _leave()


def _leave() -> None:
    """End as processes of multiprocessing do: threads are waited for, what was registered for the end runs, what was printed
    appears. Nothing is taken apart object by object: of a framework that takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # there may be none, or it is closed
            stream.flush()
    os._exit(0)


class _WorkerSide:
    def __init__(self, channel: Channel, threads: int, sessions: ProcessSessions) -> None:
        self._channel = channel
        self._sending = threading.Lock()  # threads that run splits, and the main thread, write to one channel
        self._sessions = sessions
        self._programs: dict[int, bytes] = {}  # written by the main thread, before any work that needs them is queued
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None: a thread ends
        # One for each thread, and that thread's own; the main thread reads how far they are: see _tell_progress().
        self._runners = [SplitRunner(self._programs, self._sessions, packed) for _ in range(threads)]
        self._threads = [threading.Thread(target=self._run, args=[runner]) for runner in self._runners]

    def serve(self) -> None:
        for thread in self._threads:
            thread.daemon = True  # a thread stuck in user code must not keep the process
            thread.start()
        self._send(Ready())  # after the threads: work may come at once
        selector = selectors.DefaultSelector()
        selector.register(self._channel, selectors.EVENT_READ)
        while True:
            if not selector.select(PROGRESS_EVERY):
                self._tell_progress()
                continue
            try:
                message, fds = self._channel.receive()
            except (EOFError, OSError):
                os._exit(1)  # the coordinator is gone, and so is the reason to be here
            if isinstance(message, Install):
                self._programs[message.stage] = message.program
            elif isinstance(message, Work):
                take_files([message.payload] if message.payload else [], fds)
                self._queue.put(message)
            elif isinstance(message, Stop):
                break
        # What is queued is done first; the fleet kills a worker that takes too long.
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._sessions.close()  # last: threads that run splits use its models

    def _run(self, runner: SplitRunner) -> None:
        try:
            while (work := self._queue.get()) is not None:
                self._run_one(runner, work)
            runner.close()  # on the thread that ran the steps
        except BaseException:  # a thread that ends unseen would leave the coordinator waiting
            with contextlib.suppress(Exception):
                traceback.print_exc()
            os._exit(1)

    def _run_one(self, runner: SplitRunner, work: Work) -> None:
        event = runner.run(work)
        try:
            self._tell(event)
        except Exception as exc:  # a sink's token that cannot be pickled, say
            self._send(Failed(work.task, ErrorReport.of(exc)))
        finally:
            # The coordinator has descriptors of its own by now, and those of the work were copies: these are done with.
            for payload in [*(event.payloads if isinstance(event, Done) else []), *([work.payload] if work.payload else [])]:
                payload.release()
            with contextlib.suppress(Exception):  # what steps print appears split by split; stdout may be closed
                sys.stdout.flush()

    def _tell(self, event: Done | Failed) -> None:
        fds: list[int] = []
        if isinstance(event, Done):
            shipped = [(outlet, [travelling(each, fds) for each in payloads]) for outlet, payloads in event.shipped]
            event = replace(event, shipped=shipped)
        self._send(event, fds)

    def _tell_progress(self) -> None:
        """Unless a thread is sending: this thread must go on receiving, or both sides could wait for each other."""
        rows = {work.task: runner.rows_done for runner in self._runners if (work := runner.work) is not None}
        if rows and self._sending.acquire(blocking=False):
            try:
                self._send_now(WorkerProgress(rows, self._sessions.drain_metrics()), ())
            finally:
                self._sending.release()

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        with self._sending:
            self._send_now(message, fds)

    def _send_now(self, message: object, fds: Sequence[int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # without a coordinator this process ends anyway
            self._channel.send(message, fds)
