"""The inference session: rows are submitted, batched in front of the model, and answered. Every engine uses this one.

    bundle's thread                      session (one per model and process)
    ---------------                      -----------------------------------
    lane.submit(block) -> Ticket  ---->  batcher: rows of all lanes, cut into batches
    lane.wait(ticket)             <----  run_inference(batch, model): answers back to their tickets

Who runs a batch: by default the caller whose rows complete it, on its own thread, so that one caller alone switches no
threads. A caller that waits runs what waits, as soon as no other caller can add to it. With max_batch_duration_secs a
thread of the session runs all batches, because only a thread of its own can keep a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import Any, NamedTuple

from penstock.batching.batcher import Batcher, Entry, Span
from penstock.blocks import Block, is_table, join, row_count, slice_rows
from penstock.errors import EngineError, ModelLoadError, PenstockError, PredictionCountError, StepError, UsageError
from penstock.inference.columns import as_column, with_answers
from penstock.inference.transform import RunInference
from penstock.models.loading import LoadedModel, load
from penstock.observe.metrics import Distribution, MetricKey, Metrics
from penstock.rows import row_error, safe_str, shorten

BYTES_SAMPLED_EVERY = 16  # batches: measuring the size of a batch can cost more than running it

METRICS = (
    "num_inferences",
    "failed_batches_counter",
    "inference_request_batch_size",
    "inference_request_batch_byte_size",
    "inference_batch_latency_micro_secs",
    "load_model_latency_milli_secs",
    "model_byte_size",
)


class Ticket:
    """Rows on their way through a model. The answers are there when `missing` is 0; `error` when they will never be."""

    __slots__ = ("answers", "block", "error", "missing", "pieces")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.missing = row_count(block)
        self.error: PenstockError | None = None
        self.answers: list[Any] = [] if is_table(block) else [None] * self.missing
        self.pieces: list[tuple[int, Any]] = []  # of a table: where a piece starts, and its answers

    @property
    def settled(self) -> bool:
        return not self.missing or self.error is not None

    def fill(self, start: int, stop: int, answers: Any) -> None:
        if is_table(self.block):
            self.pieces.append((start, answers))
        else:
            self.answers[start:stop] = answers
        self.missing -= stop - start


class _Request(NamedTuple):
    """What the batcher carries for a caller."""

    ticket: Ticket
    args: Any
    caller: Caller


class Caller:
    """One bundle that is running in this process, whichever sessions it submits to."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = False  # it waits for answers, so it cannot submit


class Sessions:
    """The sessions of one process. One lock for all of them, held only to decide, never while a model runs: a bundle that
    waits at one model is a bundle that cannot add rows at another."""

    def __init__(self, metrics: Metrics) -> None:
        self.changed = threading.Condition()
        self.metrics = metrics
        self._open: dict[str, InferenceSession] = {}

    def open(self, step: str, transform: RunInference[Any, Any]) -> InferenceSession:
        """The session of a step, or of all steps that share its model."""
        key = f"model {transform.model_identifier}" if transform.model_identifier else f"step {step}"
        with self.changed:
            if key not in self._open:
                self._open[key] = InferenceSession(self, step, transform)
            return self._open[key]

    def drain_metrics(self) -> Metrics:
        """What was measured since the last time."""
        with self.changed:
            for session in self._open.values():
                session.hand_in_metrics()
            return self.metrics.drain()

    def close(self, *, wait: bool = True) -> None:
        """End the sessions' threads. Models go with the process, or when nothing refers to them."""
        with self.changed:
            sessions = list(self._open.values())
            self._open.clear()
        for session in sessions:
            session.close(wait=wait)


