"""What runs in a model host: the model of an inference, asked for whole batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from penstock.batching.limits import BatchLimits
from penstock.blocks import Block
from penstock.inference.calls import How
from penstock.inference.handler import ModelHandler, concurrent_batches, variables_of
from penstock.inference.model import BYTES_SAMPLED_EVERY
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.refresh import Refreshing
from penstock.inference.residents import Residents, counts_of
from penstock.inference.search_key import search_key
from penstock.inference.service_handler import RunPlace
from penstock.inference.spec import InferenceSpec
from penstock.inference.thread_turns import QUICK_TURNS
from penstock.inference.ticket import not_packed
from penstock.models.budget import MemoryBudget
from penstock.models.memory import free_device_bytes
from penstock.models.messages import HostSpec, Loaded
from penstock.models.outcome import Outcome
from penstock.models.place import Place, Surroundings
from penstock.models.uses import OF_STEP, step_of
from penstock.transport.interpreters import thread_variables


class ServedModel:
    """What a host runs: the copy of a model, or copies of some of many, asked for whole batches."""

    def __init__(
        self,
        step: str,
        handler: ModelHandler[Any, Any, Any],
        watched: bool = False,
        refreshing: Refreshing | None = None,
        place: RunPlace | None = None,
    ) -> None:
        self.step = step
        self.many = isinstance(handler, ModelsByKey)
        self._handler = handler
        self._watched = watched
        self._refreshing = refreshing
        self._place = place
        self.device_bytes: int | None = None
        self._batches = 0

    def open(self, resized: Callable[[str, int], None]) -> None:
        told: dict[str, Any] = {
            "refreshing": self._refreshing,
            "resized": resized if self.many else None,
            "place": self._place,
        }
        self._residents = Residents(self.step, self._handler, watched=self._watched, prepared=True, **told)
        if self._handler.prepares_ahead():
            QUICK_TURNS.begin()
        if isinstance(self._handler, ModelsByKey) and self._handler.budget.bytes is None:
            self.device_bytes = self._handler.device_bytes()

    def load(self, model: str | None) -> Loaded:
        loaded = self._residents.load(model)
        return Loaded(
            loaded.seconds,
            loaded.bytes,
            None if self.many else search_key(self._handler),
            certain=loaded.certain,
            in_ram=loaded.in_ram,
            on_device=bool(loaded.devices) or self._handler.accelerator() is not None,
        )

    def unload(self, model: str) -> None:
        self._residents.unload(model)

    def close(self) -> None:
        """Let go of all models; it can be opened again."""
        self._residents.close()
        del self._residents
        if self._handler.prepares_ahead():
            QUICK_TURNS.end()

    def is_out_of_memory(self, model: str, error: BaseException) -> bool:
        return self._residents.is_out_of_memory(model, error)

    def run(
        self,
        model: str | None,
        batch: Block,
        how: How,
        calling: Callable[[], None],
        final: bool,
        read_again: Callable[[], Block],
    ) -> Outcome:
        copy = self._residents.copy(model)
        copy.announce(calling)
        outcome = copy.outcomes(batch, how, holds_back=not final, read_again=read_again)
        size = None if self._batches % BYTES_SAMPLED_EVERY else copy.byte_size(batch)
        self._batches += 1
        return outcome._replace(size=size, counts=counts_of(copy))

    def without_unpackable(self, outcome: Outcome, how: How) -> Outcome | None:
        """For the server, when answers cannot be sent to who asked: the outcome with their rows failed as not picklable;
        None if no answer by itself is to blame, or such errors are not handled."""
        if how.handling is None or not isinstance(outcome.answers, list):
            return None
        failed = not_packed(outcome.answers, how.handling, how.step, outcome.model_id)
        if not failed:
            return None
        answers = [None if at in failed else answer for at, answer in enumerate(outcome.answers)]
        return outcome._replace(answers=answers, failures={**outcome.failures, **failed})


class ServedPlace:
    """What a host runs that has the models of several steps: each as if it had one of its own."""

    many = True

    def __init__(self, step: str, members: Mapping[str, ServedModel]) -> None:
        self.step = step
        self.device_bytes: int | None = None
        self._members = members
        self._no_memory: dict[str, bool] = {}  # whether the last load of a model failed for the lack of it

    def open(self, resized: Callable[[str, int], None]) -> None:
        self._resized = resized
        self.device_bytes = free_device_bytes()

    def load(self, model: str | None) -> Loaded:
        assert model is not None
        member = self._members[model]
        member.open(lambda _, size: self._resized(model, size))
        try:
            return member.load(None)
        except BaseException as exc:
            self._no_memory[model] = member.is_out_of_memory(model, exc)
            member.close()
            raise

    def unload(self, model: str) -> None:
        self._members[model].close()

    def run(
        self,
        model: str | None,
        batch: Block,
        how: How,
        calling: Callable[[], None],
        final: bool,
        read_again: Callable[[], Block],
    ) -> Outcome:
        assert model is not None
        return self._members[model].run(None, batch, how, calling, final, read_again)

    def is_out_of_memory(self, model: str, error: BaseException) -> bool:
        return self._no_memory.get(model, False)

    def without_unpackable(self, outcome: Outcome, how: How) -> Outcome | None:
        return next(iter(self._members.values())).without_unpackable(outcome, how)


def at_place(key: str) -> str:
    """The name of a session's model at a place that several share."""
    return f"{OF_STEP}{key}"


