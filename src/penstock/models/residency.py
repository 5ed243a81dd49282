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
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from penstock.batching.entry import Entry
from penstock.models.budget import MemoryBudget
from penstock.models.evictions import Evictions, HeldModel
from penstock.models.room import Room
from penstock.models.uses import KILLS, Model, Uses

T = TypeVar("T")

PATIENCE = 1.0  # seconds that rows wait for a model while all that are loaded are given new rows
LOADS_AT_ONCE = 2  # in a copy


class LoadNow(NamedTuple):
    model: Model
    copy: int


class UnloadNow(NamedTuple):
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


Step: TypeAlias = LoadNow | UnloadNow | Admit | Refuse


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
    answered; such a model is not unloaded. `apart`: there is one copy more, beside the first, for models that have killed
    their process too often; it holds one at a time."""

    def __init__(
        self,
        budget: MemoryBudget,
        in_use: Callable[[Model], bool],
        *,
        copies: int = 1,
        apart: bool = False,
        at_once: int = LOADS_AT_ONCE,
        doing: Copies | None = None,
        files: Callable[[Model], int] = lambda model: 0,
    ) -> None:
        """files(model): bytes of its files; 0: nobody knows."""
        self.uses = Uses(budget.bytes, files)
        self.draining: int | None = None  # a copy where nothing may begin to run: a model will be loaded there, alone
        self.is_apart_needed = False  # whether models have killed their process too often
        self.is_blocked = False  # whether what waits behind the first cannot be loaded before something happens
        self.in_use = in_use
        self._doing = doing or Copies()
        self._at_once = at_once
        self.room = Room(budget, copies, apart)
        self._ready = [False] * (copies + apart)
        self._loading: dict[Model, int] = {}
        self._held: OrderedDict[Model, HeldModel] = OrderedDict()  # the one that was needed longest ago first
        self._evictions = Evictions(self._held, self.room, self.uses, lambda model: self.in_use(model))
        self._absent: OrderedDict[Model, list[Entry[T]]] = OrderedDict()  # the one whose oldest row is oldest first
        self._closing: Model | None = None
        self._lacks_room = False  # the first that waits for a copy which could load it does
        self._due: float | None = None  # when its rows have waited too long
        self._expected: dict[Model, None] = {}  # rows will come for these
        self._arrived: list[Model] = []  # loaded, and rows wait for them: these are let in before anything else waits
        self._too_large: list[Model] = []  # loaded, and to be unloaded before anything else

    @property
    def budget(self) -> MemoryBudget:
        return self.room.budget

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

    def expect(self, model: Model) -> None:
        """Rows for it will come: it may be loaded before they do, where there is room."""
        self._expected[model] = None

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
        if device_bytes is not None and self.budget.by_default and not self.room.taken(copy):
            own = device_bytes // self.budget.steps
            least = min(own, self.budget.bytes or own) if self.budget.of_each else own
            self.room.budget = self.budget._replace(bytes=least, of_each=True)
            self.uses.limit = None if self.budget.is_soft else least

    def loaded(self, model: Model, size: int, seconds: float, certain: int = 0) -> None:
        """It is there; decide() says what becomes of the rows that wait for it. certain: bytes of it that are its own,
        whatever ran beside it."""
        held = self._held[model]
        del self._loading[model]
        too_large = self.uses.is_too_large(size)
        is_beside = held.beside or self._doing.is_running(held.copy)
        in_doubt = too_large and is_beside and not self.uses.is_too_large(certain)
        self.uses.loaded(model, size, seconds, in_doubt=in_doubt)
        self.room.add(held.copy, size - held.bytes, 0)
        held.bytes, held.loading, held.admitting = size, False, model in self._absent
        self._held.move_to_end(model)
        self._arrived.append(model)
        if too_large and model in self._absent:
            held.closing = True
            self._too_large.append(model)

    def load_failed(self, model: Model, *, no_memory: bool = False) -> None:
        """It is tried again, unless it has failed too often. no_memory: if others are loaded there, it is tried without
        them, and this time does not count."""
        copy, use = self._drop(model), self.uses[model]
        is_crowded = no_memory and not use.crowded and self.room.models[copy] > 0
        use.crowded |= is_crowded
        use.failed += not is_crowded

    def lost(
        self,
        copy: int,
        let_in: Sequence[Entry[T]] = (),
        *,
        killed: bool = False,
        beside: bool = False,
        from_outside: bool = False,
    ) -> list[Model]:
        """The process of a copy is gone, with all its models; those that were loading. If it was one alone, that counts as a
        failed attempt; not if batches ran `beside` it, if the process was `killed` for another reason, or, so many times, if
        somebody else has killed it. `let_in`: rows that were, and wait again. Their models are loaded before others; those
        in use before these."""
        self._ready[copy] = False
        loading = [model for model, where in self._loading.items() if where == copy]
        lost = [model for model, held in self._held.items() if held.copy == copy]
        for model in lost:
            self._drop(model)
        for entry in reversed(let_in):
            self._absent.setdefault(entry.model, []).insert(0, entry)
            self.put_first(entry.model)
        for model in filter(self.in_use, lost):
            self._absent.setdefault(model, [])
            self.put_first(model)
        for model in () if killed else loading:
            self.uses[model].alone = True
            if len(loading) == 1 and not beside and not (from_outside and self.uses.forgive(model)):
                self.uses[model].failed += 1
                self.charge(model)
        return loading

    def charge(self, model: Model) -> bool:
        """It has killed its process, or that had to be killed because of it. Whether it goes to one of its own now."""
        self.uses[model].kills += 1
        is_moved = bool(self.room.apart) and self.uses[model].kills == KILLS
        self.is_apart_needed |= is_moved
        return is_moved

    def copies_for(self, model: Model) -> Sequence[int]:
        """The copies that it may be loaded in."""
        return self.room.apart if self.room.apart and self.uses[model].kills >= KILLS else self.room.shared

    def resized(self, model: Model, size: int) -> None:
        """A model that is loaded takes another number of bytes now."""
        held = self._held.get(model)
        if held is not None and not held.loading:
            self.room.add(held.copy, size - held.bytes, 0)
            self.uses.count(model, resident=size - held.bytes)
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
        steps += map(self._unload, self._evictions.too_much())
        self.draining, self._due, self._lacks_room, self.is_blocked = None, None, False, False
        for model in self._arrived:
            self.put_first(model)
        self._arrived.clear()
        for model, entries in self._absent.items():
            if model in self._loading:
                continue
            if self.uses.is_refused(model):
                steps.append(Refuse(model, self.uses.is_too_large(self.uses[model].bytes)))
            elif (held := self._held.get(model)) is not None:
                if not held.closing or not self.in_use(model):
                    held.closing, held.admitting = False, True
                    if self._closing == model:
                        self._closing = None
                    steps.append(Admit(model, held.copy))
            elif (found := self._room_for(model, entries, now)) is not None:
                copy, victims = found
                steps += [*map(self._unload, victims), LoadNow(model, copy)]
                self._hold(model, copy)
            elif self._lacks_room or self.copies_for(model) is self.room.shared:
                self.is_blocked = True
                break
        return steps if self.is_blocked else [*steps, *self._ahead()]

    def _ahead(self) -> list[Step]:
        """Models that are expected are loaded where nothing has to go for them."""
        steps: list[Step] = []
        for model in list(self._expected):
            use = self.uses[model]
            if model in self._held or use.crowded or use.failed:
                del self._expected[model]
                continue
            for copy in self._free_copies(model):
                if self._evictions.victims(model, copy) == []:
                    steps.append(LoadNow(model, copy))
                    self._hold(model, copy)
                    break
        return steps

    def next_time(self) -> float | None:
        """When decide() should be asked again, if nothing happens before."""
        return self._due if self._closing is None and not self._loading else None

    def _room_for(self, model: Model, entries: list[Entry[T]], now: float) -> tuple[int, list[Model]] | None:
        """The copy that may load it now, and what has to go for it."""
        copies = self._free_copies(model)
        for copy in copies:
            if (victims := self._evictions.victims(model, copy)) is not None:
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
            for copy in self.copies_for(model)
            if self._ready[copy] and loading.count(copy) < self._at_once and self._doing.may_load(copy, model)
        ]
        if self.budget.bytes is not None and not self.uses.is_known(model):  # one at a time: the budget is overrun by one
            unknown = [where for other, where in self._loading.items() if not self.uses.is_known(other)]
            free = [copy for copy in free if not any(self.room.are_together(copy, where) for where in unknown)]
        free.sort(key=lambda copy: (self.room.bytes[copy], self.room.models[copy]))  # many are too small to be measured
        if is_suspect and free and self._doing.is_running(free[0]):
            self.draining = free[0]
            return []
        return free[:1] if is_suspect else free

    def _make_way(self, copy: int, entries: list[Entry[T]], now: float) -> None:
        """All that is loaded is in use. If rows have waited too long, the model that was needed longest ago gets no more."""
        due, slots = entries[0].arrived + PATIENCE if entries else now, self.room.left(copy)[1]
        if now < due:
            self._due = due
        for model, held in self._held.items() if now >= due and self._closing is None else ():
            if not held.loading and self._evictions.can_help(held, copy, slots):
                held.closing, self._closing = True, model
                return

    def _hold(self, model: Model, copy: int) -> None:
        others = [other for other, where in self._loading.items() if where == copy]
        for other in others:
            self._held[other].beside = True
        self._held[model] = HeldModel(copy, self.uses.guess(model), beside=bool(others) or self._doing.is_running(copy))
        self._loading[model] = copy
        self.room.add(copy, self._held[model].bytes, 1)

    def _unload(self, model: Model) -> UnloadNow:
        self.uses.count(model, unloads=1)
        return UnloadNow(model, self._drop(model))

    def _drop(self, model: Model) -> int:
        held = self._held.pop(model)
        self.room.add(held.copy, -held.bytes, -1)
        if not held.loading:
            self.uses.count(model, resident=-held.bytes)
        self._loading.pop(model, None)
        if self._closing == model:
            self._closing = None
        return held.copy