class InferenceSession:
    """One model copy with the batcher in front of it."""

    def __init__(self, owner: Sessions, step: str, transform: RunInference[Any, Any]) -> None:
        self.step = step
        self.handler = transform.path.model_handler
        self._owner = owner
        self._changed = owner.changed
        self._batcher: Batcher[_Request] = Batcher(transform.limits)
        self._callers: set[Caller] = set()
        self._running = 0
        self._limit = self.handler.max_concurrent_batches()
        self._keys = {name: MetricKey(step, transform.metrics_namespace, name) for name in METRICS}
        self._loading = threading.Lock()
        self._loaded: LoadedModel | None = None
        self._closed = False
        self._sizes, self._latencies = Distribution(), Distribution()
        self._threads: list[threading.Thread] = []
        if transform.limits.max_wait is not None:
            self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self._limit)]
            for thread in self._threads:
                thread.start()

    def join(self, caller: Caller) -> Lane:
        """A bundle's own way in, until it closes it."""
        with self._changed:
            self._callers.add(caller)
        return Lane(self, caller)

    def close(self, *, wait: bool = True) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            thread.join()

    # The callers' side.

    def submit(self, request: _Request, weights: list[int] | None, alone: bool) -> None:
        """Add rows, and run on this thread the batches that they complete."""
        self._load()
        ticket = request.ticket
        group = _group(ticket.block, request.args)
        entry = Entry(request, ticket.missing, weights=weights, group=group, alone=alone)
        with self._changed:
            self._batcher.add(entry, time.monotonic())
            if self._threads:
                self._changed.notify_all()
                return
            while entry.taken < entry.size and self._running < self._limit:
                spans = self._batcher.take(time.monotonic())
                if spans is None:
                    break
                self._run(spans)

    def wait(self, ticket: Ticket, caller: Caller) -> None:
        """Until the ticket is settled; meanwhile run what no caller can add to."""
        with self._changed:
            caller.waiting = True
            self._changed.notify_all()
            try:
                while not ticket.settled:
                    spans = None if self._threads else self._take()
                    if spans is None:
                        self._changed.wait()
                    else:
                        self._run(spans)
            finally:
                caller.waiting = False

    def leave(self, caller: Caller) -> None:
        """No more rows come from this caller; what it left behind, it does not want."""
        with self._changed:
            self._callers.discard(caller)
            self._batcher.discard(lambda request: request.caller is caller)
            self._changed.notify_all()

    # Deciding and running. The lock is held, except while the model runs.

    def _take(self) -> list[Span[_Request]] | None:
        if self._running >= self._limit:
            return None
        nobody_can_add = all(caller.waiting for caller in self._callers)
        return self._batcher.take(time.monotonic(), flush=nobody_can_add)

    def _serve(self) -> None:
        """The session's own thread: every batch when it is full, due, or complete because nobody can add to it."""
        with self._changed:
            while not self._closed:
                spans = self._take()
                if spans is None:
                    deadline = self._batcher.deadline()
                    self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                else:
                    self._run(spans)

    def _run(self, spans: list[Span[_Request]]) -> None:
        error: PenstockError | None = None
        answers: Any = None
        self._running += 1
        self._changed.release()
        try:
            batch = join([slice_rows(entry.item.ticket.block, start, stop) for entry, start, stop in spans])
            args = spans[0].entry.item.args
            started = time.perf_counter()
            answers = self._answers(batch, args)
            seconds = time.perf_counter() - started
        except PenstockError as exc:
            error = exc
        except BaseException as exc:  # SystemExit from a handler is that handler's error
            error = StepError(f"step {self.step!r}: {type(exc).__name__} in run_inference(): {safe_str(exc)}")
            if isinstance(exc, KeyboardInterrupt):
                raise
        finally:
            self._changed.acquire()
            self._running -= 1
            _settle(spans, answers, error)
            self._changed.notify_all()
        if error is None:
            self._record_batch(batch, seconds)
        else:
            self._owner.metrics.count(self._keys["failed_batches_counter"])

    def _answers(self, batch: Block, args: Any) -> Any:
        try:
            return self._call(batch, args)
        except (PredictionCountError, UsageError, EngineError):
            raise  # no single row is to blame
        except Exception as exc:
            raised = exc
        found = self._find_guilty(batch, args, raised)
        if found is not None:
            row, own = found
            raise row_error(self.step, row, own) from own
        raise StepError(
            f"step {self.step!r}: {type(raised).__name__}: {safe_str(raised)}\n  raised for a batch of {row_count(batch)} "
            f"rows, none of which fails alone; its first row: {shorten(_row(batch, 0))}"
        ) from raised

    def _call(self, batch: Block, args: Any) -> Any:
        """One call of the model: a list, or for a table an Arrow array, of exactly one answer per row."""
        assert self._loaded is not None
        if is_table(batch):
            answers = as_column(self.handler.run_inference_columns(batch, self._loaded.model, args))
        else:
            answers = self.handler.run_inference(batch, self._loaded.model, args)
            if type(answers) is not list:
                answers = list(answers)
        if len(answers) != row_count(batch):
            raise PredictionCountError(
                f"step {self.step!r}: run_inference() returned {len(answers)} predictions for {row_count(batch)} examples; "
                "it must return one per example, in the same order"
            )
        return answers

    def _find_guilty(self, batch: Block, args: Any, exc: Exception) -> tuple[Any, Exception] | None:
        """Halve a batch that raised until one row is left that fails alone: that row, and its own error."""
        low, high = 0, row_count(batch)
        while high - low > 1:
            middle = (low + high) // 2
            if (raised := self._raised_by(slice_rows(batch, low, middle), args)) is None:
                low = middle  # the trouble is in the other half
            else:
                high, exc = middle, raised
        alone = exc if row_count(batch) == 1 else self._raised_by(slice_rows(batch, low, high), args)
        return None if alone is None else (_row(batch, low), alone)

    def _raised_by(self, batch: Block, args: Any) -> Exception | None:
        try:
            self._call(batch, args)
        except Exception as exc:
            return exc
        return None

    # The model, and what is measured.

    def _load(self) -> None:
        if self._loaded is not None:
            return
        with self._loading:
            if self._loaded is not None:
                return
            try:
                loaded = load(self.handler.load_model, self.handler._env_vars)
            except PenstockError:
                raise
            except Exception as exc:
                what = f"{type(self.handler).__name__}.load_model() raised {type(exc).__name__}: {safe_str(exc)}"
                raise ModelLoadError(f"step {self.step!r}: {what}") from exc
            with self._changed:
                self._owner.metrics.record(self._keys["load_model_latency_milli_secs"], loaded.seconds * 1e3)
                self._owner.metrics.record(self._keys["model_byte_size"], loaded.bytes)
            self._loaded = loaded

    def _record_batch(self, batch: Block, seconds: float) -> None:
        self._sizes.record(row_count(batch))
        self._latencies.record(seconds * 1e6)
        if self._sizes.count % BYTES_SAMPLED_EVERY == 1:
            size = batch.nbytes if is_table(batch) else self.handler.get_num_bytes(batch)  # type: ignore
            self._owner.metrics.record(self._keys["inference_request_batch_byte_size"], size)

    def hand_in_metrics(self) -> None:
        """What is counted for every batch goes to the metrics now and then."""
        if self._sizes.count:
            metrics = self._owner.metrics
            metrics.count(self._keys["num_inferences"], int(self._sizes.sum))
            metrics.distribution_of(self._keys["inference_request_batch_size"]).merge(self._sizes)
            metrics.distribution_of(self._keys["inference_batch_latency_micro_secs"]).merge(self._latencies)
            self._sizes, self._latencies = Distribution(), Distribution()


