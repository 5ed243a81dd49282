"""How far a bundle has come, while it runs: for progress, in rows of its input.

A block of input may hold a hundred thousand rows and take minutes, so that rows which were read say nothing. Each step on
the bundle's line (at a fork, the way with a model) notes when it is given a block how many rows of the input stand behind
all that it was given; what it has done of that is the same part of them. Blocks are noted, never rows.
"""

from __future__ import annotations

from penstock.blocks import Block, row_count
from penstock.steps.operator import Emit, Operator


class RowsLine:
    """The steps that the rows of a bundle go through, one behind the other. The bundle's thread passes rows on; any other
    may read rows_done(). What it reads between two notes is too little, but for rows that a step is about to give away."""

    def __init__(self) -> None:
        self._gauges: list[Gauge] = []
        self._entered = 0  # rows of the input, with the block that is on its way
        self._pushed = 0  # and without it

    def gauged(self, step: Operator) -> Emit:
        """The way into the next step on the line."""
        before = self._gauges[-1] if self._gauges else self
        self._gauges.append(Gauge(step, before))
        return self._gauges[-1].push

    def start(self) -> None:
        """A new bundle, or none."""
        self._pushed = self._entered = 0
        for gauge in self._gauges:
            gauge.start()

    def push(self, block: Block, emit: Emit) -> None:
        """Pass a block of the input on."""
        self._entered += row_count(block)
        emit(block)
        self._pushed = self._entered

    @property
    def rows_read(self) -> int:
        return self._entered

    def passed(self) -> float:
        return self._entered

    def rows_done(self) -> int:
        """How many rows of the input are through all steps. What steps hold back to fill a batch is not."""
        waiting = [rows for gauge in self._gauges if (rows := gauge.limit()) is not None]
        return int(min(waiting, default=self._pushed))


class Gauge:
    """How far one step on the line has come."""

    def __init__(self, step: Operator, before: Gauge | RowsLine) -> None:
        self._step = step
        self._before = before
        self._offered = 0.0, 0  # rows of the input behind all that the step was given, and how many rows that is: at once

    def start(self) -> None:
        self._offered = 0.0, 0

    def push(self, block: Block) -> None:
        self._offered = self._before.passed(), self._offered[1] + self._step.rows_in_block(block)
        self._step.push(block)

    def passed(self) -> float:
        """How many rows of the input have left the step, with the block that it is giving away."""
        return self._part(self._step.rows_given())

    def limit(self) -> float | None:
        """How many rows of the input are done, as far as this step knows; None if it has nothing to do."""
        through = self._step.rows_through()  # first: what is offered in between makes it less
        return None if through >= self._offered[1] else self._part(through)

    def _part(self, rows: int) -> float:
        entered, offered = self._offered
        return entered * min(rows, offered) / offered if offered else 0.0
