"""Rows of a bundle that are at a model, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.answers import pick
from penstock.blocks import Block
from penstock.inference.intake import Passage
from penstock.inference.ticket import Ticket


class Made(NamedTuple):
    """What came of some rows that were pushed: their answers, or their failures."""

    block: Block  # one answer for each row; or of rows that failed a list of (row, Failure)
    positions: Sequence[int]  # of the rows, among all that were pushed: a range, or a list where others stand between them
    failed: str | None = None  # the name of the output that failures go to; None: answers


class Beside(NamedTuple):
    """What goes beside answers to the functions behind the model."""

    keys: list[Any] | None = None
    models: list[str] | None = None


@dataclass(slots=True)
class Pending:
    """Rows in flight."""

    ticket: Ticket
    passage: Passage
    rows: int
    bytes: int
    changes: int = 0  # how often they were prepared again, for another version of the model


def in_order_of_rows(passage: Passage, ticket: Ticket, answers: Any) -> Any:
    """The answers to rows that were sorted by model, and all that is known of them, in the order in which they came."""
    order = sorted(range(len(passage.at)), key=passage.at.__getitem__)
    place = {at: now for now, at in enumerate(order)}
    ticket.failures = {place[at]: failure for at, failure in ticket.failures.items()}
    ticket.other_ids = {place[at]: model_id for at, model_id in ticket.other_ids.items()}
    passage.reorder(order)
    return pick(answers, order)