class Lane:
    """One bundle's way into a session. Used by one thread, in a `with` block."""

    def __init__(self, session: InferenceSession, caller: Caller) -> None:
        self._session = session
        self._caller = caller

    def submit(self, ticket: Ticket, args: Any = None, *, weights: list[int] | None = None, alone: bool = False) -> None:
        """Rows for the model; `alone`: they are one batch as they are. May run the model on this thread."""
        self._session.submit(_Request(ticket, args, self._caller), weights, alone)

    def wait(self, ticket: Ticket) -> Block:
        """The answers, in the order of the rows; a table comes back with the columns `inference` and `model_id`."""
        if not ticket.settled:
            self._session.wait(ticket, self._caller)
        if ticket.error is not None:
            raise ticket.error
        if not is_table(ticket.block):
            return ticket.answers
        return with_answers(ticket.block, ticket.pieces, self._session.handler.model_id())

    def close(self) -> None:
        """No more rows come from this bundle."""
        self._session.leave(self._caller)


def _settle(spans: list[Span[_Request]], answers: Any, error: PenstockError | None) -> None:
    at = 0
    for entry, start, stop in spans:
        ticket = entry.item.ticket
        if error is not None:
            ticket.error = ticket.error or error
        elif len(spans) == 1:
            ticket.fill(start, stop, answers)
        else:
            ticket.fill(start, stop, answers[at : at + stop - start])
        at += stop - start


def _group(block: Block, args: Any) -> Hashable:
    """Rows share a batch when their arguments are equal, and the columns of their tables."""
    columns = None if isinstance(block, list) else str(block.schema)
    return (columns, None if args is None else repr(args))


def _row(batch: Block, index: int) -> Any:
    return batch[index] if isinstance(batch, list) else batch.slice(index, 1).to_pylist()[0]
