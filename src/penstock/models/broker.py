"""The broker of a model host: a process that runs no user code, so that nothing can wedge it.

    clients (any process of this user) <-- Unix socket --> broker <-- socket pair --> the model's process, one per copy

One loop waits for messages, deaths and deadlines; models/dispatch.py decides; what it says is done here. Rows and answers
pass through as bytes or as descriptors of anonymous files.
"""

from __future__ import annotations

import os
import pickle
import select
import selectors
import signal
import socket
import time
from typing import Any

from penstock.errors import ModelLoadError
from penstock.models.commands import BreakBatch, Command, End, GiveUp, KillCopy, RunBatch, StartCopy
from penstock.models.connections import Client, Held, Lent, Model
from penstock.models.dispatch import Dispatch
from penstock.models.folder_use import remove_if_unused
from penstock.models.front import entries_of
from penstock.models.host_address import Address, same_user
from penstock.models.host_batches import HostBatch, Submission
from penstock.models.host_reports import HostReports
from penstock.models.messages import (
    Answers,
    Bring,
    Broken,
    Calling,
    Ended,
    Freed,
    Goes,
    Happened,
    HostReady,
    HostSpec,
    Join,
    Leaks,
    Leave,
    Load,
    Loaded,
    LoadFailed,
    ModelLost,
    ModelResized,
    Payload,
    Piece,
    Raised,
    Ran,
    Refused,
    RunRows,
    Shutdown,
    Started,
    Submit,
    Unload,
    Waits,
)
from penstock.models.residency import LoadNow, UnloadNow
from penstock.transport.channel import read_all
from penstock.transport.reports import ErrorReport
from penstock.transport.segments import SegmentRef

DUMPS = 2  # deaths after which processes no more print where they crashed: it is the same place, again and again
MOST_FDS = 200  # in a message


