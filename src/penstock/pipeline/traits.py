"""What an engine must know of a primitive step: said by the transform itself, asked by whoever plans, counts or runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.failures import Handling
from penstock.retry import Retry

if TYPE_CHECKING:
    from penstock.inference.spec import InferenceSpec
    from penstock.io.model_versions import WatchModels
    from penstock.io.sink import Sink
    from penstock.io.source import Source
    from penstock.pipeline.graph import PTransform

    Changed: TypeAlias = Callable[[InferenceSpec], PTransform[Any, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """The defaults are those of a step that makes any number of rows of one at a time."""

    rows: Literal["one", "at most one", "any"] = "any"  # that it gives for a row, a failure counted as one
    batch: int | None = 1  # rows that it takes at once, at most; None: that is found while it runs
    by_length: bool = False  # it is given rows of like length
    window: int = 0  # rows that should be under way in it at once, where it has many models; 0: any number will do
    takes_batches: bool = False  # a row that comes in is a batch of rows
    takes: Literal["rows", "columns", "either"] = "rows"  # what it wants; the other is turned into it
    in_columns: str = ""  # how to write a step of rows so that columns stay columns, if there is a way
    columns: bool = False  # tables go through it, or start or end here, as they are, and none of it is the user's Python
    failures: frozenset[str] = frozenset()  # the outputs that rows which failed leave by
    handling: Handling | None = None
    retry: Retry | None = None
    sets_up: bool = False  # it has something of its own for each thread that runs it
    joins: bool = False  # several collections as one: it does nothing to a row
    cuts: bool = False  # a stage ends here: it does nothing to a row
    source: Source[Any] | None = None  # rows start here
    sink: Sink[Any] | None = None  # rows end here
    model: InferenceSpec | None = None  # rows go through a model
    with_model: Changed | None = None  # the same step with another spec: one that names the models beside it
    watches: WatchModels | None = None  # rows appear here while the run goes on: only for what a run looks at besides

    @property
    def is_counted(self) -> bool:
        """Whether rows are counted there."""
        return not (self.joins or self.cuts)

    @property
    def in_host(self) -> bool:
        """Whether the rows go to a model, or to a process of their own as if that were one."""
        return self.model is not None or (self.handling is not None and self.handling.isolated)


STEP = Traits()


def is_ours(thing: object) -> bool:
    """Whether its class comes with Penstock. One of the user's, also if it is derived from ours, runs their Python."""
    return type(thing).__module__.partition(".")[0] == __name__.partition(".")[0]
