"""Windows, as far as a pipeline with an end has them: WindowInto, which does nothing where windows change nothing.

In Beam's examples a model that changes while the pipeline runs stands behind a WindowInto. Each row has one answer there,
whatever its window, so Penstock takes the step and leaves it out.
"""

from __future__ import annotations

from typing import Any, TypeVar

from penstock.errors import UsageError
from penstock.pipeline.graph import PCollection, PTransform

T = TypeVar("T")


class WindowFn:
    """A way to cut time into windows; rows of a pipeline with an end have no time, so that its numbers are not looked at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class FixedWindows(WindowFn):
    """Windows of one size."""


class SlidingWindows(WindowFn):
    """Windows of one size that overlap."""


class Sessions(WindowFn):
    """Windows that end when nothing comes for some time."""


class GlobalWindows(WindowFn):
    """One window for all."""


class WindowInto(PTransform[PCollection[T], PCollection[T]]):
    """The same rows. Only for pipelines written for Beam in which a model changes: in front of RunInference with
    model_metadata_pcoll= or watch_model_pattern=, and on the branch that gives its versions. Elsewhere windows would mean
    something that Penstock does not do, and running the pipeline is a UsageError.
    """

    def __init__(self, windowfn: WindowFn, **settings: Any) -> None:
        """settings: trigger=, accumulation_mode= and the like of Beam's, which have no meaning here."""
        if not isinstance(windowfn, WindowFn):
            raise UsageError(
                f"WindowInto({windowfn!r}): expected windows such as ps.window.FixedWindows(10) or ps.window.GlobalWindows()"
            )
        self.windowfn = windowfn

    def expand(self, pcoll: PCollection[T]) -> PCollection[T]:
        if not isinstance(pcoll, PCollection):
            raise UsageError(f"WindowInto needs one PCollection on its left, not {type(pcoll).__name__}")
        pcoll.pipeline.put_into_windows(pcoll)
        return pcoll
