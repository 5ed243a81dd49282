"""What each of many models has cost so far, and what to expect of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.errors import ModelLoadError, PenstockError, UsageError
from penstock.models.budget import MemoryBudget
from penstock.observe.metrics import ModelUse
from penstock.rows import safe_str

OF_STEP = "/of "  # names of models begin so that have none from a key
KILLS = 2  # of processes that others shared, after which a model has one of its own
ATTEMPTS = 3  # to load a model, before its rows fail
FORGIVEN = 7  # more of them, whose process was killed from outside: whoever does that may stop

Model: TypeAlias = Hashable


@dataclass(slots=True)
class Use(ModelUse):
    """What a model has cost so far, and what is known of its loads."""

    failed: int = 0  # attempts to load it, one after the other
    killed: int = 0  # of these attempts more, that count for nothing
    kills: int = 0  # of its process, that others may have been in
    crowded: bool = False  # there was no memory for it beside others: it is loaded when these are gone
    alone: bool = False  # a process died while it loaded, or its size is in doubt: next time nothing runs beside it


class Uses(dict[Model, Use]):
    """Of the models that were asked for. `limit`: bytes of the largest that can be used. files(model): bytes of its files;
    0: nobody knows."""

    def __init__(self, limit: int | None, files: Callable[[Model], int]) -> None:
        super().__init__()
        self.limit = limit
        self._files = files
        self._news: dict[Model, ModelUse] = {}
        self._seen = 0, 0  # models whose size is known, and the bytes of all of them
        self._unpacked = 0, 0  # of models that have files, the bytes of these, and those that they took

    def __missing__(self, model: Model) -> Use:
        use = self[model] = Use()
        return use

    def count(self, model: Model, **more_of: Any) -> None:
        """By how much the numbers of a ModelUse have grown."""
        use = self[model]
        more = ModelUse(use.bytes, **more_of)
        use.add(more)
        if (news := self._news.get(model)) is None:
            self._news[model] = more
        else:
            news.add(more)

    def news(self) -> dict[Model, ModelUse]:
        """What was counted since this was last asked."""
        news, self._news = self._news, {}
        return news

    def loaded(self, model: Model, size: int, seconds: float, *, in_doubt: bool = False) -> None:
        """It took so much. `in_doubt`: more than is allowed, and maybe not all of it is the model's."""
        use = self[model]
        if not use.bytes and not self.is_too_large(size):
            self._seen = self._seen[0] + 1, self._seen[1] + size
            if files := self._files(model):
                self._unpacked = self._unpacked[0] + files, self._unpacked[1] + size
        use.failed = use.killed = 0
        use.alone, use.bytes = in_doubt, 0 if in_doubt else size
        self.count(model, loads=1, seconds=seconds, resident=size)

    def forgive(self, model: Model) -> bool:
        """Its process was killed while it loaded; whether that is not held against it."""
        self[model].killed += 1
        return self[model].killed <= FORGIVEN

    @property
    def size_is_known(self) -> bool:
        """Of one at least."""
        return self._seen[0] > 0

    def is_known(self, model: Model) -> bool:
        """Whether something is known of its own size."""
        use = self.get(model)
        return bool((use is not None and use.bytes) or self._files(model))

    def guess(self, model: Model) -> int:
        """How large it will be: as large as it was; or as its files, and others beside theirs; or as others are."""
        use, (models, total), (packed, unpacked) = self.get(model), self._seen, self._unpacked
        if use is not None and use.bytes:
            return use.bytes
        if files := self._files(model):
            return files * unpacked // packed if packed else files
        return total // models if models else 0

    def is_too_large(self, size: int) -> bool:
        return self.limit is not None and size > self.limit

    def is_refused(self, model: Model) -> bool:
        """Whether rows for it cannot be answered: it was tried too often, or is too large."""
        use = self.get(model)
        return use is not None and (use.failed >= ATTEMPTS or self.is_too_large(use.bytes))


def told_too_large(model: Model, size: int, budget: MemoryBudget) -> str:
    """What is said of a model that a budget cannot hold."""
    limit = budget.bytes or 0
    told = bytes_told(limit)
    if budget.workers > 1:
        told += f" in each of {budget.workers} workers, {bytes_told(limit * budget.workers)} in all"
    name = "memory_budget, by default a share of what is free" if budget.by_default else "memory_budget"
    advice = "give the models more memory, fewer workers to share it, or this key a smaller model"
    return f"{of_key(model)} takes {bytes_told(size)}, and the budget is {told} ({name}): {advice}"


def told_attempt(model: Model, attempts: int, why: str) -> str | None:
    """What people are told of a load that has failed; None: it is not retried, and the error of its rows says why."""
    if not attempts:
        return f"{of_key(model)} found no memory beside others, and is loaded when they are unloaded: {why}"
    if attempts < ATTEMPTS:
        return f"{of_key(model)} could not be loaded, attempt {attempts} of {ATTEMPTS}: {why}; it is tried again"
    return None


def not_loaded(step: str, model: Model, why: BaseException) -> PenstockError:
    """What ends the run where a model cannot be loaded, and nobody handles that."""
    if isinstance(why, UsageError):
        return why
    what = f"{of_key(model)} could not be loaded: {type(why).__name__}: {safe_str(why)}"
    return ModelLoadError(f"step {step!r}: {what}")


def of_key(model: Model) -> str:
    """A model, for people: of a key; or of a step, where models of several steps share a place (OF_STEP)."""
    kind, name = step_of(model)
    return f"the model of {kind} {name!r}" if kind else f"the model of key {model!r}"


def step_of(model: Model) -> tuple[str, str]:
    """("step", its name) or ("model", its identifier), of a model at a place for several steps; else ("", its name)."""
    if not str(model).startswith(OF_STEP):
        return "", str(model)
    kind, _, name = str(model).removeprefix(OF_STEP).partition(" ")
    return kind, name


def bytes_told(size: int) -> str:
    """For people: 5.2 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
