"""What runs in a model host: the model of an inference, asked for whole batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle

from penstock.blocks import Block
from penstock.inference.handler import ModelHandler, concurrent_batches, variables_of
from penstock.inference.model import BYTES_SAMPLED_EVERY, ModelCopy
from penstock.inference.search_key import search_key
from penstock.inference.spec import InferenceSpec
from penstock.inference.ticket import not_packed
from penstock.inference.turns import QUICK_TURNS
from penstock.models.messages import HostSpec
from penstock.models.outcome import Outcome
from penstock.models.place import Place, Surroundings
from penstock.transport.interpreters import thread_variables


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

    def load(self) -> tuple[float, int, str | None]:
        self._copy = ModelCopy(self.step, self._handler, self._size_buckets, watched=self._watched, prepared=True)
        loaded = self._copy.load()
        assert loaded is not None
        if self._handler.prepares_ahead():
            QUICK_TURNS.begin()
        return loaded.seconds, loaded.bytes, search_key(self._handler)

    def run(
        self, batch: Block, how: Any, calling: Callable[[], None], final: bool, read_again: Callable[[], Block]
    ) -> Outcome:
        args, step, handling, retry = how
        assert self._copy is not None
        self._copy.announce(calling)
        outcome = self._copy.outcomes(batch, args, step, handling, retry, holds_back=not final, read_again=read_again)
        size = None if self._batches % BYTES_SAMPLED_EVERY else self._copy.byte_size(batch)
        self._batches += 1
        return outcome._replace(size=size)

    def without_unpackable(self, outcome: Outcome, how: Any) -> Outcome | None:
        """For the server, when answers cannot be sent to who asked: the outcome with their rows failed as not picklable;
        None if no answer by itself is to blame, or such errors are not handled."""
        _, step, handling, _ = how
        if handling is None or not isinstance(outcome.answers, list):
            return None
        failed = not_packed(outcome.answers, handling, step, outcome.model_id)
        if not failed:
            return None
        answers = [None if at in failed else answer for at, answer in enumerate(outcome.answers)]
        return outcome._replace(answers=answers, failures={**outcome.failures, **failed})


def host_spec(step: str, spec: InferenceSpec, place: Place, around: Surroundings) -> HostSpec:
    """What a host of this model is told."""
    handler, limits = spec.handler, spec.limits
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
        variables={**thread_variables(max(1, around.cores // place.copies)), **variables_of(handler)},
        devices=tuple({"CUDA_VISIBLE_DEVICES": device} for device in place.devices),
    )
