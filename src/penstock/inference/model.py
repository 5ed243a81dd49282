"""One model copy: loaded when it is first needed, and called with whole batches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.answers import cut
from penstock.blocks import Block, row_count
from penstock.forks import end_if_forked, this_process
from penstock.inference.calls import How, call_model, filled
from penstock.inference.failed_batch import FailedBatch
from penstock.inference.handler import AnnouncingHandler, ModelHandler, variables_of
from penstock.inference.model_loading import load_model_of
from penstock.inference.slow import SlowCalls
from penstock.inference.submitted_rows import SubmittedRows
from penstock.models.activity import BATCHES
from penstock.models.loading import LoadedModel
from penstock.models.memory import file_bytes
from penstock.models.outcome import Outcome

BYTES_SAMPLED_EVERY = 16  # batches: measuring the size of a batch can cost more than running it


class ModelCopy:
    """A handler and the model that it loaded, in this process."""

    def __init__(
        self,
        step: str,
        handler: ModelHandler[Any, Any, Any],
        size_buckets: tuple[int, ...] = (),
        *,
        slow: SlowCalls | None = None,
        prepared: bool = False,
        one_of_many: bool = False,
        model_id: str | None = None,
    ) -> None:
        """slow: tells of a call that does not end. prepared: this process has the handler's variables in its environment,
        and maybe a device of its own: they are not set again. one_of_many: others are loaded while this one is called.
        model_id: what answers are marked with; None: what the handler says."""
        self.step = step
        self._slow = slow
        self.handler = handler
        self._variables = {} if prepared else variables_of(handler)
        self._one_of_many = one_of_many
        self._model_id = model_id
        self._size_buckets = size_buckets
        self._own = threading.local()  # of each thread: whom to tell of a call, and its time on the device
        self._announces = False  # calls, to somebody who times them
        self._sees_device = type(handler).device_seconds is not ModelHandler.device_seconds
        self._loading = threading.Lock()  # held while the model loads: others wait for it
        self._loaded: LoadedModel | None = None  # written under _loading; read without: it is there whole, or not

    def load(self) -> LoadedModel | None:
        """Load the model, if nobody has; return what that cost. One thread loads, others wait for it."""
        if self._loaded is not None:
            return None
        with self._loading:
            if self._loaded is not None:  # by the thread that this one has waited for
                return None
            self._loaded = load_model_of(self.handler, self.step, self._variables, one_of_many=self._one_of_many)
            return self._loaded

    def outcomes(
        self,
        batch: Block,
        how: How,
        *,
        holds_back: bool = False,
        read_again: Callable[[], Block] | None = None,
        raised: BaseException | None = None,
    ) -> Outcome:
        """One answer or one failure per row. A batch that raises runs again in parts until the rows that fail alone are
        found. Errors that are not handled are raised; they name the row that is to blame, and the step that it came from:
        several may share this model.

        What how.retry names is tried again first. Its attempts are for the batch and all that it leads to: a fault that has
        outlasted them is not waited for once more in every part.

        holds_back: a row that does not fit alone is not blamed but left `again`, for a caller that can start this process
        anew; where several are, memory is full, and what has no answer yet is left with them.

        read_again: gives the rows once more, to a caller that keeps them elsewhere, and sends answers away before the next
        call. The handler is then given the batch itself, and its answers are taken as they are; without it, copies of what
        could be changed: every call sees the rows as they were submitted, and no call changes answers of another.

        raised: what the first call of the batch has raised, if somebody else has made it."""
        rows = SubmittedRows(batch, self.handler.changes_rows(), read_again)
        try:
            if raised is not None:
                raise raised
            call = self.call if read_again is None else partial(self.call, sent=True)
            answers = rows.call(0, rows.count, call, how.args)
        except BaseException as exc:
            return FailedBatch(self, rows, how, holds_back).outcome(exc)
        on_device = self._own.device_seconds if self._sees_device else None
        return Outcome(answers, model_id=self.model_id(), device_seconds=on_device)

    @property
    def is_plain(self) -> bool:
        """Whether a call is just that, and nobody is told of it."""
        return not (self._announces or self._size_buckets or self._one_of_many or self._sees_device or self._slow)

    def byte_size(self, batch: Block) -> int | None:
        """The bytes of a batch, if they can be told."""
        with contextlib.suppress(Exception):  # a size that cannot be told is no reason to fail
            return self.handler.get_num_bytes(batch) if isinstance(batch, list) else int(batch.nbytes)
        return None

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    @property
    def loaded(self) -> LoadedModel | None:
        return self._loaded

    def file_bytes(self) -> int | None:
        """How large the files of the model are, if that can be seen."""
        return file_bytes(self.handler.model_files)

    @property
    def bytes(self) -> int:
        """By how much this process grew when the model was loaded."""
        return 0 if self._loaded is None else self._loaded.grown or self._loaded.ram

    def is_thread_safe(self) -> bool:
        """Whether several threads may call the model that is loaded at once."""
        return self._loaded is not None and self.handler.is_thread_safe(self._loaded.model)

    def let_go(self) -> None:
        """Of the model: if nothing else refers to it, its memory is free."""
        with self._loading:
            self._loaded = None

    def model_id(self) -> str | None:
        """Text, whatever the handler says: it travels."""
        model_id = self.handler.model_id() if self._model_id is None else self._model_id
        return None if model_id is None else str(model_id)

    def announce(self, calling: Callable[[], None]) -> None:
        """From now on, tell this before each call that this thread makes."""
        self._own.calling, self._announces = calling, True
        if isinstance(self.handler, AnnouncingHandler):
            self.handler.calling = calling

    def call(self, batch: Block, args: Any, *, sent: bool = False) -> Any:
        """The answers of the model to these rows, at once. sent: before the next call, so that they need no memory of their
        own."""
        assert self._loaded is not None
        if self._announces and (calling := getattr(self._own, "calling", None)) is not None:
            calling()
        given = filled(batch, self._size_buckets) if self._size_buckets else batch
        if self._slow is not None:
            self._slow.begin()
        if self._one_of_many:
            BATCHES.begin()
        began = this_process()
        if self._sees_device:
            self.handler.device_seconds()  # what an earlier call has left
        try:
            answers = call_model(self.handler, self._loaded.model, given, args, self.step, sent)
            if self._sees_device:
                self._own.device_seconds = self.handler.device_seconds()
        finally:
            end_if_forked(began, self.step)  # first: a child that was forked inside ends here
            if self._one_of_many:
                BATCHES.end()
            if self._slow is not None:
                self._slow.end()
        return answers if given is batch else cut(answers, 0, row_count(batch))
