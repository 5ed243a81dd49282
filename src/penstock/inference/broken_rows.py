"""What rows come to that a host cannot answer: because their process dies, or because there is no model for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.errors import ModelCrashError, ModelLoadError, ModelTimeoutError, PenstockError, StepError, UsageError
from penstock.failures import LOADING, OUT_OF_MEMORY, TIMED_OUT, Failure, Handling
from penstock.models.messages import Broken
from penstock.models.uses import ATTEMPTS
from penstock.rows import shorten

_ERRORS: dict[str, type[PenstockError]] = {TIMED_OUT: ModelTimeoutError, OUT_OF_MEMORY: StepError, LOADING: ModelLoadError}


class BrokenRows:
    """Those of one message. `model_id`: of the model that they are for."""

    def __init__(self, message: Broken, model_id: str | None) -> None:
        self._message = message
        self._model_id = model_id
        self._kind = _ERRORS.get(message.kind, ModelCrashError)
        self._raised = None if message.error is None else message.error.error.error()  # with what load_model() has raised

    def is_handled(self, handling: Handling | None) -> bool:
        """Whether they cost the rows alone. Of what load_model() has raised, the user says so; if it could travel."""
        if handling is None or isinstance(self._raised, UsageError):
            return False
        cause = None if self._raised is None else self._raised.__cause__ or self._raised
        return cause is None or handling.handles(cause)

    def error(self, step: str, row: Any) -> PenstockError:
        """What ends the run."""
        message = self._message
        if isinstance(self._raised, UsageError):
            return self._raised
        held = f"it held a batch of {message.rows} rows, among them" if message.rows > 1 else "row"
        error = self._kind(f"step {step!r}: {message.message}\n  {held}: {shorten(row)}")
        if self._raised is not None:
            error.__cause__ = self._raised.__cause__
            for note in getattr(self._raised, "__notes__", ()):
                error.add_note(note)
        return error

    def failure(self, step: str) -> Failure:
        message, made = self._message, None if self._message.error is None else self._message.error.failure
        if made is not None:
            return dataclasses.replace(made, step=step, model_id=self._model_id, attempts=ATTEMPTS)
        kind = MemoryError if message.kind == OUT_OF_MEMORY else self._kind
        error = kind(message.message)
        return Failure.of(error, step, kind=message.kind, model_id=self._model_id, group=message.rows)
