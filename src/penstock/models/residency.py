"""Which of many models are loaded in a place, and which rows wait for one that is not. Pure: the time is passed in.

    rows -> their model is here: the front of its copy
         -> it is not: they wait in this object, until what decide() says has been done

Rows of models that are here run before a load is paid. What is loaded next is the model of the row that has waited longest,
and then all rows run that wait for it; so a model is loaded about once for as many rows as may wait. Who has to go for it is
the model that was needed longest ago, of those that nobody uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from penstock.batching.entry import Entry
from penstock.models.budget import Budget
from penstock.models.uses import Model, Uses

T = TypeVar("T")

PATIENCE = 1.0  # seconds that rows wait for a model while all that are loaded are given new rows
LOADS_AT_ONCE = 2  # in a copy


class Load(NamedTuple):
    model: Model
    copy: int


class Unload(NamedTuple):
    model: Model
    copy: int


class Admit(NamedTuple):
    """The rows that wait for this model go to the front of its copy: take() gives them."""

    model: Model
    copy: int


class Refuse(NamedTuple):
    """Nobody will answer the rows that wait for this model: take() gives them."""

    model: Model
    too_large: bool  # for the budget; else it could not be loaded, and whoever tried knows why


Step: TypeAlias = Load | Unload | Admit | Refuse


@dataclass(slots=True)
class _Held:
    """A model in a copy: it is loaded, or will be soon."""

    copy: int
    bytes: int  # known, or guessed while it loads
    loading: bool = True
    beside: bool = False  # other loads, or calls, so that what its process grew by is not its size alone
    admitting: bool = False  # the rows that waited for it are about to be let in
    closing: bool = False  # new rows wait, so that it can be unloaded


class Copies:
    """What the copies of a place do besides loading, as far as it matters here."""

    def may_load(self, copy: int, model: Model) -> bool:
        """Whether this one may be loaded there now."""
        return True

    def is_running(self, copy: int) -> bool:
        """Whether models are called there now."""
        return False


class Residency(Generic[T]):
    """Of one place: a process, or the copies of a host. `in_use(model)`: whether rows of it were let in and are not
    answered; such a model is not unloaded."""

    def __init__(
        self,
        budget: Budget,
        in_use: Callable[[Model], bool],
        *,
        copies: int = 1,
        at_once: int = LOADS_AT_ONCE,
        doing: Copies | None = None,
    ) -> None:
        self.budget = budget
        self.uses = Uses(budget.bytes)
        self.draining: int | None = None  # a copy where nothing may begin to run: a model will be loaded there, alone
        self.is_blocked = False  # whether what waits behind the first cannot be loaded before something happens
        self._in_use = in_use
        self._doing = doing or Copies()
        self._at_once = at_once
        self._ready = [False] * copies
        self._bytes = [0] * copies
        self._models = [0] * copies
        self._loading: dict[Model, int] = {}
        self._held: OrderedDict[Model, _Held] = OrderedDict()  # the one that was needed longest ago first
        self._absent: OrderedDict[Model, list[Entry[T]]] = OrderedDict()  # the one whose oldest row is oldest first
        self._closing: Model | None = None
        self._lacks_room = False  # the first that waits does
        self._too_large: list[Model] = []  # loaded, and to be unloaded before anything else

    # Rows.

    def add(self, entry: Entry[T], now: float) -> int | None:
        """The copy whose front these rows may go to; None: they wait here."""
        held = self._held.get(entry.model)
        if held is not None and not held.loading and not held.closing:
            self._held.move_to_end(entry.model)
            self.uses.count(entry.model, hits=1)
            return held.copy
        entry.arrived = now
        self._absent.setdefault(entry.model, []).append(entry)
        return None

    def discard(self, owner: Hashable) -> None:
        """Forget the rows of an owner that has given up."""
        for model, entries in list(self._absent.items()):
            kept = [entry for entry in entries if entry.owner != owner]
            if kept or not entries:
                self._absent[model] = kept
            else:
                del self._absent[model]

    @property
    def are_waiting(self) -> bool:
        """Whether rows wait for models that are not here."""
        return bool(self._absent)

    def copy_of(self, model: Model) -> int | None:
        """The copy in which a model can be called now."""
        held = self._held.get(model)
        return None if held is None or held.loading else held.copy

    # What processes do.

    def ready(self, copy: int, device_bytes: int | None = None) -> None:
        """Models can be loaded there. device_bytes: that are free on the device that they are loaded on."""
        self._ready[copy] = True
        if device_bytes is not None and self.budget.by_default:
            least = min(device_bytes, self.budget.bytes or device_bytes) if self.budget.of_each else device_bytes
            self.budget = self.budget._replace(bytes=least, of_each=True)
            self.uses.limit = least

    def loaded(self, model: Model, size: int, seconds: float) -> None:
        """It is there; decide() says what becomes of the rows that wait for it."""
        held = self._held[model]
        del self._loading[model]
        too_large = self.uses.is_too_large(size)
        in_doubt = too_large and (held.beside or self._doing.is_running(held.copy))
        self.uses.loaded(model, size, seconds, in_doubt=in_doubt)
        self._bytes[held.copy] += size - held.bytes
        held.bytes, held.loading, held.admitting = size, False, model in self._absent
        self._held.move_to_end(model)
        if model in self._absent:
            self._absent.move_to_end(model, last=False)
        if too_large and model in self._absent:
            held.closing = True
            self._too_large.append(model)

    def load_failed(self, model: Model) -> None:
        """It is tried again, unless it has failed too often."""
        self._drop(model)
        self.uses[model].failed += 1

    def lost(self, copy: int, let_in: Sequence[Entry[T]] = (), *, killed: bool = False, beside: bool = False) -> list[Model]:
        """The process of a copy is gone, with all its models; those that were loading. If it was one alone, that counts as a
        failed attempt; not if batches ran `beside` it, or if the process was `killed` for another reason. `let_in`: rows
        that were, and wait again. Their models are loaded before others; those in use before these."""
        self._ready[copy] = False
        loading = [model for model, where in self._loading.items() if where == copy]
        lost = [model for model, held in self._held.items() if held.copy == copy]
        for model in lost:
            self._drop(model)
        for entry in reversed(let_in):
            self._absent.setdefault(entry.model, []).insert(0, entry)
            self.put_first(entry.model)
        for model in filter(self._in_use, lost):
            self._absent.setdefault(model, [])
            self.put_first(model)
        for model in () if killed else loading:
            self.uses[model].alone = True
            self.uses[model].failed += len(loading) == 1 and not beside
        return loading

    def resized(self, model: Model, size: int) -> None:
        """A model that is loaded takes another number of bytes now."""
        held = self._held.get(model)
        if held is not None and not held.loading:
            self._bytes[held.copy] += size - held.bytes
            held.bytes = self.uses[model].bytes = size

    def put_first(self, model: Model) -> None:
        """If rows wait for it, it is loaded before others."""
        if model in self._absent:
            self._absent.move_to_end(model, last=False)

    def take(self, model: Model) -> list[Entry[T]]:
        """The rows that wait for it, which wait no more."""
        if (held := self._held.get(model)) is not None:
            held.admitting = False
        return self._absent.pop(model, [])

    # What to do now.

    def decide(self, now: float) -> list[Step]:
        """What is to be done, in this order; it counts as begun."""
        too_large, self._too_large = [model for model in self._too_large if model in self._held], []
        steps: list[Step] = [*map(self._unload, too_large)]
        steps += map(self._unload, self._too_much())
        self.draining, self._lacks_room, self.is_blocked = None, False, False
        for model, entries in self._absent.items():
            if model in self._loading:
                continue
            if self.uses.is_refused(model):
                steps.append(Refuse(model, self.uses.is_too_large(self.uses[model].bytes)))
            elif (held := self._held.get(model)) is not None:
                if not held.closing or not self._in_use(model):
                    self._reopen(model)
                    steps.append(Admit(model, held.copy))
            elif (found := self._room_for(model, entries, now)) is not None:
                copy, victims = found
                steps += [*map(self._unload, victims), Load(model, copy)]
                self._hold(model, copy)
            else:
                self.is_blocked = True
                break
        return steps

    def next_time(self) -> float | None:
        """When decide() should be asked again, if nothing happens before."""
        first = next(iter(self._absent.values()), None) if self._lacks_room else None
        return first[0].arrived + PATIENCE if first and self._closing is None and not self._loading else None

    def _too_much(self) -> list[Model]:
        """What goes because others turned out larger than was guessed."""
        if self.budget.bytes is None:
            return []
        used = self._bytes if self.budget.of_each else [sum(self._bytes)]
        over = [each - self.budget.bytes for each in used]
        victims: list[Model] = []
        for model, held in self._held.items() if max(over) > 0 else ():
            at = held.copy if self.budget.of_each else 0
            if over[at] > 0 and self._is_idle(model, held):
                victims.append(model)
                over[at] -= held.bytes
        return victims

    def _is_idle(self, model: Model, held: _Held) -> bool:
        return not (held.loading or held.admitting or self._in_use(model))

    def _room_for(self, model: Model, entries: list[Entry[T]], now: float) -> tuple[int, list[Model]] | None:
        """The copy that may load it now, and what has to go for it."""
        copies = self._free_copies(model)
        for copy in copies:
            if (victims := self._victims(model, copy)) is not None:
                return copy, victims
        if copies:
            self._lacks_room = True
            self._make_way(copies[0], entries, now)
        return None

    def _free_copies(self, model: Model) -> list[int]:
        """Those that may load it now, the one that holds least first."""
        is_suspect = self.uses[model].alone
        alone = not self.uses.size_is_known or is_suspect or any(self.uses[other].alone for other in self._loading)
        if alone and self._loading:
            return []  # the first one is measured alone, and one that may kill its process is, too
        loading = list(self._loading.values())
        free = [
            copy
            for copy, ready in enumerate(self._ready)
            if ready and loading.count(copy) < self._at_once and self._doing.may_load(copy, model)
        ]
        free.sort(key=lambda copy: (self._bytes[copy], self._models[copy]))  # many are too small to be measured
        if is_suspect and free and self._doing.is_running(free[0]):
            self.draining = free[0]
            return []
        return free[:1] if is_suspect else free

    def _victims(self, model: Model, copy: int) -> list[Model] | None:
        """What has to go for it; None if not enough can."""
        free, room = self._room(copy), self.uses.guess(model)
        victims: list[Model] = []
        candidates = iter(self._held.items())
        while not (free[0] >= room and free[1] >= 1) and len(victims) < len(self._held):
            for victim, held in candidates:
                matters = held.copy == copy or (free[1] >= 1 and not self.budget.of_each)
                if matters and self._is_idle(victim, held):
                    break
            else:
                return None
            victims.append(victim)
            free = free[0] + held.bytes, free[1] + (held.copy == copy)
        return victims

    def _room(self, copy: int) -> tuple[float, float]:
        """The bytes and the models that a copy may still take."""
        used = self._bytes[copy] if self.budget.of_each else sum(self._bytes)
        limit, most = self.budget.bytes, self.budget.models
        return (
            float("inf") if limit is None else limit - used,
            float("inf") if most is None else most - self._models[copy],
        )

    def _make_way(self, copy: int, entries: list[Entry[T]], now: float) -> None:
        """All that is loaded is in use. If rows have waited too long, the model that was needed longest ago gets no more."""
        anywhere = self._room(copy)[1] >= 1 and not self.budget.of_each
        if self._closing is None and (not entries or now >= entries[0].arrived + PATIENCE):
            for model, held in self._held.items():
                if not held.loading and (anywhere or held.copy == copy):
                    held.closing, self._closing = True, model
                    return

    def _reopen(self, model: Model) -> None:
        self._held[model].closing, self._held[model].admitting = False, True
        if self._closing == model:
            self._closing = None

    def _hold(self, model: Model, copy: int) -> None:
        others = [other for other, where in self._loading.items() if where == copy]
        for other in others:
            self._held[other].beside = True
        self._held[model] = _Held(copy, self.uses.guess(model), beside=bool(others) or self._doing.is_running(copy))
        self._loading[model] = copy
        self._bytes[copy] += self._held[model].bytes
        self._models[copy] += 1

    def _unload(self, model: Model) -> Unload:
        self.uses.count(model, unloads=1)
        return Unload(model, self._drop(model))

    def _drop(self, model: Model) -> int:
        held = self._held.pop(model)
        self._bytes[held.copy] -= held.bytes
        self._models[held.copy] -= 1
        self._loading.pop(model, None)
        if self._closing == model:
            self._closing = None
        return held.copy
