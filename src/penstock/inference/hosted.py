"""A session whose model lives in a host: the same lanes and tickets, with the batcher and the model in other processes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from penstock.blocks import Block, byte_size, is_table, row_at, rows_of
from penstock.errors import EngineError, ModelCrashError, ModelTimeoutError, PenstockError, StepError
from penstock.failures import OUT_OF_MEMORY, TIMED_OUT, Failure, Handling
from penstock.inference.handler import ModelHandler, concurrent_batches
from penstock.inference.model import BYTES_SAMPLED_EVERY, ModelCopy
from penstock.inference.ticket import Caller, Ticket, answers_of, not_packed
from penstock.inference.transform import RunInference
from penstock.inference.turns import QUICK_TURNS
from penstock.models.client import HostClient
from penstock.models.messages import Answers, Broken, HostSpec, Report, Submit
from penstock.models.place import Place, Surroundings, Wishes
from penstock.models.rendezvous import Address, name_of, run_folder
from penstock.models.server import Outcome
from penstock.observe.metrics import MetricKey
from penstock.retry import Retry
from penstock.rows import PredictionResult, safe_str, shorten
from penstock.transport.interpreters import thread_variables
from penstock.transport.packing import pack

if TYPE_CHECKING:
    from penstock.inference.session import Sessions


logger = logging.getLogger(__name__)


def wishes_of(transform: RunInference[Any, Any]) -> Wishes:
    """What the user's configuration says about where a step's model lives."""
    handler, handling = transform.path.model_handler, transform.handling
    shared = bool(handler.share_model_across_processes())
    return Wishes(
        shared=shared,
        copies=handler.model_copies() if shared else None,
        timeout=None if handling is None else handling.timeout,
        isolated=handling is not None and handling.use_subprocess,
        accelerator=handler.accelerator(),
        gpus=_gpus_in(handler._env_vars.get("CUDA_VISIBLE_DEVICES")),
    )


def _gpus_in(variable: str | None) -> tuple[str, ...] | None:
    return None if variable is None else tuple(name.strip() for name in variable.split(",") if name.strip())


class ServedModel:
    """What a host runs: one model copy, asked for whole batches."""

    def __init__(
        self, step: str, handler: ModelHandler[Any, Any, Any], size_buckets: tuple[int, ...], watched: bool = False
    ) -> None:
        self.step = step
        self._watched = watched
        self._handler = handler
        self._size_buckets = size_buckets
        self._copy: ModelCopy | None = None
        self._batches = 0

    def load(self) -> tuple[float, int]:
        self._handler._env_vars = {}  # they are set already, and a device may have been chosen since
        self._copy = ModelCopy(self.step, self._handler, self._size_buckets, watched=self._watched)
        loaded = self._copy.load()
        assert loaded is not None
        if self._handler.prepares_ahead():
            QUICK_TURNS.begin()
        return loaded.seconds, loaded.bytes

    def run(
        self, batch: Block, how: Any, calling: Callable[[], None], final: bool, read_again: Callable[[], Block]
    ) -> Outcome:
        args, step, handling, retry = how
        assert self._copy is not None
        for told in (self._copy, self._handler):  # a handler that calls its model more than once says so, too
            if hasattr(told, "announce"):
                told.announce(calling)
        as_given = rows_of if handling is not None else lambda block: block
        outcomes = self._copy.outcomes(
            as_given(batch),
            args,
            step,
            handling,
            retry,
            holds_back=not final,
            read_again=lambda: as_given(read_again()),
        )
        size = None if self._batches % BYTES_SAMPLED_EVERY else self._copy.byte_size(batch)
        self._batches += 1
        answers, failures, calls, again = outcomes
        return Outcome(answers, failures, calls, again, self._copy.take_out_of_memory(), size)

    def without_unpackable(self, outcome: Outcome, how: Any) -> Outcome | None:
        """For the server, when answers cannot be sent to who asked: the outcome with their rows failed as not picklable;
        None if no answer by itself is to blame, or such errors are not handled."""
        _, step, handling, _ = how
        if handling is None or not isinstance(outcome.answers, list):
            return None
        failed = not_packed(outcome.answers, handling, step, self._handler.model_id())
        if not failed:
            return None
        answers = [None if at in failed else answer for at, answer in enumerate(outcome.answers)]
        return outcome._replace(answers=answers, failures={**outcome.failures, **failed})


class _Open(NamedTuple):
    """A ticket that is not answered yet."""

    ticket: Ticket
    step: str
    handling: Handling | None


class HostedSession:
    """This process's way to a model that is elsewhere."""

    def __init__(self, owner: Sessions, key: str, step: str, transform: RunInference[Any, Any], place: Place) -> None:
        self.step = step
        self.handler = transform.path.model_handler
        self._owner = owner
        self._changed = owner.changed
        self._namespace = transform.metrics_namespace
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        around = owner.around
        address = Address(around.folder or run_folder(transform.id), name_of(key))
        self._client = HostClient(address, _spec(step, transform, place, around), self)

    def join(
        self, caller: Caller, step: str | None = None, handling: Handling | None = None, retry: Retry | None = None
    ) -> HostedLane:
        return HostedLane(self, caller, step or self.step, handling, retry, next(self._numbers))

    def hand_in_metrics(self) -> None: ...

    def close(self, *, wait: bool = True) -> None:
        self._client.close(wait)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # For lanes. The client's lock is never taken inside the sessions' one, only the other way round.

    def open_lane(self, number: int) -> None:
        self._client.join(number)

    def close_lane(self, number: int, tickets: list[int]) -> None:
        self._client.leave(number, tickets)
        with self._changed:
            for ticket in tickets:
                self._open.pop(ticket, None)

    def submit(
        self,
        lane: int,
        submitted: _Open,
        how: bytes,
        weights: list[int] | None,
        lengths: list[int] | None,
        alone: bool,
    ) -> int:
        number = next(self._numbers)
        block = submitted.ticket.block
        message = Submit(
            lane=lane,
            ticket=number,
            rows=submitted.ticket.missing,
            payload=b"",
            how=how,
            group=None if isinstance(block, list) else str(block.schema),
            weights=weights,
            lengths=lengths,
            alone=alone,
            size=0 if lengths is None else byte_size(block),
        )
        buffers = pack(block, submitted.step)
        with self._changed:
            self._open[number] = submitted
        self._client.submit(message, buffers)
        return number

    def wait(self, lane: int, ticket: Ticket, number: int, caller: Caller) -> None:
        self._client.waits(lane, number)
        with self._changed:
            caller.waits_for = ticket
            self._changed.notify_all()
            try:
                while not ticket.settled:
                    if self._closed:
                        raise EngineError(f"step {self.step!r}: the run has ended")
                    self._changed.wait()
            finally:
                caller.waits_for = None

    def pause(self, lane: int) -> None:
        self._client.waits(lane, None)

    def resume(self, lane: int) -> None:
        self._client.goes(lane)

    # What the host says, on the connection's thread.

    def answered(self, message: Answers, answers: list[Any]) -> None:
        with self._changed:
            at = 0
            for position, (number, start, stop) in enumerate(message.pieces):
                submitted = self._open.get(number)
                if submitted is not None:
                    part = answers[position] if is_table(submitted.ticket.block) else answers[at : at + stop - start]
                    failures = {
                        n - at + start: message.failures[n] for n in range(at, at + stop - start) if n in message.failures
                    }
                    _fill(submitted.ticket, start, stop, part, failures, message.wrapped)
                at += stop - start
            self._settle({number for number, _, _ in message.pieces})

    def broken(self, message: Broken) -> None:
        """Rows whose process was killed or died: a failure of each where that is handled, else an error."""
        kind = {TIMED_OUT: ModelTimeoutError, OUT_OF_MEMORY: StepError}.get(message.kind, ModelCrashError)
        with self._changed:
            for number, start, stop in message.pieces:
                submitted = self._open.get(number)
                if submitted is None:
                    continue
                ticket, step = submitted.ticket, submitted.step
                if submitted.handling is None:
                    held = f"it held a batch of {message.rows} rows, among them" if message.rows > 1 else "row"
                    what = f"step {step!r}: {message.message}\n  {held}: {shorten(row_at(ticket.block, start))}"
                    ticket.error = ticket.error or kind(what)
                else:
                    error = MemoryError(message.message) if message.kind == OUT_OF_MEMORY else kind(message.message)
                    model_id = self.handler.model_id()
                    failure = Failure.of(error, step, kind=message.kind, model_id=model_id, group=message.rows)
                    ticket.failures.update(dict.fromkeys(range(start, stop), failure))
                    ticket.fill(start, stop, [None] * (stop - start))
            self._settle({number for number, _, _ in message.pieces})

    def refused(self, tickets: Iterable[int], error: PenstockError) -> None:
        with self._changed:
            for number in tickets:
                if number in self._open:
                    self._open[number].ticket.error = self._open[number].ticket.error or error
            self._settle(tickets)

    def again(self, tickets: Iterable[int]) -> None:
        with self._changed:
            for number in tickets:
                if number in self._open:
                    self._open[number].ticket.reset()
            self._owner.metrics.count(self._key("model_restarts"))
        self.happened("its model host died, and is started again")

    def happened(self, what: str) -> None:
        logger.warning("step %r: %s", self.step, what)

    def reported(self, report: Report) -> None:
        with self._changed:
            metrics = self._owner.metrics
            for name, count in report.counters.items():
                metrics.count(self._key(name), count)
            for name, value in report.values.items():
                metrics.record(self._key(name), value)
            if report.note is not None:
                metrics.notes[self._key("batch_size_found")] = report.note

    def _settle(self, numbers: Iterable[int]) -> None:
        settled = [number for number in numbers if number in self._open and self._open[number].ticket.settled]
        for number in settled:
            del self._open[number]
        self._changed.notify_all()
        self._changed.release()
        try:
            self._client.forget(settled)
        finally:
            self._changed.acquire()

    def _key(self, name: str) -> MetricKey:
        return MetricKey(self.step, self._namespace, name)


