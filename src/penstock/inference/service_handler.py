"""Handlers of models that are elsewhere: they are told of the run that they work for, and count what they ask."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRowsError, EngineError, UsageError
from penstock.inference.handler import ExampleT, ModelHandler, ModelT, PredictionT
from penstock.models.host_address import make_private, name_of

if TYPE_CHECKING:
    from penstock.remote.meter import Meter
    from penstock.remote.rules import AskingRules

BATCHES_AT_ONCE = 8  # where rows reach an AsyncModelHandler in batches


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The run that a model is loaded for."""

    step: str = ""
    folder: str = ""  # private, of all processes of this run on this machine; empty: there is no run
    run_dir: str = ""  # of a run that can be resumed
    run: str = ""  # its id, the same when it is resumed
    forgives: bool = False  # rows whose request fails are handled
    nodes_file: str = ""  # that says how many nodes of a cluster run the step; empty: there is one machine

    def shared_file(self, name: str, address: str = "") -> str | None:
        """The path of a file that the processes share for this step, during the run; None: there is no run.
        address: of the service that it is about."""
        if not self.folder:
            return None
        make_private(self.folder)
        return os.path.join(self.folder, f"{name_of(f'{self.step} {address}')}.{name}")

    def meter(self, rules: AskingRules, address: str = "", *, own_service: bool = False) -> Meter:
        """What the step is asked by, in this process. address: of the service; those that share it share one pace.
        own_service: nobody else asks it; limits and budget are shared all the same."""
        from penstock.remote.meter import Meter, SharedFiles

        files = SharedFiles(
            pace=self.shared_file("pace", address),
            spent=self.shared_file("spent"),
            limits=self.shared_file("limits"),
            nodes=self.nodes_file,
        )
        kept: dict[str, Any] = {"run_dir": self.run_dir, "run": self.run, "keeps_bad": self.forgives}
        return Meter(self.step, rules, files, own_service=own_service, **kept)


class ServiceHandler(ModelHandler[ExampleT, PredictionT, ModelT]):
    """A handler that keeps something for the whole run: a pace, a budget, answers."""

    run_place: RunPlace = RunPlace()

    def enter_run(self, place: RunPlace) -> None:
        """Called on a copy of the user's handler, in the process that will hold the model, before load_model()."""
        self.run_place = place

    def take_counts(self, model: ModelT) -> Mapping[str, int]:
        """Counters for the metrics of the step, since this was last asked. Called from any thread."""
        return {}

    def close_model(self, model: ModelT) -> None:
        """The run is over in this process."""

    def give_up(self, model: ModelT, error: BaseException) -> None:
        """The run ends with this error: requests that wait to be sent are to raise it instead. Called from any thread."""

    def describe_requests(self) -> list[str]:
        """How the service is asked, for explain()."""
        return []

    def estimate(self, examples: Sequence[ExampleT], rows: int, args: Mapping[str, Any] | None = None) -> str | None:
        """What so many rows would take, in words, if all were like these; None: that is not known. Asks nobody."""
        return None

    def model_bytes(self, model: ModelT) -> int | None:
        return 0  # it is elsewhere

    def changes_rows(self) -> bool:
        return False


class AsyncModelHandler(ServiceHandler[ExampleT, PredictionT, ModelT]):
    """A handler that answers each row by itself, many at a time, on one thread. Define load_model() and answer().

    Rows go to answer() as they come, up to rows_in_flight() in each process; one that takes long holds up no other. What it
    raises is the failure of its row. Where the model has a host of its own (a timeout, model_copies), or there are many by
    key, batches come to run_inference(), which asks for all rows of a batch at once."""

    def rows_in_flight(self) -> int:
        """How many rows may be in answer() at once, in one process."""
        return 64

    async def answer(self, example: ExampleT, model: ModelT, inference_args: Mapping[str, Any] | None = None) -> PredictionT:
        """The prediction for one row. Called on the thread of the process's event loop, which it must not block. It must not
        change the row."""
        raise NotImplementedError(
            f"{type(self).__name__} must define async def answer(self, example, model, inference_args)"
        )

    def run_inference(
        self, batch: Sequence[ExampleT], model: ModelT, inference_args: Mapping[str, Any] | None = None
    ) -> list[PredictionT]:
        from penstock.remote.event_loop import run

        return run(self._answers(batch, model, inference_args))

    async def _answers(self, batch: Sequence[ExampleT], model: ModelT, args: Mapping[str, Any] | None) -> list[PredictionT]:
        import asyncio

        made: list[Any] = await asyncio.gather(*(self.answer(row, model, args) for row in batch), return_exceptions=True)
        errors = {at: each for at, each in enumerate(made) if isinstance(each, BaseException)}
        for error in errors.values():
            if isinstance(error, (UsageError, EngineError)) or not isinstance(error, Exception):
                raise error
        if errors:
            raise BadRowsError({at: error for at, error in errors.items() if isinstance(error, Exception)}, made)
        return made

    def max_concurrent_batches(self) -> int:
        return BATCHES_AT_ONCE

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        return {"max_batch_size": max(1, self.rows_in_flight() // BATCHES_AT_ONCE), **super().batch_elements_kwargs()}


def rows_at_once(handler: ModelHandler[Any, Any, Any]) -> int:
    """How many rows an AsyncModelHandler takes at once; 0 for handlers of batches."""
    if not isinstance(handler, AsyncModelHandler):
        return 0
    rows: object = handler.rows_in_flight()
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise UsageError(f"rows_in_flight() returned {rows!r}; expected a whole number of at least 1")
    return rows


def check_takes_retry(handler: ModelHandler[Any, Any, Any]) -> None:
    """UsageError for with_retry() of a handler that tries each row again by itself."""
    if isinstance(handler, AsyncModelHandler):
        raise UsageError(
            f"with_retry(): {type(handler).__name__} already retries requests; set its num_retries= and "
            "retry_filter= instead"
        )
