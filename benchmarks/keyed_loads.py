"""How many models have to be loaded for a sequence of keys, when only so many fit at once. Pure: nothing is loaded.

LRU takes rows as they come. The other two see some rows ahead and answer them in any order, and they know the future, which
nobody does: what they need is what a scheduler with as many rows in sight is measured by.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence

Key = Hashable


def lru_loads(keys: Sequence[Key], capacity: int) -> int:
    """Rows are answered in the order in which they come; the model that was used longest ago has to go."""
    held: OrderedDict[Key, None] = OrderedDict()
    loads = 0
    for key in keys:
        if key in held:
            held.move_to_end(key)
            continue
        loads += 1
        if len(held) == capacity:
            held.popitem(last=False)
        held[key] = None
    return loads


def window_loads(keys: Sequence[Key], capacity: int, window: int) -> int:
    """Windows of so many rows, one after the other. In a window rows are answered in the best order: first those of models
    that are there, then model by model, each loaded once. Between windows stay those models, of all that were there and
    all that came, whose next window is soonest: no choice needs fewer loads, as no other lets more of them wait for
    their next use."""
    needed = [set(keys[start : start + window]) for start in range(0, len(keys), window)]
    held: set[Key] = set()
    loads = 0
    for number, models in enumerate(needed):
        loads += len(models - held)
        held = set(sorted(held | models, key=lambda key: _next_window(needed, key, number + 1))[:capacity])
    return loads


def _next_window(needed: Sequence[set[Key]], key: Key, first: int) -> int:
    return next((number for number in range(first, len(needed)) if key in needed[number]), len(needed))


def sliding_loads(keys: Sequence[Key], capacity: int, window: int, block: int) -> int:
    """At most `window` rows are in sight. Rows whose model is there are answered as soon as they come, others wait. A model
    is loaded when the oldest block has a row for it, and answers all its rows that wait; when the oldest block is answered,
    the next one comes in. The model that has to go is the one whose next row, of those still to come, comes last."""
    blocks = [keys[start : start + block] for start in range(0, len(keys), block)]
    places, ahead = _places(keys), window // block
    held: set[Key] = set()
    waits_since: dict[Key, int] = {}  # the block of the oldest row that waits, for each key with one
    loads = 0
    for oldest in range(len(blocks)):
        in_sight = min(oldest + ahead, len(blocks))
        for number in range(0 if oldest == 0 else oldest + ahead - 1, in_sight):
            for key in set(blocks[number]) - held:
                waits_since.setdefault(key, number)
        for key in blocks[oldest]:
            if waits_since.get(key) != oldest:
                continue
            if len(held) == capacity:
                held.remove(max(held, key=lambda each: _next_place(places[each], in_sight * block)))
            del waits_since[key]
            held.add(key)
            loads += 1
    return loads


def _places(keys: Sequence[Key]) -> dict[Key, list[int]]:
    places: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def _next_place(places: Sequence[int], first: int) -> float:
    found = bisect_left(places, first)
    return places[found] if found < len(places) else float("inf")