class HostedLane:
    """One bundle's way to the host, used by one thread."""

    def __init__(
        self,
        session: HostedSession,
        caller: Caller,
        step: str,
        handling: Handling | None,
        retry: Retry | None,
        number: int,
    ) -> None:
        self.caller = caller
        self.step = step
        self.handling = handling
        self._retry = retry
        self._session = session
        self._number = number
        self._open: dict[int, int] = {}  # id of a ticket -> its number
        self._args: Any = None
        self._how: bytes | None = None
        session.open_lane(number)
        caller.hosted.append(self)

    def submit(
        self,
        ticket: Ticket,
        args: Any = None,
        *,
        weights: list[int] | None = None,
        lengths: list[int] | None = None,
        alone: bool = False,
    ) -> None:
        if self._how is None or args is not self._args:
            self._args, self._how = args, self._pickled(args)
        if not ticket.missing:
            return
        submitted = _Open(ticket, self.step, self.handling)
        self._open[id(ticket)] = self._session.submit(self._number, submitted, self._how, weights, lengths, alone)

    def wait(self, ticket: Ticket) -> Block:
        if not ticket.settled:
            with self.caller.paused(self):
                self._session.wait(self._number, ticket, self._open[id(ticket)], self.caller)
        self._open.pop(id(ticket), None)
        return answers_of(ticket, self._session.handler.model_id(), self.step)

    def pause(self) -> None:
        """The bundle waits at another model."""
        self._session.pause(self._number)

    def resume(self) -> None:
        self._session.resume(self._number)

    def close(self) -> None:
        self.caller.hosted.remove(self)
        self._session.close_lane(self._number, list(self._open.values()))

    def _pickled(self, args: Any) -> bytes:
        try:
            data: bytes = cloudpickle.dumps((args, self.step, self.handling, self._retry), protocol=5)
        except Exception as exc:
            what = f"inference_args cannot be sent to the model's process: {type(exc).__name__}: {safe_str(exc)}"
            raise StepError(f"step {self.step!r}: {what}") from exc
        return data


