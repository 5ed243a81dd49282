"""The inference session: rows are submitted, batched in front of the model, and answered. Every engine uses this one.

    bundle's thread                      session (one per model and process)
    ---------------                      -----------------------------------
    lane.submit(block) -> Ticket  ---->  front: rows of all lanes, cut into batches
    lane.wait(ticket)             <----  run_inference(batch, model): answers back to their tickets

The front (models/front.py) decides when a batch leaves. Who runs it: by default the caller whose rows complete it, on its
own thread, so that one caller alone switches no threads; or a caller that waits. Threads of the session run all batches
with max_batch_duration_secs, because only such a thread can keep a deadline, and where several batches may run at once.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from penstock.batching.entry import Aim, Entry, Span
from penstock.errors import EngineError, PenstockError, StepError
from penstock.failures import Handling
from penstock.inference.calls import How
from penstock.inference.handler import concurrent_batches
from penstock.inference.in_a_row import batch_rows, one_by_one, outcomes_in_a_row, rows_in_spans
from penstock.inference.lane import Caller, LocalLane, Request, settle
from penstock.inference.model import BYTES_SAMPLED_EVERY, ModelCopy
from penstock.inference.residents import Resident, Residents
from penstock.inference.search_key import search_key
from penstock.inference.service_handler import rows_at_once
from penstock.inference.session_models import ManyModels, OneModel
from penstock.inference.shared import SessionState
from penstock.inference.spec import InferenceSpec
from penstock.inference.thread_turns import QUICK_TURNS
from penstock.inference.ticket import Ticket
from penstock.models.front import Front
from penstock.models.kept_sizes import KeptSize
from penstock.models.measures import Measures, hand_in
from penstock.models.outcome import Outcome, in_one
from penstock.retry import Retry
from penstock.rows import safe_str
from penstock.seeding import seeded

# Imported where a model has a host: most have none, and a first run waits for every import.
if TYPE_CHECKING:
    from penstock.inference.row_flow import RowFlow


class InferenceSession:
    """One model copy, and its front. `_changed`, the lock of all sessions, guards all that changes, unless a comment says
    otherwise."""

    def __init__(self, owner: SessionState, key: str, step: str, spec: InferenceSpec) -> None:
        self.step = step
        self._key = key
        self._spec = spec
        self.handler = spec.handler
        self._owner = owner
        self._changed = owner.changed
        in_worker = bool(owner.around.folder) and not owner.around.in_process  # elsewhere one caller has no other thread
        self._residents = Residents(
            step,
            self.handler,
            watched=in_worker,
            refreshing=spec.refreshing(key, owner.around),
            resized=self._resized,
            place=spec.run_place(step, owner.around),
        )
        self._in_turn = self.handler.prepares_ahead()
        self.front: Front[Request] = Front(spec.limits, self.handler.measures_length(), in_turn=self._in_turn)
        self._running = 0  # batches that are in run_inference() now, with the lock released
        self._limit = concurrent_batches(self.handler)
        self._at_once = 1 if self._in_turn else self._limit  # that run; others are made ready behind them
        self._namespace = spec.metrics_namespace
        self._measures = Measures(spec.limits)
        self._one = OneModel(self._residents, self.front)
        self._models: OneModel | ManyModels = self._one
        if spec.by_key is not None:
            self._models = ManyModels(owner, self._residents, self.front, self._measures, spec.by_key)
        self._kept = KeptSize(owner.around.run_dir)
        self._batches = 0  # no lock: it only picks the batches whose bytes are measured
        self._closed = False
        self._flow: RowFlow | None = None  # of a model that answers each row by itself
        if self._in_turn:
            QUICK_TURNS.begin()
        self.threads: list[threading.Thread] = []  # fixed from here on; close() ends them
        if rows_at_once(self.handler) and spec.by_key is None and spec.refresh is None:
            self._flow = _row_flow(owner, self._residents, self.front, self._measures)
        elif spec.limits.max_wait is not None or self._limit > 1:
            self.threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self._limit)]
            for thread in self.threads:
                thread.start()
        if self.handler.accelerator() is not None and spec.by_key is None and spec.refresh is None and self._flow is None:
            owner.device_turns.join(self._one)

    def join(
        self, caller: Caller, step: str | None = None, handling: Handling | None = None, retry: Retry | None = None
    ) -> LocalLane:
        """A bundle's own way in, until it closes it; for a step that shares the model of another, with its own name and
        its own handling of errors."""
        lane = LocalLane(self, caller, step or self.step, handling, retry)
        with self._changed:
            self.front.opened(lane)
            caller.fronts[lane] = self.front
        return lane

    def close(self, *, wait: bool = True) -> None:
        with self._changed:
            if self._in_turn and not self._closed:
                QUICK_TURNS.end()
            self._closed = True
            self._changed.notify_all()
        self._residents.give_up(EngineError(f"step {self.step!r}: the run has ended"))  # threads that wait end, too
        for thread in self.threads if wait else ():  # before the models go: a batch may run
            thread.join()
        if self._flow is not None:
            self._flow.close()
        self._residents.close()

    def _resized(self, model: str, size: int) -> None:
        with self._changed:  # on whichever thread has brought the new version
            self._models.resized(model, size)

    @property
    def model(self) -> Resident:
        """The only one."""
        return self._residents.copy(None)

    def load(self) -> None:
        """Load it, if nobody has."""
        if self._spec.by_key is not None or self.model.is_loaded:
            return  # of many, each is loaded when its rows have come
        with seeded(self._owner.around.seed, self._key):
            loaded = self._owner.device_turns.load(self._one, self.step)
        if loaded is not None:
            with self._changed:
                self._measures.loaded(loaded.seconds, loaded.bytes)
                self._kept.open(search_key(self.handler), self.front.search())
            self._share_cores()

    def _share_cores(self) -> None:
        """In a short job all threads may call a model that is safe for it, each with its share of the cores. Where one at a
        time does, its libraries may use them all."""
        threads = self._owner.around.threads
        if threads > 1 and not self._in_turn and self.model.is_thread_safe():
            self._owner.native_threads.look()
            with self._changed:
                self._limit = self._at_once = max(self._limit, threads)

    # The callers' side.

    def submit(self, entries: list[Entry[Request]]) -> None:
        """Add rows, and run on this thread the batches that they complete."""
        with self._changed:
            now = time.monotonic()
            for entry in entries:
                self._models.add(entry, now)
            if self._flow is not None:
                self._flow.go_on()
                return
            if self.threads:
                self._changed.notify_all()  # wakes _serve()
                return
            while any(entry.taken < entry.stop for entry in entries) and self._run_next(idle=False):
                pass

    def wait(self, ticket: Ticket, caller: Caller) -> None:
        """Until the ticket is settled; meanwhile run what may leave."""
        with self._changed:
            self._owner.waits(caller, ticket)
            try:
                while not ticket.settled:
                    if self._closed:
                        raise EngineError(f"step {self.step!r}: the run has ended")
                    if self.threads or self._flow is not None:
                        self._changed.wait()  # until settled() of whoever ran the rows, or close()
                    elif not self._run_next(idle=True) and not self._models.go_on():
                        self._changed.wait(self._patience())
            finally:
                self._owner.goes(caller)

    def leave(self, lane: LocalLane) -> None:
        """No more rows come by this lane; what was left behind, nobody wants."""
        with self._changed:
            self.front.closed(lane)
            self._models.discard(lane)
            lane.caller.fronts.pop(lane, None)
            if self._flow is not None:
                self._flow.go_on()
            self._changed.notify_all()  # without this lane the others may have all that is to come: a batch may leave

    # Running what the front says. The lock is held, except while the model runs.

    def _run_next(self, idle: bool) -> bool:
        """Run a batch if the model is free and one may leave; whether one did."""
        if self._running >= self._limit:
            return False
        taken = self.front.take(time.monotonic(), idle=idle and self._running < self._at_once, in_a_row=self._limit == 1)
        if taken is None:
            return False
        self._run(*taken)
        return True

    def _patience(self) -> float | None:
        """How long to wait before the front is asked again, if nothing happens: until rows have lingered long enough. While
        the model is busy there is nothing to ask: whoever runs it tells everybody when it is free."""
        times = [None if self._running >= self._at_once else self.front.next_time(), self._models.next_time()]
        until = min((each for each in times if each is not None), default=None)
        return None if until is None else max(0.0, until - time.monotonic())

    def _serve(self) -> None:
        """The session's own thread. It ends with close(), at the latest after the batch that it runs."""
        with self._changed:
            while not self._closed:
                if not self._run_next(idle=True) and not self._models.go_on():
                    self._changed.wait(self._patience())

    def _run(self, spans: list[Span[Request]], aim: Aim) -> None:
        """A batch, or several in a row. The lease keeps the model here while the lock is released."""
        outcomes: list[Outcome] | PenstockError
        model, rows = spans[0].entry.model, batch_rows(spans, aim.rows)
        copy = self._models.lease(model)
        # Callers are inside `with self._changed`: from here to `finally` others may submit, and run what else may leave.
        self._running += 1
        self._changed.release()
        try:
            if not copy.is_loaded:  # it has made room for another
                self.load()
            started = time.perf_counter()
            request = spans[0].entry.item
            self._owner.native_threads.limit_this_thread()
            lane = request.lane
            how = How(request.args, lane.step, lane.handling, lane.retry, request.ticket.prepared)
            outcomes = outcomes_in_a_row(copy, rows_in_spans(spans), rows, how)
            ended = time.perf_counter()
            batches = -(-sum(stop - start for _, start, stop in spans) // rows)
            size = self._sampled_size(copy, spans, rows, batches)
        except PenstockError as exc:
            outcomes = exc
        except BaseException as exc:  # SystemExit from a handler is that handler's error
            outcomes = StepError(f"step {self.step!r}: {type(exc).__name__} in run_inference(): {safe_str(exc)}")
            if isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C
        finally:
            self._changed.acquire()  # whatever was raised: callers of this hold it, and release it
            self._running -= 1
            self._models.release(model)
            whole = in_one(outcomes) if isinstance(outcomes, list) else outcomes
            if whole is not None:
                settle(spans, whole)
            elif isinstance(outcomes, list):
                for batch, outcome in zip(one_by_one(spans, rows), outcomes, strict=True):
                    settle(batch, outcome)
            self._owner.settled()
        if not isinstance(outcomes, list):
            self._measures.failed()
            return
        # The lock is held again: the front and the measures are guarded by it.
        seconds, times = (ended - started) / batches, 1
        if whole is not None:  # they are alike
            outcomes, times = outcomes[:1], batches
        for batch, outcome in zip(one_by_one(spans, rows, len(outcomes)), outcomes, strict=True):
            too_large, failed = outcome.out_of_memory, bool(outcome.failures)
            calls, on_device = outcome.calls, outcome.device_seconds
            self.front.ran(batch, aim, seconds, ended, calls=calls, too_large=too_large, device_seconds=on_device)
            self._measures.ran(batch, seconds, size=size, failed=failed, out_of_memory=too_large, times=times)
            size = None

    def _sampled_size(self, copy: Resident, spans: list[Span[Request]], rows: int, batches: int) -> int | None:
        """The bytes of the first of these batches, if it is time for that."""
        before, self._batches = self._batches, self._batches + batches
        is_due = -(-before // BYTES_SAMPLED_EVERY) < -(-self._batches // BYTES_SAMPLED_EVERY)
        return copy.byte_size(rows_in_spans(one_by_one(spans, rows, 1)[0])) if is_due else None

    def hand_in_metrics(self) -> None:
        """What was measured goes to the metrics now and then. The lock is held."""
        self._measures.counted(self._residents.take_counts())
        self._measures.found(self.front.search().explain())
        self._measures.used(self._models.used())
        self._kept.keep(self.front.search())
        hand_in(self._measures.take(), self._owner.metrics, self.step, self._namespace)


def _row_flow(owner: SessionState, residents: Residents, front: Front[Request], measures: Measures) -> RowFlow:
    from penstock.inference.row_flow import RowFlow

    copy = residents.copy(None)
    assert isinstance(copy, ModelCopy)
    return RowFlow(owner, copy, front, measures)