def main(directory: str, name: str, listening: str, told: str) -> None:
    """The entry of a fresh interpreter: where it lives, the socket that listens there, a file with its HostSpec."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its clients
    with open(int(told), "rb") as file:
        spec: HostSpec = pickle.loads(read_all(file.fileno(), 0, os.fstat(file.fileno()).st_size))
    broker = Broker(spec, socket.socket(fileno=int(listening)))
    try:
        broker.serve()
    finally:
        Address(directory, name).remove()  # while it listens: nobody starts another one before this name is free
        broker.end()
        remove_if_unused(directory)


class Broker:
    """One thread does all of it, so that nothing has a lock. It waits in the selector, never for a peer to read or write;
    and for a model's process that has died to be gone (Model.bury())."""

    def __init__(self, spec: HostSpec, listening: socket.socket) -> None:
        self._spec = spec
        self._listening = listening  # listened before this process ran: whoever connected since waits there
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._dispatch = Dispatch(spec, time.monotonic())
        self._clients: dict[int, Client] = {}  # by number; each is here while its socket is in the selector
        self._models: dict[int, Model] = {}  # by copy; the same
        self._lent = Lent()
        self._numbers = 0  # of clients and submissions
        self._restarts = 0
        self._reports = HostReports(spec)
        self._over = False  # serve() returns, after what is in hand

    def serve(self) -> None:
        """Until the last client has gone, somebody says so, or the model cannot be had."""
        while not self._over:
            now = time.monotonic()
            # Once for all that was heard in a round: what waits together may leave together.
            for command in self._dispatch.decide(now):
                self._do(command)
            if self._over:
                break
            until = self._dispatch.next_time()
            ready = self._selector.select(None if until is None else max(0.0, until - time.monotonic()))
            for key, events in ready:
                self._hear(key, events)

    def end(self) -> None:
        for model in self._models.values():  # first: clients that see the socket close may start another host
            model.kill()
            model.bury()
        for client in self._clients.values():
            client.line.flush()  # the error that it ends with, say; what the socket does not take now is lost
            client.line.close()
        self._listening.close()

    # What comes in.

    def _hear(self, key: selectors.SelectorKey, events: int) -> None:
        owner: Client | Model | None = key.data
        if owner is None:
            self._accept()
        elif isinstance(owner, Client):  # `is owner`, here and below: it was lost by what came before it in this round
            if self._clients.get(owner.number) is owner:
                self._hear_line(owner, events)
        elif self._models.get(owner.copy) is owner:
            if isinstance(key.fileobj, int):  # its pidfd: it is gone, but for what it said last
                rest = select.poll()
                rest.register(owner.line.sock, select.POLLIN)
                while rest.poll(0) and self._read(owner):
                    pass
                self._lost(owner)
            else:
                self._hear_line(owner, events)

    def _hear_line(self, owner: Client | Model, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            owner.line.flush()
        if events & selectors.EVENT_READ and not self._read(owner):
            self._lost(owner)

    def _read(self, owner: Client | Model) -> bool:
        """All that it has said. False: it is gone."""
        try:
            messages = owner.line.frames.receive()
        except BlockingIOError:
            return True
        except Exception:  # it is gone, or talks nonsense
            return False
        for message, fds in messages:
            if isinstance(owner, Client):
                self._from_client(owner, message, fds)
            else:
                self._from_model(owner, message, fds)
        return True

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        if not same_user(sock):
            sock.close()
            return
        self._numbers += 1
        client = self._clients[self._numbers] = Client(self._numbers, sock, self._selector)
        self._dispatch.joined(client.number)
        # If the broker is killed, clients end the process groups of its models: see HostClient._reconnected().
        for model in self._models.values():
            client.line.send(Started(model.process.pid))

    def _lost(self, owner: Client | Model) -> None:
        if isinstance(owner, Client):
            self._lent.lost(owner)  # before it is closed: nothing is sent to it from here on
            del self._clients[owner.number]
            owner.line.close()
            self._dispatch.gone(owner.number, time.monotonic())
            return
        del self._models[owner.copy]  # before died(): that may start the copy again, under the same number
        how = owner.bury()
        for client in self._clients.values():
            client.line.send(Ended(owner.process.pid))  # after bury(): until then a client may have to kill the group
        self._lent.lost(owner)  # it refers to no rows any more: their owners may use the memory again
        was_killed = owner.killed_because is not None
        self._reports.restarted(self._dispatch.at_work(owner.copy))
        commands = self._dispatch.died(owner.copy, how, from_outside=owner.killed_from_outside)
        self._tell_death(f"was killed: {how}" if was_killed else f"died: {how}", commands)
        for command in commands:
            self._do(command)

    def _tell_death(self, how: str, commands: list[Command]) -> None:
        """One of the clients logs it: nothing is printed here."""
        if self._over or any(isinstance(command, GiveUp) for command in commands):
            return  # the error says it
        self._restarts += 1
        self._tell(f"its process {how}; it is started again, restart {self._restarts}{self._dispatch.outlook()}")

    def _tell(self, what: str) -> None:
        for client in list(self._clients.values())[:1]:
            client.line.send(Happened(what))

    def _from_client(self, client: Client, message: Any, fds: list[int]) -> None:
        if isinstance(message, Submit):
            # A number of the broker's: tickets are numbered by each client for itself.
            self._numbers += 1
            client.submissions[message.ticket] = self._numbers
            held = Held(message.payload, fds, message.how)  # the descriptor is its own from here on
            self._lent.owns(message.payload, client)
            submission = Submission(self._numbers, client.number, message.lane, message.ticket, held)
            now = time.monotonic()
            if self._dispatch.keyed is not None:
                self._dispatch.keyed.files.update(message.files)
            for entry in entries_of(submission, message, message.rows, message.size, (message.group, message.how)):
                self._dispatch.submitted(entry, now)
        elif isinstance(message, Waits):
            if message.ticket is None or message.ticket in client.submissions:
                submission_number = None if message.ticket is None else client.submissions[message.ticket]
                self._dispatch.submissions.waits((client.number, message.lane), submission_number)
        elif isinstance(message, Goes):
            self._dispatch.submissions.goes((client.number, message.lane))
        elif isinstance(message, Join):
            self._dispatch.opened(client.number, message.lane, message.model)
        elif isinstance(message, Leave):
            self._dispatch.closed(client.number, message.lane)
            client.submissions = {
                t: number for t, number in client.submissions.items() if self._dispatch.submissions.is_left(number)
            }
        elif isinstance(message, Freed):
            self._lent.freed(message)
        elif isinstance(message, Shutdown):
            self._over = True

    def _from_model(self, model: Model, message: Any, fds: list[int]) -> None:
        try:
            if isinstance(message, Loaded):
                self._loaded(model, message)
            elif isinstance(message, LoadFailed):
                self._load_failed(model, message)
            elif isinstance(message, HostReady):
                self._dispatch.loaded(model.copy, message.device_bytes)
            elif isinstance(message, ModelResized):
                assert self._dispatch.keyed is not None
                self._dispatch.keyed.resized(message.model, message.bytes)
            elif isinstance(message, Leaks):
                assert self._dispatch.keyed is not None
                self._dispatch.keyed.leaks(model.copy, message)
            elif isinstance(message, Ran):
                self._ran(model, message, fds)
            elif isinstance(message, Calling):
                self._dispatch.calls(model.copy, message.batch, time.monotonic())
            elif isinstance(message, Freed):
                self._lent.returned(model, message.owner, message.numbers)
            elif isinstance(message, ModelLost):
                model.last_word = message.why
            elif isinstance(message, Raised):
                batch = self._dispatch.ended(model.copy, message.batch, time.monotonic())
                if batch is not None:
                    for client, pieces in self._by_client(batch):
                        client.line.send(Refused(pieces, message.error))
                    self._reports.failed(batch.model)
        finally:
            for fd in fds:  # of answers: what is on its way to clients has copies
                os.close(fd)

    def _loaded(self, model: Model, message: Loaded) -> None:
        self._reports.loaded(message, *self._dispatch.fronts.of(model.copy))
        if message.model is None:
            self._dispatch.loaded(model.copy)
        else:
            assert self._dispatch.keyed is not None
            self._dispatch.keyed.loaded(model.copy, message.model, message.bytes, message.seconds, message.certain)

    def _load_failed(self, model: Model, message: LoadFailed) -> None:
        if message.model is None:
            self._refuse_all(message.error)
            return
        assert self._dispatch.keyed is not None
        if (what := self._dispatch.keyed.load_failed(model.copy, message)) is not None:
            self._tell(what)

    def _ran(self, model: Model, message: Ran, fds: list[int]) -> None:
        now = time.monotonic()
        commands: list[Command] = []
        outcome = message.outcome
        if outcome.again:
            batch, commands = self._dispatch.exhausted(model.copy, message.batch, outcome.again)
        else:
            failed = sum(len(failures) for _, _, failures in message.answers)
            batch = self._dispatch.ended(model.copy, message.batch, now, failed)
        if batch is None:
            return
        front, copy = self._dispatch.fronts.of(model.copy)
        if not outcome.again and outcome.stale is None:
            calls, too_large, on_device = outcome.calls, outcome.out_of_memory, outcome.device_seconds
            times = message.seconds, now
            front.ran(batch.spans, batch.aim, *times, calls=calls, too_large=too_large, device_seconds=on_device, copy=copy)
        self._reports.ran(batch, message, now, front, self._dispatch.uses)
        for client in [self._clients[s.entry.item.client] for s in batch.spans if s.entry.item.client in self._clients][:1]:
            client.line.send(self._reports.take(batch.model))  # before the answers that it waits for
        answers = {reader: (payload, failures) for reader, payload, failures in message.answers}
        for payload, _ in answers.values():
            self._lent.owns(payload, model)  # before they are sent: clients may say at once that they are done with it
        for client, pieces in self._by_client(batch) if answers else ():
            payload, failures = answers[client.number]
            sent = Answers(pieces, payload, failures, outcome.model_id, outcome.wrapped, outcome.stale)
            if isinstance(payload, SegmentRef):
                client.line.send(sent._replace(payload=payload._replace(at=0)), [fds[payload.at]])
            else:
                client.line.send(sent)
        for command in commands:
            self._do(command)

    # What is decided.

    def _do(self, command: Command) -> None:
        if isinstance(command, StartCopy):
            dumps = self._restarts < DUMPS
            started = self._models[command.copy] = Model(command.copy, self._spec, self._selector, dumps)
            for client in self._clients.values():
                client.line.send(Started(started.process.pid))
        elif isinstance(command, KillCopy):
            self._models[command.copy].kill(command.why)
        elif isinstance(command, RunBatch):
            self._run(self._models[command.copy], command.batch)
        elif isinstance(command, BreakBatch):
            for client, pieces in self._by_client(command.batch):
                rows, model = command.batch.rows if command.together else 1, command.batch.model
                client.line.send(Broken(pieces, command.kind, command.message, rows, model, command.error))
            self._reports.failed(command.batch.model)
        elif isinstance(command, LoadNow | UnloadNow):
            verb = Load if isinstance(command, LoadNow) else Unload
            self._models[command.copy].line.send(verb(str(command.model)))
        elif isinstance(command, GiveUp):
            self._refuse_all(ErrorReport.of(ModelLoadError(f"step {self._spec.name!r}: {command.message}")))
        elif isinstance(command, End):
            self._over = True

    def _run(self, model: Model, batch: HostBatch) -> None:
        new: list[tuple[int, Payload, bytes]] = []
        fds: list[int] = []
        needed = {span.entry.item.number for span in batch.spans}
        # What it holds that no batch needs any more, of any copy: told with the next batch, not by a message of its own.
        done = [number for number in model.sent - needed if not self._dispatch.submissions.is_left(number)]
        model.sent.difference_update(done)
        # Rows go to a process once, with the first batch that needs some of them, and stay there until they are in `done`.
        for span in batch.spans:
            submission = span.entry.item
            if submission.number not in model.sent:
                model.sent.add(submission.number)
                held: Held = submission.content
                payload = held.payload
                if isinstance(payload, SegmentRef):
                    assert held.fd is not None
                    if len(fds) == MOST_FDS:  # the system limits how many go with one message
                        model.line.send(Bring(new), fds)
                        new, fds = [], []
                    self._lent.lend(payload, model)
                    payload = payload._replace(at=len(fds))
                    fds.append(held.fd)
                new.append((submission.number, payload, held.how))
        pieces = [(span.entry.item.number, span.start, span.stop) for span in batch.spans]
        readers = [span.entry.item.client for span in batch.spans]
        model.line.send(RunRows(batch.number, pieces, readers, new, done, batch.final, batch.model), fds)

    def _by_client(self, batch: HostBatch) -> list[tuple[Client, list[Piece]]]:
        """Who is to hear of which rows; those who are gone, not."""
        found: dict[int, list[Piece]] = {}
        for entry, start, stop in batch.spans:
            if entry.item.client in self._clients:
                found.setdefault(entry.item.client, []).append((entry.item.ticket, start, stop))
        for number, pieces in found.items():
            for ticket in {ticket for ticket, _, _ in pieces}:
                submission = self._clients[number].submissions.get(ticket)
                if submission is not None and not self._dispatch.submissions.is_left(submission):
                    del self._clients[number].submissions[ticket]
        return [(self._clients[number], pieces) for number, pieces in found.items()]

    def _refuse_all(self, error: ErrorReport) -> None:
        """The host cannot go on: everybody is told, and it ends."""
        for client in self._clients.values():
            client.line.send(Refused([], error))
        self._over = True