def _fill(
    ticket: Ticket, start: int, stop: int, answers: Any, failures: dict[int, Failure], wrapped: tuple[str | None] | None
) -> None:
    if any(failure is None for failure in failures.values()):  # these rows run again: their answers are to come
        for at in [at for at in range(start, stop) if failures.get(at, at) is not None]:
            ticket.fill(at, at + 1, answers[at - start : at - start + 1])
        ticket.failures.update({at: failure for at, failure in failures.items() if failure is not None})
        return
    ticket.failures.update(failures)
    if wrapped is not None and isinstance(ticket.block, list):
        answers = list(map(PredictionResult, ticket.block[start:stop], answers, itertools.repeat(wrapped[0])))
    ticket.fill(start, stop, answers)


def _spec(step: str, transform: RunInference[Any, Any], place: Place, around: Surroundings) -> HostSpec:
    handler = transform.path.model_handler
    limits = transform.limits
    return HostSpec(
        name=step,
        program=cloudpickle.dumps(ServedModel(step, handler, limits.size_buckets, place.timeout is None), protocol=5),
        limits=replace(limits, weigh=len)
        if limits.weigh is not None
        else limits,  # callers weigh; none of theirs runs there
        by_length=handler.measures_length(),
        copies=place.copies,
        concurrent=concurrent_batches(handler),
        in_turn=handler.prepares_ahead(),
        retry_safe=handler.retry_safe,
        timeout=place.timeout,
        load_timeout=around.load_timeout,
        variables={**thread_variables(max(1, around.cores // place.copies)), **handler._env_vars},
        devices=tuple({"CUDA_VISIBLE_DEVICES": device} for device in place.devices),
    )
