"""What every step at work has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from penstock.blocks import Block, row_count
from penstock.failures import Failure
from penstock.observe.result import StepCount
from penstock.pipeline.graph import MAIN

Emit: TypeAlias = Callable[[Block], None]


class Operator:
    """A step at work. setup once; then start, push ..., finish for each bundle (or abort); teardown once."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.count = StepCount()
        self._outputs: dict[str, Emit] = {}

    def connect(self, outputs: dict[str, Emit]) -> None:
        self._outputs = outputs

    def emit(self, block: Block, tag: str = MAIN) -> None:
        rows = row_count(block)
        if rows:
            self.count.rows_out += rows
            self._outputs[tag](block)

    def fail(self, failed: list[tuple[Any, Failure]], tag: str) -> None:
        """Rows with their failures, for one of the step's outputs of failures."""
        self.count.rows_failed += len(failed)
        self._outputs[tag](failed)

    def setup(self) -> None: ...

    def start(self) -> None: ...

    def push(self, block: Block) -> None:
        raise NotImplementedError

    def finish(self) -> None: ...

    def abort(self) -> None: ...

    def teardown(self) -> None: ...
