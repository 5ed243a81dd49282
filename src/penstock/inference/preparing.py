"""Preparing examples beside the data: on the caller's thread with the handler's tool, or in a process that can be killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from penstock.answers import as_rows, put_together
from penstock.errors import (
    BadRowsError,
    EngineError,
    NotShippableError,
    StepError,
    UsageError,
)
from penstock.failures import PREPARING, RAISED, Failure
from penstock.forks import end_if_forked, this_process
from penstock.inference.calls import own_unless_native
from penstock.inference.guard import Guard
from penstock.inference.handler import ModelHandler
from penstock.inference.lane import Lane
from penstock.inference.model_loading import asked
from penstock.inference.ticket import Ticket, not_packed
from penstock.models.versions import Version
from penstock.row_copies import own_rows, told_once
from penstock.rows import let_through, many, row_error, without

Handler = ModelHandler[Any, Any, Any]


class Preparer(Protocol):
    """Prepares the examples of one bundle's stream, and is used by its thread alone."""

    @property
    def prepared(self) -> str | None:
        """With what, where that may change (inference/live_versions.py)."""

    def prepare(self, examples: list[Any], args: Any) -> tuple[list[Any], dict[int, Failure]]:
        """One value for each example, anything where it failed; and the failures by position. Errors that are not handled
        are raised, and name the example."""


class Preparers(NamedTuple):
    """Of a bundle's stream: that of its step; or, where there are many models, of each."""

    of_step: Preparer | None
    of_model: Callable[[str, Handler, Guard], Preparer | None] = lambda *_: None  # by name
    lane: Lane | None = None  # to the process where rows are prepared
    change: Callable[[int], bool] = lambda _: False  # prepare for the version of this number from now on: if it is another

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()


class VersionTool(NamedTuple):
    """What rows are prepared with for a version of a model that changes."""

    version: Version
    handler: Handler
    prepared: str | None  # equal for versions that take rows which are prepared alike
    tool: Any


class Tools:
    """What handlers prepare with, one of each in a process. Whichever thread comes first loads it."""

    def __init__(self) -> None:
        self._loading = threading.Lock()  # guards both; held while a tool loads, for which the others would wait anyway
        self._loaded: dict[tuple[type, str], Any] = {}
        self._versions: dict[str, VersionTool] = {}  # of models that change, by session

    def tool(self, handler: Handler, step: str, model: str = "") -> Any:
        """`model`: the name of the handler's, where the step has many."""
        key = type(handler), handler.prepare_key() or f"step {step} {model}"
        with self._loading:
            if key not in self._loaded:
                self._loaded[key] = load_tool(handler, step)
            return self._loaded[key]

    def last_version(self, session: str) -> VersionTool | None:
        """That which was asked for last: what one bundle has learned, the next begins with."""
        return self._versions.get(session)  # without the lock, which is held while another tool loads

    def of_version(self, session: str, version: Version, load: Callable[[], VersionTool]) -> VersionTool:
        """Loaded once, whatever becomes of its files: rows are prepared with what was there then, and are said to be."""
        with self._loading:
            held = self._versions.get(session)
            if held is None or held.version != version:
                held = self._versions[session] = load()
            return held


def load_tool(handler: Handler, step: str) -> Any:
    """ModelLoadError if it cannot be loaded."""
    return asked(handler, step, "load_prepare", handler.load_prepare)