def place_key(key: str, spec: InferenceSpec, place: Place) -> str:
    """What the host of a session is named by."""
    return f"place of {sorted(spec.neighbours)}" if place.shared else key


def host_spec(key: str, step: str, spec: InferenceSpec, place: Place, around: Surroundings) -> HostSpec:
    """What a host of this model is told; `key`: of its session."""
    handler = spec.handler
    many = handler if isinstance(handler, ModelsByKey) else None
    served: ServedModel | ServedPlace = _served(key, step, spec, place, around)
    budget = None if many is None else many.budget_or_default(around.default_budgets)
    if budget is not None and not budget.by_default:  # else of each is what its device has, once that is known
        budget = budget._replace(of_each=bool(place.devices))
    own_limits = {} if many is None else _own_limits(many)
    if place.shared:
        members = {at_place(each): (each, _as_run(member, spec)) for each, member in spec.neighbours.items()}
        models = {name: _served(each, step_of(name)[1], member, place, around) for name, (each, member) in members.items()}
        served, budget = ServedPlace(step, models), MemoryBudget(of_each=True, is_soft=True, by_default=True)
        own_limits = {name: (_without_functions(m.limits), m.handler.measures_length()) for name, (_, m) in members.items()}
    return HostSpec(
        name=step,
        program=cloudpickle.dumps(served, protocol=5),
        limits=_without_functions(spec.limits),
        budget=budget,
        by_step=place.shared,
        own_limits=own_limits,
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


def _served(key: str, step: str, spec: InferenceSpec, place: Place, around: Surroundings) -> ServedModel:
    run_place = spec.run_place(step, around, hosted=True)
    return ServedModel(step, spec.handler, place.timeout is None, spec.refreshing(key, around, place), run_place)


def _as_run(member: InferenceSpec, spec: InferenceSpec) -> InferenceSpec:
    """A neighbour, whose batches are formed as those of this one."""
    return member.fixed() if spec.fixed_batches else member


def _variables(spec: InferenceSpec, cores: int) -> dict[str, str]:
    """For the processes that hold the model. Those that load one after the other, in threads, use memory that one thread has
    freed in another: glibc keeps it for each thread otherwise."""
    many = spec.by_key is not None or spec.refresh is not None or bool(spec.neighbours)
    several = {"MALLOC_ARENA_MAX": "1"} if many else {}
    return {**several, **thread_variables(cores), **variables_of(spec.handler)}


def _without_functions(limits: BatchLimits) -> BatchLimits:
    """Callers weigh their rows; nothing of theirs runs in a broker."""
    return limits if limits.weigh is None else replace(limits, weigh=len)


def _own_limits(models: ModelsByKey) -> dict[str, tuple[BatchLimits, bool]]:
    return {name: (_without_functions(limits), by_length) for name, (limits, by_length) in models.own_limits().items()}
