"""What every step at work has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from penstock.blocks import Block, row_count
from penstock.failures import Failure
from penstock.forks import end_if_forked, this_process
from penstock.observe.metrics import Metrics
from penstock.observe.result import StepCount
from penstock.pipeline.graph import MAIN

Emit: TypeAlias = Callable[[Block], None]


class Operator:
    """A step at work. setup once; then start, push ..., finish for each bundle (or abort); teardown once."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.process = this_process()
        self.count = StepCount()
        self.metrics = Metrics()
        self._outputs: dict[str, Emit] = {}

    def connect(self, outputs: dict[str, Emit]) -> None:
        self._outputs = outputs

    def emit(self, block: Block, tag: str = MAIN) -> None:
        rows = row_count(block)
        if rows:
            end_if_forked(self.process, self.label)
            self._outputs[tag](block)
            self.count.rows_out += rows
            if len(self._outputs) > 1:
                self.count.count_tag(tag, rows)

    def packs(self, tag: str) -> bool:
        """Whether what is emitted here goes to another process straight away."""
        return bool(getattr(self._outputs[tag], "packs", False))

    def fail(self, failed: list[tuple[Any, Failure]], tag: str) -> None:
        """Rows with their failures, for one of the step's outputs of failures."""
        if not failed:
            return
        self.count.rows_failed += len(failed)
        self.count.count_tag(tag, len(failed))
        for _, failure in failed:
            self.count.count_error(failure.error_type, failure.message)
            self.count.kinds[failure.kind] = self.count.kinds.get(failure.kind, 0) + 1
        self._outputs[tag](failed)

    # For progress (bundle_progress.py); read from other threads. The numbers are of the bundle, and only grow.

    def rows_in_block(self, block: Block) -> int:
        """How many rows a block is, as this step counts them."""
        return row_count(block)

    def rows_given(self) -> int:
        """How many rows of the bundle it has taken of which it has given all, or is giving it now."""
        return self.count.rows_in

    def rows_through(self) -> int:
        """How many rows of the bundle it has nothing left to do for."""
        return self.count.rows_in

    def setup(self) -> None: ...

    def start(self) -> None: ...

    def push(self, block: Block) -> None:
        raise NotImplementedError

    def finish(self) -> None: ...

    def abort(self) -> None: ...

    def teardown(self) -> None: ...
