"""The splits of a run in its journal, and their parts. What is written is part of a transaction of the journal's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.journal.database import JournalDatabase
from penstock.journal.errors import unpickling
from penstock.journal.values import not_picklable
from penstock.run.outcomes import PreparedPart, SplitId, SplitResult
from penstock.transport.packing import dump_rows, load_pickle


class SplitTable:
    def __init__(self, database: JournalDatabase) -> None:
        self._db = database

    def open(self) -> list[tuple[SplitId, Any]]:
        """The splits that are still to be done."""
        found = self._db.query("SELECT source, number, split FROM splits WHERE state = 'open' ORDER BY source, number")
        with unpickling(self._db.path, "splits"):
            return [(SplitId(source, number), load_pickle(split)) for source, number, split in found]

    def of(self, source: int) -> list[tuple[SplitId, bool, Any]]:
        """All splits of a source, and whether they are still to be done."""
        found = self._db.query("SELECT number, state, split FROM splits WHERE source = ? ORDER BY number", (source,))
        with unpickling(self._db.path, "splits"):
            return [(SplitId(source, number), state == "open", load_pickle(split)) for number, state, split in found]

    def counts(self) -> dict[str, int]:
        """How many splits there are in each state."""
        return dict(self._db.query("SELECT state, count(*) FROM splits GROUP BY state"))

    def next_number(self, source: int) -> int:
        [(greatest,)] = self._db.query("SELECT max(number) FROM splits WHERE source = ?", (source,))
        return 0 if greatest is None else int(greatest) + 1

    def total(self) -> SplitResult:
        """What came of all splits that are prepared or done."""
        total = SplitResult()
        for (told,) in self._db.query("SELECT result FROM splits WHERE state != 'open'"):
            total.add(SplitResult.from_json(json.loads(told)))
        return total

    def answered(self) -> list[tuple[SplitId, str, str, int]]:
        """Of models that change: which has answered how many rows of which split, by step and model_id."""
        found = self._db.query("SELECT source, number, result FROM splits WHERE state != 'open' ORDER BY source, number")
        return [
            (SplitId(source, number), step, model_id, rows)
            for source, number, told in found
            for step, _, model_id, rows in json.loads(told)["metrics"].get("answered", ())
        ]

    def prepared(self) -> list[tuple[SplitId, list[PreparedPart]]]:
        """The splits that are prepared and not done, with their parts."""
        return self._with_parts("state = 'prepared'")

    def prepared_tokens(self) -> dict[int, list[Any]]:
        """The tokens of the parts of these splits, by sink."""
        found: dict[int, list[Any]] = {}
        for _, parts in self.prepared():
            for part in parts:
                found.setdefault(part.sink, []).append(part.token)
        return found

    def with_parts(self) -> list[tuple[SplitId, list[PreparedPart]]]:
        """The splits that are prepared or done, with their parts."""
        return self._with_parts("state != 'open'")

    def parts(self) -> list[dict[str, Any]]:
        """The sinks' details of all parts, of splits that are prepared or done."""
        return [json.loads(details) for (details,) in self._db.query("SELECT details FROM parts")]

    def published(self) -> dict[int, list[dict[str, Any]]]:
        """The sinks' details of all parts of splits that are done, by sink, in the order of splits."""
        found: dict[int, list[dict[str, Any]]] = {}
        for sink, details in self._db.query(
            "SELECT p.sink, p.details FROM splits s JOIN parts p USING (source, number)"
            " WHERE s.state = 'done' ORDER BY p.source, p.number, p.position"
        ):
            found.setdefault(sink, []).append(json.loads(details))
        return found

    def _with_parts(self, condition: str) -> list[tuple[SplitId, list[PreparedPart]]]:
        found: dict[SplitId, list[PreparedPart]] = {}
        with unpickling(self._db.path, "parts"):
            for source, number, sink, token, details in self._db.query(
                "SELECT s.source, s.number, p.sink, p.token, p.details FROM splits s"
                f" LEFT JOIN parts p USING (source, number) WHERE {condition} ORDER BY s.source, s.number, p.position"
            ):
                parts = found.setdefault(SplitId(source, number), [])
                if token is not None:
                    parts.append(PreparedPart(sink, load_pickle(token), json.loads(details)))
        return list(found.items())

    def add(self, splits: Iterable[tuple[SplitId, Any]]) -> None:
        rows = ((*split, self._pickled(payload, "split", split.source)) for split, payload in splits)
        self._db.executemany("INSERT INTO splits (source, number, split) VALUES (?, ?, ?)", rows)

    def put_parts(self, split: SplitId, parts: Sequence[PreparedPart]) -> None:
        rows = [
            (*split, at, part.sink, self._pickled(part.token, "part", part.sink), json.dumps(part.details))
            for at, part in enumerate(parts)
        ]
        self._db.executemany("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _pickled(self, value: Any, kind: str, maker: int) -> bytes:
        """A split of a source, or the token of a sink's part, for later processes."""
        try:
            return dump_rows(value)
        except Exception as exc:
            order = self._db.fact("order") or {}
            makers = order.get("sources" if kind == "split" else "sinks", ())
            raise not_picklable(value, kind, makers[maker] if maker < len(makers) else f"number {maker}", exc) from exc
