"""The inference session: rows are submitted, batched in front of the model, and answered. Every engine uses this one.

    bundle's thread                      session (one per model and process)
    ---------------                      -----------------------------------
    lane.submit(block) -> Ticket  ---->  batcher: rows of all lanes, cut into batches
    lane.wait(ticket)             <----  run_inference(batch, model): answers back to their tickets

Who runs a batch: by default the caller whose rows complete it, on its own thread, so that one caller alone switches no
threads. A caller that waits runs what waits, as soon as no other caller can add to it. Threads of the session run all
batches with max_batch_duration_secs, because only a thread of its own can keep a deadline, and where several batches may
be in run_inference() at once.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from penstock.batching.aim import Aiming
from penstock.batching.batcher import Batcher
from penstock.batching.entry import Aim, Entry, Span
from penstock.blocks import Block, gather, row_count, rows_of
from penstock.errors import EngineError, PenstockError, StepError
from penstock.failures import Handling
from penstock.inference.handler import concurrent_batches
from penstock.inference.hosted import HostedSession
from penstock.inference.lane import Caller, LocalLane, Request, lengths_of, settle
from penstock.inference.model import BYTES_SAMPLED_EVERY, ModelCopy
from penstock.inference.shared import Shared
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import Ticket
from penstock.inference.turns import QUICK_TURNS
from penstock.models.memory import available_bytes
from penstock.models.outcome import Outcome
from penstock.models.place import Place, Surroundings, choose_place, fits
from penstock.models.rendezvous import Notice
from penstock.observe.metrics import Distribution, MetricKey, Metrics
from penstock.retry import Retry
from penstock.rows import safe_str
from penstock.seeding import seeded

METRICS = (
    "failed_batches_counter",
    "inference_request_batch_size",
    "inference_request_batch_byte_size",
    "inference_batch_latency_micro_secs",
    "load_model_latency_milli_secs",
    "model_byte_size",
    "useful_cost",
    "padded_cost",
    "out_of_memory_counter",
    "batch_size_found",
    "model_place",
)

logger = logging.getLogger(__name__)


class Sessions(Shared):
    """The sessions of one process, or of one run in it."""

    def __init__(self, metrics: Metrics, around: Surroundings | None = None) -> None:
        super().__init__(metrics, around)
        self._open: dict[str, InferenceSession | HostedSession] = {}
        self._closed = False

    def open(self, step: str, spec: InferenceSpec) -> InferenceSession | HostedSession:
        """The session of a step, or of all steps that share its model: here, or in a host."""
        key = f"model {spec.model_identifier}" if spec.model_identifier else f"step {step}"
        with self.changed:
            if self._closed:
                raise EngineError(f"step {step!r}: the run has ended")
            if key not in self._open:
                place = choose_place(spec.wishes(), self.around)
                kind = HostedSession if place.hosted else InferenceSession
                self._open[key] = kind(self, key, step, spec, place)
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
            self._closed = True
            sessions = list(self._open.values())
            self._open.clear()
        for session in sessions:
            session.close(wait=wait)


class InferenceSession:
    """One model copy with the batcher in front of it."""

    def __init__(self, owner: Shared, key: str, step: str, spec: InferenceSpec, place: Place) -> None:
        self.step = step
        self._key = key
        self._spec = spec
        self._place = place
        self._placing = threading.Lock()
        self._moved: HostedSession | None = None
        self.handler = spec.handler
        self._owner = owner
        self._changed = owner.changed
        in_worker = (
            bool(owner.around.folder) and not owner.around.in_process
        )  # elsewhere a single caller has no other thread
        self._model = ModelCopy(step, self.handler, spec.limits.size_buckets, watched=in_worker)
        self._batcher: Batcher[Request] = Batcher(spec.limits)
        self._aiming = Aiming(spec.limits, self.handler.measures_length())
        self._limits = spec.limits
        self._lanes: set[LocalLane] = set()
        self._running = 0
        self._in_turn = self.handler.prepares_ahead()
        self._limit = concurrent_batches(self.handler)
        self._keys = {name: MetricKey(step, spec.metrics_namespace, name) for name in METRICS}
        self._closed = False
        self._sizes, self._latencies = Distribution(), Distribution()
        self._ended = 0.0  # when the last batch did
        if self._in_turn:
            QUICK_TURNS.begin()
        self._threads: list[threading.Thread] = []
        if spec.limits.max_wait is not None or self._limit > 1:
            self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self._limit)]
            for thread in self._threads:
                thread.start()

    def join(
        self, caller: Caller, step: str | None = None, handling: Handling | None = None, retry: Retry | None = None
    ) -> LocalLane:
        """A bundle's own way in, until it closes it; for a step that shares the model of another, with its own name and
        its own handling of errors."""
        lane = LocalLane(self, caller, step or self.step, handling, retry)
        with self._changed:
            self._lanes.add(lane)
        return lane

    def close(self, *, wait: bool = True) -> None:
        with self._changed:
            if self._in_turn and not self._closed:
                QUICK_TURNS.end()
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            thread.join()
        self._model.close()
        if self._moved is not None:
            self._moved.close(wait=wait)

    # Where the model is.

    def load(self) -> HostedSession | None:
        """Load the model, if nobody has. If memory does not hold one in each worker, the session of the host to go to."""
        if self._place.measured:
            with self._placing:
                if self._place.measured:
                    self._place = self._measured_place()
                    if self._place.hosted:
                        self._moved = HostedSession(self._owner, self._key, self.step, self._spec, self._place)
        if self._moved is None:
            self._load_here()
        return self._moved

    def _measured_place(self) -> Place:
        """The first worker loads the first copy, alone, and decides for all of them."""
        around = self._owner.around
        with Notice(around.folder, self._key) as notice:
            if not notice.text:
                self._load_here()
                size, free = self._model.bytes, available_bytes()
                if not fits(size, around.workers - 1, free):
                    self._model.unload()
                    notice.write(
                        f"a copy takes {size / 1e9:.3g} GB, and {around.workers} workers would hold one each: "
                        f"{free / 1e9:.3g} GB were left beside the first"
                    )
                    logger.warning("step %r: one model host for all workers: %s", self.step, notice.text)
                else:
                    notice.write("fits")
            if notice.text == "fits":
                return replace(self._place, measured=False)
        with self._changed:
            self._owner.metrics.notes[self._keys["model_place"]] = f"one host for all workers: {notice.text}"
        return Place(hosted=True, why=notice.text, timeout=self._place.timeout)

    def _load_here(self) -> None:
        if self._model.is_loaded:
            return
        with seeded(self._owner.around.seed, self._key):
            loaded = self._model.load()
        if loaded is not None:
            with self._changed:
                self._owner.metrics.record(self._keys["load_model_latency_milli_secs"], loaded.seconds * 1e3)
                self._owner.metrics.record(self._keys["model_byte_size"], loaded.bytes)

    # The callers' side.

    def submit(self, entry: Entry[Request]) -> None:
        """Add rows, and run on this thread the batches that they complete."""
        with self._changed:
            self._batcher.add(entry, time.monotonic())
            if self._threads:
                self._changed.notify_all()
                return
            while entry.taken < entry.size and self._running < self._limit:
                spans = self._take(flush=False)
                if spans is None:
                    break
                self._run(spans)

    def wait(self, ticket: Ticket, caller: Caller) -> None:
        """Until the ticket is settled; meanwhile run what no caller can add to."""
        with self._changed:
            caller.waits_for = ticket
            self._changed.notify_all()
            try:
                while not ticket.settled:
                    if self._closed:
                        raise EngineError(f"step {self.step!r}: the run has ended")
                    spans = None if self._threads else self._take(flush=self._nobody_can_add())
                    if spans is None:
                        self._changed.wait()
                    else:
                        self._run(spans)
            finally:
                caller.waits_for = None

    def leave(self, lane: LocalLane) -> None:
        """No more rows come by this lane; what was left behind, nobody wants."""
        with self._changed:
            self._lanes.discard(lane)
            self._batcher.discard(lambda request: request.lane is lane)
            self._changed.notify_all()

    # Deciding and running. The lock is held, except while the model runs.

    def _nobody_can_add(self) -> bool:
        return all(lane.caller.waiting for lane in self._lanes)

    def _take(self, flush: bool) -> list[Span[Request]] | None:
        if self._running >= self._limit:
            return None
        self._batcher.aim = self._aiming.aim()
        return self._batcher.take(time.monotonic(), flush=flush)

    def _serve(self) -> None:
        """The session's own thread: every batch when it is full, due, or complete because nobody can add to it."""
        with self._changed:
            while not self._closed:
                spans = self._take(flush=self._nobody_can_add())
                if spans is None:
                    deadline = self._batcher.deadline()
                    self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
                else:
                    self._run(spans)

    def _run(self, spans: list[Span[Request]]) -> None:
        outcome: Outcome | PenstockError
        aim = self._batcher.aim
        self._running += 1
        self._changed.release()
        try:
            batch = gather([(entry.item.ticket.block, start, stop) for entry, start, stop in spans])
            started = time.perf_counter()
            request = spans[0].entry.item
            lane = request.lane
            given = batch if lane.handling is None else rows_of(batch)
            outcome = self._model.outcomes(given, request.args, lane.step, lane.handling, lane.retry)
            seconds = time.perf_counter() - started
            size = self._sampled_size(batch)
        except PenstockError as exc:
            outcome = exc
        except BaseException as exc:  # SystemExit from a handler is that handler's error
            outcome = StepError(f"step {self.step!r}: {type(exc).__name__} in run_inference(): {safe_str(exc)}")
            if isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C
        finally:
            self._changed.acquire()
            self._running -= 1
            settle(spans, outcome)
            self._changed.notify_all()
        if isinstance(outcome, Outcome):
            self._learn(spans, aim, row_count(batch), self._own_time(started, seconds), outcome.calls)
            self._record_batch(row_count(batch), seconds, size)
        if not isinstance(outcome, Outcome) or outcome.failures:
            self._owner.metrics.count(self._keys["failed_batches_counter"])

    # What is learned and measured.

    def _own_time(self, started: float, seconds: float) -> float:
        """How long the model worked on a batch: where batches take turns, without the time of the one before."""
        before, self._ended = self._ended, max(self._ended, started + seconds)
        return max(started + seconds - max(before, started), 0.0) if self._in_turn else seconds

    def _learn(self, spans: list[Span[Request]], aim: Aim, rows: int, seconds: float, calls: int) -> None:
        lengths = lengths_of(spans)
        if lengths is not None:
            self._owner.metrics.count(self._keys["useful_cost"], sum(lengths))
            self._owner.metrics.count(self._keys["padded_cost"], rows * self._limits.padded_length(max(lengths)))
        failed = self._model.take_out_of_memory()
        if failed is None:
            if calls == 1:  # how long the search for bad rows took, says nothing of the size
                self._aiming.ran(aim, rows, lengths, seconds)
            return
        self._owner.metrics.count(self._keys["out_of_memory_counter"])
        self._aiming.out_of_memory(failed, None if lengths is None else lengths[-failed:])

    def _sampled_size(self, batch: Block) -> int | None:
        """The bytes of some batches; None for others."""
        return None if self._sizes.count % BYTES_SAMPLED_EVERY else self._model.byte_size(batch)

    def _record_batch(self, rows: int, seconds: float, size: int | None) -> None:
        self._sizes.record(rows)
        self._latencies.record(seconds * 1e6)
        if size is not None:
            self._owner.metrics.record(self._keys["inference_request_batch_byte_size"], size)

    def hand_in_metrics(self) -> None:
        """What is counted for every batch goes to the metrics now and then."""
        if self._sizes.count:
            metrics = self._owner.metrics
            metrics.distribution_of(self._keys["inference_request_batch_size"]).merge(self._sizes)
            metrics.distribution_of(self._keys["inference_batch_latency_micro_secs"]).merge(self._latencies)
            self._sizes, self._latencies = Distribution(), Distribution()
            found = self._aiming.explain()
            if found is not None:
                metrics.notes[self._keys["batch_size_found"]] = found
