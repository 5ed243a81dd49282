"""What runs in a model host: the model of an inference, asked for whole batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle

from penstock.batching.limits import BatchLimits
from penstock.blocks import Block
from penstock.inference.handler import ModelHandler, concurrent_batches, variables_of
from penstock.inference.model import BYTES_SAMPLED_EVERY
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.refresh import Refreshing
from penstock.inference.residents import Residents
from penstock.inference.search_key import search_key
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import not_packed
from penstock.inference.turns import QUICK_TURNS
from penstock.models.messages import HostSpec
from penstock.models.outcome import Outcome
from penstock.models.place import Place, Surroundings
from penstock.transport.interpreters import thread_variables


class ServedModel:
    """What a host runs: the copy of a model, or copies of some of many, asked for whole batches."""

    def __init__(
        self,
        step: str,
        handler: ModelHandler[Any, Any, Any],
        watched: bool = False,
        refreshing: Refreshing | None = None,
    ) -> None:
        self.step = step
        self.many = isinstance(handler, ModelsByKey)
        self._handler = handler
        self._watched = watched
        self._refreshing = refreshing
        self.device_bytes: int | None = None
        self._batches = 0

    def open(self, resized: Callable[[str, int], None]) -> None:
        told: dict[str, Any] = {"refreshing": self._refreshing, "resized": resized if self.many else None}
        self._residents = Residents(self.step, self._handler, watched=self._watched, prepared=True, **told)
        if self._handler.prepares_ahead():
            QUICK_TURNS.begin()
        if isinstance(self._handler, ModelsByKey) and self._handler.budget.bytes is None:
            self.device_bytes = self._handler.device_bytes()

    def load(self, model: str | None) -> tuple[float, int, str | None]:
        loaded = self._residents.load(model)
        return loaded.seconds, loaded.bytes, None if self.many else search_key(self._handler)

    def unload(self, model: str) -> None:
        self._residents.unload(model)

    def run(
        self,
        model: str | None,
        batch: Block,
        how: Any,
        calling: Callable[[], None],
        final: bool,
        read_again: Callable[[], Block],
    ) -> Outcome:
        args, step, handling, retry, prepared = how
        copy = self._residents.copy(model)
        copy.announce(calling)
        options: dict[str, Any] = {"holds_back": not final, "read_again": read_again, "prepared": prepared}
        outcome = copy.outcomes(batch, args, step, handling, retry, **options)
        size = None if self._batches % BYTES_SAMPLED_EVERY else copy.byte_size(batch)
        self._batches += 1
        return outcome._replace(size=size)

    def without_unpackable(self, outcome: Outcome, how: Any) -> Outcome | None:
        """For the server, when answers cannot be sent to who asked: the outcome with their rows failed as not picklable;
        None if no answer by itself is to blame, or such errors are not handled."""
        _, step, handling, *_ = how
        if handling is None or not isinstance(outcome.answers, list):
            return None
        failed = not_packed(outcome.answers, handling, step, outcome.model_id)
        if not failed:
            return None
        answers = [None if at in failed else answer for at, answer in enumerate(outcome.answers)]
        return outcome._replace(answers=answers, failures={**outcome.failures, **failed})


def host_spec(key: str, step: str, spec: InferenceSpec, place: Place, around: Surroundings) -> HostSpec:
    """What a host of this model is told; `key`: of its session."""
    handler = spec.handler
    refreshing = spec.refreshing(key, around, place.copies)
    many = handler if isinstance(handler, ModelsByKey) else None
    return HostSpec(
        name=step,
        program=cloudpickle.dumps(ServedModel(step, handler, place.timeout is None, refreshing), protocol=5),
        limits=_without_functions(spec.limits),
        budget=None if many is None else many.budget_or_default()._replace(of_each=bool(place.devices)),
        own_limits={} if many is None else _own_limits(many),
        by_length=handler.measures_length(),
        copies=place.copies,
        concurrent=concurrent_batches(handler),
        in_turn=handler.prepares_ahead(),
        retry_safe=handler.retry_safe,
        timeout=place.timeout,
        load_timeout=around.load_timeout,
        variables=_variables(spec, max(1, around.cores // place.copies)),
        devices=tuple({"CUDA_VISIBLE_DEVICES": device} for device in place.devices),
        run_dir=around.run_dir,
    )


def _variables(spec: InferenceSpec, cores: int) -> dict[str, str]:
    """For the processes that hold the model. Those that load one after the other, in threads, use memory that one thread has
    freed in another: glibc keeps it for each thread otherwise."""
    several = {"MALLOC_ARENA_MAX": "1"} if spec.by_key is not None or spec.refresh is not None else {}
    return {**several, **thread_variables(cores), **variables_of(spec.handler)}


def _without_functions(limits: BatchLimits) -> BatchLimits:
    """Callers weigh their rows; nothing of theirs runs in a broker."""
    return limits if limits.weigh is None else replace(limits, weigh=len)


def _own_limits(models: ModelsByKey) -> dict[str, tuple[BatchLimits, bool]]:
    return {name: (_without_functions(limits), by_length) for name, (limits, by_length) in models.own_limits().items()}