class ThreadPreparer:
    """On the caller's own thread."""

    prepared: str | None = None

    def __init__(self, handler: Handler, tools: Tools, guard: Guard, model: str = "") -> None:
        self._handler = handler
        self._model = model
        self._tools = tools
        self._guard = guard
        self._may_change = handler.changes_rows()

    def prepare(self, examples: list[Any], args: Any) -> tuple[list[Any], dict[int, Failure]]:
        return self.prepare_with(self._tools.tool(self._handler, self._guard.step, self._model), examples, args)

    def prepare_with(self, tool: Any, examples: list[Any], args: Any) -> tuple[list[Any], dict[int, Failure]]:
        values, errors = self._tried(examples, tool, args)
        failed = {at: self._failure(examples[at], errors.pop(at)) for at in list(errors)}  # none stays here
        return values, failed

    def _failure(self, example: Any, error: BaseException) -> Failure:
        handling, why = self._guard.handling, told_once([example]) if self._may_change else ""
        if handling is None or not handling.handles(error):
            raised = row_error(f"{self._guard.step} (preparing)", example, error)
            if why:
                raised.add_note(why)
            raise raised from error
        return self._guard.failure(error, PREPARING).because(why)

    def _tried(self, examples: list[Any], tool: Any, args: Any) -> tuple[list[Any], dict[int, BaseException]]:
        """The values, and the errors of examples that cannot be prepared. One that cannot be copied is given once."""
        uncopied: dict[int, Exception] = {}
        given = own_rows(examples, uncopied) if self._may_change else examples
        try:
            return self._call(given, tool, args), {}
        except (UsageError, EngineError, StepError):
            raise
        except BadRowsError as exc:
            if exc.values is not None:
                return own_unless_native(self._handler, list(exc.values)), dict(exc.errors)
            return self._tried_without(examples, {**dict.fromkeys(uncopied, exc), **exc.errors}, tool, args)
        except BaseException as exc:
            let_through(exc)
            if len(examples) == 1:
                return [None], {0: exc}
            if uncopied:
                return self._tried_without(examples, dict.fromkeys(uncopied, exc), tool, args)
        values: list[Any] = []
        errors: dict[int, BaseException] = {}
        for at, example in enumerate(examples):
            one, failed = self._tried([example], tool, args)
            values += one
            errors |= dict.fromkeys([at], failed[0]) if failed else {}
        return values, errors

    def _tried_without(
        self, examples: list[Any], errors: Mapping[int, BaseException], tool: Any, args: Any
    ) -> tuple[list[Any], dict[int, BaseException]]:
        rest = [at for at in range(len(examples)) if at not in errors]
        made, more = self._tried(list(without(examples, errors)), tool, args) if rest else ([], {})
        values: list[Any] = [None] * len(examples)
        for at, value in zip(rest, made, strict=True):
            values[at] = value
        return values, {**errors, **{rest[at]: error for at, error in more.items()}}

    def _call(self, examples: list[Any], tool: Any, args: Any) -> list[Any]:
        began = this_process()
        values: object = self._handler.prepare(examples, tool, args)
        end_if_forked(began, self._guard.step)
        own: list[Any] = own_unless_native(self._handler, checked_values(values, len(examples), self._guard.step))
        return own


def checked_values(values: Any, examples: int, step: str) -> list[Any]:
    """What prepare() returned, if it is one value for each example."""
    seen = type(values).__name__
    try:
        made = list(many(values, "prepare()"))
    except TypeError as exc:
        raise StepError(f"step {step!r}: prepare() returned a {seen}; expected a list of one value per example") from exc
    if len(made) != examples:
        raise StepError(
            f"step {step!r}: prepare() returned {len(made)} values for {examples} examples; it must return one per example, "
            "in the same order"
        )
    return made


class PrepareHandler(ModelHandler[Any, Any, Any]):
    """Preparing as a model, for a process that can be killed: its answers are what prepare() gives."""

    def __init__(self, handler: Handler) -> None:
        super().__init__(max_batch_size=64)
        self.handler = handler

    def load_model(self) -> Any:
        return self.handler.load_prepare()

    def run_inference(self, batch: Sequence[Any], model: Any, inference_args: Mapping[str, Any] | None = None) -> list[Any]:
        return list(self.handler.prepare(batch, model, inference_args))


class IsolatedPreparer:
    """In a process of its own, under the same deadline as the model. `model`: its name, where there are many."""

    prepared: str | None = None

    def __init__(self, lane: Lane, guard: Guard, model: str | None = None) -> None:
        self._lane = lane
        self._guard = guard
        self._model = model

    def prepare(self, examples: list[Any], args: Any) -> tuple[list[Any], dict[int, Failure]]:
        failed: dict[int, Failure] = {}
        ticket = self._ticket(examples)
        try:
            self._lane.submit(ticket, args)
        except NotShippableError:
            assert self._guard.handling is not None, "what nobody handles runs in no process of its own"
            failed = not_packed(examples, self._guard.handling, self._guard.step, self._guard.model_id)
            if not failed:
                raise
            ticket = self._ticket(list(without(examples, failed)))
            self._lane.submit(ticket, args)
        sent = [at for at in range(len(examples)) if at not in failed]
        made = as_rows(self._lane.wait(ticket)) if sent else []
        failed |= {sent[at]: _of_preparing(failure) for at, failure in ticket.failures.items()}
        return put_together(len(examples), [(sent, made)]), failed

    def _ticket(self, examples: list[Any]) -> Ticket:
        return Ticket(examples, parts=None if self._model is None else [(self._model, 0, len(examples))])


def _of_preparing(failure: Failure) -> Failure:
    return replace(failure, kind=PREPARING) if failure.kind == RAISED else failure
