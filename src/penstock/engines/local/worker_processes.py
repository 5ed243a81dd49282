"""The fleet of worker processes: starting them, handing them work, and hearing what became of it."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.engines.local.processes import Guardian, WorkerProcess
from penstock.engines.local.wire import Install, Stop, take_files, travelling
from penstock.models.place import Surroundings
from penstock.run.fleet import Died, Done, Event, Work
from penstock.run.pools import Pool
from penstock.transport.channel import Channel
from penstock.transport.interpreters import describe_exit, open_pidfd

GRACE = 2.0  # seconds for a worker whose socket has closed to be gone
TEARDOWN = 30.0  # seconds for all workers to tear down their steps

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _LocalWorker:
    """A worker. The fleet owns its process, its channel and its pidfd; _forget() and _end() end them."""

    process: WorkerProcess
    pidfd: int | None
    installed: set[int] = field(default_factory=set)  # stages that it was sent


class ProcessFleet:
    """Worker processes. wait() is the one place where the coordinator blocks: on messages and deaths at once."""

    def __init__(
        self, programs: Mapping[int, bytes], pools: Mapping[int, Pool], guardian: Guardian, around: Surroundings
    ) -> None:
        self._programs = programs
        self._pools = pools
        self._around = around
        self._guardian = guardian
        # The coordinator's thread alone uses all of this, so that nothing has a lock; other threads use _bell, in wake().
        self._members: dict[int, _LocalWorker] = {}  # by worker; those that are watched
        self._leaving: list[_LocalWorker] = []  # were told to leave, and are not watched; close() waits for them
        self._selector = selectors.DefaultSelector()
        self._rung, self._bell = socket.socketpair()  # other threads ring: see wake()
        self._bell.setblocking(False)  # whoever rings never waits
        self._selector.register(self._rung, selectors.EVENT_READ)

    def start(self, pool: int, worker: int) -> None:
        chosen = self._pools[pool]
        size = chosen.size
        around = replace(self._around, workers=size.workers, slots=size.slots, in_turn=chosen.ahead)
        process = WorkerProcess(size.slots, chosen.cores, around, chosen.variables)
        self._guardian.started(process.pid)  # at once: if this process is killed before, the worker sees its socket close
        pidfd = open_pidfd(process.pid)
        self._members[worker] = _LocalWorker(process, pidfd)
        self._selector.register(process.channel, selectors.EVENT_READ, worker)
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, worker)

    def assign(self, worker: int, work: Work) -> None:
        member = self._members[worker]
        fds: list[int] = []
        if work.payload is not None:
            work = replace(work, payload=travelling(work.payload, fds))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died just now: wait() will tell
            if work.stage not in member.installed:
                member.process.channel.send(Install(work.stage, self._programs[work.stage]))  # before work that needs it
                member.installed.add(work.stage)
            member.process.channel.send(work, fds)

    def stop(self, worker: int) -> None:
        """Tell a worker to leave; close() sees to it that it does."""
        member = self._forget(worker)  # its end is expected: wait() would report it as a death
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            member.process.channel.send(Stop())
        self._leaving.append(member)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # closed, or so full that wait() will see it anyway
            self._bell.send(b"!")

    def wait(self, seconds: float | None) -> list[tuple[int, Event]]:
        keys = [key for key, _ in self._selector.select(seconds)]
        ready = [key for key in keys if key.fileobj is not self._rung]
        if len(ready) < len(keys):
            self._rung.recv(4096)
        # A worker that has died may have said something before: one message is heard now, and its pidfd stays readable.
        talking = {key.data for key in ready if isinstance(key.fileobj, Channel)}
        silent = {key.data for key in ready} - talking
        events = [(worker, self._hear(worker)) for worker in sorted(talking)]
        return events + [(worker, self._bury(worker)) for worker in sorted(silent)]

    def close(self) -> None:
        """The run is over: every worker leaves, or is made to."""
        for worker in list(self._members):
            self.stop(worker)
        deadline = time.monotonic() + TEARDOWN
        for member in self._leaving:
            if member.process.wait(max(0.0, deadline - time.monotonic())) is None:
                logger.warning("worker %d was still busy %g s after the run; it is killed", member.process.pid, TEARDOWN)
        self.kill()

    def kill(self) -> None:
        """End all workers at once."""
        self._leaving += [self._forget(worker) for worker in list(self._members)]
        for member in self._leaving:  # also those that have left: what they started may live on in their groups
            self._end(member)
        self._leaving = []
        self._selector.close()
        self._rung.close()
        self._bell.close()

    def _hear(self, worker: int) -> Event:
        member = self._members[worker]
        event: Event
        try:
            event, fds = member.process.channel.receive()
        except (EOFError, OSError):
            return self._bury(worker)
        if isinstance(event, Done):
            take_files(event.payloads, fds)
        return event

    def _bury(self, worker: int) -> Died:
        member = self._forget(worker)
        code = member.process.wait(GRACE)
        self._end(member)
        return Died(describe_exit(code), killed=(code or 0) < 0)

    def _forget(self, worker: int) -> _LocalWorker:
        member = self._members.pop(worker)
        self._selector.unregister(member.process.channel)  # before they are closed: numbers are used again
        if member.pidfd is not None:
            self._selector.unregister(member.pidfd)
            os.close(member.pidfd)
        return member

    def _end(self, member: _LocalWorker) -> None:
        member.process.kill()
        member.process.close()
        self._guardian.ended(member.process.pid)  # last: until it is gone the guardian may have to kill it
