"""Who is connected to a host, who waits there, and which rows are still to be answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from penstock.batching.entry import Entry, Span
from penstock.models.batch import Parcel

Lane: TypeAlias = tuple[int, int]  # the client, and a lane of its own


class Callers:
    """The clients of a host, each with lanes that submit parcels of rows."""

    def __init__(self) -> None:
        self.clients: set[int] = set()
        self.lanes: set[Lane] = set()
        self._waiting: dict[Lane, int | None] = {}  # lanes that add nothing until this parcel is answered
        self._left: dict[int, int] = {}  # rows of a parcel that are not answered
        self._parcels: dict[Lane, set[int]] = {}  # of a lane, those that are not answered

    def close(self, lane: Lane) -> None:
        """What it has submitted, nobody wants any more."""
        self.lanes.discard(lane)
        self._waiting.pop(lane, None)
        for number in self._parcels.pop(lane, ()):
            self._left.pop(number, None)

    def submitted(self, entry: Entry[Parcel]) -> None:
        parcel = entry.item
        self._left[parcel.number] = entry.size
        self._parcels.setdefault((parcel.client, parcel.lane), set()).add(parcel.number)

    def waits(self, lane: Lane, parcel: int | None) -> None:
        """Until the rows of this parcel are answered; or, for None, until it goes on."""
        if lane in self.lanes and (parcel is None or parcel in self._left):
            self._waiting[lane] = parcel

    def goes(self, lane: Lane) -> None:
        self._waiting.pop(lane, None)

    def nobody_can_add(self) -> bool:
        return len(self._waiting) == len(self.lanes)

    def is_left(self, parcel: int) -> bool:
        """Whether some rows of a parcel are still to be answered."""
        return parcel in self._left

    def want(self, spans: Iterable[Span[Parcel]]) -> bool:
        """Whether some of these rows are still wanted."""
        return any(span.entry.item.number in self._left for span in spans)

    def settle(self, spans: Iterable[Span[Parcel]]) -> None:
        """These rows are answered, or have failed."""
        for entry, start, stop in spans:
            number, lane = entry.item.number, (entry.item.client, entry.item.lane)
            left = self._left.get(number)
            if left is None:
                continue  # nobody wants it any more
            self._left[number] = left - (stop - start)
            if not self._left[number]:
                del self._left[number]
                self._parcels[lane].discard(number)
                if self._waiting.get(lane) == number:
                    del self._waiting[lane]
